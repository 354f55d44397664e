"""The loader: every document once an epoch, the same under every mesh, exact from any saved state."""

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from operator import itemgetter

import grain
import jax
import numpy as np
import pytest

from jaxthd.config import ComputeConfig, Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig
from jaxthd.data.loader import make_loader
from jaxthd.data.packer import PackDocuments
from jaxthd.data.stream import epochs_of
from jaxthd.data.workers import Workers
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.document import Document
from tests.data.items import BROKEN, LONG, LOUD, SOURCE, WIDE, draw, fail, load, quiet
from tests.packing.test_pack import AUDIO, MELS, supervision


def settings(context: int = 1, tensor: int = 1, **data) -> Config:
    defaults = {"rows": 3, "capacity": 128, "audio_capacity": 512, "max_documents": 5, "packing_bins": 3}
    layout = data.pop("layout", "buffer")
    return Config(
        mesh=MeshConfig(context=context, tensor=tensor),
        data=DataConfig(**{**defaults, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=MELS, chunk_seconds=1.0)),
        compute=ComputeConfig(context_layout=layout),
    )


def keys_by_row(steps) -> list[list[str]]:
    steps = list(steps)
    return [[k for _, report in steps for k in report.keys[row]] for row in range(len(steps[0][1].keys))]


def flat(keys: list[list[str]]) -> list[str]:
    return [k for row in keys for k in row]


GOOD = sorted(f"item-{i}" for i in SOURCE if i not in (BROKEN, LONG, LOUD, WIDE))


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "best_fit_decreasing", "padded"])
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_one_epoch_holds_every_document_once(packing, context, tensor):
    config, skipped = settings(context, tensor, packing=packing, round_to=4), {}
    loader = make_loader([SOURCE], load, config, repeat=False, on_skip=skipped.__setitem__)
    steps = list(loader)
    assert sorted(flat(keys_by_row(steps))) == GOOD
    expected = {BROKEN: "broken", LONG: "200 token slots", LOUD: "800 audio frames"}
    expected[WIDE] = "[136, 136, 136] audio frames exceed the front end's longest of 104"
    assert set(skipped) == {f"item-{i}" for i in expected}
    for item, reason in expected.items():
        assert reason in skipped[f"item-{item}"]
    for batch, report in steps:
        most = max(len(keys) for keys in report.keys)
        assert most <= (1 if packing == "padded" else 5)
        assert batch.segment_ids.max() == most
        assert batch.tokens.shape == (3, 128)
        assert batch.features.shape == (3, 512, MELS)
        assert report.documents == sum(len(keys) for keys in report.keys)
        assert report.real_tokens == (batch.segment_ids > 0).sum()
        assert report.supervised_tokens == batch.weights.sum()
        assert report.audio_seconds == pytest.approx(batch.frame_mask.sum() / 100)
        assert report.capacity_tokens == 3 * 128
        assert report.imbalance >= 1.0
    with pytest.raises(StopIteration):
        next(loader)


def test_rows_that_end_early_are_filled_with_empty_ones():
    steps = list(
        make_loader([range(4)], load, settings(rows=3, packing="padded"), repeat=False, shuffle=False)
    )
    assert [r.keys for _, r in steps] == [
        (("item-0",), ("item-1",), ("item-2",)),
        (("item-3",), (), ()),
    ]
    assert not steps[1][0].segment_ids[1:].any()
    nothing = list(make_loader([[]], load, settings(), repeat=False))
    assert nothing == []


def test_packed_and_padded_supervise_the_same_pairs():
    def all_pairs(**data):
        total = Counter()
        for batch, report in make_loader([SOURCE], load, settings(2, **data), repeat=False, on_skip=quiet):
            for row, keys in enumerate(report.keys):
                total += supervision(jax.tree.map(itemgetter(slice(row, row + 1)), batch), keys)
        return total

    packed = all_pairs(packing="first_fit", rows=2)
    assert packed == all_pairs(packing="padded") == all_pairs(packing="best_fit", capacity=160)
    assert sum(packed.values()) > 100


