"""The numbers in the guide's figures: what jaxthd computes for a small ragged batch, as JSON.

Legend: R rows, T tokens of a row, C context ranks, s ring steps, L (lo, hi), n = T / C.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxthd.config import Config, MeshConfig
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.ssd import ssd_and_states
from jaxthd.ops.scan.state_passing import DecayMap, initial_states
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout, DualChunkSwap, attention_work, inverse_permutation
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import make_segments
from jaxthd.packing.thd_view import thd_view
from jaxthd.parallel.mesh import CONTEXT, make_mesh
from jaxthd.parallel.schedule import make_schedule
from scripts.gpu_models import clip_of

CAPACITY, RANKS = 128, 4
CHUNK = CAPACITY // (2 * RANKS)
DOCUMENTS = ((2, 37, 8), (1, 5, 2), (2, 9, 4), (2, 16, 5), (1, 4, 2), (2, 10, 4), (1, 4, 3))
"""For each document: tokens of the prompt, encoder frames, tokens of the answer."""
SENTENCES = ((("Write:",), 4, ("one", "two", "<end>")), (("Say:",), 3, ("go", "<end>")))
"""The same for the documents that are drawn slot by slot, and their words."""
AUDIO = "audio"
DECAY = 0.08
"""The state decays by exp(-DECAY) from token to token."""
Numbers = dict[str, Any]


class Buffer(NamedTuple):
    """A row of a batch in document order, with the fields of Batch; the context layout is undone.

    ids: the number of the token's document. segments: Batch.segment_ids.
    """

    ids: Int[np.ndarray, " T"]
    segments: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, " T"]
    audio_slots: Int[np.ndarray, " T"]
    weights: Float[np.ndarray, " T"]

    @property
    def audio(self) -> Bool[np.ndarray, " T"]:
        return self.audio_slots >= 0


def document_order(batch: Batch, row: int, config: Config) -> Buffer:
    """A row of the batch, in the order before it was laid out over the context ranks of `config`."""
    ids, splits = np.asarray(batch.segment_ids)[row], batch.splits_of(row)
    back = ContextLayout.of(config).inverse(ids, splits)
    audio_slots = batch.audio_slots if batch.has_audio else np.full_like(batch.segment_ids, -1)
    fields = batch.documents, batch.segment_ids, batch.positions, audio_slots, batch.weights
    return Buffer(*(np.asarray(x)[row][back] for x in fields))


def document(key: int, prompt: Sequence[int], frames: int, answer: Sequence[int]) -> Document:
    """A prompt, `frames` encoder frames of audio, and a supervised answer."""
    mels = np.zeros((frames * SUBSAMPLING, 1), np.float32)
    tokens = [*prompt, 0, *answer]
    supervised = [False] * (len(prompt) + 1) + [True] * len(answer)
    return Document.splice(str(key), tokens, supervised, [clip_of([mels])], placeholder=0)


def packed() -> tuple[Batch, Buffer]:
    """(DOCUMENTS as the loader lays them out over RANKS context ranks, the same row in document order).
    Documents are ordered so that attention is balanced over the ranks.
    """
    documents = [document(key, [1] * a, b, [2] * c) for key, (a, b, c) in enumerate(DOCUMENTS)]
    settings: dict[str, Any] = {
        "capacity": CAPACITY,
        "audio_capacity": CAPACITY * SUBSAMPLING,
        "front_end": FastConformer(num_mels=1),
        "max_documents": len(documents),
        "context": RANKS,
    }
    _, report = pack_row(documents, **settings)
    documents = [documents[int(key)] for key in report.keys]
    batch, _ = pack_row(documents, **settings, order_seed=None)
    return batch, document_order(batch, 0, Config(mesh=MeshConfig(context=RANKS)))


def slots(ids: np.ndarray, audio_slots: np.ndarray) -> Numbers:
    """The document of each slot, and whether the slot holds audio."""
    return {"ids": ids.tolist(), "audio": (audio_slots >= 0).astype(int).tolist()}


def buffer_numbers() -> Numbers:
    batch, buffer = packed()
    return {
        **slots(buffer.ids, buffer.audio_slots),
        "positions": buffer.positions.tolist(),
        "supervised": (buffer.weights > 0).astype(int).tolist(),
        "cu_seqlens": thd_view(batch.segment_ids[0]).cu_seqlens.tolist(),
    }


def slot_numbers() -> Numbers:
    words = [AUDIO, *dict.fromkeys(word for prompt, _, answer in SENTENCES for word in (*prompt, *answer))]
    documents = [
        document(key, [words.index(x) for x in prompt], frames, [words.index(x) for x in answer])
        for key, (prompt, frames, answer) in enumerate(SENTENCES)
    ]
    capacity = 1 + sum(map(len, documents))
    batch, _ = pack_row(
        documents,
        capacity=capacity,
        audio_capacity=256,
        front_end=FastConformer(num_mels=1),
        max_documents=2,
        order_seed=None,
    )
    ids, supervised = batch.segment_ids[0], batch.weights[0] > 0
    return {
        **slots(ids, batch.audio_slots[0]),
        "token": [words[t] if s else "" for t, s in zip(batch.tokens[0], ids, strict=True)],
        "target": [words[t] if w else "" for t, w in zip(batch.targets[0], supervised, strict=True)],
        "weight": supervised.astype(int).tolist(),
        "segment id": ids.tolist(),
        "position": batch.positions[0].tolist(),
    }


def layout_numbers() -> Numbers:
    batch, buffer = packed()
    ids, positions = batch.segment_ids[0], batch.positions[0]
    return {
        "in order": slots(buffer.ids, buffer.audio_slots),
        "on ranks": slots(ids, batch.audio_slots[0]),
        "attention work": attention_work(positions, ids, RANKS).tolist(),
    }


def on_ranks(function: Callable[..., Any], batch: Batch, *by_rank: Any) -> np.ndarray:
    """function(ids, positions, *by_rank) on RANKS context ranks, each with its part; results side by side."""
    row, part = PartitionSpec(None, CONTEXT), PartitionSpec(CONTEXT)
    specs = row, row, *(part for _ in by_rank)
    mesh = make_mesh(MeshConfig(context=RANKS))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=part, check_vma=False)
    return np.asarray(jax.jit(mapped)(batch.segment_ids, batch.positions, *by_rank))


def _ring_steps(ids: Any, positions: Any) -> Any:
    """Key intervals on one rank, as int [1, ring steps, (lo, hi), queries]; runs inside shard_map."""
    segments = make_segments(ids, positions, block=8, axis=CONTEXT)
    return jnp.stack([jnp.stack([x.lo, x.hi]) for x in segments.keys.by_step])[None]


def ring_numbers() -> Numbers:
    """By ring step, rank and local query: the interval [lo, hi) of keys that it sees at that step."""
    batch, _ = packed()
    keys_CsLn = on_ranks(_ring_steps, batch)
    ids = batch.segment_ids[0].reshape(RANKS, -1)
    return {"ids": ids.tolist(), "keys": keys_CsLn.swapaxes(0, 1).tolist()}


def scan(x_RT: np.ndarray, positions_RT: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The state of one head with one number, where dt, B and C are 1, after each of the rows' slots `at`."""

    def run(x_RT: Any, positions_RT: Any, at: Any) -> Any:
        segments = make_segments(jnp.ones_like(positions_RT), positions_RT, block=8, axis=None)
        x, a = x_RT.reshape(-1, 1, 1), jnp.array([-DECAY], jnp.float32)
        ones = jnp.ones_like(x)
        return ssd_and_states(ScanInputs(x, ones[..., 0], a, ones, ones), segments, at, chunk=CHUNK)[1]

    arrays = x_RT.astype(np.float32), positions_RT.astype(np.int32), at.astype(np.int32)
    return np.asarray(jax.jit(run)(*arrays)).reshape(-1)


