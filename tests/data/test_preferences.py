"""Preference lines: how they are read, what documents they become, which runs take them."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig, SpecAugmentConfig, TrainConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.data.example import Alternative, Clip, Example, Samples, Turn
from jaxthd.data.mismatched import WithMismatched
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.shar import SharSource
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.objectives import SFT, make_objective
from jaxthd.objectives.answers import why_unusable
from jaxthd.packing.document import Document
from jaxthd.planning.lengths import measure
from tests.answers import alone
from tests.data.sets import read_manifest, sound, write_tar
from tests.data.test_chat_template import CHATML, checkpoint

HEARD = {"audio_filepath": "a.wav", "duration": 0.5}
PAIR = {"chosen": "one two", "rejected": "won too"}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it {audio} or {audio}?"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("Yes.", "No."))
ASKS = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
"""With the beginning of an answer in the prompt."""
BOTH = (Alternative("one two", 1.0), Alternative("won too", -1.0))


def write(folder: Path, *lines: dict[str, Any], name: str = "m.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def read_one(folder: Path, line: dict[str, Any], **options: Any) -> Example:
    (example,), _ = read_manifest(write(folder, line), **options)
    return example


def shown(example: Example) -> list[tuple[str, list[str]]]:
    return [(t.role, [p if isinstance(p, str) else "<clip>" for p in t.parts]) for t in example.turns]


def test_a_pair_about_a_recording_has_the_configured_prompt(tmp_path: Path):
    line = HEARD | PAIR | {"text": "is not read", "lang": "en"}
    example = read_one(tmp_path, line, prompt="Hear {audio}!")
    assert (example.key, example.duration, example.alternatives) == ("1:a.wav", 0.5, BOTH)
    assert shown(example) == [("user", ["Hear ", "<clip>", "!"])]
    own = read_one(tmp_path, line | {"context": "What?", "system_prompt": "Listen."})
    assert shown(own) == [("system", ["Listen."]), ("user", ["What? ", "<clip>"])]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": ASKED, "chosen": YES, "rejected": NO},
        {"messages": ASKED, "chosen": "Yes.", "rejected": NO},
        {"chosen": [*ASKED, *YES], "rejected": [*ASKED, *NO]},
        {
            "conversations": [{"from": m["role"], "value": m["content"]} for m in ASKED],
            "chosen": [{"from": "gpt", "value": "Yes."}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
        },
    ],
    ids=["prompt", "messages", "implicit", "conversations"],
)  # fmt: skip
def test_a_prompt_may_be_a_conversation_with_recordings(tmp_path: Path, line: dict[str, Any]):
    example = read_one(tmp_path, line | {"id": 7, "audio": ["a.wav", {"path": "b.wav", "offset": 0.5}]})
    assert example.key == "1:7"
    assert shown(example) == [
        ("system", ["Be brief."]),
        ("user", ["Is it ", "<clip>", " or ", "<clip>", "?"]),
    ]
    assert example.clips == [Clip(tmp_path / "a.wav"), Clip(tmp_path / "b.wav", 0.5)]
    assert example.alternatives == (Alternative("Yes.", 1.0), Alternative("No.", -1.0))


def test_a_label_is_one_answer_and_a_prompt_may_be_a_text(tmp_path: Path):
    line = {"prompt": "Is it?", "completion": "Yes.", "label": False}
    example = read_one(tmp_path, line)
    assert shown(example) == [("user", ["Is it?"])]
    assert example.alternatives == (Alternative("Yes.", -1.0),)
    kept = read_one(tmp_path, HEARD | {"completion": YES, "label": True, "chosen": None})
    assert kept.alternatives == (Alternative("Yes.", 1.0),)
    plain = read_one(tmp_path, HEARD | {"text": "one", "label": True, "chosen": None})
    assert (plain.alternatives, plain.text) == ((), "one")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (HEARD | {"chosen": "one"}, "rejected is missing; found ['audio_filepath', 'chosen', 'duration']"),
        (HEARD | {"rejected": "one"}, "chosen is missing"),
        (HEARD | PAIR | {"chosen": " "}, "chosen is empty; expected the text of an answer"),
        (HEARD | PAIR | {"chosen": 5}, "chosen is 5; expected a string, or a list"),
        (HEARD | PAIR | {"rejected": []}, "rejected is []; expected a string, or a list"),
        (HEARD | PAIR | {"rejected": "\ud800"}, "surrogates not allowed"),
        (HEARD | PAIR | {"rejected": "one two "}, "chosen and rejected are both 'one two'"),
        (HEARD | PAIR | {"label": True}, "chosen is given with label; expected chosen and rejected, or"),
        (HEARD | PAIR | {"completion": "a"}, "chosen is given with completion"),
        (HEARD | {"completion": "one"}, "label is missing"),
        (HEARD | {"label": True}, "completion is missing"),
        (HEARD | {"completion": "one", "label": 1}, "label is 1; expected true or false"),
        (HEARD | PAIR | {"chosen": ["a"]}, "the last message of chosen is a JSON str; expected an object"),
        (HEARD | PAIR | {"chosen": ASKED[1:]}, "last message of chosen has role 'user'; expected assistant"),
        (HEARD | PAIR | {"chosen": [{"role": "assistant"}]}, "content of chosen is None; expected a text"),
        (HEARD | {"chosen": [*ASKED, *YES], "rejected": NO}, "2 audio placeholders ({audio}) but 1 clips"),
        (HEARD | PAIR | {"prompt": "a", "messages": ASKED}, "prompt and messages are given; expected one of"),
        (PAIR, "prompt is missing; found ['chosen', 'rejected']"),
        (PAIR | {"prompt": []}, "messages is []"),
        (PAIR | {"prompt": 5}, "messages is 5"),
        (PAIR | {"prompt": [*ASKED[:1], *YES]}, "the last turn is the assistant's; expected the user's"),
        (PAIR | {"prompt": ASKED}, "2 audio placeholders ({audio}) but 0 clips"),
        ({"chosen": [*ASKED[:1], *YES], "rejected": [*ASKED[1:], *NO], "audio": ["a", "b"]}, "but 2 clips"),
        ({"chosen": [{"role": "user", "content": "a"}, *YES], "rejected": [ASKED[0], *NO]}, "differ"),
        (PAIR | {"audio_filepath": ""}, "audio_filepath is empty"),
        (HEARD | PAIR | {"_skipme": True}, "_skipme is set"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_used_is_skipped_with_a_reason(tmp_path: Path, line: dict[str, Any], reason: str):
    examples, ((_, found),) = read_manifest(write(tmp_path, HEARD | PAIR, line))
    assert len(examples) == 1
    assert reason in found


def test_a_cut_of_shar_has_them_among_its_custom_fields(tmp_path: Path):
    cut = {"id": "a", "start": 0, "duration": 0.5, "recording": {"channel_ids": [0]}, "supervisions": []}
    custom = {"custom": PAIR | {"context": "What?"}}
    (tmp_path / "cuts.0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (cut | custom, cut | {"custom": {"chosen": "x"}}))
    )
    write_tar(tmp_path / "recording.0.tar", {"a.wav": sound(0.5), "a.json": b"{}"})
    (example,), ((_, reason),) = SharSource(SourceSetting(str(tmp_path))).read(DataConfig())
    assert (shown(example), example.alternatives) == ([("user", ["What? ", "<clip>"])], BOTH)
    assert "rejected is missing" in reason


# --- documents ---

CONFIG = Config(
    data=DataConfig(spec_augment=SpecAugmentConfig(freq=(1, 4))),
    model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
)
NOISE = Samples(np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32), 16_000)
TURNS = (
    Turn("user", ("Hear ", NOISE)),
    Turn("assistant", ("earlier",)),
    Turn("user", ("Again: ", NOISE)),
)


def settings(template: str) -> Config:
    return replace(CONFIG, data=replace(CONFIG.data, template=template))


@pytest.mark.parametrize("template", ["plain", "chatml", "chat_template"])
def test_each_answer_is_what_the_template_writes_of_it_alone(tmp_path: Path, template: str):
    config = settings(template)
    tokenizer = checkpoint(tmp_path, ASKS) if template == "chat_template" else ByteTokenizer()
    if template == "chat_template":
        config = replace(config, data=replace(config.data, tokenizer=str(tmp_path)))
        turns: tuple[Turn, ...] = (
            Turn("user", ("Is it?",)),
            Turn("assistant", ("It is.",)),
            Turn("user", ("So?",)),
        )
        clips: tuple[Any, ...] = ()
    else:
        turns, clips = TURNS, (NOISE, NOISE)
    make = SpeechDocuments(config, tokenizer, train=False)
    pair = make(Example("a", turns, BOTH), 0)
    assert isinstance(pair, Document)
    assert len(pair.pieces) == 2 * len(clips)
    end = PromptTemplate(config.data, tokenizer).end_id
    for text, answer, sign in zip(("one two", "won too"), alone(pair), (1, -1), strict=True):
        whole = make(Example("a", (*turns, Turn("assistant", (text,)))), 0)
        assert isinstance(whole, Document)
        assert answer.tokens.tolist() == whole.tokens[: len(answer)].tolist()
        assert answer.tokens[-1] == end
        assert not whole.supervised[len(answer) :].any()
        own = np.arange(len(answer)) >= pair.prompt_length
        np.testing.assert_array_equal(answer.supervised, whole.supervised[: len(answer)] & own)
        np.testing.assert_array_equal(answer.extras["preference"], np.where(own, sign, 0))
        assert tokenizer.decode(answer.tokens[answer.supervised].tolist()).strip() == text
    assert make.prompt(Example("a", turns)).tokens.tolist() == pair.tokens[: pair.prompt_length].tolist()


def test_lengths_are_planned_as_they_are_packed():
    examples = [Example("a", TURNS, BOTH), Example("b", TURNS, BOTH[:1])]
    for share in (True, False):
        config = replace(CONFIG, posttraining=replace(CONFIG.posttraining, share_prompts=share))
        found, unusable = measure(examples, config)
        make = SpeechDocuments(config, ByteTokenizer(), train=False)
        made = [make(example, 0) for example in examples]
        assert not unusable
        assert found.tokens.tolist() == [
            sum(len(x) for x in alone(d)) - share * (len(d.answers) - 1) * (d.prompt_length - 1)
            for d in made
            if isinstance(d, Document)
        ]


def test_answers_whose_tokens_cannot_be_told_from_the_prompts_are_skipped(tmp_path: Path):
    """A template that writes the prompt otherwise before an answer; answers that become the same tokens; text
    that is a mark of the template."""
    thinks = ASKS.replace("assistant\n", "assistant\n<think>")
    tokenizer = checkpoint(tmp_path, thinks)
    config = settings("chat_template")
    asked = (Turn("user", ("Is it?",)),)
    found = SpeechDocuments(config, tokenizer, train=False)(Example("a", asked, BOTH), 0)
    assert isinstance(found, Skipped)
    assert "the template writes the prompt otherwise before the answer 'one two'" in found.reason
    strips = ASKS.replace("m.content", "m.content|trim")
    same = (Alternative("a", 1.0), Alternative("a\n", -1.0))
    found = SpeechDocuments(config, checkpoint(tmp_path, strips), train=False)(Example("a", asked, same), 0)
    assert isinstance(found, Skipped)
    assert "the same tokens" in found.reason
    marked = (BOTH[0], Alternative("<|im_end|>", -1.0))
    found = SpeechDocuments(settings("chatml"), ByteTokenizer(), train=False)(Example("a", asked, marked), 0)
    assert isinstance(found, Skipped)
    assert "a mark of the template" in found.reason


# --- runs ---


def run_config(folder: Path, objective: str, *manifests: str, **data: Any) -> Config:
    defaults: dict[str, Any] = {
        "validation_manifest": "", "workers": 0, "capacity": 128, "audio_capacity": 400,
        "max_skipped_share": 1.0, "rows": 2,
    }  # fmt: skip
    return replace(
        CONFIG,
        data=replace(CONFIG.data, manifest=tuple(str(folder / m) for m in manifests), **{**defaults, **data}),
        train=TrainConfig(objective=objective),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs as files and in a tar file, labelled answers, transcripts."""
    at = tmp_path_factory.mktemp("preferences")
    soundfile.write(at / "a.wav", np.random.default_rng(0).normal(0, 0.1, 8000), 16000)
    write_tar(at / "audio.tar", {"t.wav": sound(0.5)})
    pairs = [HEARD | {"chosen": f"one {n}", "rejected": "won" * (n + 1)} for n in range(7)]
    write(
        at, *pairs, HEARD | PAIR | {"audio_filepath": "gone.wav"}, HEARD | {"chosen": "x"}, name="pairs.jsonl"
    )
    write(at, *({**p, "audio_filepath": "t.wav"} for p in pairs[:5]), name="tarred.jsonl")
    write(at, *(HEARD | {"completion": f"{n}", "label": n % 2 == 0} for n in range(4)), name="labels.jsonl")
    write(at, *[HEARD | {"text": "one"}] * 3, name="speech.jsonl")
    write(at, *[HEARD | {"text": "one"}] * 2, HEARD | PAIR, name="mixed.jsonl")
    return at


