"""The evaluate command: its figures follow from the texts it writes, on any mesh, for each set."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jiwer
import pytest

from jaxthd.config import BlockSizes, Config
from jaxthd.convert import export_weights
from jaxthd.errors import UserError
from jaxthd.evaluate import evaluate as evaluate_config
from jaxthd.evaluate import main
from jaxthd.files.jsonl import read_lines
from jaxthd.inference.wer import make_normaliser
from jaxthd.run import startup
from jaxthd.run.evaluations import evaluated_settings, evaluation_folder, require_free
from tests import test_score, test_train

manifest, run = test_train.manifest, test_score.run
"""Fixtures."""


def evaluate(run: tuple[Path, Path], out: Path, *options: Any) -> dict[str, Any]:
    file, workdir = run
    main(list(map(str, ["--config", file, "--weights", workdir, "--out", out, *options])))
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def halves(manifest: Path) -> tuple[Path, Path]:
    """The manifest split in two files beside it; the second has the unusable lines."""
    text = manifest.read_text().splitlines(keepends=True)
    files = manifest.with_name("first.jsonl"), manifest.with_name("second.jsonl")
    for file, part in zip(files, (text[:7], text[7:]), strict=True):
        file.write_text("".join(part))
    return files


def test_sets_are_evaluated_each_and_as_the_whole_is_on_another_mesh(
    run: tuple[Path, Path],
    manifest: Path,
    halves: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    first, second = halves
    sets = ["--data.validation-manifest", first, f"other={second}"]
    summary = evaluate(run, tmp_path / "sets", *sets, "--train.normaliser", "none", "--gallery", 3)
    shown = capsys.readouterr().out
    assert list(summary["sets"]) == ["first", "other"]
    assert {file.name for file in (tmp_path / "sets").iterdir()} == {
        "first.jsonl",
        "other.jsonl",
        "summary.json",
        "error_gallery.png",
        "report.html",
        "skipped.jsonl",
    }
    assert len(read_lines(tmp_path / "sets" / "skipped.jsonl")) == summary["skipped_documents"] == 2
    assert "2 skipped documents are listed" in shown
    spoken, tokens = {}, {}
    for name, numbers in (("first", range(1, 8)), ("other", range(1, 14))):
        hypotheses, figures = read_lines(tmp_path / "sets" / f"{name}.jsonl"), summary["sets"][name]
        assert [line["key"] for line in hypotheses] == [
            f"{n}:{n - 1 + 7 * (name == 'other')}.wav" for n in numbers
        ]
        assert figures["documents"] == len(hypotheses)
        # Computed over all texts at once, independently of how documents are counted.
        said, got = ([" ".join(line[k].split()) for line in hypotheses] for k in ("reference", "hypothesis"))
        words = jiwer.process_words(said, got)
        assert figures["wer"] == pytest.approx(words.wer)
        assert figures["cer"] == pytest.approx(jiwer.cer(said, got))
        for kind in ("substitutions", "deletions", "insertions"):
            assert figures[kind] == getattr(words, kind) == sum(line[kind] for line in hypotheses)
        for line, reference, hypothesis in zip(hypotheses, said, got, strict=True):
            assert line["wer"] == pytest.approx(jiwer.wer(reference, hypothesis))
        assert figures["audio_seconds"] == pytest.approx(sum(line["audio_seconds"] for line in hypotheses))
        assert figures["cut_off"] == sum(not line["ended"] for line in hypotheses)
        assert figures["rtfx"] == pytest.approx(figures["audio_seconds"] / figures["seconds"])
        assert figures["judged_by"] == "words"
        assert figures["cpwer"] is None
        assert f"  {name} " in shown
        assert f"{figures['wer']:.2%}" in shown
        spoken[name] = {line["reference"]: line["audio_seconds"] for line in hypotheses}
        tokens[name] = sum(len(line["reference"].encode()) + 1 for line in hypotheses)
    assert len({seconds for of_set in spoken.values() for seconds in of_set.values()}) > 15, "ragged"

    # The whole manifest, on a pipeline, as one set without a name; weights from Hugging Face folders.
    parts = export_weights(run[1], tmp_path / "parts", form="parts")
    mesh = ["--mesh.data", 1, "--mesh.context", 1, "--mesh.pipeline", 2, "--data.rows", 2]
    # The encoder's folder alone: the model before training had another LLM. Training has the same documents.
    more = ["--guard", "manifest", "--train.init-from", parts[0], "--contamination"]
    of_whole = evaluate(run, tmp_path / "whole", *mesh, "--weights", *parts, *more)
    whole = of_whole["sets"]["manifest"]
    check_guard(of_whole, tmp_path / "whole", capsys.readouterr().out)
    assert (tmp_path / "whole" / "manifest.jsonl").exists()
    for name in ("loss", "accuracy"):
        mean = sum(summary["sets"][s][name] * tokens[s] for s in tokens) / sum(tokens.values())
        assert whole[name] == pytest.approx(mean, rel=1e-5)
    hypotheses = {
        line["reference"]: line["audio_seconds"] for line in read_lines(tmp_path / "whole" / "manifest.jsonl")
    }
    assert hypotheses == spoken["first"] | spoken["other"]
    normalise = make_normaliser("basic")
    assert whole["words"] == sum(len(normalise(reference).split()) for reference in hypotheses)


def check_guard(summary: dict[str, Any], out: Path, shown: str) -> None:
    """The comparison follows from the texts of both models; all documents are in the training data."""
    guard, lines = summary["guard"]["manifest"], {}
    normalise = make_normaliser("basic")
    for name in ("before_manifest", "manifest"):
        lines[name] = read_lines(out / f"{name}.jsonl")
        texts = [[normalise(line[k]) for line in lines[name]] for k in ("reference", "hypothesis")]
        rate = jiwer.wer(*texts)
        words = sum(len(text.split()) for text in texts[0])
        assert guard["before" if "before" in name else "after"] == pytest.approx(rate)
    assert guard["after"] == summary["sets"]["manifest"]["wer"]
    assert [x["hypothesis"] for x in lines["before_manifest"]] != [x["hypothesis"] for x in lines["manifest"]]
    assert guard["documents"] == len(lines["manifest"]) == 20
    assert guard["low"] <= guard["difference"] <= guard["high"]
    assert f"manifest, guarded: WER {guard['before']:.2%} before training" in shown
    inserted = guard["insertions"]
    assert inserted["after"] == summary["sets"]["manifest"]["insertions"] / words
    assert inserted["before"] == sum(x["insertions"] for x in lines["before_manifest"]) / words
    assert f"insertions {inserted['before']:.2%} before training" in shown
    assert "cpwer" not in guard, "no reference names a speaker"
    found = summary["contamination"]["manifest"]
    assert found == {"documents": 20, "by_text": 20, "by_audio": 20, "error_rate_of_others": None}
    assert "20 documents are in the training data too" in shown
    matches = read_lines(out / "contamination.jsonl")
    assert len(matches) == 40
    assert all(line["key"] == line["training"] for line in matches)


def test_what_cannot_be_evaluated_is_refused(
    run: tuple[Path, Path], halves: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    file, _ = run
    with pytest.raises(UserError, match="--weights is missing"):
        main(["--config", str(file)])
    with pytest.raises(UserError, match="validation_manifest is empty"):
        evaluate(run, tmp_path, "--data.validation-manifest", "")
    with pytest.raises(UserError, match=r"--guard names old; .*data.validation_manifest \(manifest\)"):
        evaluate(run, tmp_path, "--guard", "old")
    with pytest.raises(UserError, match="began with none"):
        evaluate(run, tmp_path, "--guard", "manifest")
    with pytest.raises(UserError, match="2 sets of the name 'a'"):
        evaluate(run, tmp_path, "--data.validation-manifest", f"a={halves[0]}", f"a={halves[1]}")
    with pytest.raises(UserError, match="of another model"):
        evaluate(run, tmp_path, "--model.llm.dim", 32)
    with pytest.raises(FileNotFoundError, match=r"no manifest at .*gone.jsonl.*data.validation_manifest"):
        evaluate(run, tmp_path, "--data.validation-manifest", "gone.jsonl")


def test_training_manifests_are_not_read(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is decoded: there are only loss and accuracy, and no picture. The workdir alone is given; the
    results lie there."""
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    workdir = tmp_path / "run"
    shutil.copytree(run[1], workdir)
    main([f"{workdir}@newest", "--data.manifest", "gone.jsonl", "--train.max-new-tokens", "0"])
    out = workdir / "evaluations" / "0" / "manifest"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["evaluated"]["checkpoint"] == 0
    assert summary["evaluated"]["weights"] == "the run's"
    (of_set,) = summary["sets"].values()
    assert of_set["wer"] is None
    assert of_set["documents"] == 20
    assert of_set["loss"] > 0
    assert not (out / "error_gallery.png").exists()
    assert not (out / "report.html").exists()
    assert read_lines(out / "manifest.jsonl") == []


