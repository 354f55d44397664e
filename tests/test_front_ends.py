"""Every front end gives the loss and the gradients of each document alone, packed, on every kind of mesh;
DPO, KTO and GRPO too, whose answers share a prompt, in documents that are divided over context ranks."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import AdaptConfig, Config, MeshConfig, ModelConfig, TrainConfig
from jaxthd.config.front_end import FrontEnd
from jaxthd.models.front_ends import (
    FastConformer,
    GraniteConformer,
    QFormer,
    Qwen3Audio,
    Stacked,
    Transcribe,
    Whisper,
)
from jaxthd.models.front_ends.transcribe.settings import Diarizer, SpeakerCache
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.objectives import OBJECTIVES, register_objective
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document, audio_pieces
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.answers import with_most_split
from tests.front_ends import Carried
from tests.helpers import assert_same
from tests.meshes.models import COMPUTE, MODEL, VOCAB, with_pattern
from tests.test_objectives_on_meshes import EXTRAS, Together, with_numbers
from tests.weights import random_state

CONFORMER: dict[str, Any] = {
    "num_mels": 8,
    "dim": 16,
    "heads": 2,
    "ffn_dim": 24,
    "subsampling_channels": 4,
    "conv_kernel": 5,
}
WHISPER: dict[str, Any] = {
    "mel_bands": 8,
    "layers": 1,
    "model_dim": 16,
    "heads": 2,
    "ffn_dim": 24,
    "positions": 20,
}
FRONT_ENDS: dict[str, FrontEnd] = {
    "fastconformer": FastConformer(**CONFORMER, layers=1, chunk_seconds=0.4),
    "whole, with outputs of several blocks": FastConformer(
        **CONFORMER, layers=2, chunk_seconds=0.0, output_layers=(0, 1)
    ),
    "qformer": QFormer(
        **CONFORMER,
        layers=2,
        chunk_seconds=0.4,
        output_layers=(0, 1),
        queries=3,
        query_layers=2,
        query_heads=2,
        query_ffn_dim=12,
    ),
    "stacked": Stacked(
        mel_bands=8,
        stack=4,
        layers=2,
        dim=16,
        heads=2,
        head_dim=8,
        ffn_dim=24,
        chunk_outputs=6,
        context_outputs=(2, 1),
    ),
    "whisper": Whisper(**WHISPER, tail="ceil", rope_theta=100.0),
    "whisper_window": Whisper(**WHISPER, tail="window", whole_features=True),
    "whisper_hidden": Whisper(**WHISPER, join="mean", joined=2, silence="hidden"),
    "whisper_absent": Whisper(
        **WHISPER, join="mean", joined=2, silence="absent", whole_features=True, stored_positions=False
    ),
    "qwen3_audio": Qwen3Audio(
        mel_bands=8, channels=4, layers=1, dim=16, heads=2, ffn_dim=24, chunks=1, filled=False
    ),
    "granite_conformer": GraniteConformer(
        mel_bands=4,
        layers=3,
        model_dim=16,
        heads=2,
        head_dim=8,
        ffn_dim=24,
        block=20,
        distances=22,
        conv_kernel=5,
        conv_dim=24,
        labels=5,
        joined_layers=(0, 2),
        window=6,
        queries=2,
        query_dim=12,
        query_heads=2,
        query_ffn_dim=20,
    ),
    "carried": Carried(),
    "transcribe": Transcribe(
        mel_bands=8,
        stack=4,
        layers=1,
        dim=16,
        heads=2,
        head_dim=8,
        ffn_dim=24,
        chunk_outputs=6,
        context_outputs=(2, 1),
        diarizer=Diarizer(
            layers=1,
            dim=12,
            heads=2,
            head_dim=6,
            ffn_dim=8,
            head_inner=6,
            speakers=3,
            cache=SpeakerCache(queue=3, moved=4, size=9),
        ),
    ),
}
STORED = AdaptConfig(freeze=("encoder.blocks.conv.norm.*",))
ADAPT = {
    name: STORED if isinstance(x, FastConformer | GraniteConformer) else AdaptConfig()
    for name, x in FRONT_ENDS.items()
}
"""BatchNorms normalise by stored statistics: those of a microbatch depend on its other documents."""
MESHES = [
    MeshConfig(1, 2, 2, 2),
    pytest.param(MeshConfig(2, 4, 1, 1), marks=pytest.mark.exhaustive),
    pytest.param(MeshConfig(2, 2, 1, 2), marks=pytest.mark.exhaustive),
    pytest.param(MeshConfig(1, 4, 2, 1), marks=pytest.mark.exhaustive),
    pytest.param(MeshConfig(4, 1, 1, 2), marks=pytest.mark.exhaustive),
]
AUDIO, CAPACITY = 400, 96
ROWS = ((0.31, 0.0, 0.07), (0.9, 0.2), (0.0, 0.0), (1.2,), (0.45, 0.33, 0.5), (), (0.05,), (0.0, 0.64))
"""Seconds of each document's recording, row by row; 0: text alone."""
PLACEHOLDER = VOCAB - 1
ANSWERED = (((0.31, 3), (0.9, 0)), ((0.45, 2),), ((0.08, 2), (0.0, 2), (1.1, 0)), ())
"""(seconds of the recording in a prompt, answers to it) of each document, row by row. 0 answers: its text
follows, and it may be divided."""
OF_EACH_KIND = ("granite_conformer", "qwen3_audio", "carried")
"""Front ends whose frames, whose pieces and whose recordings ranks may take."""