def state_numbers() -> Numbers:
    """keeps, adds: what each context chunk multiplies the state by and adds to it. enters: the state at the
    start of each chunk, after the exchange between ranks. state: the result of one scan over the whole
    buffer.
    """
    batch, buffer = packed()
    inputs = (buffer.ids > 0).astype(float)
    parts = {name: np.split(x, 2 * RANKS) for name, x in (("x", inputs), ("positions", buffer.positions))}
    last = (np.arange(2 * RANKS) + 1) * CHUNK - 1
    adds = scan(np.stack(parts["x"]), np.stack(parts["positions"]), last)
    # Only the token before the chunk adds 1, so the state at the chunk's end is the part that it keeps.
    probe = np.tile([1.0] + [0.0] * CHUNK, (2 * RANKS, 1))
    before = np.stack([np.append([0], p) for p in parts["positions"]])
    keeps = scan(probe, before, (np.arange(2 * RANKS) + 1) * (CHUNK + 1) - 1)

    order = DualChunkSwap(RANKS).permutation(2 * RANKS)

    def of_rank(ids: Any, positions: Any, decay: Any, state: Any) -> Any:
        segments = make_segments(ids, positions, block=8, axis=CONTEXT)
        return initial_states(
            DecayMap(decay.reshape(2, 1, 1), state.reshape(2, 1, 1, 1, 1)), segments
        ).reshape(2)

    enters = on_ranks(of_rank, batch, *(jnp.asarray(x[order], jnp.float32) for x in (keeps, adds)))
    every = scan(inputs[None], buffer.positions[None], np.arange(CAPACITY))
    values = {"state": every, "keeps": keeps, "adds": adds, "enters": enters[inverse_permutation(order)]}
    return {
        **slots(buffer.ids, buffer.audio_slots),
        "positions": buffer.positions.tolist(),
        "ranks": (np.argsort(order) // 2).tolist(),
        **{name: [float(f"{v:.4g}") for v in x] for name, x in values.items()},
    }


def pipeline_numbers() -> Numbers:
    found = {}
    for chunks in (1, 2):
        schedule = make_schedule(8, RANKS, chunks)
        found[str(chunks)] = {
            "bubble": round(schedule.bubble, 4),
            **{
                name: [work.microbatch.T.tolist(), work.chunk.T.tolist()]
                for name, work in (("forward", schedule.table.forward), ("backward", schedule.table.backward))
            },
        }
    return found
