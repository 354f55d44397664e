"""The grain plugin among grain's own transformations: what it yields, and from which state it goes on."""

import json
import runpy
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags
from jax.sharding import PartitionSpec

from jaxthd.config import Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig
from jaxthd.data.example import Clip, Example, Samples, Turn
from jaxthd.data.packer import PackDocuments, PackedRow, pack_documents
from jaxthd.data.shards import data_shard, shard_of
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch, concatenate_rows, with_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from tests.data.items import BROKEN, LONG, LOUD, SOURCE, load, quiet, to_document
from tests.packing.test_pack import MELS

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "flax_loop.py"
WINDOW = 16


PACK = PackDocuments(
    capacity=128,
    audio_capacity=512,
    max_documents=4,
    front_end=FastConformer(num_mels=MELS),
    window=WINDOW,
    on_skip=quiet,
)
GOOD = sorted(f"item-{i}" for i in SOURCE if i not in (BROKEN, LONG, LOUD))


class ToDocument(grain.transforms.Map):
    def map(self, element: int) -> Any:
        return load(element, 0)


def documents() -> grain.MapDataset:
    return grain.MapDataset.source(SOURCE).map(to_document)


def data_loader(*more: Any, **settings: Any) -> grain.DataLoader:
    sampler = grain.samplers.SequentialSampler(len(SOURCE))
    defaults = {"shard_options": grain.sharding.NoSharding(), "operations": [ToDocument(), *PACK, *more]}
    return grain.DataLoader(data_source=SOURCE, sampler=sampler, **(defaults | settings))


def keys(rows: Any) -> list[tuple[str, ...]]:
    return [row.report.keys for row in rows]


def equal(one: Any, other: Any) -> bool:
    """Whether two elements, of rows or of batches, are the same to the bit."""
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def rows() -> list[PackedRow]:
    return list(documents().pipe(PACK))


def test_rows_are_batched_as_the_step_takes_them(rows: list[PackedRow]) -> None:
    """Whatever stands between, a batch holds the arrays of its rows, one above the other."""
    expected = concatenate_rows([row.batch for row in rows[:2]])
    assert expected.tokens.shape == (2, 128)
    assert expected.future_tokens.shape == (2, 0, 128)
    piped = documents().pipe(PACK)
    batched = next(iter(piped.batch(2)))
    assert equal(with_rows(batched.batch), expected)
    assert [report.keys for report in batched.report] == keys(rows[:2])
    for batches in (
        piped.map(lambda row: row.batch).batch(2),
        piped.batch(2).map(lambda rows: rows.batch),
        piped.filter(lambda row: True).map(lambda row: row.batch).batch(2, drop_remainder=True),
    ):
        assert equal(with_rows(next(iter(batches))), expected)
    (alone,) = piped.map(lambda row: row.batch).batch(1).pipe(lambda ds: islice(ds, 1))
    placed = put_batch(rows[0].batch, make_mesh(MeshConfig()))
    assert placed.tokens.sharding.spec == PartitionSpec("data", "context")
    assert equal(placed, with_rows(alone))
    kept = list(piped.filter(lambda row: len(row.report.keys) == 4))
    assert keys(kept) == [each for each in keys(rows) if len(each) == 4] != keys(rows)


