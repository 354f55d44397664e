"""Scores of packed documents, on any mesh, are those of each document alone."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config, DataConfig, MeshConfig
from jaxthd.errors import UserError
from jaxthd.inference.model import Model
from jaxthd.inference.scorer import DocumentScores, in_order
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run import startup
from jaxthd.score import main
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.scoring import make_scoring_step
from tests import test_train
from tests.answers import alone, document_with_answers
from tests.helpers import save_run
from tests.speech_model import AUDIO, CAPACITY, MELS, MODEL, Spec, document, run_config, state
from tests.test_train import tiny

TOP = 4
SPECS = [
    Spec(5, (40,)),
    Spec(1),
    Spec(9, (17,)),
    Spec(20),
    Spec(7, (64, 9)),
    Spec(12, (), 0.0),
    Spec(2, (33,)),
    Spec(3),
    Spec(30, (8,)),
    Spec(4, (21, 40)),
    Spec(53, (64, 24)),
    Spec(2, (1,)),
]
"""Documents of one token; with nothing supervised; with several clips; as long as a buffer."""


@functools.cache
def documents() -> list[Document]:
    rng = np.random.default_rng(8)
    return [document(f"d{n}", spec, rng) for n, spec in enumerate(SPECS)]


@functools.cache
def weights() -> Weights:
    return Weights(*state("float64"))


@functools.cache
def log_probs_alone() -> dict[str, np.ndarray]:
    """Log softmax over the whole vocabulary at each position, by document. Nothing is packed, no mesh."""
    graph = Blueprint(run_config(1, 1, "ring", "float64")).graph

    @jax.jit
    def run(params: Any, buffers: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, buffers)
        x_ND, _ = model.embed(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        return jax.nn.log_softmax(model.hidden(x_ND) @ model.head[...].T)

    sizes = {
        "capacity": CAPACITY,
        "audio_capacity": AUDIO,
        "front_end": FastConformer(num_mels=MELS),
        "max_documents": 1,
    }
    with jax.enable_x64(True):
        return {
            one.key: np.asarray(run(*state("float64"), pack_row([one], **sizes)[0]))[: len(one)]
            for one in documents()
        }


def expected(one: Document, *, every_token: bool) -> DocumentScores:
    logp_TV = log_probs_alone()[one.key]
    scored = ~one.is_audio if every_token else one.supervised
    positions = np.flatnonzero(scored[1:]) + 1
    before_sV = logp_TV[positions - 1]
    top = np.argsort(-before_sV, axis=-1, kind="stable")[:, :TOP]
    of_tokens = np.take_along_axis(before_sV, one.tokens[positions][:, None], axis=-1)[:, 0]
    top_log_probs = np.take_along_axis(before_sV, top, axis=-1)
    return DocumentScores(one.key, one.tokens, positions, of_tokens, top.astype(np.int32), top_log_probs)


def config_for(mesh: MeshConfig, layout: str = "buffer", rows: int = 4, microbatches: int = 2) -> Config:
    long = 1 if layout == "buffer" else 2
    base = run_config(mesh.data, mesh.context, "ring", "float64", layout, microbatches)  # type: ignore[arg-type]
    data = DataConfig(
        rows=rows,
        capacity=CAPACITY * long,
        audio_capacity=AUDIO * mesh.audio_ranks,
        max_documents=8,
        packing_bins=3,
        workers=0,
    )
    return replace(base, mesh=mesh, data=data)


@pytest.mark.parametrize(
    ("mesh", "layout", "every_token"),
    [
        (MeshConfig(2, 2, 1, 1), "buffer", True),
        pytest.param(MeshConfig(1, 4, 1, 1), "whole", True, marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(1, 2, 2, 1), "buffer", True, marks=pytest.mark.exhaustive),
        # Two unequal stages on each rank.
        pytest.param(
            MeshConfig(1, 1, 2, 1, stages_per_rank=2), "buffer", False, marks=pytest.mark.exhaustive
        ),
        pytest.param(MeshConfig(2, 1, 1, 2), "buffer", True, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_packed_documents_on_any_mesh_get_the_scores_they_get_alone(mesh, layout, every_token):
    with jax.enable_x64(True):
        model = Model(config_for(mesh, layout), weights())
        found = model.score(documents(), top_k=TOP, every_token=every_token)
        assert [scores.key for scores in found] == [one.key for one in documents()]
        for got, one in zip(found, documents(), strict=True):
            want = expected(one, every_token=every_token)
            for name in ("tokens", "positions", "top_ids"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=one.key)
            for name in ("log_probs", "top_log_probs"):
                np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-10)
    assert sum(len(scores.positions) for scores in found) > 60
    assert any(not len(scores.positions) for scores in found)


@pytest.mark.parametrize(
    ("mesh", "layout", "share_prompts"),
    [
        (MeshConfig(1, 2, 1, 1), "buffer", True),
        pytest.param(MeshConfig(1, 2, 1, 1), "whole", True, marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(2, 1, 2, 1), "buffer", True, marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(1, 2, 1, 1), "buffer", False, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_each_of_several_answers_gets_the_scores_it_gets_alone(mesh, layout, share_prompts):
    rng = np.random.default_rng(1)
    settings = {"mels": MELS, "most": 6, "vocabulary": 48}
    grouped = [document_with_answers(rng, f"{n}", answers=n % 3 + 1, **settings) for n in range(7)]
    grouped += [*documents()[:2]]
    with jax.enable_x64(True):
        config = config_for(mesh, layout, rows=2, microbatches=1)
        config = replace(config, posttraining=replace(config.posttraining, share_prompts=share_prompts))
        model = Model(config, weights())
        found = model.score(grouped)
        each_alone = [x for d in grouped for x in alone(d)]
        single = Model(config_for(MeshConfig(), rows=1, microbatches=1), weights()).score(each_alone)
        by_key = {scores.key: scores for scores in single}
        for got, document in zip(found, grouped, strict=True):
            np.testing.assert_array_equal(got.tokens, document.tokens)
            np.testing.assert_array_equal(np.flatnonzero(document.supervised[1:]) + 1, got.positions)
            want = np.concatenate([by_key[one.key].log_probs for one in alone(document)])
            np.testing.assert_allclose(got.log_probs, want, rtol=1e-10, atol=1e-10)
        with pytest.raises(UserError, match="leave out --every-token"):
            model.score(grouped, every_token=True)


def test_what_cannot_be_scored_is_named():
    alone = config_for(MeshConfig(), rows=1, microbatches=1)
    long = document("long", Spec(65), np.random.default_rng(0))
    with jax.enable_x64(True):
        with pytest.raises(UserError, match=r"'long' cannot be packed: its 65 token slots exceed"):
            Model(alone, weights()).score([documents()[0], long])
        with pytest.raises(UserError, match="2 documents have 1 keys"):
            Model(alone, weights()).score([long, long])
        for top_k in (-1, MODEL.llm.vocab_size + 1):
            with pytest.raises(ValueError, match=f"top_k is {top_k}; expected 0 to 50"):
                make_scoring_step(Blueprint(alone), make_mesh(alone.mesh), top_k)


def test_scores_wait_for_those_before_them_and_not_for_what_is_skipped():
    def scores(key: str) -> DocumentScores:
        ids, numbers = np.zeros(0, np.int32), np.zeros(0)
        return DocumentScores(key, ids, ids, numbers, ids.reshape(0, 0), numbers.reshape(0, 0))

    skipped, told = set(), []

    def found():
        for key in ("c", "a", "e", "d"):
            yield scores(key)
            told.append(key)
            skipped.update({"b"} if key == "e" else ())

    got = [(s.key, len(told)) for s in in_order("abcdefg", found(), skipped.__contains__)]
    # After c nothing can be given, after a only a; once d has come, b is known to be missing.
    assert got == [("a", 1), ("c", 3), ("d", 3), ("e", 3)]


manifest = test_train.manifest
"""A fixture: 20 ragged recordings, and two lines that cannot be used."""


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a config file, the workdir of a run of it with random weights)."""
    folder = tmp_path_factory.mktemp("run")
    save_run(tiny(manifest), folder / "run")
    (folder / "tiny.py").write_text(
        "from pathlib import Path\nfrom tests.test_train import tiny\n\n\n"
        f"def config():\n    return tiny(Path({str(manifest)!r}))\n"
    )
    return folder / "tiny.py", folder / "run"


