"""A packed row holds its documents exactly, each as if alone."""

from collections import Counter

import numpy as np
import pytest

from jaxthd.models.front_ends import FastConformer, Transcribe
from jaxthd.models.front_ends.transcribe.labels import WordTimes
from jaxthd.packing.batch import AUDIO_FIELDS, Batch, concatenate_rows
from jaxthd.packing.document import Document, audio_pieces
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import PackReport, pack_row
from tests.clips import clip_of

MELS = 3
AUDIO = 7  # the placeholder id


def random_document(rng: np.random.Generator, key: str, chunk_frames: int = 60) -> Document:
    """Ragged turns of text and audio, any text token supervised or not, sometimes no audio at all."""
    tokens, supervised, clips = [], [], []
    for _ in range(rng.integers(1, 4)):
        text = rng.integers(1, 6)
        tokens += (100 + rng.integers(0, 900, size=text)).tolist()
        supervised += (rng.random(text) < 0.6).tolist()
        if rng.random() < 0.6:
            tokens.append(AUDIO)
            supervised.append(False)
            lengths = rng.integers(1, chunk_frames + 1, size=rng.integers(1, 3))
            clips.append([rng.normal(size=(n, MELS)).astype(np.float32) for n in lengths])
    return Document.splice(key, tokens, supervised, [clip_of(clip) for clip in clips], AUDIO)


def random_documents(seed: int, count: int, **kwargs) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [random_document(rng, f"{seed}-{i}", **kwargs) for i in range(count)]


SIZES = {
    "capacity": 384,
    "audio_capacity": 2048,
    "front_end": FastConformer(num_mels=MELS),
    "max_documents": 12,
}


def arrays(batch):
    """The fields that are arrays. Without jax: worker processes import this file."""
    return {name: x for name, x in batch._asdict().items() if isinstance(x, np.ndarray)}


def in_document_order(batch, context):
    """The row's arrays with the context layout undone, R dropped."""
    back = ContextLayout("buffer", context).inverse(batch.segment_ids[0])
    row = batch._replace(**{name: x[0] for name, x in arrays(batch).items()})
    return row._replace(**{name: getattr(row, name)[back] for name in Batch._fields[:6]})


def supervision(batch, keys):
    """Counter of (document, position, token, target) of the supervised positions."""
    where = np.argwhere(batch.weights > 0)
    return Counter(
        (
            keys[batch.segment_ids[i] - 1],
            *(int(x[i]) for x in (batch.positions, batch.tokens, batch.targets)),
        )
        for i in map(tuple, where)
    )


@pytest.mark.parametrize(
    ("context", "audio_ranks", "round_to"),
    [
        (1, 1, 1),
        (2, 2, 1),
        (2, 4, 8),
        (4, 8, 16),
        (1, 2, 5),
    ],
)
def test_unpacking_gives_every_document_back(context, audio_ranks, round_to):
    for seed in range(6):
        documents = random_documents(seed, 6)
        batch, report = pack_row(
            documents,
            **SIZES,
            context=context,
            audio_ranks=audio_ranks,
            round_to=round_to,
        )
        row = in_document_order(batch, context)
        assert sorted(report.keys) == sorted(d.key for d in documents)
        ids = row.segment_ids[row.segment_ids > 0]
        assert (np.diff(ids) >= 0).all()
        assert set(ids) == set(range(1, 7))
        for segment, key in enumerate(report.keys, 1):
            document = next(d for d in documents if d.key == key)
            at = np.flatnonzero(row.segment_ids == segment)
            assert at[0] % round_to == 0
            np.testing.assert_array_equal(at, at[0] + np.arange(len(document)))
            np.testing.assert_array_equal(row.tokens[at], document.tokens)
            np.testing.assert_array_equal(row.positions[at], np.arange(len(document)))
            np.testing.assert_array_equal(row.audio_slots[at] >= 0, document.is_audio)
            check_audio(row, row.audio_slots[at][document.is_audio], document)
        padding = row.segment_ids == 0
        for x in (row.tokens, row.positions, row.targets, row.weights):
            assert not x[padding].any()
        assert (row.audio_slots[padding] == -1).all()
        slots = row.audio_slots[row.audio_slots >= 0]
        assert len(set(slots)) == len(slots) == (row.piece_ids > 0).sum()
        assert report.real_tokens == sum(map(len, documents)) == (~padding).sum()
        assert report.supervised_tokens == row.weights.sum()
        frames = sum(len(c.features) for d in documents for c in d.pieces)
        assert row.frame_mask.sum() == frames == round(report.audio_seconds * 100)
        assert not row.features[~row.frame_mask].any()