def document(name: str, key: str, seconds: float, rng: np.random.Generator, answers: int = 0) -> Document:
    """A recording and 3 to 11 tokens of text, or of each answer; of text, most tokens are supervised."""
    front_end = FRONT_ENDS[name]
    samples = rng.standard_normal(round(16000 * seconds)).astype(np.float32)
    pieces = front_end.pieces(len(samples))
    clips = [audio_pieces(pieces, front_end.features(samples, None))] if seconds else []
    lengths = rng.integers(3, 12, max(answers, 1))
    text = rng.integers(1, PLACEHOLDER, lengths.sum()).tolist()
    supervised = [bool(answers)] * len(text) if answers else (rng.random(len(text)) < 0.7).tolist()
    # A prompt is never empty.
    prompt = [*[PLACEHOLDER] * len(clips), *[1] * bool(answers)]
    tokens, trained = [*prompt, *text], [False] * len(prompt) + supervised
    spliced = Document.splice(key, tokens, trained, clips, PLACEHOLDER)
    return replace(spliced, answers=tuple(lengths.tolist()) if answers else ())


@functools.cache
def documents(name: str) -> list[list[Document]]:
    rng = np.random.default_rng(0)
    return [[document(name, f"{r}.{d}", s, rng) for d, s in enumerate(row)] for r, row in enumerate(ROWS)]


@functools.cache
def answered(name: str) -> list[list[Document]]:
    """Prompts with answers, and the numbers that objectives read."""
    rng = np.random.default_rng(1)

    def one(key: str, seconds: float, answers: int) -> Document:
        return with_numbers(document(name, key, seconds, rng, answers), rng)

    return [[one(f"{r}.{d}", *spec) for d, spec in enumerate(row)] for r, row in enumerate(ANSWERED)]


def packed(name: str, mesh: MeshConfig, rows: list[list[Document]], how: Any = None, **more: Any) -> Batch:
    """The rows as a batch of the mesh. how: (row) -> further arguments of pack_row."""
    sizes: dict[str, Any] = {"capacity": CAPACITY, "audio_capacity": AUDIO, "max_documents": 8}
    sizes |= {"context": mesh.context, "audio_ranks": mesh.audio_ranks, "front_end": FRONT_ENDS[name]} | more
    return concatenate_rows([pack_row(row, **sizes, **(how(row) if how else {}))[0] for row in rows])


def found(name: str, mesh_config: MeshConfig, batch: Batch, layout: Any = "buffer", **train: Any) -> Any:
    """(loss, gradients in checkpoint layout) of a batch, in float64. train: settings of TrainConfig."""
    model = ModelConfig(encoder=FRONT_ENDS[name], llm=with_pattern(MODEL.llm, "M*-M*-"), adapter_dim=16)
    compute = replace(COMPUTE, dtype="float64", sequence_sharded=mesh_config.tensor > 1)
    config = Config(
        mesh=mesh_config,
        model=model,
        compute=replace(compute, context_layout=layout),
        adapt=ADAPT[name],
        train=TrainConfig(microbatches=2, **train),
    )
    with jax.enable_x64(True):
        blueprint, mesh = Blueprint(config), make_mesh(mesh_config)
        state = random_state(Blueprint(replace(config, mesh=MeshConfig())).model)[1:]
        state = jax.tree.map(lambda x: x.astype("float64"), state)
        held = to_stages(state, blueprint.stages)
        got = jax.jit(loss_and_gradient(blueprint, mesh))(*held, put_batch(batch, mesh))
        return float(got.loss), from_stages(jax.device_get(got.gradients), blueprint.stages)


def one_by_one(rows: list[list[Document]]) -> list[list[Document]]:
    """Each document in a row of its own, for two microbatches."""
    alone = [[document] for row in rows for document in row]
    return alone + [[]] * (len(alone) % 2)


def assert_alike(got: tuple[float, Any], want: tuple[float, Any]) -> None:
    """Asserts that loss and gradients are the same, and that all of the encoder has one."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10)
    assert_same(got[1], want[1], 1e-10)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(got[1]["encoder"]))


@functools.cache
def alone(name: str) -> tuple[float, Any]:
    """Each document in a row of its own, on one device."""
    return found(name, MeshConfig(), packed(name, MeshConfig(), one_by_one(documents(name))))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.exhaustive if name in ("whisper_absent", "whisper_window") else ()
        )
        for name in FRONT_ENDS
    ],
)
def test_packed_on_a_mesh_is_as_alone(name: str, mesh: MeshConfig):
    assert_alike(found(name, mesh, packed(name, mesh, documents(name))), alone(name))


@pytest.fixture
def together() -> Iterator[str]:
    """The name of an objective that is the sum of DPO's, KTO's and GRPO's."""
    register_objective("together", Together)
    yield "together"
    del OBJECTIVES["together"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in OF_EACH_KIND else pytest.mark.nightly)
        for name in FRONT_ENDS
    ],
)
def test_answers_in_divided_documents_are_as_alone(name: str, together: str):
    """Under the layout "whole", on data, context and tensor ranks. Alone each answer has the prompt, and its
    recording, to itself."""
    mesh, rows = MeshConfig(2, 2, 1, 2), answered(name)
    sizes: dict[str, Any] = {"capacity": 128, "answers": True, "extras": EXTRAS}
    split = functools.partial(with_most_split, context=mesh.context, capacity=sizes["capacity"])
    batch = packed(name, mesh, rows, split, **sizes)
    assert np.asarray(batch.splits).any()
    got = found(name, mesh, batch, layout="whole", objective=together)
    apart = packed(name, MeshConfig(), one_by_one(rows), **sizes, share_prompts=False)
    assert_alike(got, found(name, MeshConfig(), apart, objective=together))
