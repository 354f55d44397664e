"""What a step keeps for its backward pass changes neither loss nor gradients."""

from typing import Any

import jax
import pytest

from jaxthd.config import ComputeConfig, Config, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.helpers import assert_same, batch_of, filled_state

LLM = LLMConfig(
    pattern="M*-" * 2,
    dim=16,
    blocks={
        "*": Attention(heads=2, kv_heads=1, head_dim=8),
        "-": MLP(inner=16),
        "M": Mamba2(heads=2, head_dim=8, state=8),
    },
)
ENCODER = EncoderConfig(num_mels=16, layers=2, dim=16, heads=2, ffn_dim=16, subsampling_channels=4)
KEPT: list[dict[str, Any]] = [
    {"remat": "selective", "unroll_layers": True},
    {"remat": "layers"},
    {"remat": "none"},
]


def found(**compute: Any) -> Any:
    config = Config(
        model=ModelConfig(encoder=ENCODER, llm=LLM), compute=ComputeConfig(dtype="float64", **compute)
    )
    mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
    state, batch = filled_state(blueprint, mesh), put_batch(batch_of([5, 20, 11], 1), mesh)
    run = jax.jit(loss_and_gradient(blueprint, mesh))
    gradient = run(state.params, state.buffers, batch)
    return gradient.loss, gradient.gradients


@pytest.mark.exhaustive
@pytest.mark.parametrize("compute", KEPT, ids=str)
def test_what_is_kept_changes_no_gradient(compute: dict[str, Any]):
    with jax.enable_x64(True):
        assert_same(found(**compute), found(), 1e-10)