def reasons(workdir: Path) -> list[str]:
    path = workdir / "skipped.jsonl"
    return [json.loads(line)["reason"] for line in path.read_text().splitlines()] if path.exists() else []


def test_pairs_are_mixed_tarred_resumed_and_listed_like_other_data(folder: Path, tmp_path: Path):
    config = run_config(
        folder, "dpo", "pairs.jsonl", f"tarred.jsonl::{folder}/audio.tar", "mixed.jsonl",
        weights=(2.0, 1.0, 1.0), rows=1,
    )  # fmt: skip
    data = SpeechData(config, tmp_path)
    with data.training() as loader:
        before = list(islice(loader, 4))
        state = loader.get_state()
        after = list(islice(loader, 4))
    with data.training() as again:
        again.set_state(json.loads(json.dumps(state)))
        for (batch, report), (want, wanted) in zip(again, after, strict=False):
            assert report.keys == wanted.keys
            for name, x in want._asdict().items():
                if isinstance(x, np.ndarray):
                    np.testing.assert_array_equal(x, getattr(batch, name))
    keys = {key for _, report in [*before, *after] for row in report.keys for key in row}
    assert {key.split("/")[0] for key in keys if "/" in key} == {"1", "2"}
    found = sorted(reasons(tmp_path))
    assert len(found) == 4
    assert sum("it has no answers to compare" in reason for reason in found) == 2
    assert any("rejected is missing" in reason for reason in found)
    assert any("gone.wav" in reason for reason in found)
    batch, _ = before[0]
    assert set(np.unique(batch.extras["preference"][batch.weights > 0])) == {-1.0, 1.0}
    assert batch.prefixes is not None
    assert batch.document_ids.max() < batch.segment_ids.max()
    written_out = replace(config, posttraining=replace(config.posttraining, share_prompts=False))
    with (
        SpeechData(written_out, tmp_path).training() as other,
        pytest.raises(UserError, match="share_prompts"),
    ):
        other.set_state(state)