def check_audio(row, slots, document):
    """Followed to the mel buffer, the slots show the document's chunks, each with a number of its own."""
    for chunk in (piece.features for piece in document.pieces):
        frames = -(-(len(chunk)) // 8)
        mine, slots = slots[:frames], slots[frames:]
        np.testing.assert_array_equal(mine, mine[0] + np.arange(frames))
        np.testing.assert_array_equal(row.features[8 * mine[0] : 8 * mine[0] + len(chunk)], chunk)
        valid = np.arange(8 * frames) < len(chunk)
        np.testing.assert_array_equal(row.frame_mask[8 * mine[0] : 8 * (mine[-1] + 1)], valid)
        np.testing.assert_array_equal(row.piece_positions[mine], np.arange(frames))
        np.testing.assert_array_equal(np.flatnonzero(row.piece_ids == row.piece_ids[mine[0]]), mine)
    numbers = row.piece_ids[row.piece_ids > 0]
    assert (np.diff(numbers) >= 0).all()
    assert set(numbers) == set(range(1, len(set(numbers)) + 1))
    assert not len(slots)


def test_batch_has_the_contracts_shapes_and_dtypes():
    batch, _ = pack_row(random_documents(0, 3), **SIZES, context=2, audio_ranks=2, depths=3)
    token, ahead, frame = (1, 384), (1, 3, 384), (1, 2048 // 8)
    expected = {
        "tokens": (token, np.int32), "targets": (token, np.int32), "weights": (token, np.float32),
        "segment_ids": (token, np.int32), "positions": (token, np.int32), "audio_slots": (token, np.int32),
        "features": ((1, 2048, MELS), np.float32), "frame_mask": ((1, 2048), bool),
        "piece_ids": (frame, np.int32), "piece_positions": (frame, np.int32),
        "future_tokens": (ahead, np.int32), "future_audio_slots": (ahead, np.int32),
        "future_targets": (ahead, np.int32), "future_weights": (ahead, np.float32),
    }  # fmt: skip
    fields = batch._asdict()
    assert fields.pop("extras") == {}
    absent = (
        "document_ids",
        "prefixes",
        "embeddings",
        "draws",
        "splits",
        "recording_ids",
        "recording_positions",
        "recording_labels",
    )
    assert {fields.pop(name) for name in absent} == {None}
    assert {k: (v.shape, v.dtype) for k, v in fields.items()} == expected


@pytest.mark.parametrize(("context", "round_to"), [(1, 1), (4, 1), (2, 4)])
def test_tokens_ahead_are_the_documents_own(context, round_to):
    """By position: the token, the audio slot and the supervised target, or that there is none."""
    depths, documents = (
        3,
        [*random_documents(4, 6), *(random_document(np.random.default_rng(i), f"{i}", 1) for i in range(2))],
    )
    kwargs = {"context": context, "audio_ranks": context, "round_to": round_to}
    batch, report = pack_row(documents, **SIZES, **kwargs, depths=depths)
    without, _ = pack_row(documents, **SIZES, **kwargs)
    assert sum(x.nbytes for name, x in arrays(without).items() if name.startswith("future")) == 0
    by_key = {d.key: d for d in documents}
    slots = {
        (s, p): a
        for s, p, a in zip(batch.segment_ids[0], batch.positions[0], batch.audio_slots[0], strict=True)
    }
    for depth in range(depths):
        for i, (segment, position) in enumerate(zip(batch.segment_ids[0], batch.positions[0], strict=True)):
            one = by_key[report.keys[segment - 1]] if segment else None
            near, far = position + depth + 1, position + depth + 2
            has_near, has_far = (one is not None and place < len(one) for place in (near, far))
            token, slot = (one.tokens[near], slots[segment, near]) if has_near else (-1, -1)
            weight = float(has_far and one.supervised[far])
            assert batch.future_tokens[0, depth, i] == token
            assert batch.future_audio_slots[0, depth, i] == slot
            assert batch.future_weights[0, depth, i] == weight
            assert batch.future_targets[0, depth, i] == (one.tokens[far] if weight else 0)


@pytest.mark.parametrize("context", [1, 4])
def test_supervised_pairs_equal_those_of_each_document_alone(context):
    documents = random_documents(11, 8)
    alone = Counter(
        (d.key, i, int(d.tokens[i]), int(d.tokens[i + 1]))
        for d in documents
        for i in range(len(d) - 1)
        if d.supervised[i + 1]
    )

    def pairs(documents):
        batch, report = pack_row(documents, **SIZES, context=context, audio_ranks=context)
        return supervision(batch, report.keys)

    packed, padded = pairs(documents), sum((pairs([d]) for d in documents), Counter())
    assert packed == padded == alone


def test_labels_stop_at_the_documents_edge_and_audio_predicts_the_first_word():
    frame = np.ones((9, MELS), np.float32)
    a = Document.splice("a", [AUDIO, 5, 6], [False, True, False], [clip_of([frame])], AUDIO)
    b = Document.splice("b", [8, 9], [True, True], [], AUDIO)
    batch, report = pack_row([a, b], **SIZES, order_seed=None)
    assert report.keys == ("a", "b")
    assert batch.tokens[0, :7].tolist() == [AUDIO, AUDIO, 5, 6, 8, 9, 0]
    assert batch.weights[0, :7].tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert batch.targets[0, :7].tolist() == [0, 5, 0, 0, 9, 0, 0]
    assert batch.positions[0, :7].tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert batch.audio_slots[0, :7].tolist() == [0, 1, -1, -1, -1, -1, -1]


def test_rows_without_documents_or_without_audio():
    batch, report = pack_row([], **SIZES, context=2, audio_ranks=4)
    assert not any(x.any() for name, x in arrays(batch).items() if name != "audio_slots")
    assert (batch.audio_slots == -1).all()
    assert report == PackReport((), 0, 0, (), 1.0, 0)
    with pytest.raises(ValueError, match="has no token"):
        Document.splice("empty", [], [], [], AUDIO)
    text = Document.splice("text", [1, 2, 3], [False, True, True], [], AUDIO)
    batch, report = pack_row([text], **SIZES, audio_ranks=4)
    assert (report.real_tokens, report.supervised_tokens, report.audio_seconds) == (3, 2, 0.0)
    assert not batch.is_audio.any()


@pytest.mark.parametrize("context", [1, 2])
def test_without_room_for_audio_its_arrays_are_none_and_all_others_the_same(context):
    """As a model without an encoder takes them."""
    rng = np.random.default_rng(0)
    documents = [
        Document.splice(str(n), rng.integers(9, 99, n).tolist(), (rng.random(n) < 0.7).tolist(), [], AUDIO)
        for n in (11, 5, 1, 30)
    ]
    sizes = {"context": context, "audio_ranks": 2 * context, "depths": 2}
    with_room, report = pack_row(documents, **SIZES, **sizes)
    without, other_report = pack_row(documents, **{**SIZES, "audio_capacity": 0, "front_end": None}, **sizes)
    assert report == other_report
    optional = {
        "document_ids",
        "prefixes",
        "embeddings",
        "draws",
        "splits",
        "recording_ids",
        "recording_positions",
        "recording_labels",
    }
    absent = {name for name, x in without._asdict().items() if x is None} - optional
    assert absent == set(AUDIO_FIELDS) == {
        "audio_slots", "features", "frame_mask", "piece_ids", "piece_positions", "future_audio_slots",
    }  # fmt: skip
    assert with_room.has_audio
    assert not without.has_audio
    np.testing.assert_array_equal(without.is_audio, with_room.is_audio)
    for name in set(Batch._fields) - absent - optional:
        np.testing.assert_array_equal(getattr(without, name), getattr(with_room, name))
    two = concatenate_rows([without, without])
    assert two.features is None
    assert two.tokens.shape == (2, SIZES["capacity"])
    heard = Document.splice("heard", [AUDIO], [False], [clip_of([np.ones((8, MELS), np.float32)])], AUDIO)
    with pytest.raises(ValueError, match="raise audio_capacity"):
        pack_row([heard], **{**SIZES, "audio_capacity": 0})


def test_the_chosen_order_is_no_less_even_than_the_given_one():
    for seed in range(8):
        documents = random_documents(seed, 10)
        kwargs = {**SIZES, "context": 4, "round_to": 4}
        assert (
            pack_row(documents, **kwargs)[1].imbalance
            <= pack_row(documents, **kwargs, order_seed=None)[1].imbalance
        )


@pytest.mark.parametrize(
    ("audio_capacity", "ranks", "share"),
    [
        (2048, 1, 2048),
        (2041, 1, 2048),
        (2048, 2, 1024),
        (2040, 2, 1024),
        (2048, 8, 256),
        (500, 64, 8),
        (0, 4, 0),
    ],
)
def test_a_ranks_share_of_the_audio(audio_capacity: int, ranks: int, share: int):
    limits = BufferLimits(64, audio_capacity, 4, ranks, front_end=FastConformer(chunk_seconds=10.0))
    assert (limits.rank_frames, limits.array_frames) == (share, share * ranks)


def test_what_does_not_fit_is_refused():
    def pack(documents, **changed):
        return pack_row(documents, **{**SIZES, **changed})

    documents = random_documents(1, 4)
    total = sum(map(len, documents))
    pack(documents, capacity=total)
    with pytest.raises(ValueError, match=f"take {total} token slots, the buffer has {total - 1}"):
        pack(documents, capacity=total - 1)
    with pytest.raises(ValueError, match="4 documents in a row, at most 3"):
        pack(documents, max_documents=3)
    frames = sum(FastConformer().taken(d.pieces) for d in documents)
    pack(documents, audio_capacity=frames, audio_ranks=2)
    with pytest.raises(ValueError, match=f"take {frames} audio frames, the buffer has {frames - 8}"):
        pack(documents, audio_capacity=frames - 8, audio_ranks=1)
    short = FastConformer(num_mels=MELS, chunk_seconds=0.07)
    with pytest.raises(
        ValueError, match=f"split over {frames // 8} audio ranks of 8 each; expected at most 8"
    ):
        pack(documents, audio_capacity=frames, audio_ranks=frames // 8, front_end=short)
    with pytest.raises(ValueError, match="make the capacity a multiple of 8"):
        pack(documents, capacity=total + 8 - total % 8 + 1, context=4)
    with pytest.raises(ValueError, match="has audio frames of 3 numbers, expected 80"):
        pack(documents, front_end=FastConformer(num_mels=80))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_front_end_that_reads_recordings_is_told_whose_token_each_output_is(ranks: int):
    """By what the outputs hold: the first number of a frame is its own number in the recording."""
    words = WordTimes(classes=9, blank=8, upsampling=2, loss=1.0)
    front_end = Transcribe(mel_bands=1, stack=4, chunk_outputs=5, context_outputs=(2, 1), word_times=words)
    documents, lengths = [], (3, 24, 40, 81, 20)
    for n, frames in enumerate(lengths):
        run = np.zeros((frames + (frames % 4 == 0), 3), np.float32)
        run[:, 0] = 1000 * n + np.arange(len(run))
        pieces = audio_pieces(front_end.pieces(160 * frames), [run])
        pieces[0] = pieces[0]._replace(labels=tuple(range(n, n + frames // 4)))
        documents.append(Document.splice(f"{n}", [AUDIO], [False], [pieces], AUDIO))
    sizes = {**SIZES, "front_end": front_end, "audio_capacity": 280}
    batch, _ = pack_row(documents, **sizes, audio_ranks=ranks, order_seed=None)
    ids, positions, labels = batch.recording_ids[0], batch.recording_positions[0], batch.recording_labels[0]
    first = batch.features[0].reshape(-1, 4, 3)[:, 0, 0].astype(int)
    is_used = batch.piece_ids[0] > 0
    assert (ids[~is_used] == 0).all()
    assert (positions[~is_used] == -1).all()
    for n, frames in enumerate(lengths):
        of_recording = is_used & (ids == n + 1)
        own, tokens = of_recording & (positions >= 0), -(-frames // 4)
        assert sorted(positions[own]) == list(range(tokens))
        np.testing.assert_array_equal(first[own], 1000 * n + 4 * positions[own])
        others = of_recording & (positions < 0)
        np.testing.assert_array_equal(first[others], 1000 * n + 4 * (-2 - positions[others]))
        assert others.any() == (tokens > 5 or frames % 4 == 0)
        masked = ~batch.frame_mask[0].reshape(-1, 4)[of_recording, 0]
        np.testing.assert_array_equal(masked, first[of_recording] == 1000 * n + frames)
        in_order = labels[own][np.argsort(positions[own])].reshape(-1)
        want = np.full(2 * tokens, -1)
        want[: frames // 4] = range(n, n + frames // 4)
        np.testing.assert_array_equal(in_order, want)
    assert (labels[positions < 0] == -1).all()