def test_the_audio_arrays_are_as_long_as_the_mesh_needs():
    """An even share in whole encoder frames on each rank, less than the longest chunk; audio_capacity is the
    same."""
    for mesh, frames in (((1, 1), 504), ((2, 1), 512), ((2, 2), 512), ((4, 2), 512), ((2, 8), 512)):
        loader = make_loader([SOURCE], load, settings(*mesh, audio_capacity=500), on_skip=quiet)
        assert next(loader)[0].features.shape == (3, frames, MELS)
        assert loader.get_state()["identity"]["audio_capacity"] == 500


def test_a_row_reads_its_own_items_whatever_the_mesh():
    def keys(*mesh, **data):
        return keys_by_row(
            islice(make_loader([range(12)], draw, settings(*mesh, packing="padded", **data)), 8)
        )

    one = keys()
    for row in range(3):
        assert sorted(one[row][:4]) != sorted(one[row][4:]), "the second epoch deals the items anew"
    for epoch in (slice(4), slice(4, 8)):
        assert sorted(flat([row[epoch] for row in one])) == sorted(f"item-{i}" for i in range(12))
    assert keys(2) == keys(2, 2) == one
    assert keys(seed=7) != one
    assert keys(shuffle=False) == [[f"item-{i}" for i in range(row, 12, 3)] * 2 for row in range(3)]


def test_buffers_hold_the_same_documents_under_every_mesh():
    def buffers(*mesh, **data):
        loader = make_loader([SOURCE], load, settings(*mesh, audio_capacity=2048, **data), on_skip=quiet)
        return [[sorted(keys) for keys in report.keys] for _, report in islice(loader, 12)]

    assert buffers() == buffers(2) == buffers(2, 2) == buffers(4)
    assert buffers(round_to=8) == buffers(4, round_to=8) != buffers()


def assert_same_stream(found, expected):
    for (batch, report), (other, other_report) in zip(found, expected, strict=True):
        assert report == other_report
        for x, y in zip(*map(jax.tree.leaves, (batch, other)), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("context", "changes", "repeat"),
    [
        (1, {}, True),
        (4, {"audio_capacity": 416, "max_documents": 8}, True),
        (4, {"audio_capacity": 416, "packing": "best_fit", "rows": 2}, False),
        (2, {"packing": "padded"}, False),
        (4, {"audio_capacity": 416, "packing": "best_fit_decreasing", "packing_bins": 3}, True),
        (1, {"packing": "best_fit_decreasing", "rows": 1, "packing_bins": 2}, False),
    ],
)
def test_a_restored_loader_continues_exactly_from_every_step(context, changes, repeat):
    config, steps, tail = settings(context, **changes), 8, 3

    def fresh():
        return make_loader([SOURCE], load, config, repeat=repeat, on_skip=quiet)

    loader, states, stream = fresh(), [], []
    for _ in range(steps + tail):
        states.append(json.dumps(loader.get_state()))
        stream.extend(islice(loader, 1))
    assert len(stream) >= steps
    for k, state in enumerate(states[:steps]):
        restored = fresh()
        restored.set_state(json.loads(state))
        assert json.dumps(restored.get_state()) == state
        assert_same_stream(islice(restored, tail), stream[k : k + tail])
    rewound = fresh()
    list(islice(rewound, 4))
    rewound.set_state(json.loads(states[1]))
    assert_same_stream(islice(rewound, tail), stream[1 : 1 + tail])


