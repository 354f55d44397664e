"""Greedy decoding after packed prompts gives the same as computing every document alone from scratch."""

import functools
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import Config, MeshConfig, ModelConfig
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import to_stages
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.packing.prompts import find_prompts
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.validation import Scores, make_validation_step
from tests.speech_model import (
    AUDIO,
    CAPACITY,
    DEEPSEEK_V3,
    GPT,
    KIMI,
    MELS,
    MODEL,
    NEXT,
    QWEN,
    Layout,
    Spec,
    document,
    pack,
    placement,
    run_config,
    state,
)

NEW = 6
"""The most tokens decoded for an answer."""
ROWS = [
    [Spec(5, (40,)), Spec(1), Spec(9, (17,)), Spec(14)],
    [Spec(7, (64, 9)), Spec(12), Spec(2, (33,))],
    [Spec(40, (60,))],
    [],
]


@functools.cache
def documents() -> list[list[Document]]:
    """Prompts of every kind; the last third of the text (at least a token) is the answer."""
    rng = np.random.default_rng(3)
    rows = [[document(f"{r}.{d}", s, rng) for d, s in enumerate(row)] for r, row in enumerate(ROWS)]
    return [[_with_answer(d) for d in row] for row in rows]


def _with_answer(document: Document) -> Document:
    """The document's audio slots, then its text; the last third of the text is supervised."""
    order = np.argsort(~document.is_audio, kind="stable")
    text = int((~document.is_audio).sum())
    supervised = np.arange(len(document)) >= len(document) - max(1, text // 3)
    return replace(
        document, tokens=document.tokens[order], is_audio=document.is_audio[order], supervised=supervised
    )


@functools.cache
def next_token_program(model: ModelConfig = MODEL) -> Any:
    graph = Blueprint(replace(run_config(1, 1, "ring", "float64"), model=model)).graph

    def logits(params: Any, buffers: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, buffers)
        x_ND, _ = model.embed(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        return jnp.einsum("nd,vd->nv", model.hidden(x_ND), model.gathered_head())

    return jax.jit(logits)


@functools.cache
def alone(stop_ids: tuple[int, ...], model: ModelConfig = MODEL) -> dict[str, list[int]]:
    """Every document's answer by one full forward pass for each token; nothing is cached or packed."""
    answers = {}
    for one in (d for row in documents() for d in row):
        prompt = int(np.flatnonzero(one.supervised)[0])
        if prompt == 0:  # its only token is the first, which is never predicted
            continue
        tokens, is_audio = one.tokens[:prompt], one.is_audio[:prompt]
        answer: list[int] = []
        while len(answer) < NEW and not {*answer[-1:]} & {*stop_ids}:
            grown = Document(
                one.key,
                np.append(tokens, np.array(answer, np.int32)),
                np.append(is_audio, np.zeros(len(answer), bool)),
                np.zeros(len(tokens) + len(answer), bool),
                one.pieces,
            )
            batch, _ = pack_row(
                [grown],
                capacity=80,
                audio_capacity=128,
                front_end=FastConformer(num_mels=MELS),
                max_documents=1,
                order_seed=None,
            )
            row = next_token_program(model)(*state("float64", model), batch)[len(grown) - 1]
            answer.append(int(np.argmax(row)))
        answers[one.key] = answer
    return answers


@functools.cache
def decoded(
    data: int, context: int, stop_ids: tuple[int, ...], layout: Layout, model: ModelConfig = MODEL
) -> tuple[Scores, dict[str, list[int]]]:
    config = replace(run_config(data, context, "ring", "float64", layout), model=model)
    return decoded_by(config, pack(documents(), context, layout), stop_ids)


def decoded_by(config: Config, host: Batch, stop_ids: tuple[int, ...]) -> tuple[Scores, dict[str, list[int]]]:
    mesh, layout = make_mesh(config.mesh), config.compute.context_layout
    ends, _ = find_prompts(host, ContextLayout(layout, config.mesh.context), max_documents=5)
    step = make_validation_step(Blueprint(config), mesh, stop_ids=stop_ids, new_tokens=NEW)
    held = to_stages(state("float64", config.model), Blueprint(config).stages)
    scores, tokens = step(*held, put_batch(host, mesh), ends)
    assert tokens.shape == (ends.last.size, NEW)
    tokens = np.asarray(tokens).reshape(*ends.last.shape, NEW)
    rows = [_in_row_order(row, config.mesh.context, layout) for row in documents()]
    return scores, {
        one.key: tokens[r, d].tolist()
        for r, row in enumerate(rows)
        for d, one in enumerate(row)
        if ends.last[r, d] >= 0
    }


def _in_row_order(row: list[Document], context: int, layout: Layout) -> list[Document]:
    placed = placement(row, context, layout)
    return row if placed is None else [row[i] for i in placed.order]


@pytest.mark.parametrize(
    ("data", "context", "layout"),
    [
        (2, 2, "buffer"),
        pytest.param(2, 2, "whole", marks=pytest.mark.exhaustive),
        *(pytest.param(*mesh, "buffer", marks=pytest.mark.exhaustive) for mesh in [(1, 1), (1, 4)]),
    ],
)
def test_decoding_goes_on_from_packed_prompts_as_from_each_alone(data: int, context: int, layout: Layout):
    if layout == "whole":
        placed = [placement(row, context, layout) for row in documents()]
        assert any(one and one.split and one.whole[0] for one in placed), (
            "a row should have a split document too"
        )
    with jax.enable_x64(True):
        never = alone((-1,))
        assert len({tuple(a) for a in never.values()}) > 4, "answers should differ"
        (often, _), (next_often, _) = Counter(chain(*never.values())).most_common(2)
        # -1 is no token: answers end with each of the others, and padding is the first, whatever ended them.
        stop_ids = (-1, often, next_often)
        for ids in (stop_ids[:1], stop_ids):
            want = {key: a + [-1] * (NEW - len(a)) for key, a in alone(ids).items()}
            assert decoded(data, context, ids, layout)[1] == want
        ends = {a[-1] for a in alone(stop_ids).values() if len(a) < NEW}
        assert ends == {often, next_often}, "documents should end early, with either token"


@pytest.mark.parametrize(
    ("data", "context", "layout"),
    [pytest.param(1, 2, "buffer", marks=pytest.mark.exhaustive)],
)
def test_decoding_counts_positions_from_the_documents_start(data: int, context: int, layout: Layout):
    """Of a model with a rotary position embedding, and norms of queries and keys."""
    with jax.enable_x64(True):
        want = alone((-1,), QWEN)
        assert len({tuple(a) for a in want.values()}) > 4, "answers should differ"
        assert decoded(data, context, (-1,), layout, QWEN)[1] == want


@pytest.mark.parametrize(
    ("model", "data", "context", "layout"),
    [
        pytest.param(model, 1, *ranks, id=name, marks=pytest.mark.exhaustive)
        for name, model, ranks in (
            ("Qwen3-Next on 4", NEXT, (4, "buffer")),
            ("Qwen3-Next, whole", NEXT, (2, "whole")),
            ("Kimi-Linear on 4", KIMI, (4, "buffer")),
            ("Kimi-Linear, whole", KIMI, (2, "whole")),
        )
    ],
)
def test_decoding_goes_on_from_the_states_of_the_gated_delta_rule(
    model: ModelConfig, data: int, context: int, layout: Layout
):
    with jax.enable_x64(True):
        want = alone((-1,), model)
        assert len({tuple(a) for a in want.values()}) > 4, "answers should differ"
        assert decoded(data, context, (-1,), layout, model)[1] == want


@pytest.mark.parametrize(
    ("data", "context", "layout"),
    [pytest.param(1, 4, "buffer", marks=pytest.mark.exhaustive)],
)
def test_decoding_in_windows_equals_a_whole_pass_for_each_token(data: int, context: int, layout: Layout):
    """Of a model with windows shorter than prompts and answers, and with sinks."""
    assert GPT.llm.window < NEW
    with jax.enable_x64(True):
        want = alone((-1,), GPT)
        assert len({tuple(a) for a in want.values()}) > 4, "answers should differ"
        assert decoded(data, context, (-1,), layout, GPT)[1] == want


@pytest.mark.exhaustive
def test_decoding_by_kernels_equals_a_whole_pass_for_each_token():
    """In windows too. The kernels are interpreted."""
    config = replace(run_config(1, 2, "ring", "float64"), model=GPT)
    config = replace(config, compute=replace(config.compute, attention_backend="pallas"))
    with jax.enable_x64(True):
        assert decoded_by(config, pack(documents(), 2), (-1,))[1] == alone((-1,), GPT)


@pytest.mark.parametrize(
    ("data", "context", "layout"),
    [pytest.param(1, 2, "buffer", marks=pytest.mark.exhaustive)],
)
def test_decoding_keeps_the_latents_alone(data: int, context: int, layout: Layout):
    """Of latent attention: the expansions of keys and values are absorbed by queries and outputs."""
    with jax.enable_x64(True):
        want = alone((-1,), DEEPSEEK_V3)
        assert len({tuple(a) for a in want.values()}) > 4, "answers should differ"
        assert decoded(data, context, (-1,), layout, DEEPSEEK_V3)[1] == want


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(1, 2, 2, 1),
        # Two unequal stages on each rank.
        pytest.param(MeshConfig(1, 1, 2, 1, stages_per_rank=2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(2, 1, 1, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_pipeline_and_tensor_ranks_decode_together(mesh: MeshConfig):
    rows = [
        pack_row(
            row,
            capacity=CAPACITY,
            audio_capacity=AUDIO * mesh.audio_ranks,
            front_end=FastConformer(num_mels=MELS),
            max_documents=16,
            context=mesh.context,
            audio_ranks=mesh.audio_ranks,
            order_seed=None,
        )[0]
        for row in documents()
    ]
    host = concatenate_rows(rows)
    config = replace(run_config(mesh.data, mesh.context, "ring", "float64"), mesh=mesh)
    with jax.enable_x64(True):
        scores, answers = decoded_by(config, host, (-1,))
        want, _ = decoded(1, 1, (-1,), "buffer")
        assert answers == alone((-1,))
        np.testing.assert_allclose(scores, want, rtol=1e-10)


def test_accuracy_counts_supervised_tokens_that_are_the_likeliest():
    """Compared with the whole distribution at every supervised position, computed from each row alone."""
    with jax.enable_x64(True):
        correct = tokens = 0
        for row in documents():
            batch = pack([row], context=1)
            best = np.argmax(next_token_program()(*state("float64"), batch), axis=-1)
            correct += int(((best == batch.targets[0]) & (batch.weights[0] > 0)).sum())
            tokens += int(batch.weights.sum())
        scores, _ = decoded(2, 2, (-1,), "buffer")
    assert (int(scores.tokens), int(scores.correct)) == (tokens, correct)
    assert 0 < correct < tokens
