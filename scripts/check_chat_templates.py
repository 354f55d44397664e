"""Compares token ids of chat templates with transformers' apply_chat_template, run live: a table.

    python scripts/check_chat_templates.py [FOLDER ...] [--python-reference PYTHON] [--seed N] [--count N]

Needs transformers: in this environment, or in another one, whose interpreter --python-reference names. A few
seconds. FOLDER is a published checkpoint, or a folder with its tokenizer.json and chat template alone; its
weights are not read. Without one, the templates are those of tests/references/chat, which have the form of
Qwen3's, GPT-OSS's, DeepSeek-V3's, Moonlight's and Nemotron's; with one, they are compared too.

Each template gets random conversations: one to four questions, with and without a system message, with texts
in several scripts, spaces at their ends, thoughts, and recordings. Exits 1 unless, in every conversation,

- the tokens of the whole, and those of the prompt for the last answer, equal the library's;
- the supervised tokens equal the library's assistant_masks, where the template has generation tags or
  comments in their place; elsewhere, they hold what is left of the last answer's text, and the token that
  ends it, which decoding stops at.

A conversation that the template refuses for the library too counts as equal, and is shown.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.data.example import Clip, Turn
from jaxthd.data.text.chat_template import ChatTemplate
from jaxthd.data.text.tokenizer import FileTokenizer, load_tokenizer
from jaxthd.errors import UserError
from scripts.benchmark import Claim, benchmark, conclude, table

ROOT = Path(__file__).parents[1]
CHAT = ROOT / "tests" / "references" / "chat"
OWN = ("qwen3", "gpt_oss", "deepseek_v3", "moonlight", "nemotron")
TEXTS = (
    "What is said?",
    "  one two three ",
    "naïve – 你好, как дела?\n",
    "Explain:\n\n- this\n- that",
    "It is so.",
    "a",
    "\n\nspaces  inside\tand a tab",
    "{{ braces }} {% and %} 'quotes' \"too\" \\n",
    "🎧 emoji",
)
THOUGHTS = ("<think>\n{}\n</think>\n\n", "<think>{}</think>")
CLIP = Clip(Path("a.wav"))


class Case(NamedTuple):
    """A conversation, as turns and as the library's messages."""

    turns: list[Turn]
    messages: list[dict[str, Any]]


def conversation(draw: random.Random) -> Case:
    turns = [Turn("system", (draw.choice(TEXTS),))] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        parts: list[Any] = [draw.choice(TEXTS)]
        if draw.random() < 0.3:
            parts.insert(draw.randint(0, 1), CLIP)
        answer = draw.choice(TEXTS)
        if draw.random() < 0.3:
            answer = draw.choice(THOUGHTS).format(draw.choice(TEXTS).strip()) + answer
        turns += [Turn("user", tuple(parts)), Turn("assistant", (answer,))]
    kinds = {str: lambda part: {"type": "text", "text": part}, Clip: lambda _: {"type": "audio"}}
    messages = [
        {
            "role": turn.role,
            "content": [kinds[type(part)](part) for part in turn.parts]
            if CLIP in turn.parts
            else turn.parts[0],
        }
        for turn in turns
    ]
    return Case(turns, messages)


def write_own(name: str, folder: Path) -> Path:
    """One of the templates of the tests, as a checkpoint's folder."""
    folder.mkdir(parents=True)
    tokens = json.loads((CHAT / "tokenizer_config.json").read_text())
    expected = json.loads((CHAT / "expected.json").read_text())
    tokens |= next(found["tokens"] for key, found in expected.items() if key.startswith(f"{name}/"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokens | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    shutil.copy(CHAT / "tokenizer.json", folder)
    shutil.copy(CHAT / f"{name}.jinja", folder / "chat_template.jinja")
    return folder


def compare(case: Case, want: dict[str, Any], template: ChatTemplate, tokenizer: FileTokenizer) -> str:
    """What differs; "" if nothing does."""
    try:
        ids, supervised = template.written(case.turns)
        prompt = template.prompt(case.turns[:-1])
    except (UserError, ValueError) as error:
        return "" if "error" in want else f"refused: {error}"
    if "error" in want:
        return f"the library refuses it: {want['error']}"
    around = {*tokenizer.recording} - {tokenizer.audio_id}  # what a processor writes, not the template
    found = {"whole": ids, "prompt": prompt}
    for name, tokens in found.items():
        plain = [-1 if i == tokenizer.audio_id else i for i in tokens if i not in around]
        if plain != want[name]:
            return f"{name}: {plain} instead of {want[name]}"
    if want["learnt"] is not None:
        marks = [mark for i, mark in zip(ids, supervised, strict=True) if i not in around]
        return (
            "" if list(map(bool, want["learnt"])) == marks else f"supervised tokens differ: {case.messages}"
        )
    said = str(case.turns[-1].parts[0]).split("</think>")[-1].strip()
    learnt = [i for i, is_supervised in zip(ids, supervised, strict=True) if is_supervised]
    if said not in tokenizer.decode(learnt) or learnt[-1] != template.end_id:
        return f"the supervised tokens say {tokenizer.decode(learnt)!r}"
    return ""


def main() -> None:
    parser = benchmark(__doc__, check=False)
    parser.add_argument("folders", nargs="*", type=Path, help="published checkpoints")
    parser.add_argument("--python-reference", default=sys.executable, help="has transformers")
    parser.add_argument("--seed", type=int, default=1, help="of the conversations")
    parser.add_argument("--count", type=int, default=30, help="conversations for each template")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows, claims = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [write_own(name, Path(scratch) / name) for name in OWN] + options.folders
        for folder in folders:
            cases = [conversation(draw) for _ in range(options.count)]
            tokenizer = load_tokenizer(folder)
            assert isinstance(tokenizer, FileTokenizer)
            template = ChatTemplate(tokenizer, {})
            audio = tokenizer.audio_text or "<|audioplaceholder|>"
            given = {"folder": str(folder.absolute()), "variables": {}, "audio": audio}
            asked = [json.dumps(given | {"messages": case.messages}) for case in cases]
            command = [options.python_reference, "-m", "tests.references.chat_templates", "--answer"]
            done = subprocess.run(command, input="\n".join(asked), capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            answers = list(map(json.loads, done.stdout.splitlines()))
            found = [compare(c, want, template, tokenizer) for c, want in zip(cases, answers, strict=True)]
            differing = list(filter(None, found))
            refused = sum("error" in want for want in answers)
            masks = sum(want.get("learnt") is not None for want in answers)
            rows.append((folder.name, len(cases), refused, masks, len(differing)))
            claims.append(Claim(f"{folder.name}: tokens are transformers'", not differing))
            for text in differing[:3]:
                print(f"{folder.name}: {text}", file=sys.stderr)
    columns = "template|conversations|refused by both|with the library's masks|differing"
    print(table("Chat templates against transformers", columns, rows))
    conclude(claims, check=True)


if __name__ == "__main__":
    main()