@pytest.mark.parametrize("data", [{}, {"round_to": 8}], ids=["", "rounded"])
def test_a_state_saved_under_one_mesh_restores_under_another(data):
    def fresh(context):
        config = settings(context, audio_capacity=416, **data)
        return make_loader([SOURCE], load, config, repeat=False, on_skip=quiet)

    for steps in range(8):
        for before, after in ((1, 4), (4, 1), (4, 2)):
            loader = fresh(before)
            seen = list(islice(loader, steps))
            state = json.loads(json.dumps(loader.get_state()))
            other = fresh(after)
            other.set_state(state)
            found = Counter(flat(keys_by_row([*seen, *other])))
            assert max(found.values()) == 1
            assert set(found) == set(GOOD)


def test_the_plugin_drops_into_a_grain_pipeline():
    seen = []
    pack = PackDocuments(
        capacity=128,
        audio_capacity=512,
        max_documents=4,
        front_end=FastConformer(num_mels=MELS),
        on_skip=lambda key, _: seen.append(key),
    )
    mapped = grain.MapDataset.source(SOURCE).map(lambda i: load(i, 0) if i != BROKEN else None)
    for documents in (mapped, mapped.to_iter_dataset(allow_nones=True)):
        seen.clear()
        rows = list(documents.pipe(pack))
        assert sorted(k for row in rows for k in row.report.keys) == sorted([*GOOD, f"item-{WIDE}"])
        assert seen == [f"item-{LONG}", f"item-{LOUD}"]
        assert max(len(row.report.keys) for row in rows) == 4
        assert all(row.batch.tokens.shape == (128,) for row in rows)


def test_text_alone_needs_no_audio_capacity():
    def text(item, epoch):
        return Document.splice(f"t{item}", [epoch, *range(item % 7 + 1)], [True] * (item % 7 + 2), [], AUDIO)

    config = settings(2, 2, audio_capacity=0)
    batch, report = next(make_loader([range(50)], text, config))
    assert not batch.has_audio
    assert batch.tokens.shape == (3, 128)
    assert report.audio_seconds == 0.0
    assert report.documents > 3


def test_without_audio_capacity_documents_with_recordings_are_skipped():
    skipped = {}
    pack = PackDocuments(capacity=128, audio_capacity=0, max_documents=5, on_skip=skipped.__setitem__)
    documents = [load(item, 0) for item in SOURCE if item not in (BROKEN, LONG)]
    rows = list(grain.MapDataset.source(documents).pipe(pack))
    packed = {key for row in rows for key in row.report.keys}
    assert packed == {d.key for d in documents if not d.pieces}
    assert set(skipped) == {d.key for d in documents if d.pieces}
    assert set(skipped.values()) == {"it holds a recording, and audio_capacity is 0"}
    assert not any(row.batch.has_audio for row in rows)


def test_the_packer_counts_rounded_slots():
    reports = [report for _, report in make_loader([range(30)], draw, settings(round_to=50), repeat=False)]
    assert max(len(keys) for report in reports for keys in report.keys) == 2
    assert sum(report.documents for report in reports) == 30


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Workers | int]]:
    """Workers by their number, shared by the tests' loaders."""
    with closing(Workers(1)) as one, closing(Workers(3)) as three:
        yield {0: 0, 1: one, 3: three}


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (1, 0), (1, 2), (3, 0), (3, 2)])
@pytest.mark.parametrize("repeat", [True, False])
def test_workers_and_prefetch_change_nothing(pools, workers, prefetch, repeat):
    def stream(**ahead):
        skipped = []
        with make_loader(
            [SOURCE], load, settings(2), repeat=repeat, on_skip=lambda *skip: skipped.append(skip), **ahead
        ) as loader:
            states = [loader.get_state()]
            steps = []
            for step in islice(loader, 12):
                steps.append(step)
                states.append(loader.get_state())
            assert bool(repeat) == (len(steps) == 12)
        return steps, states, skipped

    steps, states, skipped = stream(workers=pools[workers], prefetch=prefetch)
    plain, plain_states, plain_skipped = stream()
    assert_same_stream(steps, plain)
    assert states == plain_states
    assert skipped[: len(plain_skipped)] == plain_skipped  # batches made ahead may have met more
    assert ("item-5", "broken") in skipped
    if not repeat:
        assert Counter(key for key, _ in skipped) == Counter(f"item-{i}" for i in (BROKEN, LONG, LOUD, WIDE))