def test_documents_of_published_weights_have_room(
    tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
):
    """Published weights come without sizes, and documents of more slots than the default were skipped."""
    line = {"audio_filepath": str(next(manifest.parent.glob("*.wav"))), "text": "word " * 600}
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps(line) + "\n")
    built: list[Config] = []

    def build(config: Config, weights: Any) -> Any:
        built.append(config)
        raise UserError("far enough")

    monkeypatch.setattr("jaxthd.evaluate.Model", build)
    data = replace(Config().data, validation_manifest=str(long))
    with pytest.raises(UserError, match="far enough"):
        evaluate_config(replace(Config(), data=data), ["folder"], tmp_path / "out")
    assert built[0].data.capacity >= 3_000 > Config().data.capacity


def test_results_depend_on_what_documents_are_made_of_and_not_on_the_mesh(tmp_path: Path):
    plain = evaluated_settings(Config(), ["a"])
    for path, value, is_same in (
        ("data.prompt", "Write: {audio}", False),
        ("data.capacity", 64, False),
        ("compute.dtype", "bfloat16", False),
        ("train.max_new_tokens", 7, False),
        ("mesh.context", 4, True),
        ("compute.block_sizes", BlockSizes(scan=32), True),
        ("train.learning_rate", 1.0, True),
    ):
        group, name = path.split(".")
        config = replace(Config(), **{group: replace(getattr(Config(), group), **{name: value})})
        assert (evaluated_settings(config, ["a"]) == plain) == is_same, path


def test_results_are_overwritten_by_the_same_evaluation_only(tmp_path: Path):
    one, other = ({"checkpoint": 3, "normaliser": name} for name in ("basic", "none"))
    first = evaluation_folder(tmp_path, ["clean", "other"], one)
    assert first == tmp_path / "clean+other"
    for folder, evaluated in ((first, one), (tmp_path / "clean+other-2", other)):
        assert evaluation_folder(tmp_path, ["clean", "other"], evaluated) == folder
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"evaluated": evaluated}))
        assert evaluation_folder(tmp_path, ["clean", "other"], evaluated) == folder
        require_free(folder, evaluated)
    many = [f"set{number}" for number in range(40)]
    assert evaluation_folder(tmp_path, many, one) == tmp_path / "40-sets"
    with pytest.raises(UserError, match=r"(?s)normaliser: basic there, none now.*choose another --out"):
        require_free(first, other)
    (first / "summary.json").write_text("{")
    assert evaluation_folder(tmp_path, ["clean", "other"], one) == tmp_path / "clean+other-3"