def test_a_policys_recordings_are_neither_dithered_nor_masked(folder: Path, tmp_path: Path):
    data = SpeechData(run_config(folder, "dpo", f"tarred.jsonl::{folder}/audio.tar"), tmp_path)
    with data.training() as loader:
        batch, report = next(loader)
    made = SpeechDocuments(CONFIG, ByteTokenizer(), train=False)(
        Example("t", (Turn("user", (Clip(folder / "audio.tar", 0.0, 0.5),)),), BOTH), 0
    )
    assert isinstance(made, Skipped), "the tar file itself is no recording"
    plain = np.unique(batch.features[batch.frame_mask], axis=0)
    assert len(plain) == 50, "the same frames in every epoch and document"
    assert report.documents > 1


@pytest.mark.parametrize(
    ("objective", "manifest", "change"),
    [
        ("sft", "pairs.jsonl", "set train.objective to dpo"),
        ("sft", "labels.jsonl", "set train.objective to kto"),
        ("dpo", "speech.jsonl", "jaxthd preferences makes such lines from transcripts; or set"),
        ("dpo", "labels.jsonl", "expected chosen and rejected: set train.objective to kto"),
        ("kto", "speech.jsonl", "expected completion and label, or chosen and rejected"),
    ],
)  # fmt: skip
def test_a_run_refuses_data_of_another_kind(
    folder: Path, tmp_path: Path, objective: str, manifest: str, change: str
):
    with pytest.raises(UserError, match=f"first item is 1:a.wav: it has .*{change}"):
        SpeechData(run_config(folder, objective, manifest), tmp_path)


