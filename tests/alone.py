"""A document computed alone, by the definitions: nothing packed, no mesh."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.packing.document import Document
from jaxthd.packing.segments import Segments, make_segments
from tests.speech_model import CAPACITY, CHUNK, MELS, MODEL


class Parts(NamedTuple):
    """One document; arrays are padded to fixed sizes.

    tokens, supervised: of the document; the first `length` are real.
    slot: for an audio token its encoder frame, chunk * CHUNK / 8 + frame; -1 for text.
    mels: [4, CHUNK, MELS], one encoder chunk a row; frames: valid ones of each.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    length: np.ndarray
    slot: np.ndarray
    mels: np.ndarray
    frames: np.ndarray


def parts(one: Document) -> Parts:
    filled = Parts(
        tokens=np.zeros(CAPACITY, np.int32),
        supervised=np.zeros(CAPACITY, bool),
        length=np.int32(len(one)),
        slot=np.full(CAPACITY, -1, np.int32),
        mels=np.zeros((4, CHUNK, MELS)),
        frames=np.zeros(4, np.int32),
    )
    filled.tokens[: len(one)], filled.supervised[: len(one)] = one.tokens, one.supervised
    slots = []
    for c, chunk in enumerate(piece.features for piece in one.pieces):
        filled.mels[c, : len(chunk)], filled.frames[c] = chunk, len(chunk)
        slots += [c * CHUNK // SUBSAMPLING + f for f in range(-(-(len(chunk)) // 8))]
    filled.slot[: len(one)][one.is_audio] = slots
    return filled


def states_of(model: Any, one: Parts) -> tuple[jax.Array, jax.Array]:
    """(embeddings, input of the head) of one document, by the definitions: each audio chunk is encoded alone
    and inserted at its slots, then the decoder runs."""

    def one_document(length: jax.Array, size: int) -> Segments:
        real_N = jnp.arange(size, dtype=jnp.int32) < length
        positions_N = jnp.where(real_N, jnp.arange(size, dtype=jnp.int32), 0)
        return make_segments(real_N.astype(jnp.int32)[None], positions_N[None], block=16, axis=None)

    def encode(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        mels_AM, frames = chunk
        segments = one_document(-(-frames // SUBSAMPLING), CHUNK // SUBSAMPLING)
        mask_A = jnp.arange(CHUNK) < frames
        y_ED, _ = model.encoder(mels_AM, mask_A, segments, train=False, axes=())
        return model.adapter(y_ED)

    audio_FD = jax.lax.map(encode, (one.mels, one.frames)).reshape(-1, MODEL.llm.dim)
    x_TD = jnp.where(one.slot[:, None] >= 0, audio_FD[one.slot], model.embedding[...][one.tokens])
    return x_TD, model.decoder.norm(model.decoder(x_TD, one_document(one.length, CAPACITY))[0])
