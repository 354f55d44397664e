"""A reference whose log-probabilities are kept: those of a reference that is held, and never another's."""

import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile
from jax.sharding import Mesh

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    MeshConfig,
    PostTrainingConfig,
    TrainConfig,
)
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines
from jaxthd.objectives.objective import REFERENCE
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_reference_scores
from jaxthd.steps.state import TrainState, init_state
from jaxthd.train import train
from jaxthd.training.cached_reference import CachedReference, of_earlier_form
from tests.parallel.test_distributed import two, until
from tests.shared_programs import shared_programs, without_clock
from tests.survival import tiny

STEPS = 4
MODEL = tiny.config().model
CONFIG = Config(
    data=DataConfig(
        validation_manifest="",
        capacity=96,
        audio_capacity=512,
        max_documents=8,
        rows=2,
        workers=0,
    ),
    model=replace(MODEL, llm=replace(MODEL.llm, pattern="M*-").with_settings("-", inner=16)),
    compute=ComputeConfig(
        dtype="float64", context_exchange="all_gather", block_sizes=BlockSizes(scan=16, attention=32, loss=32)
    ),
    posttraining=PostTrainingConfig(reference="cached"),
    train=TrainConfig(
        objective="dpo",
        steps=STEPS,
        learning_rate=1e-2,
        warmup_steps=0,
        checkpoint_every=2,
        validate_every=STEPS,
        mtp_loss=0.0,
        trackers=(),
    ),
)
TEXT_ONLY = replace(CONFIG.model, encoder=None, llm=replace(CONFIG.model.llm, pattern="*-"))


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with shared_programs():
        yield


def write_pairs(folder: Path, *, audio: bool, seed: int = 0) -> Path:
    """Ten of them: three steps are an epoch, or less."""
    rng, lines = np.random.default_rng(seed), []
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, 10)):
        asked: dict[str, Any] = {"prompt": "What" + "?" * i}
        if audio:
            asked = {"audio_filepath": f"{i}.wav", "duration": seconds}
            soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        chosen, rejected = "la " * (1 + (i + seed) % 3), "no" + "o" * (i % 4)
        lines.append(asked | {"chosen": chosen, "rejected": rejected})
    manifest = folder / "pairs.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A text-only model of attention, validated on other preferences than it trains on."""
    manifest, held_out = (
        write_pairs(tmp_path_factory.mktemp(name), audio=False, seed=seed)
        for seed, name in enumerate(("pairs", "held_out"))
    )
    data = replace(CONFIG.data, manifest=(str(manifest),), validation_manifest=str(held_out))
    return replace(CONFIG, data=data, model=TEXT_ONLY)


def trained(config: Config, workdir: Path) -> list[dict[str, Any]]:
    with jax.enable_x64(True):
        train(config, workdir)
    return without_clock(read_metrics(workdir))


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("cached")
    trained(config, workdir)
    return workdir


def test_a_run_learns_what_it_learns_from_a_reference_that_it_holds(
    config: Config, whole: Path, tmp_path: Path
):
    held = replace(config, posttraining=PostTrainingConfig(reference="copy"))
    expected = trained(held, tmp_path)
    found = without_clock(read_metrics(whole))
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    before, after = (found[n]["validation_preference_loss"] for n in (0, -1))
    assert before == pytest.approx(np.log(2), abs=1e-10)
    assert abs(after - before) > 1e-4
    assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-10)
    assert abs(found[-1]["margin"]) > 1e-3
    del found[0]["validation_preference_accuracy"], expected[0]["validation_preference_accuracy"]
    for line in (found[1], expected[1]):
        del line["accuracy"]  # of margins that are 0 but for rounding
    for line, wanted in zip(found, expected, strict=True):
        assert {k: pytest.approx(v, rel=1e-9, abs=1e-10) for k, v in wanted.items()} == line


