"""The preferences command: pairs by word error rate, items without spread, continued after a kill."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd import preferences
from jaxthd.config import Config
from jaxthd.data.example import Example
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.files.jsonl import read_lines
from jaxthd.files.run_folder import write_config
from jaxthd.inference.generator import Answer, Generator
from jaxthd.inference.model import Model, load
from jaxthd.run.continuing import OPTIONS
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.validate import DeviceFacts, findings
from tests.data.sets import read_manifest
from tests.helpers import save_run
from tests.test_generate import CONFIG

SAID = {
    "a": ["one two", "One, two!", "one", "won too", "won too three", "won too tree", ""],
    "b": ["yes", "yes"],
    "c": ["no", "nein"],
    "d": ["yes sir", "YES sir."],
}
"""What the model says; the last of "a" is empty, and the one before it is cut off."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(CONFIG)
    config = load_config(tmp_path / "tiny.py")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    write_config(tmp_path / "run", config)
    (tmp_path / "speech").mkdir()
    chat = [{"role": "user", "content": "{audio} Is it?"}, {"role": "assistant", "content": "Yes."}]
    lines = [
        {"audio_filepath": "a.wav", "text": "one two", "duration": 1.0, "speaker": "s"},
        {"id": "b", "audio": [{"path": "b.wav", "offset": 0.5}], "messages": chat, "lang": "en"},
        "{",
        {"audio_filepath": "c.wav", "text": "?!"},
        {"audio_filepath": "d.wav", "text": "yes sir", "context": "Hm?"},
        {"audio_filepath": "e.wav", "text": "gone"},
        {"audio_filepath": "a.wav", "chosen": "one", "rejected": "two"},
    ]
    encoded = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "speech" / "m.jsonl").write_text("\n".join(encoded) + "\n")
    return tmp_path


class Parrot(Generator):
    """A generator that says what SAID has for the recording; "e" cannot be answered."""

    def __init__(self, dies_at: str = "") -> None:
        self.config = Config()
        self.asked: list[str] = []
        self._dies_at = dies_at

    def why_unusable(self, conversation: Example) -> str:
        return "there is no recording" if "e.wav" in conversation.key else ""

    def generate(self, conversations: Sequence[Example], **settings: Any) -> list[Answer]:
        return [self._answer(conversation) for conversation in conversations]

    def _answer(self, conversation: Example) -> Answer:
        name, _, number = conversation.key.partition(":")[2].partition("/")
        if self._dies_at and name.startswith(self._dies_at):
            raise KeyboardInterrupt
        assert conversation.turns[-1].role == "user"
        self.asked.append(conversation.key)
        said = SAID[name[0]]
        text = said[int(number) % len(said)]
        return Answer(conversation.key, text, (), "length" if "tree" in text else "stop")


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, parrot: Parrot, *options: str) -> list[dict[str, Any]]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(preferences, "load", lambda *_, **__: SimpleNamespace(generator=parrot))
    monkeypatch.setattr(preferences, "checkpoint_of", lambda weights: (folder / "run", 3))
    manifest = ["--manifest", "speech/m.jsonl", "--out", "pairs.jsonl", "--samples", "7", "--batch", "4"]
    preferences.main(["run", *manifest, *options])
    return read_lines(folder / "pairs.jsonl")