def test_windows_are_packed_each_by_itself(rows: list[PackedRow]) -> None:
    """By apply, by a list of operations, by a DataLoader: the same rows, each document once."""
    windows = list(documents().to_iter_dataset().apply(PACK))
    assert sorted(key for row in windows for key in row.report.keys) == GOOD
    packed = {key: number for number, row in enumerate(windows) for key in row.report.keys}
    for number in range(len(windows)):
        of_window = {int(key.partition("-")[2]) // WINDOW for key, row in packed.items() if row == number}
        assert len(of_window) == 1, "a row holds documents of two windows"
    assert len(windows) <= len(rows) + -(-len(SOURCE) // WINDOW)
    for same in (
        grain.MapDataset.source(SOURCE).to_iter_dataset().apply([ToDocument(), *PACK]),
        documents().apply(PACK).to_iter_dataset(),
        data_loader(),
    ):
        assert all(equal(x, y) for x, y in zip(same, windows, strict=True))
    batch = next(iter(data_loader(grain.transforms.Batch(2)))).batch
    assert equal(with_rows(batch), concatenate_rows([row.batch for row in windows[:2]]))


def mixed() -> grain.IterDataset:
    """Two streams of rows, 2 : 1, shuffled in a window, in batches."""
    halves = [grain.MapDataset.source(SOURCE)[i::2].map(to_document).repeat(3).pipe(PACK) for i in (0, 1)]
    rows = grain.IterDataset.mix(halves, [2, 1])
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=4, seed=1).batch(2)


PIPELINES = {
    "pipe": lambda: documents().pipe(PACK),
    "pipe, batch": lambda: documents().shuffle(seed=3).pipe(PACK).map(lambda row: row.batch).batch(2),
    "mix, shuffle, batch": mixed,
    "apply": lambda: documents().to_iter_dataset().apply(PACK),
    "DataLoader": data_loader,
    "DataLoader, batch": lambda: data_loader(grain.transforms.Batch(2)),
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_grain_s_checkpoint_handler_restores_every_state(make: Any, tmp_path: Path) -> None:
    """Saved by orbax's manager, next to an array."""
    stream = list(make())
    assert len(stream) >= 5
    with ocp.CheckpointManager(tmp_path) as manager:
        iterator = iter(make())
        for step in range(len(stream)):
            args = {"rows": grain.checkpoint.CheckpointSave(iterator), "x": ocp.args.ArraySave(np.arange(3))}
            if step in (0, 1, len(stream) // 2, len(stream) - 1):
                manager.save(step, args=ocp.args.Composite(**args))
            assert equal(next(iterator), stream[step])
        manager.wait_until_finished()
        for step in manager.all_steps():
            iterator = iter(make())
            next(iterator)
            args = {"rows": grain.checkpoint.CheckpointRestore(iterator)}
            manager.restore(step, args=ocp.args.Composite(**args))
            rest = list(iterator)
            assert len(rest) == len(stream) - step
            assert all(equal(x, y) for x, y in zip(rest, stream[step:], strict=True))


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    """Grain's worker processes read absl's flags, which absl.app.run would have parsed."""
    flags.FLAGS.mark_as_parsed()
    yield
    flags.FLAGS.unparse_flags()


@pytest.mark.exhaustive
def test_worker_processes_make_documents_rows_or_batches(rows: list[PackedRow], parsed_flags: None) -> None:
    two = grain.MultiprocessingOptions(num_workers=2)
    with closing(iter(documents().to_iter_dataset().mp_prefetch(two).pipe(PACK))) as before:
        assert all(equal(x, y) for x, y in zip(before, rows, strict=True))
    with closing(iter(documents().pipe(PACK).batch(2).mp_prefetch(two))) as after:
        found = list(islice(after, 3))
        state = after.get_state()
        rest = list(after)
        reports = [report for batch in found + rest for report in batch.report]
        assert sorted(key for report in reports for key in report.keys) == GOOD
        after.set_state(state)
        assert all(equal(x, y) for x, y in zip(after, rest, strict=True))


def test_processes_read_shards() -> None:
    def shards(*of_ranks: set[int]) -> list[tuple[int, int]]:
        """(index, count) of every process; of_ranks: the processes that hold each data rank."""
        ranks = list(map(frozenset, of_ranks))
        found = [shard_of(ranks, process) for process in range(max(map(max, ranks)) + 1)]
        return [(shard.shard_index, shard.shard_count) for shard in found]

    assert shards({0}, {0}, {1}, {1}) == [(0, 2), (1, 2)]
    assert shards({0, 1}, {2, 3}) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert shards({0, 1}, {0, 1}) == [(0, 1), (0, 1)]
    for wrong in ([{0}, {1}, {0}], [{0, 1}, {1, 2}], [{0}, {0}, {1}]):
        with pytest.raises(ValueError, match="consecutive parts of the data axis"):
            shards(*wrong)
    mesh = make_mesh(MeshConfig(data=2, context=2))
    assert data_shard(mesh) == grain.sharding.ShardOptions(shard_index=0, shard_count=1)

    total: Counter[str] = Counter()
    for index in range(3):
        shard_options = grain.sharding.ShardOptions(shard_index=index, shard_count=3)
        for row in data_loader(shard_options=shard_options):
            total.update(row.report.keys)
    assert set(total.values()) == {1}
    assert len(total) >= len(GOOD) - 2, "grain leaves out what does not divide by the shards"


def test_bad_recordings_are_reported_and_other_elements_refused(tmp_path: Path) -> None:
    """SpeechDocuments goes into a pipeline as it is."""
    sizes = DataConfig(capacity=64, audio_capacity=400, max_documents=4)
    config = Config(data=sizes, model=ModelConfig(encoder=EncoderConfig(num_mels=8, chunk_seconds=1.0)))
    (tmp_path / "cut.wav").write_bytes(b"RIFF")
    good = Samples(np.linspace(-0.5, 0.5, 8000, dtype=np.float32), 16000)
    clips = [good, Clip(tmp_path / "gone.wav"), Clip(tmp_path / "cut.wav"), good]
    examples = [
        Example(str(i), (Turn("user", (clip,)), Turn("assistant", ("yes",)))) for i, clip in enumerate(clips)
    ]
    to_document, skipped = SpeechDocuments(config, load_tokenizer("bytes"), train=False), {}
    pack = pack_documents(config, on_skip=skipped.__setitem__)
    found = grain.MapDataset.source(examples).map(to_document)
    for packed in (found.pipe(pack), found.to_iter_dataset().apply(pack)):
        skipped.clear()
        assert sorted(key for row in packed for key in row.report.keys) == ["0", "3"]
        assert set(skipped) == {"1", "2"}
        assert "gone.wav" in skipped["1"]
    with pytest.raises(UserError, match=r"given a dict; expected jaxthd\.Documents"):
        list(grain.MapDataset.source([{"tokens": [1]}]).pipe(pack))
    with pytest.raises(UserError, match=r"operations=\[to_document, \*pack\]"):
        iter(data_loader(operations=[ToDocument(), PACK]))
    with pytest.raises(ValueError, match="window must be at least 1"):
        PackDocuments(capacity=8, audio_capacity=0, max_documents=1, window=0)
    with pytest.raises(ValueError, match="splits is -1"):
        PackDocuments(capacity=8, audio_capacity=0, max_documents=1, splits=-1)


def test_a_loop_that_is_not_ours_learns() -> None:
    example = runpy.run_path(str(EXAMPLE))
    losses = example["train"](steps=30)
    assert losses[-1] < losses[0] / 2
    text = example["TEXTS"][0]
    (row,) = (
        grain.MapDataset.source([text])
        .map(example["document"])
        .pipe(PackDocuments(capacity=32, audio_capacity=0, max_documents=1))
    )
    batch: Batch = row.batch
    assert isinstance(example["document"](text), Document)
    assert bytes(batch.tokens[: len(text)].tolist()).decode() == text
    assert batch.targets[: len(text) - 1].tolist() == list(text[1:].encode())


LAYOUTS: dict[str, dict[str, Any]] = {
    "buffer": {},
    "two ranks": {"context": 2, "audio_ranks": 2, "layout": "whole"},
    "four ranks": {"context": 4, "audio_ranks": 4, "layout": "whole", "splits": 2},
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("two ranks", "two ranks"),
        ("two ranks", "buffer"),
        ("buffer", "four ranks"),
        ("four ranks", "two ranks"),
    ],
)
def test_a_stream_goes_on_under_another_layout_with_the_documents_that_are_left(first: str, second: str):
    """Wherever it is interrupted. Under the same layout its rows are those of a run without interruption."""
    ds = documents().repeat(2)
    streams = {name: ds.pipe(replace(PACK, **LAYOUTS[name])) for name in (first, second)}
    whole = [row.report.keys for row in streams[first]]
    assert Counter(chain(*whole)) == Counter(2 * GOOD)
    for count in range(1, len(whole), 7):
        before = iter(streams[first])
        seen = [next(before).report.keys for _ in range(count)]
        state = json.loads(json.dumps(before.get_state()))
        after = iter(streams[second])
        after.set_state(state)
        rest = [row.report.keys for row in after]
        assert Counter(chain(*seen, *rest)) == Counter(2 * GOOD)
        if first == second:
            assert [*seen, *rest] == whole


def test_a_stream_changes_its_layout_and_is_interrupted_once_more() -> None:
    """Under "whole" a row may take all of a later buffer before all of an earlier one."""
    lengths = [4, 6, 25, 54, 26, 51]
    sized = [
        Document(str(i), np.ones(n, np.int32), np.zeros(n, bool), np.ones(n, bool))
        for i, n in enumerate(lengths)
    ]
    whole = PackDocuments(
        capacity=64,
        audio_capacity=0,
        max_documents=9,
        packing_bins=1,
        context=2,
        layout="whole",
        splits=1,
    )
    ds, seen, state = grain.MapDataset.source(sized), [], None
    for pack in (whole, replace(whole, layout="buffer"), replace(whole, layout="buffer")):
        rows = iter(ds.pipe(pack))
        if state is not None:
            rows.set_state(state)
        seen += next(rows).report.keys
        state = json.loads(json.dumps(rows.get_state()))
    rows.set_state(state)
    seen += chain(*(row.report.keys for row in rows))
    assert Counter(seen) == Counter(map(str, range(len(lengths))))
