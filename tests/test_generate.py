"""The generate command: prompts from options, answers printed in order as they come, chat, errors."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd import generate
from jaxthd.config import Config, DataConfig
from jaxthd.data.example import Clip, Example, Turn
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.inference import chat
from jaxthd.inference.generator import AnswerDelta, Generator
from jaxthd.inference.model import load
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.helpers import filled_state, save_run

ROOT = Path(__file__).parents[1]
CONFIG = '''"""A tiny model."""
from jaxthd.config import *
from jaxthd.models.blocks import Attention, Mamba2
def config():
    encoder = EncoderConfig(
        layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
    )
    llm = LLMConfig(
        pattern="M*", dim=16,
        blocks={"*": Attention(heads=2, kv_heads=2, head_dim=8), "M": Mamba2(heads=2, head_dim=8)},
    )
    return Config(
        mesh=MeshConfig(tensor=2),
        data=DataConfig(template="chatml", capacity=128, audio_capacity=480),
        model=ModelConfig(encoder=encoder, llm=llm),
        train=TrainConfig(microbatches=4),
    )
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.py, two recordings and one of 12 s, and a checkpoint of that config in its workdir
    `run`."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "tiny.py").write_text(CONFIG)
    rng = np.random.default_rng(0)
    for name, rate in (("a.wav", 16000), ("b.wav", 22050)):
        soundfile.write(folder / name, rng.normal(0, 0.1, rate), rate)
    soundfile.write(folder / "long.wav", rng.normal(0, 0.1, 12 * 16000), 16000)
    config = load_config(folder / "tiny.py")
    save_run(config, folder / "run", step=3)
    return folder


def test_answers_go_to_the_terminal_and_to_a_file(run: Path):
    """End to end, as a user runs it: recordings get an answer each. One that is not there does not end the
    others, and one that is longer than what fits is read in windows; the exit status tells of the first."""
    out = run / "answers.jsonl"
    options = "--config tiny.py --weights run --temperature 0.8 --seed 5 --max-new-tokens 6"
    options += " --audio a.wav none.wav long.wav b.wav"
    ran = subprocess.run(
        [sys.executable, "-m", "jaxthd.generate", *options.split(), "--out", str(out), "--prompt", "Hm?"],
        cwd=run,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    *answered, skipped = ran.stderr.splitlines()
    assert skipped == "  conversation '2:none.wav': none.wav: no such file; correct its path"
    assert answered[-1] == "error: 1 of 4 could not be used, and have no answer:"
    assert any(
        re.match(r"long\.wav: 12\.0 s are read in [3-9] windows of up to 4\.\d s", x) for x in answered
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["1:a.wav", "2:none.wav", "3:long.wav", "4:b.wav"]
    assert [line["audio"] for line in lines] == [["a.wav"], ["none.wav"], ["long.wav"], ["b.wav"]]
    assert [line["windows"] > 1 for line in lines] == [False, False, True, False]
    assert "no such file" in lines[1]["reason"]
    assert (lines[1]["end"], lines[1]["text"]) == ("skipped", "")
    assert "none.wav: [skipped]" in ran.stdout
    # Random bytes may be line breaks.
    shown = re.split(r"^(?:a|none|long|b)\.wav: ", ran.stdout, flags=re.M)[1:]
    assert len(shown) == 4
    shown, answers = [shown[0], shown[3]], [lines[0], lines[3]]
    texts = [chat.printable(answer["text"]) for answer in answers]
    for line, text, answer in zip(shown, texts, answers, strict=True):
        line = line.removesuffix("\n")
        assert line.startswith(text)
        assert line.endswith("[cut off at 6 tokens]") == (answer["end"] == "length")
    assert all(answer["text"] == ByteTokenizer().decode(answer["tokens"]) for answer in answers)
    assert any(answer["tokens"] for answer in answers)
    assert all((answer["end"] == "length") == (len(answer["tokens"]) == 6) for answer in answers)
    assert "3 answers" in ran.stderr
    assert re.search(r"; 3 programs( compiled|.* read from the cache)", ran.stderr)


def test_the_checkpoints_weights_answer(run: Path):
    config = load_config(run / "tiny.py")
    settings: dict[str, Any] = {"batch": 2, "max_new_tokens": 5}
    model = load([run / "run"], config, **settings)
    saved = filled_state(Blueprint(config), make_mesh(config.mesh))
    for got, want in zip(*map(jax.tree.leaves, (model.weights.params, saved.params)), strict=True):
        assert got.sharding == want.sharding
        np.testing.assert_array_equal(got, want)
    question = Turn("user", ("What? ", Clip(run / "b.wav")))
    said = [Example("x", (question,)), Example("y", (Turn("user", ("é",)),))]
    answers = model.generate(said, temperature=0.9)
    assert answers == model.generator.generate(said, temperature=0.9)
    assert answers[0].tokens != answers[1].tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--weights is missing"),
        ("--weights none --prompt hi", "no checkpoint at none; expected a folder"),
        (
            "--weights run --prompt hi --model.llm.vocab-size 100",
            "model.llm.vocab_size is 100; expected 260",
        ),
        ("--weights run --prompt hi --max-new-tokens 0", "--max-new-tokens is 0; expected 1 or more"),
        ("--weights run --prompt hi --batch -1", "--batch is -1; expected 1 or more"),
        ("--weights run --prompt hi --chat x.jsonl", "--chat is given with --audio or --prompt"),
        ("--weights run --chat none.jsonl", "no file at none.jsonl"),
        ("--weights run --prompt {audio}{audio} --audio a.wav", "1 recordings for 2 placeholders"),
        ("--weights run --prompt {audio}", "0 recordings for 1 placeholders"),
        ("--weights run --audio none.wav", "none.wav: no such file"),
        ("--weights run --prompt hi --top-p 2", "top_p is 2.0; expected more than 0, and at most 1"),
        ("--weights run --prompt " + 200 * "a", "token slots exceed the capacity of 128"),
    ],
)
def test_what_cannot_work_is_said(run: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str):
    monkeypatch.chdir(run)
    with pytest.raises((UserError, FileNotFoundError)) as found:
        generate.main(["--config", "tiny.py", *arguments.split()])
    assert message in str(found.value)


def asked(run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[Example]:
    """The conversations that the command would pass to the generator."""
    found: list[Example] = []

    class AskedError(Exception):
        pass

    def load(*_: Any, **__: Any) -> Any:
        raise AskedError

    def conversations(options: Any, data: DataConfig) -> list[Example]:
        found.extend(original(options, data))
        return found

    original = generate._conversations
    monkeypatch.setattr(generate, "_conversations", conversations)
    monkeypatch.setattr(generate, "load", load)
    monkeypatch.chdir(run)
    with pytest.raises(AskedError):
        generate.main(["--config", "tiny.py", "--weights", "run", *arguments])
    return found


A, B = Clip(Path("a.wav")), Clip(Path("b.wav"))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--prompt", "hi"], [("hi",)]),
        (["--audio", "a.wav", "b.wav"], [(A,), (B,)]),
        (["--audio", "a.wav", "b.wav", "--prompt", "What?"], [(A, "What?"), (B, "What?")]),
        (["--audio", "a.wav", "--prompt", "Is {audio} it?"], [("Is ", A, " it?")]),
        (["--audio", "a.wav", "b.wav", "--prompt", "{audio} or {audio}?"], [(A, " or ", B, "?")]),
        ([], []),
    ],
)
def test_options_are_what_the_user_says(run: Path, monkeypatch: pytest.MonkeyPatch, arguments, want):
    found = asked(run, monkeypatch, arguments)
    assert [[(turn.role, turn.parts) for turn in example.turns] for example in found] == [
        [("user", parts)] for parts in want
    ]
    assert len({example.key for example in found}) == len(found)


def test_a_file_of_conversations_is_read_as_a_manifest_is(run: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "{audio} Hm?"}], "audio": ["a.wav"], "id": "chat"},
        {
            "conversations": [
                {"from": "human", "value": "Hm?"},
                {"from": "gpt", "value": "Yes."},
                {"from": "human", "value": "Why?"},
            ]
        },
        {"audio_filepath": "b.wav"},
    ]
    (run / "chats.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    first, second, third = asked(run, monkeypatch, ["--chat", "chats.jsonl"])
    assert first == Example("1:chat", (Turn("user", (Clip(Path("a.wav")), " Hm?")),))
    assert [turn.role for turn in second.turns] == ["user", "assistant", "user"]
    assert third == Example("5:b.wav", (Turn("user", (B,)),))
    for line, message in (
        ({"messages": [{"role": "assistant", "content": "Yes."}]}, "the last turn is the assistant's"),
        ({"messages": []}, "messages is"),
    ):
        (run / "bad.jsonl").write_text(json.dumps(line))
        with pytest.raises(UserError, match=r"bad\.jsonl, line 1: ") as found:
            generate.read_chats(run / "bad.jsonl")
        assert message in str(found.value)
    (run / "bad.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no lines"):
        generate.read_chats(run / "bad.jsonl")


DELTAS = (
    AnswerDelta(1, "B", (1,), None),
    AnswerDelta(0, "A", (1,), None),
    AnswerDelta(2, "C\x1b[2J\n", (1,), "stop"),
    AnswerDelta(1, "b", (2,), "length"),
    AnswerDelta(0, "", (), None),
    AnswerDelta(0, "a", (2,), "stop"),
)


def test_several_answers_have_names_and_say_what_is_no_whole_answer(capsys: pytest.CaptureFixture):
    examples = [Example(key, ()) for key in ("1:a.wav", "2:b.wav", "chat")]
    chat.show_answers(iter(DELTAS), examples, None, named=True)
    assert capsys.readouterr().out == "a.wav: Aa\nb.wav: Bb [cut off at 2 tokens]\nchat: C\ufffd[2J\n\n"
    nothing = (AnswerDelta(1, "", (), "stop"), AnswerDelta(0, " ", (1,), "stop"))
    chat.show_answers(iter(nothing), examples[:2], None, named=True)
    assert capsys.readouterr().out == "a.wav:  [empty]\nb.wav: [empty]\n"


def test_json_is_a_line_for_each_answer_with_its_recordings(capsys: pytest.CaptureFixture, tmp_path: Path):
    turns = (Turn("user", (A, "or", B)), Turn("assistant", ("yes",)), Turn("user", ("why",)))
    examples = [Example("1:x", turns), Example("2:y", ()), Example("3:z", ())]
    chat.show_answers(iter(DELTAS), examples, tmp_path / "out.jsonl", named=True, as_json=True)
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "out.jsonl").read_text()
    lines = [json.loads(line) for line in shown.splitlines()]
    assert lines[0] == {
        "key": "1:x",
        "audio": ["a.wav", "b.wav"],
        "text": "Aa",
        "tokens": [1, 2],
        "end": "stop",
        "windows": 1,
        "reason": "",
    }
    assert [(line["audio"], line["end"]) for line in lines[1:]] == [([], "length"), ([], "stop")]


def test_answers_are_shown_in_order_whichever_comes_first(capsys: pytest.CaptureFixture, tmp_path: Path):
    shown = []

    def pieces() -> Iterator[AnswerDelta]:
        for piece in DELTAS:
            shown.append(capsys.readouterr().out)
            yield piece

    examples = [Example(key, ()) for key in "xyz"]
    answers = chat.show_answers(pieces(), examples, tmp_path / "out.jsonl")
    assert "".join(shown) + capsys.readouterr().out == "Aa\nBb\nC\ufffd[2J\n\n"
    assert shown[:4] == ["", "", "A", ""], "as it comes"
    assert [(a.key, a.text, a.tokens, a.end) for a in answers] == [
        ("x", "Aa", (1, 2), "stop"),
        ("y", "Bb", (1, 2), "length"),
        ("z", "C\x1b[2J\n", (1,), "stop"),
    ]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["x", "y", "z"]


def test_a_chat_goes_on_from_what_was_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    class Echo(Generator):
        """Answers with the number of turns; fails, or gives an empty answer, when told to."""

        def __init__(self) -> None:
            self.config = Config()

        def stream(self, conversations: Any, **settings: Any) -> Iterator[AnswerDelta]:
            (example,) = conversations
            prompts.append([turn.parts for turn in example.turns])
            assert settings == {"temperature": 0.5}
            last = example.turns[-1].parts[-1]
            if last == "fail":
                raise UserError("no such thing")
            if last in ("interrupt", "interrupt at once"):
                yield AnswerDelta(0, "so" if last == "interrupt" else "", (), None)
                raise KeyboardInterrupt
            if last in ("silence", "noise"):
                yield AnswerDelta(0, "", (7,) if last == "noise" else (), "stop")
            else:
                yield AnswerDelta(0, f"<{len(example.turns)}>", (), "stop")

    prompts: list[Any] = []
    lines = ["one", "", "/audio a.wav", "/audio none.wav", "two", "/foo", "/help", "fail", "silence", "noise"]
    lines += ["interrupt at once", "interrupt", "three", "/reset"]
    lines += ["/audio b.wav", "/audio a.wav", "{audio} or {audio}?", "/quit", "never"]
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    chat.chat(Echo(), {"temperature": 0.5}, None)
    first = [("one",), ("<1>",), (A, "two"), ("<3>",)]
    assert prompts == [
        [("one",)],
        first[:3],
        [*first, ("fail",)],
        [*first, ("silence",)],
        [*first, ("noise",)],
        [*first, ("interrupt at once",)],
        [*first, ("interrupt",)],
        [*first, ("interrupt",), ("so",), ("three",)],
        [(B, " or ", A, "?")],
    ]
    printed = capsys.readouterr()
    assert printed.out == "<1>\n<3>\n\n\n\nso\n<7>\n<1>\n"
    assert "error: no such thing" in printed.err
    assert "error: no file 'none.wav'" in printed.err
    assert "error: there is no command /foo; /help lists them" in printed.err
    assert printed.err.count("/reset        starts over") == 2
    for why in ("the model ended it at once", "its 1 tokens are no text", "you ended it"):
        assert printed.err.count(f"(no answer, since {why}; what you said is forgotten)") == 1