def test_a_state_saved_with_some_workers_restores_with_others(pools):
    """And into a loader that has already read, whose batches made ahead are dropped."""

    def fresh(workers, prefetch):
        return make_loader(
            [SOURCE, range(100, 117)],
            load,
            settings(2, audio_capacity=416, rows=2),
            on_skip=quiet,
            weights=[2.0, 1.0],
            workers=pools[workers],
            prefetch=prefetch,
        )

    with fresh(0, 0) as loader:
        plain = list(islice(loader, 10))
    for before, after, steps in (((0, 0), (3, 2), 3), ((3, 2), (0, 0), 5), ((3, 1), (1, 2), 4)):
        with fresh(*before) as loader, fresh(*after) as other:
            assert_same_stream(islice(loader, steps), plain[:steps])
            state = json.loads(json.dumps(loader.get_state()))
            list(islice(other, 2))
            other.set_state(state)
            assert json.loads(json.dumps(other.get_state())) == state
            assert_same_stream(islice(other, 10 - steps), plain[steps:])


@pytest.mark.parametrize(
    ("workers", "read", "error", "message"),
    [(0, 11, ZeroDivisionError, "our defect"), (2, 8, RuntimeError, r"\(11, 0\): Traceback")],
)
def test_what_goes_wrong_ahead_is_raised_and_closing_leaves_nothing(workers, read, error, message):
    threads, keys = set(threading.enumerate()), []
    config = settings(rows=1, packing="padded")
    loader = make_loader([range(30)], fail, config, shuffle=False, workers=workers, prefetch=2)
    with pytest.raises(error, match=message):
        keys.extend(report.keys[0][0] for _, report in loader)
    assert set(threading.enumerate()) > threads or not workers
    loader.close()
    loader.close()
    assert set(threading.enumerate()) == threads
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_closing_does_not_wait_for_the_batch_that_is_being_made():
    late = []

    def slow(item: int, epoch: int) -> Document:
        if epoch:
            late.append(item)
            time.sleep(0.005)
        return draw(item, epoch)

    config = settings(rows=1, capacity=1000, max_documents=1000, packing_bins=1)
    with make_loader([range(1000)], slow, config, prefetch=1) as loader:
        next(loader)
    assert len(late) < 900


def test_a_loader_closes_itself_and_not_the_workers_that_it_shares(pools):
    before = set(threading.enumerate())
    pools[1].submit(draw, [(1, 0)]).result()
    shared = set(threading.enumerate())
    loader = make_loader([SOURCE], load, settings(), on_skip=quiet, workers=pools[1], prefetch=1)
    next(loader)
    assert set(threading.enumerate()) > shared >= before
    del loader
    gc.collect()
    assert set(threading.enumerate()) == shared
    assert pools[1].submit(draw, [(1, 0)]).result()[0].key == "item-1"


