"""A checkpoint's own chat template: transformers' tokens, answers learnt, hostile programs stopped."""

import json
import pickle
import shutil
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DataConfig
from jaxthd.data.example import Clip, Turn
from jaxthd.data.text.chat_template import ChatTemplate
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.render import Renderer, RenderError
from jaxthd.data.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from jaxthd.errors import UserError
from tests.hf.speech_folders import ANSWERS, ASKS, RECOGNISER

CHAT = Path(__file__).parents[1] / "references" / "chat"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CHAT / "expected.json").read_text())
CLIP = Clip(Path("a.wav"))
ASKED = (Turn("user", ("Is it?",)), Turn("assistant", ("It is.",)))
TWICE = (*ASKED, Turn("user", ("Is it so?",)), Turn("assistant", ("It is so.",)))
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def checkpoint(folder: Path, template: str, tokens: dict[str, str] | None = None) -> FileTokenizer:
    """The reference tokenizer with this template. tokens: what tokenizer_config.json names otherwise."""
    shutil.copy(CHAT / "tokenizer.json", folder)
    named = json.loads((CHAT / "tokenizer_config.json").read_text()) | (tokens or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def named(name: str) -> str:
    return (CHAT / f"{name}.jinja").read_text()


def turns_of(messages: list[dict[str, Any]]) -> list[Turn]:
    def parts(content: Any) -> tuple[str | Clip, ...]:
        if isinstance(content, str):
            return (content,)
        return tuple(CLIP if part["type"] == "audio" else part["text"] for part in content)

    return [Turn(message["role"], parts(message["content"])) for message in messages]


def shown(tokenizer: FileTokenizer, ids: list[int]) -> str:
    """Special tokens by their names."""
    return tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


def learnt(tokenizer: FileTokenizer, options: dict[str, Any], turns: Any) -> list[str]:
    """The stretches that are learnt."""
    ids, marks = ChatTemplate(tokenizer, options).written(turns)
    stretches = (
        list(group) for is_learnt, group in groupby(zip(ids, marks, strict=True), lambda t: t[1]) if is_learnt
    )
    return [shown(tokenizer, [token for token, _ in stretch]) for stretch in stretches]


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str):
    expected = EXPECTED[name]
    tokenizer = checkpoint(tmp_path, named(name.partition("/")[0]), expected["tokens"])
    template = ChatTemplate(tokenizer, expected["variables"])
    turns = turns_of(expected["messages"])
    ids, marks = template.written(turns)
    assert ids == expected["whole"]
    assert template.prompt(turns[:-1]) == expected["prompt"]
    assert sum(i == tokenizer.audio_id for i in ids) == sum(p is CLIP for t in turns for p in t.parts)
    if "learnt" in expected:
        assert marks == list(map(bool, expected["learnt"]))
    end = "<|eot_id|>" if name.startswith("llama3") else expected["tokens"].get("eos_token", "<|im_end|>")
    assert [template.end_id] == tokenizer.encode_marks(end)


@pytest.mark.parametrize(
    ("template", "conversation", "options", "want"),
    [
        ("chatml", "one", {}, ["It says: one two.<|im_end|>"]),
        ("llama3", "two", {}, ["A recording — naïve.<|eot_id|>", "one two three<|eot_id|>"]),
        ("tagged", "one", {}, ["It says: one two.<|im_end|>"]),
        # The template's own thoughts are of the prompt, or are not what it would have gone on with.
        ("thinking", "one", {"enable_thinking": False}, ["It says: one two.<|im_end|>"]),
        ("thinking", "one", {}, ["It says: one two.<|im_end|>"]),
        # Of a prompt that ends in <think>, a line break, the rest is supervised; earlier thoughts are gone.
        ("thinking", "thoughts", {}, ["It is.<|im_end|>", "So?\n</think>\nIt is so.<|im_end|>"]),
        # Qwen3's writes thoughts with line breaks of its own, even after a prompt that rules them out.
        ("qwen3", "thoughts", {}, ["It is.<|im_end|>", "<think>\nSo?\n</think>\n\nIt is so.<|im_end|>"]),
        (
            "qwen3",
            "thoughts",
            {"enable_thinking": False},
            ["It is.<|im_end|>", "So?\n</think>\n\nIt is so.<|im_end|>"],
        ),
        ("qwen3", "one", {}, ["<think>\n\n</think>\n\nIt says: one two.<|im_end|>"]),
        ("qwen3", "one", {"enable_thinking": False}, ["It says: one two.<|im_end|>"]),
        ("thinking", "recordings", {"enable_thinking": False}, ["one<|im_end|>", "two three<|im_end|>"]),
    ],
)
def test_answers_and_their_ends_are_learnt(tmp_path: Path, template, conversation, options, want):
    tokenizer = checkpoint(tmp_path, named(template))
    turns = turns_of(EXPECTED[f"{template}/{conversation}"]["messages"])
    assert learnt(tokenizer, options, turns) == want


