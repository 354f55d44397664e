"""Writes tests/references/chat/expected.json: how transformers renders chat templates.

    python -m tests.references.chat_templates           # with transformers (made with 5.23); a few seconds
    python -m tests.references.chat_templates --answer  # scripts/check_chat_templates.py asks it

For every template and conversation the file holds the ids of the text without and with a generation prompt
("whole", "prompt"), encoded as apply_chat_template encodes them, and the tokens of TOKENS[template], which
tokenizer_config.json names. "learnt" marks the assistant's tokens, which are the supervised ones, where the
template has generation tags. In templates whose families publish none, comments stand where they would be:
{#- generation -#} and {#- endgeneration -#}. They become tags here; the text is the same. A recording is
written the way NemotronH_Omni_Reasoning_V3Processor writes one embedding. The tokenizer beside it is a
byte-level BPE, trained here on a few lines so that text has merges. The templates are written for these
tests, after the form of each family's: none is a published one.

--answer reads JSON lines {"folder", "messages", "variables", "audio"} and prints for each a line {"whole",
"prompt", "learnt"}. audio: the token that stands for a recording in strings; it is added to a tokenizer that
has none, and its ids are printed as -1. learnt: null where the template has neither tags nor such comments.
"""

import argparse
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<so_embedding>",
    "<so_start>",
    "<so_end>",
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
)
_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
TOKENS = {
    "gpt_oss": {"eos_token": "<|return|>"},
    "deepseek_v3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "nemotron": {"eos_token": "<SPECIAL_12>"},
}
"""What a template's family names otherwise than _TOKENS."""
LINES = [
    "What is said in this recording?\n\nIt says: one two three.\n",
    "You listen, and you answer in a sentence.\n",
    "system\nuser\nassistant\nToday: unknown\n\n",
]
RECORDING = {"type": "audio", "audio": ""}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [
        {"role": "user", "content": "What is said?"},
        {"role": "assistant", "content": "It says: one two."},
    ],
    "two": [
        {"role": "system", "content": "You listen.\n"},
        {"role": "user", "content": "  What is this? "},
        {"role": "assistant", "content": "\nA recording — naïve.\n\n"},
        {"role": "user", "content": "And what is said?"},
        {"role": "assistant", "content": "one two three"},
    ],
    "thoughts": [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "<think>\nWhat is it?\n</think>\nIt is."},
        {"role": "user", "content": "Is it so?"},
        {"role": "assistant", "content": "<think>\nSo?\n</think>\nIt is so."},
    ],
    "recordings": [
        {"role": "user", "content": [RECORDING, text(" What is said?")]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [text("And: "), RECORDING, RECORDING]},
        {"role": "assistant", "content": "two three"},
    ],
}
TEMPLATES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "chatml": (("one", "two", "thoughts"), {}),
    "llama3": (("one", "two"), {"date": "1 May"}),
    "thinking": (tuple(CONVERSATIONS), {}),
    "tagged": (("one", "two"), {}),
    "qwen3": (tuple(CONVERSATIONS), {}),
    "gpt_oss": (("one", "two", "recordings"), {"reasoning_effort": "low"}),
    "deepseek_v3": (tuple(CONVERSATIONS), {}),
    "moonlight": (tuple(CONVERSATIONS), {}),
    "nemotron": (tuple(CONVERSATIONS), {}),
}
"""Conversations, each with variables of the template."""
IN_STRINGS = ("qwen3", "gpt_oss", "deepseek_v3", "moonlight", "nemotron")
"""Templates that know no recordings: placeholders for them are in the strings."""
_COMMENT = re.compile(r"\{#- (generation|endgeneration) -#\}")


def with_tags(source: str) -> str:
    return _COMMENT.sub(r"{%- \1 -%}", source)


def in_strings(messages: list[dict[str, Any]], audio: str) -> list[dict[str, Any]]:
    """Lists of parts as strings with placeholders."""

    def string(content: Any) -> str:
        if isinstance(content, str):
            return content
        return "".join(audio if part["type"] == "audio" else part["text"] for part in content)

    return [{**message, "content": string(message["content"])} for message in messages]


def answer(tokenizer: Any, source: str, messages: Any, variables: Any, around: Any = str) -> dict[str, Any]:
    """around: (text) -> the text with what a processor writes around a recording's token."""

    def encoded(messages: list[dict[str, Any]], **more: Any) -> list[int]:
        written = tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, **variables, **more
        )
        return tokenizer(around(written), add_special_tokens=False)["input_ids"]

    found: dict[str, Any] = {"whole": encoded(messages), "learnt": None}
    found["prompt"] = encoded(messages[:-1], add_generation_prompt=True)
    tagged = with_tags(source)
    if "endgeneration" in tagged:
        marked = tokenizer.apply_chat_template(
            messages, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        ids = tokenizer.apply_chat_template(messages, chat_template=source, return_dict=True, **variables)
        assert marked["input_ids"] == ids["input_ids"], "comments and tags write the same text"
        found["learnt"] = marked["assistant_masks"] if ids["input_ids"] == found["whole"] else None
    return found


@functools.cache
def opened(folder: str, audio: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = None  # otherwise masks of merged spaces are shifted
    if tokenizer.convert_tokens_to_ids(audio) in (None, tokenizer.unk_token_id):
        tokenizer.add_special_tokens({"additional_special_tokens": [audio]})
    return tokenizer


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        tokenizer, audio = opened(asked["folder"], asked["audio"]), asked["audio"]
        number = tokenizer.convert_tokens_to_ids(audio)
        source = tokenizer.get_chat_template()
        try:
            found = answer(tokenizer, source, in_strings(asked["messages"], audio), asked["variables"])
        except jinja2.TemplateError as error:
            print(json.dumps({"error": str(error)}))
            continue
        for name in ("whole", "prompt"):
            found[name] = [-1 if i == number else i for i in found[name]]
        print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answer", action="store_true", help="answer requests from the standard input")
    if parser.parse_args().answer:
        serve()
        return
    file = tokenizers.Tokenizer(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.post_processor = processors.ByteLevel()  # its offsets exclude spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    file.train_from_iterator(LINES * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    file.add_special_tokens(list(SPECIAL))
    file.add_tokens(["<think>", "</think>"])
    file.save(str(FOLDER / "tokenizer.json"), pretty=False)
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(_TOKENS, indent=2) + "\n")
    expected: dict[str, Any] = {}
    for template, (conversations, variables) in TEMPLATES.items():
        tokens = _TOKENS | TOKENS.get(template, {})
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=file, **tokens)
        source = (FOLDER / f"{template}.jinja").read_text()
        for name in conversations:
            messages = CONVERSATIONS[name]
            given = in_strings(messages, "<so_embedding>") if template in IN_STRINGS else messages
            around = _omni if name == "recordings" else str
            found = answer(tokenizer, source, given, variables, around)
            if found["learnt"] is None:
                del found["learnt"]
            expected[f"{template}/{name}"] = {
                "variables": variables,
                "tokens": TOKENS.get(template, {}),
                "messages": messages,
                **found,
            }
    lines = (f'"{name}": {json.dumps(found)}' for name, found in expected.items())
    (FOLDER / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _omni(written: str) -> str:
    return written.replace("<so_embedding>", "<so_start><so_embedding><so_end>")


if __name__ == "__main__":
    main()