def test_sources_are_drawn_by_weight_each_in_epochs_of_its_own():
    sources, weights, steps = [range(20), range(100, 106), range(200, 230)], [5.0, 3.0, 2.0], 300
    config = settings(rows=2, packing="padded")
    seen = [[[], []] for _ in sources]  # by source and row: (item, epoch)
    for batch, report in islice(make_loader(sources, draw, config, weights=weights), steps):
        for row in range(2):
            item = int(report.keys[row][0].removeprefix("item-"))
            seen[item // 100][row].append((item, int(batch.tokens[row, 0]) - 100))
    orders = set()
    for source, weight, rows in zip(sources, weights, seen, strict=True):
        share = weight / sum(weights) * steps
        each = len(source) // 2
        for found in rows:
            assert abs(len(found) - share) <= 2 + share / 100
            assert [epoch for _, epoch in found] == [i // each for i in range(len(found))]
        for start in range(0, min(map(len, rows)) - each + 1, each):
            dealt = [item for found in rows for item, _ in found[start : start + each]]
            assert sorted(dealt) == list(source)
            orders.add(tuple(item % 100 for item in dealt))
    assert len(orders) > 20, "epochs and sources differ in their order"


def test_without_weights_the_sources_are_one():
    sources = [range(9), range(100, 114)]
    items = sorted(f"item-{i}" for source in sources for i in source)
    config = settings(rows=1, packing="padded")
    endless = flat(keys_by_row(islice(make_loader(sources, draw, config), 2 * len(items))))
    assert sorted(endless[: len(items)]) == sorted(endless[len(items) :]) == items
    once = flat(keys_by_row(make_loader(sources, draw, config, repeat=False, weights=[1.0, 9.0])))
    assert sorted(once) == items


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="2 items cannot feed 3 rows"):
        make_loader([range(2)], load, settings())
    with pytest.raises(ValueError, match="none of 1 items could be used"):
        next(make_loader([[LONG]], load, settings(rows=1), on_skip=quiet))
    with pytest.raises(ValueError, match="none of 2 items could be used"):
        next(make_loader([[BROKEN, WIDE]], load, settings(2, rows=1), on_skip=quiet))
    mixed = settings(2, rows=1), [1.0, 99.0]
    with pytest.raises(ValueError, match="none of 3 items could be used"):
        next(make_loader([[BROKEN, LONG], [WIDE]], load, mixed[0], on_skip=quiet, weights=mixed[1]))
    next(make_loader([[0, 1], [WIDE]], load, mixed[0], on_skip=quiet, weights=mixed[1]))
    with pytest.raises(ValueError, match="2 items cannot feed 3 rows"):
        make_loader([SOURCE, range(2)], load, settings(), weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"capacity 128 must be a multiple of 2 \* context = 6"):
        make_loader([SOURCE], load, settings(3, audio_capacity=480))
    with pytest.raises(ValueError, match="must be at least 1"):
        make_loader([SOURCE], load, settings(max_documents=0))
    pack = PackDocuments(capacity=8, audio_capacity=0, max_documents=1)
    object.__setattr__(pack, "packing", "worst_fit")  # as it comes without the tests' type checks
    with pytest.raises(ValueError, match="'worst_fit'; choose"):
        pack.__post_init__()


def test_a_state_of_another_stream_is_refused():
    state = make_loader([SOURCE], load, settings()).get_state()
    for changed in ({"seed": 1}, {"capacity": 256}, {"rows": 2}, {"packing": "best_fit"}, {"round_to": 4}):
        with pytest.raises(ValueError, match="belongs to another stream"):
            make_loader([SOURCE], load, settings(**changed)).set_state(state)
    with pytest.raises(ValueError, match="items: 41 then, 40 now"):
        make_loader([range(40)], load, settings()).set_state(state)
    with pytest.raises(ValueError, match=r"items: 41 then, \[21, 20\] now; weights: None then, \[1.0, 2.0\]"):
        make_loader([range(21), range(20)], load, settings(), weights=[1.0, 2.0]).set_state(state)
    loader = make_loader([SOURCE], load, settings(), on_skip=quiet)
    state["streams"][0]["emitted"] = 50
    loader.set_state(state)
    with pytest.raises(ValueError, match="50 documents of a buffer were handed out"):
        next(loader)


def test_the_largest_seed_orders_every_data_set():
    """Source s is shuffled with seed + s, which has 32 bits."""

    def order(seed: int, source: int) -> list[int]:
        epochs = epochs_of([[50], [50]], seed)[source]
        return [epochs.at(0, 1, place)[0] for place in range(50)]

    first, second = (order(2**32 - 1, source) for source in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert second == order(0, 0) != first