def test_a_run_that_was_killed_continues_from_the_files(config: Config, whole: Path, tmp_path: Path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    file = tmp_path / "reference.jsonl"
    before = file.read_text()
    lines = trained(config, tmp_path)
    assert lines == without_clock(read_metrics(whole))
    assert before == file.read_text()
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    file.unlink()
    with pytest.raises(UserError, match=r"reference\.jsonl is missing"):
        trained(config, tmp_path)


def test_a_run_of_an_earlier_jaxthd_keeps_its_numbers(config: Config, whole: Path, tmp_path: Path):
    """They were in a folder of npz files."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    file = tmp_path / "reference.jsonl"
    first, *lines = read_lines(file)
    file.unlink()
    (tmp_path / "reference.json").write_text(json.dumps(first) + "\n")
    folder = tmp_path / "reference" / first["weights"]
    folder.mkdir(parents=True)
    documents = [line for line in lines if "document" in line]
    digests = np.array([list(bytes.fromhex(line["document"])) for line in documents], np.uint8)
    scores = [line["log_probs"] for line in documents]
    np.savez(folder / "0.npz", digests=digests, lengths=[*map(len, scores)], log_probs=np.concatenate(scores))
    (folder / "damaged.npz").write_bytes((folder / "0.npz").read_bytes()[:-50])
    (folder / f"{next(x['data'] for x in lines if 'data' in x)}.done").touch()
    expected = without_clock(read_metrics(whole))
    assert trained(config, tmp_path) == expected
    assert sorted(map(str, read_lines(file))) == sorted(map(str, [first, *lines]))


def test_objects_in_such_a_file_are_not_unpickled(tmp_path: Path):
    (tmp_path / "reference.json").write_text('{"weights": "w"}')
    folder = tmp_path / "reference" / "w"
    folder.mkdir(parents=True)
    executed = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return executed.touch, ()

    np.savez(folder / "0.npz", log_probs=np.array([Evil()], object), lengths=[1], digests=[[1]])
    assert of_earlier_form(tmp_path) == [{"weights": "w"}]
    assert not executed.exists()


@pytest.mark.exhaustive
def test_numbers_are_those_of_the_reference_on_any_mesh_and_never_old_ones(tmp_path: Path):
    """A changed recording, other weights and lost lines are scored anew, by the first weights."""
    data = replace(CONFIG.data, manifest=(str(write_pairs(tmp_path, audio=True)),))
    config = replace(CONFIG, data=data)
    with jax.enable_x64(True):
        first, file = Served(config, tmp_path), tmp_path / "reference.jsonl"
        assert first.documents == 10
        before = file.read_text()
        other = Served(replace(config, mesh=MeshConfig(1, 2, 2, 1)), tmp_path)
        assert other.documents == 10
        assert file.read_text() == before, "the mesh is no part of the digest"

        later = first.state._replace(
            step=first.state.step + 1, params=jax.tree.map(lambda x: 0.9 * x, first.state.params)
        )
        soundfile.write(tmp_path / "3.wav", np.sin(np.arange(8000)), 16000)
        changed = Served(config, tmp_path, later, first.state)
        assert changed.documents == 11

        whole = file.read_text()
        file.write_text(whole[:-500])
        assert Served(config, tmp_path, later, first.state).documents == 11

        moved = replace(config, train=replace(config.train, seed=1))
        assert Served(moved, tmp_path).documents == 10
        assert read_lines(file)[0] != json.loads(whole.splitlines()[0])
        file.write_text(whole)
        soundfile.write(tmp_path / "3.wav", np.sin(2 * np.arange(8000)), 16000)
        with pytest.raises(UserError, match="other weights"):
            Served(moved, tmp_path, later, first.state)


@functools.cache
def made(config: Config) -> tuple[Blueprint, Mesh, TrainState, Any]:
    """(blueprint, mesh, first state, what a held reference would say)."""
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    held = Blueprint(replace(config, posttraining=PostTrainingConfig(reference="copy")))
    return blueprint, mesh, init_state(blueprint, mesh), make_reference_scores(held, mesh)


class Served:
    """What a run is served in six steps, compared with what the reference says live. state: the run's newest.
    reference: the state whose policy the reference is. documents: that are kept."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        state: TrainState | None = None,
        reference: TrainState | None = None,
    ) -> None:
        blueprint, mesh, first, live = made(config)
        self.state = state or first
        policy = reference or self.state
        with closing(SpeechData(config, workdir)) as data, closing(data.training()) as batches:
            cached = CachedReference(blueprint, mesh, data, workdir, self.state)
            for batch, _ in islice(batches, 6):
                expected = live(policy.params, None, policy.buffers, put_batch(batch, mesh))
                found = cached(batch).extras[REFERENCE]
                assert np.abs(found).max() > 1
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
        self.documents = len(cached.scores)


def of_processes(manifest: Path) -> Config:
    """A text-only model in float32, over data and context ranks."""
    return replace(
        CONFIG,
        model=TEXT_ONLY,
        mesh=MeshConfig(data=2, context=2),
        data=replace(CONFIG.data, manifest=(str(manifest),)),
        compute=replace(CONFIG.compute, dtype="float32"),
    )


@pytest.mark.exhaustive
def test_two_processes_score_a_share_each_and_learn_what_one_does(tmp_path: Path):
    manifest = write_pairs(tmp_path, audio=False)
    (tmp_path / "settings.py").write_text(
        "from pathlib import Path\nfrom tests.test_cached_reference import of_processes\n\n\n"
        f"def config():\n    return of_processes(Path({str(manifest)!r}))\n"
    )
    workdirs = [tmp_path / name for name in ("one", "two")]
    train(of_processes(manifest), workdirs[0])
    with two(manifest, workdirs[1]) as processes:
        output = "".join(until(processes, "(?!)"))
        assert processes.wait() == 0, output
    (first, *one), (other, *both) = (read_lines(workdir / "reference.jsonl") for workdir in workdirs)
    assert first == other, "the digest of the same weights"
    scores = [{x["document"]: x["log_probs"] for x in lines if "document" in x} for lines in (one, both)]
    assert scores[0].keys() == scores[1].keys()
    assert len(scores[0]) == 10
    for digest, found in scores[1].items():
        np.testing.assert_allclose(found, scores[0][digest], atol=1e-5)
    lines = [without_clock(read_metrics(workdir)) for workdir in workdirs]
    for got, wanted in zip(lines[1], lines[0], strict=True):
        assert {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in wanted.items()} == got