def test_the_best_and_the_worst_hypothesis_become_a_pair(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (pair,) = run(folder, monkeypatch, Parrot())
    progress = capsys.readouterr()
    assert (
        "5/5 items  ETA 00:00  1 pairs  2 without spread  4 skipped  WER 0.0% chosen, 150.0% rej"
        in progress.err
    )
    hypotheses = pair.pop("hypotheses")
    assert pair == {
        "audio_filepath": "speech/a.wav", "text": "one two", "duration": 1.0, "speaker": "s",
        "item": "1:a.wav", "chosen": "one two", "rejected": "won too three",
        "chosen_wer": 0.0, "rejected_wer": 1.5,
    }  # fmt: skip
    assert [h["text"] for h in hypotheses] == SAID["a"]
    assert [h["wer"] for h in hypotheses] == [0.0, 0.0, 0.5, 1.0, 1.5, 1.5, 1.0]
    assert [h["ended"] for h in hypotheses] == [True] * 5 + [False, True]
    without = read_lines(folder / "pairs.without_spread.jsonl")
    assert [(line["item"], line["reference"]) for line in without] == [
        ("2:b", "Yes."),
        ("5:d.wav", "yes sir"),
    ]
    skipped = {line["key"]: line["reason"] for line in read_lines(folder / "pairs.skipped.jsonl")}
    assert skipped.keys() == {"3:", "4:c.wav", "6:e.wav", "7:a.wav"}
    assert "no words" in skipped["4:c.wav"]
    assert "preference line" in skipped["7:a.wav"]
    shown = progress.out
    assert "pairs.jsonl: 1 pairs of 3 items; word error rate 0.0% of the chosen, 150.0%" in shown
    assert "2 items (66.7%) without spread: of 2 every hypothesis is right" in shown
    assert "4 skipped items are listed in pairs.skipped.jsonl" in shown
    assert (folder / "pairs.report.txt").read_text() in shown
    lines = shown.splitlines()
    at = lines.index("Pairs (what was chosen, what was rejected, with their word error rates)")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["0.0%", "one", "two"],
        ["150.0%", "won", "too", "three"],
    ]
    command = shlex.split(lines[lines.index("Next") + 1])
    trained = parse_command_line("train", command[2:], OPTIONS).config
    assert command[:2] == ["jaxthd", "train"]
    assert (trained.train.objective, trained.data.manifest) == ("dpo", (str(folder / "pairs.jsonl"),))
    assert trained.train.init_from == (str(folder / "run"),)
    device = DeviceFacts.of_this_machine(260)
    of_run = {*map(str, findings(load_config(folder / "tiny.py"), device))}
    assert {*map(str, findings(trained, device))} <= of_run, "it asks for nothing that cannot work"
    (example,), none = read_manifest(folder / "pairs.jsonl")
    assert not none
    assert example.clips[0].path.resolve() == folder / "speech" / "a.wav"
    assert [a.text for a in example.alternatives] == ["one two", "won too three"]


