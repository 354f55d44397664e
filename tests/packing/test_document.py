"""A document with several answers in a row is, for each answer, what the answer alone with its prompt is."""

from dataclasses import replace

import grain
import numpy as np
import pytest

from jaxthd.data.packer import PackDocuments
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document, of_tokens
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.packing.thd_view import thd_view
from tests.answers import AUDIO, alone, document_with_answers
from tests.clips import clip_of

MELS = 4
SIZES = {
    "capacity": 384,
    "audio_capacity": 2048,
    "front_end": FastConformer(num_mels=MELS),
    "max_documents": 40,
    "answers": True,
}
PLAIN = Document.splice(
    "plain", [9, AUDIO, 5, 6], [False, False, True, True], [clip_of([np.ones((9, MELS), np.float32)])], AUDIO
)
TOKEN_FIELDS = (
    "tokens", "targets", "weights", "segment_ids", "positions", "audio_slots", "document_ids", "prefixes",
)  # fmt: skip


def ragged(seed: int) -> list[Document]:
    """Documents with 1 to 4 answers, and two without among them."""
    rng = np.random.default_rng(seed)
    settings = {"mels": MELS, "extras": ("drawn",)}
    documents = [document_with_answers(rng, f"{n}", answers=n % 4 + 1, **settings) for n in range(5)]
    plain = replace(PLAIN, extras={"drawn": rng.normal(size=len(PLAIN)).astype(np.float32)})
    one_token = Document("short", np.int32([7, 8, 9]), np.zeros(3, bool), np.array([False, True, True]))
    one_token = replace(one_token, answers=(1, 1), extras={"drawn": np.float32([1, 2, 3])})
    return [documents[0], plain, *documents[1:], one_token]


def slots_of(batch: Batch, layout: ContextLayout) -> dict[str, np.ndarray]:
    """The row's arrays of tokens in document order."""
    order = layout.inverse(batch.segment_ids[0])
    arrays = {name: getattr(batch, name) for name in TOKEN_FIELDS} | batch.extras
    return {name: x[0][order] for name, x in arrays.items() if x is not None}


def heard(batch: Batch, slots: np.ndarray) -> list[np.ndarray]:
    """The valid mel frames behind each encoder frame."""
    frames = [slice(8 * slot, 8 * slot + 8) for slot in slots]
    return [batch.features[0, frame][batch.frame_mask[0, frame]] for frame in frames]


def frames_of(document: Document) -> list[np.ndarray]:
    return [x.features[i : i + 8] for x in document.pieces for i in range(0, len(x.features), 8)]


def check_sequence(document: Document, batch: Batch, row: dict[str, np.ndarray], at: np.ndarray) -> None:
    """The slots `at` hold a document that is one sequence; where they change segment, nothing is supervised
    (the last slot of a prompt predicts nothing, since every answer repeats the token after it)."""
    assert row["tokens"][at].tolist() == document.tokens.tolist()
    assert (row["audio_slots"][at] >= 0).tolist() == document.is_audio.tolist()
    for found, wanted in zip(
        heard(batch, row["audio_slots"][at][document.is_audio]), frames_of(document), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    supervised = np.append(document.supervised[1:], False)
    assert row["weights"][at].tolist() == supervised.tolist()
    after = np.append(document.tokens[1:], 0)
    assert row["targets"][at].tolist() == np.where(supervised, after, 0).tolist()
    numbers = np.append(document.extras["drawn"][1:], 0)
    same = np.diff(row["segment_ids"][at], append=row["segment_ids"][at[-1]]) == 0
    assert row["drawn"][at].tolist() == np.where(same, numbers, 0).tolist()


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    ("context", "round_to"),
    [(1, 1), (2, 1), (4, 3), (2, 4), (4, 8)],
)
def test_every_answer_is_what_it_is_alone(context: int, round_to: int, share_prompts: bool):
    layout = ContextLayout("buffer", context, round_to)
    for seed in range(3):
        documents = ragged(seed)
        settings = {"context": context, "audio_ranks": context, "round_to": round_to}
        sizes = SIZES | {"capacity": 384 if share_prompts and round_to < 4 else 768}
        batch, report = pack_row(
            documents, **sizes, **settings, extras=("drawn",), share_prompts=share_prompts
        )
        row, ids = slots_of(batch, layout), batch.segment_ids
        assert report.segments == ids.max()
        assert report.real_tokens == (ids > 0).sum()
        assert sorted(report.keys) == sorted(d.key for d in documents)
        assert (batch.prefixes is None) == (not share_prompts)
        assert batch.documents is batch.document_ids
        prefixes = row.get("prefixes", np.zeros_like(row["segment_ids"]))
        seen, segment = np.zeros(len(prefixes), bool), 0
        for number, key in enumerate(report.keys, 1):
            document = next(d for d in documents if d.key == key)
            shared, of_prompt = share_prompts and document.answers and document.prompt_length > 1, 0
            if shared:
                segment = of_prompt = segment + 1
            for sequence in alone(document):
                segment += 1
                own, before = (
                    np.flatnonzero(row["segment_ids"] == n) if n else [] for n in (segment, of_prompt)
                )
                assert own[0] % round_to == 0
                assert row["positions"][own].tolist() == list(range(len(own)))
                assert set(prefixes[own]) == {of_prompt}
                at = np.concatenate([before, own]).astype(int)
                assert set(row["document_ids"][at]) == {number}
                check_sequence(sequence, batch, row, at)
                seen[at] = True
            of_document = row["document_ids"] == number
            assert of_document.sum() <= BufferLimits(9**9, 0, 9, share_prompts=share_prompts).slots(document)
            numbers = of_tokens(document, share_prompts, row["drawn"][of_document])
            answers = slice(document.prompt_length if document.answers else 1, None)
            np.testing.assert_array_equal(numbers[answers], document.extras["drawn"][answers])
        assert segment == report.segments
        for name, x in row.items():
            assert not (x[~seen] if name != "audio_slots" else x[~seen] + 1).any(), name
        frames = sum(len(c.features) for d in documents for c in d.pieces)
        assert batch.frame_mask.sum() == frames, "every recording is encoded once"


