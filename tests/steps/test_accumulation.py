"""Updates of objectives that compare answers: from any number of buffers, beside any reference policy."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import AdaptConfig, ComputeConfig, Config, DataConfig, PostTrainingConfig, TrainConfig
from jaxthd.data.packer import pack_documents
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.accumulation import AccumulatedStep
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_refresh, make_with_scores
from jaxthd.steps.state import TrainState
from jaxthd.steps.training import make_train_step
from tests.answers import document_with_answers
from tests.helpers import filled_state
from tests.steps.test_step import MODEL

CONFIG = Config(
    data=DataConfig(capacity=128, audio_capacity=512, max_documents=8, rows=4),
    # Without Mamba2, which tests/test_exactness.py has on packed rows.
    model=replace(MODEL, llm=replace(MODEL.llm, pattern="E*-")),
    compute=ComputeConfig(dtype="float64"),
    posttraining=PostTrainingConfig(share_prompts=False),
    train=TrainConfig(objective="dpo", learning_rate=1e-2, warmup_steps=0, steps=10),
)
PREFERENCE = "preference"
train_step = functools.cache(make_train_step)
"""The first two tests' config is the same."""


def pairs(count: int) -> list[Document]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        document = document_with_answers(rng, str(number))
        first, second = document.answers
        sign = np.repeat([0.0, 1.0, -1.0], [document.prompt_length, first, second]).astype(np.float32)
        found.append(Document(**vars(document) | {"extras": {PREFERENCE: sign}}))
    return found


def rows_of(documents: list[list[Document]], config: Config) -> Batch:
    pack = pack_documents(config, extras=(PREFERENCE,), answers=True)
    return concatenate_rows([pack.row(of_row).batch for of_row in documents])


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def start(float64: None) -> TrainState:
    state = filled_state(Blueprint(CONFIG), make_mesh(CONFIG.mesh))
    # A reference other than the policy, so that nothing cancels.
    return state._replace(reference=jax.tree.map(lambda x: 0.9 * x, state.params))


def copied(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.copy(), state)


def test_an_update_depends_neither_on_its_buffers_nor_on_padding(start: TrainState):
    documents, mesh, blueprint = pairs(7), make_mesh(CONFIG.mesh), Blueprint(CONFIG)
    together = rows_of([documents[:2], documents[2:4], documents[4:6], documents[6:]], CONFIG)
    with_scores = make_with_scores(blueprint, mesh)
    whole = with_scores(start, put_batch(together, mesh))
    want, measured = train_step(blueprint, mesh)(copied(start), whole)
    apart = replace(CONFIG, data=replace(CONFIG.data, rows=1))
    step, blueprint = AccumulatedStep(Blueprint(apart), mesh), Blueprint(apart)
    with_scores = make_with_scores(blueprint, mesh)
    rows = [[documents[6], documents[0]], [documents[3]], [], documents[1:3], documents[4:6]]
    batches = [with_scores(start, put_batch(rows_of([row], apart), mesh)) for row in rows]
    got, results = step(copied(start), batches)
    close(got, want)
    # The metric of the experts' balance is of what is computed together.
    close(results._replace(aux_loss=None), measured._replace(aux_loss=None))
    assert step.programs.made == 4
    assert float(results.grad_norm) > 1e-3
    close(got.buffers["encoder"], start.buffers["encoder"], 0)


@pytest.mark.parametrize(
    "adapt",
    [
        AdaptConfig(),
        pytest.param(
            AdaptConfig(lora_rank=2, lora_targets=("*.q", "*.up")), marks=pytest.mark.exhaustive, id="LoRA"
        ),
    ],
)
def test_the_first_loss_is_ln_2_and_lora_needs_no_copy(adapt: AdaptConfig):
    config = replace(
        CONFIG, adapt=replace(adapt, freeze=("encoder.*", "adapter.*") if adapt.lora_rank else ())
    )
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    state = filled_state(blueprint, mesh)
    if adapt.lora_rank:
        zero = {"b": 0.0}
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x * zero.get(path[-1].key if "lora" in str(path) else "", 1.0), state.params
        )
        state = state._replace(params=params)
        assert not jax.tree.leaves(state.reference)
    else:
        state = make_refresh(blueprint, mesh)(state)
        close(state.reference, state.params, 0)
    batch = put_batch(rows_of([pairs(2), pairs(4)[2:], [], []], config), mesh)
    batch = make_with_scores(blueprint, mesh)(state, batch)
    _, results = train_step(blueprint, mesh)(state, batch)
    assert float(results.loss) == pytest.approx(math.log(2), abs=1e-6)