def test_hypotheses_are_told_apart_by_their_insertions(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Of equals the one with fewer other errors is better; spread in other errors makes no pair."""
    monkeypatch.setitem(SAID, "a", ["won", "one two", "one two too", "one two too tree", "won too three"])
    monkeypatch.setitem(SAID, "d", ["yes", "no", "yes sir"])
    (pair,) = run(folder, monkeypatch, Parrot(), "--by", "insertions")
    assert (pair["chosen"], pair["rejected"]) == ("one two", "won too three")
    assert (pair["chosen_wer"], pair["rejected_wer"]) == (0.0, 1.5)
    with pytest.raises(UserError, match=r"other settings:\n  by: insertions there, None now"):
        run(folder, monkeypatch, Parrot())


def test_without_a_pair_no_training_is_advised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(SAID, "a", ["one two"])
    assert not run(folder, monkeypatch, Parrot())
    said = capsys.readouterr().out
    assert "No pair was found: give a new --out, and --samples 14 or a higher --temperature" in said
    assert "jaxthd train" not in said


def test_a_conversation_becomes_a_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAID, "b", ["No.", "Yes!"])
    (pair,) = run(folder, monkeypatch, Parrot(), "--samples", "2")
    assert (pair["id"], pair["lang"], pair["chosen"], pair["rejected"]) == ("b", "en", "Yes!", "No.")
    assert pair["prompt"] == [
        {
            "role": "user",
            "content": [
                {"type": "audio", "path": "speech/b.wav", "offset": 0.5},
                {"type": "text", "text": " Is it?"},
            ],
        }
    ]
    (example,), _ = read_manifest(folder / "pairs.jsonl")
    want = read_manifest(folder / "speech" / "m.jsonl")[0][1]
    assert [turn.role for turn in example.turns] == ["user"]
    assert example.clips[0].offset == want.clips[0].offset == 0.5
    assert example.turns[0].parts[1] == want.turns[0].parts[1]


def test_a_killed_call_is_continued_and_nothing_is_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAID, "d", ["yes", "no", "yes sir"])
    whole = run(folder, monkeypatch, Parrot())
    others = read_lines(folder / "pairs.without_spread.jsonl")
    for path in folder.glob("pairs.*"):
        path.unlink()
    first = Parrot(dies_at="d")
    with pytest.raises(KeyboardInterrupt):
        run(folder, monkeypatch, first)
    with (folder / "pairs.jsonl").open("a") as file:
        file.write('{"item": "5:d.w')  # as a kill leaves it
    second = Parrot()
    assert run(folder, monkeypatch, second) == whole
    assert read_lines(folder / "pairs.without_spread.jsonl") == others
    assert sorted([*first.asked, *second.asked]) == sorted(set(first.asked) | set(second.asked))
    assert {key.partition("/")[0] for key in second.asked} == {"5:d.wav"}
    assert run(folder, monkeypatch, third := Parrot()) == whole
    assert not third.asked
    before = (folder / "pairs.jsonl").read_text()
    with pytest.raises(UserError, match=r"other settings:\n  temperature: 1.0 there, 0.8 now"):
        run(folder, monkeypatch, Parrot(), "--temperature", "0.8")
    (folder / "pairs.settings.json").unlink()
    with pytest.raises(UserError, match=r"pairs.jsonl exists, and pairs.settings.json"):
        run(folder, monkeypatch, Parrot())
    assert (folder / "pairs.jsonl").read_text() == before


def test_only_the_first_items(folder: Path, monkeypatch: pytest.MonkeyPatch):
    parrot = Parrot()
    run(folder, monkeypatch, parrot, "--items", "1")
    assert {key.partition("/")[0] for key in parrot.asked} == {"1:a.wav"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tiny.py --manifest m.jsonl", "--weights, --out missing"),
        ("run --manifest speech/m.jsonl --out p.jsonl --samples 1", "--samples is 1; expected 2 or more"),
        ("run --manifest speech/m.jsonl --out p.jsonl --items 0", "--items is 0; expected 1 or more"),
        ("run --manifest speech/m.jsonl --out p.jsonl --temperature 0", "--temperature is 0, with which"),
        ("run --manifest speech/m.jsonl --out p.jsonl --top-p 0", "top_p is 0.0"),
        ("run --manifest none.jsonl --out p.jsonl", "no manifest at none.jsonl"),
        ("run --manifest speech --out p.jsonl", "--manifest speech is no manifest"),
    ],
)
def test_mistakes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str):
    monkeypatch.chdir(folder)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        preferences.main(arguments.split())
    assert not list(folder.glob("p.*"))


def test_a_models_hypotheses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """End to end, with a model that says anything: the same lines again."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    config = load_config(tmp_path / "tiny.py")
    save_run(config, tmp_path / "run", step=3)
    rng = np.random.default_rng(0)
    for name in "ab":
        soundfile.write(tmp_path / f"{name}.wav", rng.normal(0, 0.1, 8000), 16000)
    lines = [{"audio_filepath": f"{name}.wav", "text": "one two"} for name in "aab"]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    loaded: list[Model] = []

    def once(*arguments: Any, **options: Any) -> Model:
        loaded[:] = loaded or [load(*arguments, **options)]
        return loaded[0]

    monkeypatch.setattr(preferences, "load", once)
    found = []
    for out, seed in (("x.jsonl", "0"), ("y.jsonl", "0"), ("z.jsonl", "1")):
        options = ["--samples", "3", "--max-new-tokens", "5", "--batch", "2", "--seed", seed]
        preferences.main(["run", "--manifest", "m.jsonl", "--out", out, *options])
        every = [
            *read_lines(tmp_path / out),
            *read_lines((tmp_path / out).with_suffix(".without_spread.jsonl")),
        ]
        found.append(sorted(every, key=lambda line: str(line["item"])))
    assert found[0] == found[1] != found[2]
    assert [line["item"] for line in found[0]] == ["1:a.wav", "2:a.wav", "3:b.wav"]
    texts = [h["text"] for line in found[0] for h in line["hypotheses"]]
    assert len(texts) == 9
    assert len(set(texts)) > 1
