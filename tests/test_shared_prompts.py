"""Answers that share the slots of their prompt train as answers that each stand alone with it: the whole
speech model, on every mesh axis, every gradient, in float64.

Prompts and answers are ragged, several a row, with audio up to the prompt's last token, beside documents
without answers; prompts have 1, 2, K - 1 and K tokens, answers 1 token and more.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxthd.config import AdaptConfig, Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.alone import parts
from tests.answers import alone, with_most_split
from tests.clips import clip_of
from tests.helpers import assert_same
from tests.meshes.gradients import canonical_state
from tests.meshes.models import mixed
from tests.meshes.runs import variants
from tests.speech_model import CHUNK, MELS, PLACEHOLDER
from tests.test_exactness import score_packed, score_parts, scorer

CAPACITY, AUDIO, SEGMENTS = 64, 512, 16
ONE_DEVICE = MeshConfig()


class Spec(NamedTuple):
    """A prompt: text tokens, mel frames of a clip after them, text tokens after that. And its answers."""

    text: int
    clip: int
    more: int
    answers: tuple[int, ...] = ()


ROWS = [
    [Spec(2, 30, 1, (3, 1, 4)), Spec(4, 0, 0), Spec(1, 0, 0, (2, 5)), Spec(2, 9, 3)],
    [
        Spec(0, 24, 0, (2, 2)),
        Spec(2, 0, 0, (1, 3)),
        Spec(3, 0, 0, (1, 6)),
        Spec(4, 0, 0, (2,)),
    ],
    [Spec(8, 64, 4, (12, 14, 9))],
    [],
]


@functools.cache
def documents() -> list[list[Document]]:
    rng = np.random.default_rng(0)

    def document(key: str, spec: Spec) -> Document:
        sizes = spec.text, spec.more, sum(spec.answers)
        before, after, answers = (rng.integers(1, PLACEHOLDER, n).tolist() for n in sizes)
        clip = rng.normal(size=(spec.clip, MELS)).astype(np.float32)
        clips = [np.split(clip, range(CHUNK, len(clip), CHUNK))] if spec.clip else []
        prompt = [*before, *[PLACEHOLDER] * len(clips), *after]
        supervised = [not spec.answers and token != PLACEHOLDER for token in prompt] + [True] * len(answers)
        spliced = Document.splice(
            key, [*prompt, *answers], supervised, [clip_of(clip) for clip in clips], PLACEHOLDER
        )
        return replace(spliced, answers=spec.answers)

    return [[document(f"{r}.{d}", spec) for d, spec in enumerate(row)] for r, row in enumerate(ROWS)]


def pack(mesh: MeshConfig, layout: Any = "buffer", share_prompts: bool = True) -> Batch:
    capacity = CAPACITY if share_prompts else 4 * CAPACITY
    sizes: dict[str, Any] = {
        "capacity": capacity * {"buffer": 1, "whole": 4}[layout],
        "audio_capacity": AUDIO,
        "front_end": FastConformer(num_mels=MELS),
        "max_documents": SEGMENTS,
        "context": mesh.context,
        "audio_ranks": mesh.audio_ranks,
    }
    rows = []
    for row in documents():
        more = {"layout": layout}
        if layout == "whole":
            more = with_most_split(row, mesh.context, sizes["capacity"], share_prompts=share_prompts)
        rows.append(pack_row(row, **sizes, **more, answers=True, share_prompts=share_prompts)[0])
    batch = concatenate_rows(rows)
    assert (batch.prefixes is not None) == share_prompts
    return batch


def test_the_loss_and_its_gradients_are_those_of_each_answer_alone():
    """One device, against the definitions, answer by answer: nothing is packed there, audio is encoded for
    each."""
    total, wanted = 0.0, []
    for document in (d for row in documents() for d in row):
        for one in alone(document):
            logp, gradients = scorer(score_parts)(parts(one))
            total += logp.sum()
            wanted.append(gradients)
    batch = pack(ONE_DEVICE)
    logp, gradients = scorer(score_packed)(batch)
    np.testing.assert_allclose((batch.weights * logp).sum(), total, rtol=1e-10)
    assert_same(gradients, jax.tree.map(lambda *g: sum(g), *wanted), 1e-10)


def config_of(mesh: MeshConfig, variant: int = 0, microbatches: int = 2) -> Config:
    """With the encoder's stored statistics, as in post-training: those of a batch would depend on how rows
    are divided."""
    return replace(
        variants(mesh, "float64")[variant],
        train=TrainConfig(microbatches=microbatches),
        adapt=AdaptConfig(freeze=("encoder.blocks.conv.norm.*",)),
        data=DataConfig(max_documents=SEGMENTS),
    )


def loss_and_gradients(config: Config, batch: Batch) -> tuple[float, Any]:
    with jax.enable_x64(True):
        blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
        llm = replace(config.model.llm, pattern=config.model.llm.letters)
        params, buffers = to_stages(canonical_state("float64", llm=llm), blueprint.stages)
        found = jax.jit(loss_and_gradient(blueprint, mesh))(params, buffers, put_batch(batch, mesh))
        return float(found.loss), from_stages(jax.device_get(found.gradients), blueprint.stages)


@functools.cache
def written_out() -> tuple[float, Any]:
    config = config_of(ONE_DEVICE, microbatches=1)
    return loss_and_gradients(config, pack(ONE_DEVICE, share_prompts=False))


def with_all_blocks(config: Config) -> Config:
    """With the decoder of tests/meshes that has the blocks of all families."""
    return replace(config, model=replace(config.model, llm=mixed(config.model.llm)))


RUNS = [
    (ONE_DEVICE, 0),
    (MeshConfig(1, 2, 2, 2), 0),
    (MeshConfig(1, 4, 1, 1), 1),
    (MeshConfig(2, 2, 2, 1), 1),
]
"""(mesh, variant of tests/meshes/runs.py): 0 has the ring and the layout by buffers, 1 all-gather, that by
documents, interleaved or uneven stages, sequence-sharded residuals."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "variant"), RUNS, ids=str)
def test_on_a_mesh_shared_prompts_train_as_prompts_written_out_on_one_device(mesh, variant):
    config = config_of(mesh, variant)
    loss, gradients = loss_and_gradients(config, pack(mesh, config.compute.context_layout))
    want_loss, want = written_out()
    np.testing.assert_allclose(loss, want_loss, rtol=1e-10)
    assert_same(gradients, want, 1e-10)