def test_the_command_writes_a_line_a_document_in_the_manifests_order(
    run,
    manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, workdir = run
    out = tmp_path / "new" / "scores.jsonl"
    command = [workdir, "--manifest", manifest, "--out", out, "--top-k", "3"]
    main(list(map(str, command)))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["key"].partition(":")[0] for line in lines] == [str(n) for n in range(1, 21)]
    for line in lines:
        assert len(line["positions"]) == len(line["log_probs"]) == len(line["top_ids"])
        assert re.match(r"number \d+", line["text"])
        assert "".join(line["texts"]) == line["text"]
        assert [len(texts) for texts in line["top_texts"]] == [3] * len(line["texts"])
        np.testing.assert_allclose(line["log_prob"], sum(line["log_probs"]), rtol=1e-5)
        for token, logp, ids, top in zip(
            [line["tokens"][p] for p in line["positions"]],
            line["log_probs"],
            line["top_ids"],
            line["top_log_probs"],
            strict=True,
        ):
            assert len(set(ids)) == 3
            assert top == sorted(top, reverse=True)
            assert dict(zip(ids, top, strict=True)).get(token, logp) == logp <= top[0]
    shown = capsys.readouterr().out
    total = sum(len(line["positions"]) for line in lines)
    assert f"20 documents, {total} tokens scored" in shown
    least = min(lines, key=lambda line: line["log_prob"] / len(line["positions"]))
    _, first, *_ = (line for line in shown.splitlines() if line.startswith("  "))
    assert first.split()[:2] == [least["key"], str(len(least["positions"]))]
    assert least["text"][:8] in first
    assert all(len(line) <= 60 for line in shown.splitlines() if line.startswith("  "))
    assert "2 skipped documents are listed" in shown
    skipped = (out.parent / "scores.skipped.jsonl").read_text()
    assert "missing.wav" in skipped
    assert "not JSON" in skipped


