"""A recording of an hour through Transcribe's diarizer: scored as a whole, whatever the mesh, in memory that
grows by the embeddings alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.hf.checkpoint import model_config
from jaxthd.inference.model import load
from jaxthd.models.front_ends import Transcribe
from jaxthd.models.front_ends.transcribe.module import TranscribeEncoder
from jaxthd.models.front_ends.transcribe.order import Order
from jaxthd.models.front_ends.transcribe.speakers import later_chunks
from jaxthd.packing.document import Document, audio_pieces
from tests.hf.published import COMPUTE
from tests.hf.transcribed import write_transcribe
from tests.spoken_words import write_tokenizer
from tests.waves import talk

RATE, SECONDS = 16_000, 3600
CHUNKS: dict[str, Any] = {"chunk_outputs": 500, "context_outputs": (50, 50)}
"""As published; the rest is tiny."""


def front_end_of(folder: Any) -> tuple[Config, Transcribe]:
    model = model_config(folder)
    encoder = model.audio_encoder
    assert isinstance(encoder, Transcribe)
    encoder = replace(encoder, **CHUNKS)
    return Config(model=replace(model, encoder=encoder), compute=COMPUTE), encoder


def spoken(encoder: Transcribe, key: str, samples: np.ndarray) -> Document:
    """A prompt, the recording, and an answer."""
    pieces = audio_pieces(encoder.pieces(len(samples)), encoder.features(samples, None))
    audio = sum(piece.tokens for piece in pieces)
    tokens = np.array([3, 1, *[0] * audio, *range(20, 30)], np.int32)
    is_audio = (np.arange(len(tokens)) >= 2) & (np.arange(len(tokens)) < 2 + audio)
    return Document(key, tokens, is_audio, np.arange(len(tokens)) >= 2 + audio, tuple(pieces))


@pytest.mark.nightly
def test_an_hour_with_speakers_is_scored_as_a_whole(tmp_path, record_property):
    """The same on one device and cut over two ranks; and another where the first minute is played backwards,
    which the last answer hears by the speakers and the LLM's states."""
    folder = write_transcribe(tmp_path / "model")
    config, encoder = front_end_of(folder)
    write_tokenizer(tmp_path, config.model.llm.vocab_size)
    whole = np.concatenate([talk(n, 100 * RATE) for n in range(SECONDS // 100)]).astype(np.float32) / 32768
    changed = np.concatenate([whole[: 60 * RATE][::-1], whole[60 * RATE :]])
    documents = [spoken(encoder, "whole", whole), spoken(encoder, "changed", changed)]
    count = len(documents[0])
    frames = sum(len(piece.features) + piece.padding for piece in documents[0].pieces)
    assert count > SECONDS * 12.5
    found = {}
    for ranks in (2, 1):  # jax begins with the devices of the first
        data = DataConfig(
            tokenizer=str(tmp_path),
            rows=1,
            capacity=128 * -(-(count + 64) // 128),
            audio_capacity=128 * -(-(frames + 8 * 600) // 128),
            max_documents=1,
            workers=0,
            packing_bins=1,
        )
        of_mesh = replace(config, mesh=MeshConfig(context=ranks), data=data, train=TrainConfig())
        found[ranks] = load(folder, of_mesh).score(documents, every_token=True)
    for one, two in zip(found[1], found[2], strict=True):
        assert len(one.log_probs) == 11
        np.testing.assert_allclose(two.log_probs, one.log_probs, rtol=0, atol=2e-5)
    apart = np.abs(found[1][0].log_probs - found[1][1].log_probs)
    record_property("apart", f"{apart[-1]:.1e}")
    assert apart[-1] > 1e-6


@pytest.mark.nightly
def test_the_diarizers_memory_grows_by_the_embeddings_alone(tmp_path, record_property):
    """Of 30 minutes and an hour, as the compiler plans it."""
    _, encoder = front_end_of(write_transcribe(tmp_path / "model"))
    diarizer = TranscribeEncoder(encoder, nnx.Rngs(0)).diarizer
    graph, state = nnx.split(diarizer)

    def planned(outputs: int) -> int:
        ints = jax.ShapeDtypeStruct((outputs,), jnp.int32)
        bools = jax.ShapeDtypeStruct((outputs,), bool)
        order = Order(ints, ints, ints, ints, bools, jax.ShapeDtypeStruct((2 * outputs + 1,), jnp.int32))
        numbers = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        embedded, heard = (
            numbers((outputs, dim)) for dim in (encoder.diarizer.dim, encoder.diarizer.speakers)
        )

        def run(state: Any, *given: Any) -> jax.Array:
            return later_chunks(nnx.merge(graph, state), encoder, *given, 64, ())

        plan = jax.jit(run).lower(state, order, embedded, heard).compile().memory_analysis()
        return int(plan.temp_size_in_bytes)

    outputs = SECONDS * 25 // 2
    half, whole = planned(outputs // 2), planned(outputs)
    grown = (whole - half) / (outputs / 2)
    of_embeddings = 4 * (encoder.diarizer.dim + 2 * encoder.diarizer.speakers)
    record_property("bytes an output", f"{grown:.0f}, embeddings {of_embeddings}")
    assert grown <= 2 * of_embeddings