def test_a_shared_prompt_saves_its_slots():
    """145 prompt tokens, 25 of each of 8 answers: 144 + 8 * 26 slots, in place of 8 * 170."""
    tokens = np.arange(145 + 8 * 25, dtype=np.int32)
    supervised = tokens >= 145
    group = Document("group", tokens, np.zeros(len(tokens), bool), supervised, answers=(25,) * 8)
    shared, copied = (BufferLimits(9999, 0, 9, share_prompts=share).fit(group) for share in (True, False))
    assert (shared.slots, shared.segments) == (144 + 8 * 26, 9)
    assert (copied.slots, copied.segments) == (8 * 170, 8)
    assert BufferLimits(9999, 0, 9, round_to=8).slots(group) == 144 + 8 * 32
    few = BufferLimits(9999, 0, 8).fit(group)
    assert few.reject_reason == "its 8 answers make 9 segments, which exceed the max_documents of 8"
    with pytest.raises(ValueError, match="1 documents of 9 segments in a row, at most 8"):
        pack_row([group], **SIZES | {"max_documents": 8})
    rows = [pack_row([group], **SIZES | {"capacity": 1360, "share_prompts": s})[0] for s in (True, False)]
    assert np.diff(thd_view(rows[1]).cu_seqlens[0]).tolist() == [170] * 8
    with pytest.raises(ValueError, match="share_prompts=False"):
        thd_view(rows[0])


def test_batches_of_documents_without_answers_stay_as_they_were():
    plain, _ = pack_row([PLAIN], **SIZES | {"answers": False})
    assert plain.document_ids is None
    assert plain.prefixes is None
    assert plain.documents is plain.segment_ids
    among, _ = pack_row([PLAIN], **SIZES)
    np.testing.assert_array_equal(among.document_ids, plain.segment_ids)
    assert not among.prefixes.any()
    for name, x in plain._asdict().items():
        if x is not None and name != "extras":
            np.testing.assert_array_equal(x, getattr(among, name))
    assert concatenate_rows([among, among]).prefixes.shape == (2, SIZES["capacity"])
    with pytest.raises(ValueError, match="None in 1 of 2 batches"):
        concatenate_rows([plain, among])
    group = document_with_answers(np.random.default_rng(0), "group", mels=MELS)
    with pytest.raises(ValueError, match=r"'group' has 2 answers.*answers=True"):
        pack_row([group], **SIZES | {"answers": False})


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_packer_never_exceeds_the_segments_or_slots_of_a_row(share_prompts: bool):
    rng = np.random.default_rng(1)
    documents = [
        document_with_answers(rng, str(n), answers=int(rng.integers(1, 9)), mels=MELS) for n in range(60)
    ]
    skipped: list[str] = []
    sizes = SIZES | {"capacity": 96, "max_documents": 8, "share_prompts": share_prompts, "round_to": 4}
    pack = PackDocuments(**sizes, context=2, audio_ranks=2, on_skip=lambda key, reason: skipped.append(key))
    rows = list(grain.MapDataset.source(documents).pipe(pack))
    assert sorted([*skipped, *(key for row in rows for key in row.report.keys)], key=int) == [
        d.key for d in documents
    ]
    assert all(pack.limits.fit(documents[int(key)]).reject_reason for key in skipped)
    assert max(row.report.segments for row in rows) <= 8
    assert len({row.batch.prefixes is None for row in rows}) == 1
    with pytest.raises(ValueError, match="no multi-token prediction"):
        PackDocuments(**sizes, depths=1)


def test_the_order_of_documents_balances_what_answers_see():
    rng = np.random.default_rng(5)
    documents = [
        document_with_answers(rng, str(n), answers=int(rng.integers(1, 5)), mels=MELS, most=12)
        for n in range(9)
    ]
    settings = SIZES | {"capacity": 768, "context": 4, "max_documents": 64}
    batch, chosen = pack_row(documents, **settings)
    _, given = pack_row(documents, **settings, order_seed=None)
    assert chosen.imbalance < given.imbalance
    ids, prefixes, positions = batch.segment_ids[0], batch.prefixes[0], batch.positions[0]
    keys = [
        p + 1 + (ids == f).sum() * (f > 0) if s else 0
        for s, f, p in zip(ids, prefixes, positions, strict=True)
    ]
    work = np.reshape(keys, (4, -1)).sum(1)
    assert chosen.imbalance == pytest.approx(work.max() / work.mean())