def test_kto_takes_labels_and_pairs_and_validation_takes_transcripts_too(folder: Path, tmp_path: Path):
    config = run_config(
        folder, "kto", "labels.jsonl", "pairs.jsonl", validation_manifest=str(folder / "mixed.jsonl")
    )
    data = SpeechData(config, tmp_path)
    with data.training() as loader:
        assert {key.partition("/")[0] for _, r in islice(loader, 4) for row in r.keys for key in row}
    with data.validation() as held_out:
        (batch, report) = next(held_out)
    assert report.documents == 2
    assert batch.document_ids is None
    compared = data.validation_preferences()
    assert compared is not None
    with compared:
        (batch, report) = next(compared)
    assert report.keys[0] == ("3:a.wav",)
    assert {-1.0, 1.0} <= set(np.unique(batch.extras["preference"]))
    for objective, other in (("sft", "pairs"), ("dpo", "labels")):
        own = {"sft": "speech", "dpo": "pairs"}[objective]
        held_out = str(folder / f"{other}.jsonl")
        with pytest.raises(UserError, match=r"\(data.validation_manifest\).*which validation needs"):
            SpeechData(run_config(folder, objective, f"{own}.jsonl", validation_manifest=held_out), tmp_path)


def test_mismatched_answers_are_of_another_item_in_every_epoch():
    turns = (Turn("user", ("?",)),)
    pairs = [
        Example(f"{n}:", turns, (Alternative(f"a{n}", 1.0), Alternative(f"b{n}", -1.0))[: 1 + n % 2])
        for n in range(5)
    ]
    mismatched, shifts = WithMismatched(pairs, seed=3), set()
    for epoch in range(12):
        made = [mismatched.of_epoch(n, epoch) for n in range(5)]
        assert made == [WithMismatched(pairs, seed=3).of_epoch(n, epoch) for n in range(5)]
        others = []
        for n, example in enumerate(made):
            count = len(pairs[n].alternatives)
            assert example.alternatives[:count] == pairs[n].alternatives
            added = example.alternatives[count:]
            assert [x.preference for x in added] == [0.0] * count
            (other,) = {int(x.text[1:]) for x in added}
            others.append(other)
        assert sorted(others) == list(range(5)), "each item's answers are used once"
        assert all(other != n for n, other in enumerate(others))
        shifts.add(others[0])
    assert len(shifts) > 1, "epochs differ"


