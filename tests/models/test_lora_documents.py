"""LoRA that is on in documents with audio alone: documents packed together are computed as two models would.

One has the low-rank matrices, and gets the documents with audio; the other has none, and gets the rest.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import AdaptConfig, Config, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.adapt import dotted, is_lora
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import find_prompts
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from jaxthd.steps.validation import make_validation_step
from jaxthd.validate import DeviceFacts, findings
from tests.helpers import assert_same
from tests.models.test_decoding import NEW, documents
from tests.speech_model import MODEL, pack, run_config
from tests.weights import random_state

ADAPT = AdaptConfig(lora_rank=3, lora_targets=("decoder.*",), freeze=("!*",), lora_documents="audio")
BLOCKS: dict[str, Any] = {
    "*": Attention(heads=4, kv_heads=2, head_dim=8),
    "-": MLP(inner=32),
    "M": Mamba2(heads=4, head_dim=16, state=8, groups=2),
}
SPEECH = replace(MODEL, llm=replace(MODEL.llm, pattern="M*-M*-", blocks=BLOCKS, vocab_size=52))


def config_of(mesh: MeshConfig, adapt: AdaptConfig = ADAPT) -> Config:
    config = run_config(mesh.data, mesh.context, "ring", "float64")
    compute = replace(config.compute, sequence_sharded=mesh.tensor > 1)
    return replace(config, mesh=mesh, model=SPEECH, adapt=adapt, compute=compute)


@functools.cache
def weights(*, has_lora: bool = True) -> tuple[Any, Any]:
    """(parameters, buffers) in the checkpoint layout. has_lora: else the matrices b are zeros."""
    _, params, buffers = random_state(Blueprint(config_of(MeshConfig())).canonical_model)
    if not has_lora:
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x * (dotted(tuple(key.key for key in path))[-7:] != ".lora.b"), params
        )
    return params, buffers


def parts() -> list[tuple[bool, list[list[Document]]]]:
    """(with audio, the rows with these documents alone), for both kinds."""
    found = [
        (heard, [[d for d in row if bool(d.pieces) is heard] for row in documents()])
        for heard in (True, False)
    ]
    assert all(any(rows) for _, rows in found)
    return found


@functools.cache
def gradient_program(config: Config) -> Any:
    return jax.jit(loss_and_gradient(Blueprint(config), make_mesh(config.mesh)))


def gradient(
    config: Config, rows: list[list[Document]], *, has_lora: bool = True
) -> tuple[float, float, dict[str, Any]]:
    """(loss, supervised tokens, gradients in the checkpoint layout)."""
    stages, batch = Blueprint(config).stages, pack(rows, config.mesh.context)
    held = to_stages(weights(has_lora=has_lora), stages)
    found = gradient_program(config)(*held, put_batch(batch, make_mesh(config.mesh)))
    return float(found.loss), float(batch.weights.sum()), from_stages(jax.device_get(found.gradients), stages)


def as_two_models() -> tuple[float, dict[str, Any]]:
    """The loss and the gradients over all documents, which two models have computed."""
    found = []
    plain = config_of(MeshConfig(), replace(ADAPT, lora_documents="all"))
    for heard, rows in parts():
        loss, tokens, gradients = gradient(plain, rows, has_lora=heard)
        if not heard:
            gradients = jax.tree_util.tree_map_with_path(
                lambda path, x: x * (not is_lora(tuple(key.key for key in path))), gradients
            )
        found.append((loss, tokens, gradients))
    (loss, n, of_audio), (other, m, of_text) = found
    mean = jax.tree.map(lambda x, y: (n * x + m * y) / (n + m), of_audio, of_text)
    return (n * loss + m * other) / (n + m), mean


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(),
        pytest.param(MeshConfig(1, 2, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(2, 2, 1, 2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_two_models(mesh: MeshConfig):
    with jax.enable_x64(True):
        loss, _, gradients = gradient(config_of(mesh), documents())
        assert_same((loss, gradients), as_two_models(), 1e-10)


def answers(
    config: Config, rows: list[list[Document]], *, has_lora: bool = True
) -> tuple[np.ndarray, dict[str, list[int]]]:
    """(loss and number of supervised tokens, each document's greedy answer)."""
    mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
    host = pack(rows, config.mesh.context)
    ends, _ = find_prompts(host, ContextLayout("buffer", config.mesh.context), max_documents=5)
    step = make_validation_step(blueprint, mesh, stop_ids=(-1,), new_tokens=NEW)
    held = to_stages(weights(has_lora=has_lora), blueprint.stages)
    scores, tokens = step(*held, put_batch(host, mesh), ends)
    tokens = np.asarray(tokens).reshape(*ends.last.shape, NEW)
    return np.array([scores.loss, scores.tokens]), {
        one.key: tokens[r, d].tolist()
        for r, row in enumerate(rows)
        for d, one in enumerate(row)
        if ends.last[r, d] >= 0
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(1, 2, 2, 2)], ids=str)
def test_answers_are_those_of_two_models(mesh: MeshConfig):
    with jax.enable_x64(True):
        plain = config_of(MeshConfig(), replace(ADAPT, lora_documents="all"))
        (of_audio, heard), (of_text, read) = (answers(plain, rows, has_lora=x) for x, rows in parts())
        both = answers(plain, documents())[1]
        assert both != heard | read, "LoRA should change answers to text"
        scores, found = answers(config_of(mesh), documents())
        assert found == heard | read
        np.testing.assert_allclose(scores, of_audio + of_text, rtol=1e-10)


def test_what_cannot_be_is_said():
    text = Config(model=ModelConfig(encoder=None, llm=LLMConfig(blocks=BLOCKS, pattern="M*-")), adapt=ADAPT)
    assert any("without an encoder" in str(x) for x in findings(text, DeviceFacts.of_this_machine()))
