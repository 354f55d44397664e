"""Answers that are drafted with multi-token prediction are those without, token by token, drawn ones too."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
)
from jaxthd.data.example import Example, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.inference.generator import Generator
from jaxthd.models.blocks import (
    MLP,
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Mamba2,
    MoE,
    Parallel,
    ShortConv,
)
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.rl.rollouts import Rollouts
from jaxthd.steps.blueprint import Blueprint
from tests.weights import random_state

NEW, TOKENIZER = 12, ByteTokenizer()
ATTENTION = Attention(heads=2, kv_heads=1, head_dim=8)
MAMBA = Mamba2(heads=2, head_dim=8, state=8, groups=2)
CONFIG = Config(
    data=DataConfig(template="chatml", capacity=256),
    model=ModelConfig(
        encoder=None,
        llm=LLMConfig(
            pattern="MDW",
            mtp_pattern="W-",
            vocab_size=264,
            dim=16,
            blocks={
                "*": ATTENTION,
                "W": replace(ATTENTION, window=4),
                "-": MLP(inner=16),
                "M": MAMBA,
                "D": GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8),
                "K": KimiDelta(heads=2, head_dim=8),
                "C": ShortConv(inner=16),
                "H": Parallel(self_attention=ATTENTION, mamba=MAMBA),
                "L": LatentAttention(heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4),
                "E": MoE(experts=4, experts_per_token=2, inner=8, shared_inner=8),
            },
        ),
    ),
    compute=ComputeConfig(
        dtype="float64", block_sizes=BlockSizes(scan=16, attention=32, experts=8), num_speculative_tokens=3
    ),
)
DRAWN: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "seed": 7}
ASKED = tuple(Example(f"c{i}", (Turn("user", ("w" * n,)),)) for i, n in enumerate((2, 9, 31, 1, 17)))


def config_of(
    pattern: str = "MDW",
    mtp: str = "W-",
    drafted: int = 3,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008  (frozen)
) -> Config:
    llm = CONFIG.model.llm
    blocks = {x: block for x, block in llm.blocks.items() if x in pattern + mtp}
    llm = replace(llm, pattern=pattern, mtp_pattern=mtp, blocks=blocks)
    compute = replace(CONFIG.compute, num_speculative_tokens=drafted)
    return replace(CONFIG, model=replace(CONFIG.model, llm=llm), compute=compute, mesh=mesh)


@functools.cache
def weights(config: Config, end: float = 2.0) -> tuple[Any, Any]:
    """With six tokens that are likely, so that drafts of random weights are accepted now and then.

    end: how likely the token is that ends an answer; -2: it is not.
    """
    _, params, buffers = random_state(Blueprint(replace(config, mesh=MeshConfig())).model)
    embedding, head = 0.5 * params["embedding"], params["head"].copy()
    likely = np.isin(np.arange(264), [TOKENIZER.eos_id, *range(97, 102)])
    # Every hidden state has a large first feature, which only these tokens' rows of the head look for.
    embedding[:, 0] += 1.0
    head[:, 0] = np.where(likely, 2.0, -2.0)
    head[TOKENIZER.eos_id, 0] = end
    return {**params, "embedding": embedding, "head": head}, buffers


@functools.cache
def generator(config: Config, end: float = 2.0) -> Generator:
    return Generator(config, make_mesh(config.mesh), *weights(config, end), batch=5, max_new_tokens=NEW)


def without_drafts(config: Config) -> Generator:
    """The same on one device, without drafts."""
    compute = replace(config.compute, num_speculative_tokens=0)
    return generator(replace(config, compute=compute, mesh=MeshConfig()))


@functools.cache
def whole_pass(config: Config, end: float = 2.0) -> Any:
    """(prompt, tokens after it) -> the logits of the next token, and those of depth 0 for the one that it
    drafts, by a pass over the conversation alone: nothing is cached."""
    graph = Blueprint(config).graph

    def program(params: Any, buffers: Any, batch: Any, last: Any) -> Any:
        model = nnx.merge(graph, params, buffers)
        (x_ND, e_ND), _ = model.embed_with_future(batch, axes=(), train=False)
        h_ND = model.decoder.norm(model.decoder(x_ND, model.segments(batch, ()))[0])
        ahead_ND, _ = model.mtp(0, h_ND, e_ND, model.segments_ahead(batch, 0, ()))
        return model.logits(h_ND)[last], model.logits(ahead_ND)[last - 1]

    jitted = jax.jit(program)

    def logits(prompt: Document, told: Sequence[int]) -> Any:
        more = np.zeros(len(told), bool)
        tokens, is_audio = np.append(prompt.tokens, np.int32(told)), np.append(prompt.is_audio, more)
        document = Document(prompt.key, tokens.astype(np.int32), is_audio, np.zeros(len(tokens), bool), ())
        sizes = {"capacity": 128, "audio_capacity": 0, "front_end": None, "max_documents": 1}
        batch, _ = pack_row([document], **sizes, order_seed=None, depths=1)
        return jitted(*weights(config, end), batch, len(tokens) - 1)

    return logits


def prompts(config: Config, asked: Sequence[Example] = ASKED) -> list[Document]:
    return [*map(SpeechDocuments(config, TOKENIZER, train=False).prompt, asked)]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_of(), id="hybrid"),
        *(
            pytest.param(config_of(*patterns), id=patterns[0], marks=pytest.mark.exhaustive)
            for patterns in (("*KCL", "M"), ("*EH-", "*E"), ("*-", "D-", 1), ("W", "HC", 5))
        ),
        *(
            pytest.param(config_of(mesh=mesh), id=name, marks=pytest.mark.exhaustive)
            for name, mesh in {
                "context": MeshConfig(context=2),
                "tensor": MeshConfig(tensor=2),
                "data": MeshConfig(data=2),
            }.items()
        ),
    ],
)
def test_answers_are_those_without_drafts(config: Config):
    """Cut off in a draft, ended in one; read after every step or at the end; likeliest and drawn."""
    with jax.enable_x64(True):
        own, plain = generator(config), without_drafts(config)
        for settings in ({}, DRAWN, {"temperature": 1.0, "seed": 3, "max_new_tokens": 5}):
            want = plain.generate(ASKED, **settings)
            assert own.generate(ASKED, **settings) == want
            assert own.generate(ASKED, every=1, **settings) == want
        assert [own.generate([x], **settings)[0] for x in ASKED[:2]] == want[:2], "in other company"
        want = plain.generate(ASKED, **DRAWN)
        assert own.generate(ASKED, **DRAWN) == want
        assert 0 < own.drafted.accepted < own.drafted.tokens
        if config == config_of():
            assert {x.end for x in want} == {"stop", "length"}, "some answers should end early"
        assert own.programs.made == 3


@pytest.mark.parametrize(
    "config",
    [config_of(), pytest.param(config_of("*M", "MW", 2), marks=pytest.mark.exhaustive)],
    ids=["attention", "states"],
)
def test_the_first_draft_is_that_of_a_whole_pass(config: Config, monkeypatch: pytest.MonkeyPatch):
    """Depth 0 drafts what it predicts in training."""
    with jax.enable_x64(True):
        own, after = generator(config, end=-2.0), []
        steps = own._drawing._steps

        def noted(*arguments: Any) -> Any:
            places, found = steps.decode(*arguments)
            d = places.decoding
            after.append([np.asarray(x[0]) for x in (d.drafts.tokens, d.next.tokens, d.number, d.active)])
            return places, found

        monkeypatch.setattr(own._drawing, "_steps", steps._replace(decode=noted))
        asked = ASKED[:4]  # one more would wait for a place
        answers, compared = own.generate(asked, every=1), 0
        for state in after:
            for prompt, answer, drafts, token, number, goes_on in zip(
                prompts(config, asked), answers, *(x[: len(asked)] for x in state), strict=True
            ):
                if goes_on:
                    told = [*answer.tokens[:number], int(token)]
                    drafted = int(np.argmax(whole_pass(config, end=-2.0)(prompt, told)[1]))
                    assert drafted == drafts[0], (prompt.key, number)
                    compared += 1
        assert compared > 20


@pytest.mark.exhaustive
def test_rollouts_and_their_log_probabilities_are_those_without_drafts():
    """Groups of a prompt, places that are refilled, all numbers that a policy is trained with."""
    settings = RolloutConfig(group_size=3, answers_at_once=6, max_new_tokens=NEW, temperature=0.8, top_k=6)
    with jax.enable_x64(True):
        drawn = []
        for drafted in (3, 0):
            config = replace(config_of(drafted=drafted), rollout=settings)
            engine = Rollouts(config, make_mesh(config.mesh), stop_ids=(TOKENIZER.eos_id,))
            drawn.append(engine.draw(*weights(config_of()), prompts(config), seed=2))
        for got, want in zip(*(chain(*groups) for groups in drawn), strict=True):
            assert got.ended == want.ended
            np.testing.assert_array_equal(got.tokens, want.tokens)
            for name in ("log_probs", "drawn_log_probs", "entropies"):
                np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=1e-10)


def test_drawn_tokens_are_distributed_as_the_model_says():
    """Pairs of tokens over 1,000 draws, by a chi-square test."""
    config, how = config_of(), {"temperature": 1.3, "top_k": 4, "max_new_tokens": 3}
    with jax.enable_x64(True):
        own, prompt = generator(config), prompts(config)[0]
        drawn: Counter[tuple[int, ...]] = Counter()
        for seed in range(200):
            same = [replace(ASKED[0], key=str(n)) for n in range(5)]
            drawn.update(x.tokens for x in own.generate(same, seed=seed, **how))

        def probabilities(told: tuple[int, ...]) -> dict[int, float]:
            scaled = np.asarray(whole_pass(config)(prompt, told)[0]) / how["temperature"]
            best = np.argsort(scaled)[-how["top_k"] :]
            p = np.exp(scaled[best] - scaled[best].max())
            return dict(zip(best.tolist(), (p / p.sum()).tolist(), strict=True))

        def answers(told: tuple[int, ...], p: float) -> Iterator[tuple[tuple[int, ...], float]]:
            for token, share in probabilities(told).items():
                if token == TOKENIZER.eos_id:
                    yield told, p * share
                elif len(told) == 2:
                    yield (*told, token), p * share
                else:
                    yield from answers((*told, token), p * share)

        expected = dict(answers((), 1000.0))
        assert set(drawn) <= set(expected)
        many = [x for x, count in expected.items() if count >= 5]
        got, want = ([x[a] for a in many] for x in (drawn, expected))
        got, want = [*got, 1000 - sum(got)], [*want, 1000 - sum(want)]
        square = sum((a - b) ** 2 / b for a, b in zip(got, want, strict=True) if b > 1e-6)
        freedom = len(want) - 1
        assert freedom > 8
        assert square < freedom + 4 * (2 * freedom) ** 0.5, "a chance of about 1 in 10,000"