@pytest.mark.exhaustive
def test_the_blocks_of_all_families_go_on_from_the_prompt() -> None:
    """Rotary positions, the state of the gated delta rule, a window that reaches back into the prompt, and
    latent attention, whose value heads have another dim than its query heads."""
    mesh = MeshConfig(1, 4, 1, 2)
    config, alone = (with_all_blocks(config_of(of, variant)) for of, variant in ((mesh, 1), (ONE_DEVICE, 0)))
    loss, gradients = loss_and_gradients(config, pack(mesh, config.compute.context_layout))
    want_loss, want = loss_and_gradients(alone, pack(ONE_DEVICE, share_prompts=False))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-10)
    assert_same(gradients, want, 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "layout", "exchange"),
    [
        (MeshConfig(1, 4, 1, 1), "buffer", "all_gather"),
        (MeshConfig(1, 4, 1, 1), "whole", "ring"),
        (MeshConfig(2, 2, 2, 1), "whole", "all_gather"),
    ],
    ids=str,
)
def test_exchange_and_layout_are_free_to_choose(mesh, layout, exchange):
    """The pairs that the variants above do not have."""
    config = config_of(mesh)
    compute = replace(config.compute, context_exchange=exchange, context_layout=layout)
    batch = pack(mesh, layout)
    if layout == "whole":
        assert (batch.splits > 0).any()
        assert batch.prefixes.any()
    loss, gradients = loss_and_gradients(replace(config, compute=compute), batch)
    np.testing.assert_allclose(loss, written_out()[0], rtol=1e-10)
    assert_same(gradients, written_out()[1], 1e-10)