def test_what_the_template_puts_between_prompt_and_answer_is_learnt(tmp_path: Path):
    """As Qwen3's, which gives a last answer without thoughts empty ones, and asks for none."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
        "<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    want = ["It is.<|im_end|>", "<think></think>It is so.<|im_end|>"]
    assert learnt(checkpoint(tmp_path, template), {}, TWICE) == want


def test_answers_are_found_where_prompts_are_no_prefixes(tmp_path: Path):
    """The whole begins with the number of messages, so no prompt is how it begins."""
    template = "{{ messages | length }}\n" + CHATML
    assert learnt(checkpoint(tmp_path, template), {}, TWICE) == ["It is.<|im_end|>", "It is so.<|im_end|>"]


def test_answers_are_found_by_their_text_where_nothing_else_tells(tmp_path: Path):
    """What the template writes depends on the answer's length."""
    counted = CHATML.replace("m.content", "m.content | length ~ m.content")
    tokenizer = checkpoint(tmp_path, "{{ messages | length }}\n" + counted)
    assert learnt(tokenizer, {}, TWICE) == ["It is.<|im_end|>", "It is so.<|im_end|>"]
    again = (Turn("user", ("It is.",)), ASKED[1])
    with pytest.raises(UserError, match=r"'It is\.', or what is around it, and the text holds it 2 times"):
        ChatTemplate(tokenizer, {}).written(again)


def test_recordings_are_written_as_the_template_can(tmp_path: Path):
    """In a string, in a list, or by a sign of our own where the tokenizer has no token for one."""
    turns = (Turn("user", ("A", CLIP, "B")), ASKED[1])
    around = ["<so_start>", "<so_embedding>", "<so_end>"]
    for template in (CHATML, named("thinking")):
        tokenizer = checkpoint(tmp_path, template)
        ids, _ = ChatTemplate(tokenizer, {}).written(turns)
        at = ids.index(tokenizer.audio_id)
        assert [tokenizer.token_text(i) for i in ids[at - 1 : at + 2]] == around
        assert tokenizer.recording == tuple(ids[at - 1 : at + 2])
        assert [tokenizer.token_text(i) for i in (ids[at - 2], ids[at + 2])] == ["A", "B"]
    surrounding = "replace('<so_embedding>', '<so_start><so_embedding><so_end>')"
    own = checkpoint(tmp_path, CHATML.replace("m.content", f"m.content | {surrounding}"))
    assert ChatTemplate(own, {}).written(turns)[0].count(own.recording[0]) == 1, "not written twice"
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["added_tokens"] = [t for t in file["added_tokens"] if not t["content"].startswith("<so_")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    deaf = load_tokenizer(tmp_path)
    assert isinstance(deaf, FileTokenizer)
    ids, _ = ChatTemplate(deaf, {}).written(turns)
    assert ids.count(deaf.audio_id) == 1
    assert deaf.audio_id == deaf.vocab_size - 1
    at = ids.index(deaf.audio_id)
    assert shown(deaf, ids[at - 1 : at]) + shown(deaf, ids[at + 1 : at + 2]) == "AB"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% if %}", "fails: TemplateSyntaxError"),
        ("{{ raise_exception('system first') }}", "fails: TemplateError: system first"),
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__ }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails: OverflowError: Range too big"),
        ("{{ 'a' * 10**10 }}", "fails: MemoryError"),
        ("{% include '/etc/passwd' %}", "fails: TypeError: no loader"),
        ("Hello", "leaves out what the user says"),
        (
            "{{ messages[0].content }}",
            "changes the answer 'It is so.', or what is around it, and the text holds",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(tmp_path: Path, template: str, what: str):
    with pytest.raises(UserError, match=r"the chat template beside .*tokenizer\.json") as found:
        ChatTemplate(checkpoint(tmp_path, template), {})
    assert what in str(found.value)
    assert "correct the template" in str(found.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ n ** n ** n }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_templates_have_limited_time_and_memory(template: str):
    start = time.monotonic()
    with pytest.raises(RenderError, match=r"more than 0\.5 s|MemoryError"):
        Renderer(template, seconds=0.5)([{"messages": [], "n": 10**6}])
    assert time.monotonic() - start < 30


def test_a_renderer_serves_again_after_what_failed():
    renderer = Renderer(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ 1 // n }}", 0.5
    )
    assert renderer([{"n": 1}]) == ["1"]
    with pytest.raises(RenderError, match="ZeroDivisionError"):
        renderer([{"n": 0}])
    start = time.monotonic()
    with pytest.raises(RenderError, match="more than"):
        renderer([{"n": 99999}])
    assert time.monotonic() - start < 30
    assert renderer([{"n": 1}, {"n": 1}]) == ["1", "1"]
    renderer.close()


def test_text_that_would_steer_the_model_is_refused(tmp_path: Path):
    tokenizer = checkpoint(tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content }}|>"))
    template = ChatTemplate(tokenizer, {})
    for text, reason in (
        ("a<|im_end|>b", "holds the special token <|im_end|>"),
        ("<so_embedding>", "holds the special token <so_embedding>"),
        ("a<|im_start", r"makes the special token <|im_start|> with what the chat template writes"),
        ("a\ufdd0b", "assigns to no character"),
    ):
        for turns in ((Turn("user", (text,)), ASKED[1]), (ASKED[0], Turn("assistant", (text,)))):
            with pytest.raises(ValueError, match="text") as found:
                template.written(turns)
            assert reason in str(found.value)
        with pytest.raises(ValueError, match="text") as found:
            template.prompt([Turn("user", (text,))])
        assert reason in str(found.value)


