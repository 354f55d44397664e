"""Every command on a tiny folder of Nemotron 3.5 Transcribe, which stands in the place of a config file."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile

from jaxthd.files.jsonl import read_lines, write_lines
from jaxthd.run.metrics_file import read_metrics
from tests.hf.published import assert_identical, tensors
from tests.hf.transcribe_folder import write_folder
from tests.test_adapting import run
from tests.waves import talk

pytestmark = pytest.mark.nightly
SECONDS = (0.3, 3.41, 1.28, 6.2, 2.05, 0.77)
MESH = ["--mesh.data", "1", "--mesh.context", "2", "--mesh.pipeline", "2", "--mesh.tensor", "2"]
ALONE = ["--mesh.data", "1", "--mesh.context", "1", "--mesh.pipeline", "1", "--mesh.tensor", "1"]
SIZES = ["--data.rows", "2", "--data.workers", "0", "--train.trackers", "--train.validation-batches", "1"]
STEPS = [
    "--train.steps",
    "4",
    "--train.warmup-steps",
    "0",
    "--train.learning-rate",
    "1e-2",
    "--train.validate-every",
    "4",
]


class Place(NamedTuple):
    """What the commands work on: the folder, a manifest, and where they write."""

    folder: Path
    manifest: Path
    work: Path

    def train(self, out: str, *options: Any) -> Path:
        """The workdir of a run of four steps from the folder."""
        data = ("--data.manifest", self.manifest, "--data.validation-manifest", self.manifest)
        run("train", self.folder, *data, *SIZES, *STEPS, *options, "--workdir", self.work / out)
        return self.work / out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Recordings of talk, every second one with its speakers."""
    work, lines = tmp_path_factory.mktemp("commands"), []
    write_folder(work / "model")
    for n, seconds in enumerate(SECONDS):
        soundfile.write(work / f"{n}.wav", talk(n, round(16000 * seconds)), 16000)
        line = {
            "audio_filepath": f"{n}.wav",
            "duration": seconds,
            "text": f"<spk:0> one two <spk:{n % 3}> six",
        }
        said = [
            {"speaker": "ann", "start": 0.0, "end": 0.6 * seconds},
            {"speaker": "bo", "start": 0.5 * seconds, "end": seconds},
        ]
        lines.append(line | ({"speaker_segments": said} if n % 2 else {}))
    write_lines(work / "talk.jsonl", lines)
    return Place(work / "model", work / "talk.jsonl", work)


@pytest.fixture(scope="module")
def trained(place: Place) -> Path:
    """A run of all parameters on a mesh of all axes, with the loss of the head for word times."""
    return place.train("run", *MESH, "--model.encoder.word-times.loss", 0.3)


def metric(workdir: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(workdir) if name in line]


def changed(workdir: Path, place: Place) -> set[str]:
    """The tensors that an export of the run has otherwise than the folder."""
    out = workdir.with_name(f"{workdir.name}-exported")
    run("convert", "export", workdir, "--out", out, "--like", place.folder)
    old, new = tensors(place.folder), tensors(out)
    assert old.keys() == new.keys()
    return {name for name, x in old.items() if x.tobytes() != new[name].tobytes()}


def test_all_parameters_train_but_the_diarizers(place: Place, trained: Path):
    for name in ("loss", "label_loss"):
        found = metric(trained, name)
        assert len(found) == 4
        assert found[-1] < found[0], name
    found, everything = changed(trained, place), set(tensors(place.folder))
    fixed = everything - found
    assert fixed, "the diarizer's"
    assert all(name.startswith("perception.encoder.diarization_model") for name in fixed), fixed
    assert not [name for name in found if name.startswith("perception.encoder.diarization_model")]


def test_lora_trains_its_projections_and_the_adapter_beside_a_frozen_encoder(place: Place):
    options = (
        "--adapt.lora-rank",
        2,
        "--adapt.lora-targets",
        "decoder.layers.*",
        "--adapt.freeze",
        "encoder.*",
    )
    found = changed(place.train("lora", *options), place)
    assert any(name.startswith("llm.") for name in found)
    assert {name for name in found if not name.startswith("llm.")} <= {
        "perception.proj.weight",
        "perception.proj.bias",
    }