def test_ktos_mismatched_answers_are_packed_resumed_and_refused_elsewhere(folder: Path, tmp_path: Path):
    def data(kl: str) -> SpeechData:
        config = run_config(folder, "kto", "labels.jsonl", "pairs.jsonl")
        return SpeechData(
            replace(config, train=replace(config.train, objective_options=(f"kl={kl}",))), tmp_path
        )

    with data("mismatched").training() as loader:
        next(loader)
        state = loader.get_state()
        after = list(islice(loader, 3))
    with data("mismatched").training() as again:
        again.set_state(json.loads(json.dumps(state)))
        for (batch, _), (want, _) in zip(again, after, strict=False):
            np.testing.assert_array_equal(batch.tokens, want.tokens)
            np.testing.assert_array_equal(batch.extras["preference"], want.extras["preference"])
    for batch, _ in after:
        supervised = batch.weights > 0
        for row, ids in enumerate(batch.document_ids):
            for document in range(1, ids.max() + 1):
                here = supervised[row] & (ids == document)
                labels = batch.extras["preference"][row][here]
                segments = batch.segment_ids[row][here]
                by_answer = [labels[segments == s] for s in np.unique(segments)]
                assert all(len(set(x)) == 1 for x in by_answer)
                signs = [x[0] for x in by_answer]
                half = len(signs) // 2
                assert all(signs[:half])
                assert not any(signs[half:])
                assert half
    with data("answers").training() as other, pytest.raises(UserError, match="mismatched"):
        other.set_state(state)


def test_which_examples_an_objective_takes():
    objectives = {name: make_objective(name) for name in ("sft", "dpo", "kto", "grpo")}
    takes = {
        name: [n for n in (0, 1, 2) if not why_unusable(n, name, objective)]
        for name, objective in objectives.items()
    }
    assert takes == {"sft": [0], "dpo": [2], "kto": [1, 2], "grpo": [0]}
    assert isinstance(objectives["sft"], SFT)