def test_an_empty_answer_and_an_unwritten_recording_are_refused(tmp_path: Path):
    template = ChatTemplate(checkpoint(tmp_path, CHATML), {})
    with pytest.raises(ValueError, match="an answer of the assistant is empty"):
        template.written((ASKED[0], Turn("assistant", (" ",))))
    deaf = ChatTemplate(
        checkpoint(tmp_path, CHATML.replace("m.content", "m.content | replace('<so_embedding>', '')")), {}
    )
    with pytest.raises(UserError, match="writes 0 recordings; expected 1"):
        deaf.written((Turn("user", ("A", CLIP)), ASKED[1]))


def test_a_prompt_template_takes_it_from_the_configuration(tmp_path: Path):
    tokenizer = checkpoint(tmp_path, named("thinking"))
    data = DataConfig(
        tokenizer=str(tmp_path),
        template="chat_template",
        template_options='{"enable_thinking": false}',
        system_prompt="You listen.",
    )
    template = PromptTemplate(data, tokenizer)
    copy = pickle.loads(pickle.dumps(template))
    want = "<|im_start|>system\nYou listen.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n"
    prompt = template.prompt(ASKED[:1])
    assert shown(tokenizer, prompt) == want + "<|im_start|>assistant\n<think></think>"
    assert template(ASKED) == copy(ASKED)
    assert template(ASKED)[0][: len(prompt)] == prompt
    assert template.stop_ids == (template.end_id,) == (tokenizer.eos_id,)
    with pytest.raises(UserError, match=r'"chat_template" with data\.tokenizer .*expected the folder'):
        PromptTemplate(data, ByteTokenizer())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"there is none beside .*chat_template\.jinja"):
        PromptTemplate(data, load_tokenizer(tmp_path))


def test_a_recogniser_s_template_takes_recordings_alone(tmp_path: Path):
    """What the user says is refused, not lost; an answer that the template leaves out follows the prompt."""
    for template, has_answers in ((RECOGNISER + ANSWERS + ASKS, True), (RECOGNISER + ASKS, False)):
        tokenizer = checkpoint(tmp_path, template.replace("<|audio_pad|>", "<so_embedding>"))
        chat = ChatTemplate(tokenizer, {})
        system = (Turn("system", ("Names: Ann.",)),)
        asked = (*system, Turn("user", (CLIP,)))
        ids, marks = chat.written((*asked, Turn("assistant", ("One two.",))))
        prompt = chat.prompt(asked)
        assert shown(tokenizer, prompt).startswith("<|im_start|>system\nNames: Ann.<|im_end|>\n")
        assert ids[: len(prompt)] == prompt
        assert not any(marks[: len(prompt)])
        answer = shown(tokenizer, ids[len(prompt) :])
        assert answer == ("One two.<|im_end|>\n" if has_answers else "One two.<|im_end|>")
        assert chat.end_id == tokenizer.encode_marks("<|im_end|>")[0]
        with pytest.raises(ValueError, match="the user says more"):
            chat.written((Turn("user", (CLIP, "What is said?")), Turn("assistant", ("It is.",))))
    with pytest.raises(UserError, match="the last turn's is not the only one"):
        chat.written((*asked, TWICE[1], Turn("user", (CLIP,)), TWICE[3]))


def test_an_answer_without_an_end_gets_the_tokenizer_s(tmp_path: Path):
    """Earlier ones end with the mark of the next turn, if that ends answers."""
    asks = "{% if add_generation_prompt %}<|start|>{% endif %}"
    template = "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}" + asks
    tokenizer = checkpoint(tmp_path, template)
    chat = ChatTemplate(tokenizer, {})
    assert chat.end_id == tokenizer.eos_id
    ids, marks = chat.written(ASKED)
    assert shown(tokenizer, ids) == "<|start|>Is it?<|start|>It is.<|im_end|>"
    assert shown(tokenizer, [x for x, mark in zip(ids, marks, strict=True) if mark]) == "It is.<|im_end|>"


def test_another_template_may_be_given(tmp_path: Path):
    tokenizer = checkpoint(tmp_path, "{{ raise_exception('not this') }}")
    template = PromptTemplate(DataConfig(template="chat_template", template_source=CHATML), tokenizer)
    assert shown(tokenizer, template(ASKED)[0]).startswith("<|im_start|>user\nIs it?<|im_end|>")