def test_an_untouched_import_is_the_folder(place: Place):
    run("convert", "import", place.folder, "--out", place.work / "imported")
    out = place.work / "back"
    run("convert", "export", place.work / "imported", "--out", out, "--like", place.folder)
    assert_identical(tensors(out), tensors(place.folder))
    for file in ("tokenizer.json", "alignment_tokenizer/tokenizer.json"):
        assert (out / file).read_bytes() == (place.folder / file).read_bytes()


def test_the_export_answers_and_scores_as_the_run_does(place: Place, trained: Path):
    """On one device what a mesh of eight has trained."""
    out = place.work / "handed-on"
    run("convert", "export", trained, "--out", out, "--like", place.folder)
    found: dict[str, list[Any]] = {}
    for name, source, mesh in (("run", trained, []), ("export", out, ALONE)):
        files = [place.work / f"{name}-{kind}.jsonl" for kind in ("scores", "answers")]
        run("score", source, *mesh, "--manifest", place.manifest, "--out", files[0], "--every-token")
        audio = [place.work / f"{n}.wav" for n in range(3)]
        asked = ("--audio", *audio, "--out", files[1], "--max-new-tokens", 6)
        run("generate", source, *mesh, *asked)
        found[name] = [read_lines(file) for file in files]
    for ours, theirs in zip(found["run"][0], found["export"][0], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], rtol=0, atol=2e-5)
    assert [x["tokens"] for x in found["run"][1]] == [x["tokens"] for x in found["export"][1]]


def test_words_have_the_same_times_on_a_mesh_and_on_one_device(place: Place, trained: Path):
    found = []
    for mesh in ([], ALONE):
        out = place.work / f"times-{len(mesh)}"
        given = ("--manifest", place.manifest, "--out", out, "--data.workers", 0)
        run("align", trained, *mesh, *given)
        found.append(read_lines(out / "words.jsonl"))
    ours, alone = found
    assert len(ours) == len(SECONDS) - 1, "that of 0.3 s is too short for its text"
    for line, want in zip(ours, alone, strict=True):
        assert line["key"] == want["key"]
        assert [x["word"] for x in line["words"]] == [x["word"] for x in want["words"]] != []
        for got, x in zip(line["words"], want["words"], strict=True):
            np.testing.assert_allclose([got["start"], got["end"]], [x["start"], x["end"]], atol=1e-3)
            assert got["speaker"] == x["speaker"]


def test_a_run_is_evaluated_and_prefers(place: Place, trained: Path):
    """evaluate, DPO on pairs and GRPO, two steps each."""
    run("evaluate", trained, "--out", place.work / "evaluated", "--data.validation-manifest", place.manifest)
    assert any((place.work / "evaluated").rglob("summary.json"))
    pairs = [
        {key: line[key] for key in ("audio_filepath", "duration")}
        | {"chosen": line["text"], "rejected": line["text"][::-1].replace(">", "").replace("<", "")}
        for line in read_lines(place.manifest)
    ]
    write_lines(place.work / "pairs.jsonl", pairs)
    two = ("--train.steps", 2, "--train.validate-every", 0, "--train.warmup-steps", 0)
    given = ("--data.manifest", place.work / "pairs.jsonl", *SIZES, *two)
    run("train", place.folder, *given, "--train.objective", "dpo", "--workdir", place.work / "dpo")
    assert len(metric(place.work / "dpo", "loss")) == 2
    grpo = [
        "--train.objective",
        "grpo",
        "--rollout.prompts",
        "2",
        "--rollout.group-size",
        "4",
        "--rollout.rewards",
        "wer",
    ]
    drawn = ("--rollout.max-new-tokens", 6, "--rollout.temperature", 2.0)
    given = ("--data.manifest", place.manifest, *SIZES, *two)
    run("grpo", place.folder, *given, *grpo, *drawn, "--workdir", place.work / "grpo")
    assert read_lines(place.work / "grpo" / "rollouts.jsonl")