def test_the_answers_of_preference_lines_are_scored(
    run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pair has the scores of the two transcripts."""
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    heard = {
        name: x for name, x in json.loads(manifest.read_text().splitlines()[0]).items() if name != "text"
    }
    texts = ("number one", "number eleven")
    lines = [heard | dict(zip(("chosen", "rejected"), texts, strict=True)), heard | {"text": texts[1]}]
    lines.append(heard | {"completion": texts[0], "label": True})
    pairs = manifest.parent / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "scores.jsonl"
    command = list(map(str, [run[1], "--manifest", pairs, "--out", out]))
    main(command)
    pair, transcript, labelled = map(json.loads, out.read_text().splitlines())
    assert [answer["text"] for answer in pair["answers"]] == list(texts)
    assert sum(answer["tokens"] for answer in pair["answers"]) == len(pair["positions"])
    (of_transcript,), (of_label,) = transcript["answers"], labelled["answers"]
    wanted = [of_label["log_prob"], of_transcript["log_prob"]]
    np.testing.assert_allclose([a["log_prob"] for a in pair["answers"]], wanted, rtol=1e-5)
    with pytest.raises(UserError, match="leave out --every-token"):
        main([*command, "--every-token"])


def test_the_commands_options_are_checked(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file, workdir = run
    with pytest.raises(UserError, match="--manifest, --out missing"):
        main(["--config", str(file), "--weights", str(workdir)])
    rest = ["--weights", str(workdir), "--manifest", "x", "--out", str(tmp_path / "y")]
    with pytest.raises(UserError, match="--top-k is 300; expected 0 to 260"):
        main(["--config", str(file), *rest, "--top-k", "300"])
