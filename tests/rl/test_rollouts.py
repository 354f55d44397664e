"""Log-probabilities recorded while answers are drawn are those of each document alone, on any mesh."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
)
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.inference.generator import Generator
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import to_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.rl.rollouts import Rollout, Rollouts
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import state_shardings
from tests.clips import clip_of
from tests.meshes.models import HYBRIDS, gpt_oss
from tests.weights import random_state

NEW, GROUP, VOCAB, ALONE = 16, 3, 264, 160
TOKENIZER = ByteTokenizer()
STOPS = (TOKENIZER.eos_id, *range(4, VOCAB - 8, 16))
"""Some of them are drawn soon."""
CONFIG = Config(
    data=DataConfig(template="chatml", capacity=256, audio_capacity=480),
    model=ModelConfig(
        encoder=EncoderConfig(
            layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
        ),
        llm=LLMConfig(
            pattern="ME*-",
            vocab_size=VOCAB,
            dim=16,
            blocks={
                "*": Attention(heads=2, kv_heads=2, head_dim=8),
                "-": MLP(inner=16),
                "M": Mamba2(heads=2, head_dim=8, state=8, groups=2),
                "E": MoE(experts=4, experts_per_token=2, inner=8, shared_inner=8),
            },
        ),
    ),
    compute=ComputeConfig(dtype="float64", block_sizes=BlockSizes(scan=16, attention=32, experts=8, loss=32)),
    rollout=RolloutConfig(
        group_size=GROUP,
        answers_at_once=8,
        max_new_tokens=NEW,
        temperature=0.8,
        top_p=0.9,
    ),
)


@functools.cache
def conversations() -> tuple[Example, ...]:
    """Ragged, with and without recordings; more than the places have room for at once."""
    rng = np.random.default_rng(0)

    def recording(seconds: float) -> Samples:
        return Samples(rng.normal(0, 0.1, round(16000 * seconds)), 16000)

    said: list[tuple[Any, ...]] = [
        ("hi",),
        (recording(1.3), " What?"),
        ("one two three four five six",),
        (recording(0.4),),
        ("A ", recording(0.2), " and ", recording(0.7)),
        ("why",),
        (recording(0.9), "a longer question to a recording"),
    ]
    return tuple(Example(f"p{i}", (Turn("user", parts),)) for i, parts in enumerate(said))


@functools.cache
def prompts() -> tuple[Document, ...]:
    documents = SpeechDocuments(CONFIG, TOKENIZER, train=False)
    return tuple(map(documents.prompt, conversations()))


@functools.cache
def weights(dtype: str) -> tuple[Any, Any]:
    """In the checkpoint layout. Small embeddings, so that more than the last token tells what comes next."""
    _, params, buffers = random_state(Blueprint(config_on(MeshConfig(), dtype="float32")).model)
    filled = {**params, "embedding": 0.1 * params["embedding"]}, buffers
    return jax.tree.map(lambda x: x.astype(dtype), filled)


def config_on(mesh: MeshConfig, layout: str = "buffer", dtype: str = "float64") -> Config:
    """Its pages have room for the same recordings on every mesh. Unlike stages cannot exchange by a ring."""
    data = replace(CONFIG.data, audio_capacity=CONFIG.data.audio_capacity * mesh.audio_ranks)
    exchange = "all_gather" if mesh.pipeline > 1 else "ring"
    compute = replace(CONFIG.compute, dtype=dtype, context_layout=layout, context_exchange=exchange)
    return replace(CONFIG, mesh=mesh, data=data, compute=compute)


@functools.cache
def engine(mesh: MeshConfig = MeshConfig(), layout: str = "buffer", dtype: str = "float64") -> Rollouts:  # noqa: B008
    return Rollouts(config_on(mesh, layout, dtype), make_mesh(mesh), stop_ids=STOPS)


def drawn(own: Rollouts, asked: Any = None, **settings: Any) -> list[list[Rollout]]:
    held = to_stages(weights(own.config.compute.dtype), Blueprint(own.config).stages)
    return own.draw(*held, prompts() if asked is None else asked, **{"seed": 5, "step": 2} | settings)


def answered(prompt: Document, answer: Rollout) -> Document:
    n = len(answer.tokens)
    return Document(
        prompt.key,
        np.append(prompt.tokens, answer.tokens),
        np.append(prompt.is_audio, np.zeros(n, bool)),
        np.append(np.zeros(len(prompt), bool), np.ones(n, bool)),
        prompt.pieces,
    )


def scored_alone(groups: list[list[Rollout]], dtype: str) -> list[tuple[np.ndarray, ...]]:
    """Of every answer: log-probabilities, and those of all tokens [n, V]; each in a row alone."""
    sizes = {
        "capacity": ALONE,
        "audio_capacity": 480,
        "front_end": FastConformer(num_mels=16),
        "max_documents": 1,
    }
    documents = [answered(p, a) for p, group in zip(prompts(), groups, strict=True) for a in group]
    batch = concatenate_rows([pack_row([d], **sizes, order_seed=None)[0] for d in documents])
    blueprint, mesh = Blueprint(config_on(MeshConfig(), dtype=dtype)), make_mesh(MeshConfig())
    step = make_scoring_step(blueprint, mesh, VOCAB, temperature=CONFIG.rollout.temperature)
    scores = jax.tree.map(np.asarray, step(*weights(dtype), batch))
    found = []
    for row, at in enumerate(batch.weights > 0):
        all_n_v = np.zeros((at.sum(), VOCAB))
        np.put_along_axis(all_n_v, scores.top_ids[row, at], scores.top_log_probs[row, at], axis=1)
        found.append((scores.log_probs[row, at], all_n_v))
    return found


def truncated(log_p_V: np.ndarray, top_p: float) -> np.ndarray:
    """Log-probabilities of the likeliest entries that reach top_p together; written out with a sort."""
    order = np.argsort(-log_p_V)
    last = int(np.searchsorted(np.cumsum(np.exp(log_p_V[order])), top_p))
    left = np.where(log_p_V >= log_p_V[order[last]], log_p_V, -np.inf)
    return left - np.log(np.exp(left).sum())


def assert_scored_alike(groups: list[list[Rollout]], dtype: str, tolerance: float) -> None:
    answers = [answer for group in groups for answer in group]
    for answer, (log_probs, all_nV) in zip(answers, scored_alone(groups, dtype), strict=True):
        entropy_n = -(np.exp(all_nV) * all_nV).sum(-1)
        np.testing.assert_allclose(answer.log_probs, log_probs, rtol=0, atol=tolerance)
        np.testing.assert_allclose(answer.entropies, entropy_n, rtol=0, atol=10 * tolerance)
        for token, log_p_V, own in zip(answer.tokens, all_nV, answer.drawn_log_probs, strict=True):
            assert abs(truncated(log_p_V, CONFIG.rollout.top_p)[token] - own) < tolerance


@pytest.fixture(scope="module")
def expected() -> list[list[Rollout]]:
    """On one device."""
    with jax.enable_x64(True):
        return drawn(engine())


def test_recorded_log_probs_are_those_of_each_document_alone(expected: list[list[Rollout]]):
    """Places are refilled, whole groups at a time; three programs serve all."""
    with jax.enable_x64(True):
        own = engine()
        lengths = {len(answer.tokens) for group in expected for answer in group}
        assert min(lengths) < NEW // 2
        assert len(lengths) > 5
        assert {answer.ended for group in expected for answer in group} == {True, False}
        for answer in (answer for group in expected for answer in group):
            assert not np.isin(answer.tokens[:-1], STOPS).any()
            assert answer.ended == (answer.tokens[-1] in STOPS)
            assert answer.ended or len(answer.tokens) == NEW
        assert len({tuple(answer.tokens) for group in expected for answer in group}) == 7 * GROUP
        assert len(prompts()) * GROUP > CONFIG.rollout.answers_at_once, "places are refilled"
        assert own.programs.made == 3
        assert_scored_alike(expected, "float64", 1e-10)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (MeshConfig(data=2, context=2), "buffer"),
        *(
            pytest.param(mesh, layout, marks=pytest.mark.exhaustive)
            for mesh, layout in [
                (MeshConfig(pipeline=2, stages_per_rank=2), "buffer"),
                (MeshConfig(1, 2, 2, 2), "buffer"),
                (MeshConfig(2, 2, 1, 1), "whole"),
            ]
        ),
    ],
)
def test_draws_are_the_same_on_any_mesh(mesh: MeshConfig, layout: str, expected: list[list[Rollout]]):
    with jax.enable_x64(True):
        own = engine(mesh, layout)
        assert_same_answers(drawn(own), expected)
        assert own.programs.made == 3


@contextmanager
def with_llm(llm: LLMConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has CONFIG with another decoder."""
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, model=replace(CONFIG.model, llm=llm)))
    cached = weights, engine
    try:
        for each in cached:
            each.cache_clear()
        yield
    finally:
        for each in cached:
            each.cache_clear()


@pytest.mark.exhaustive
def test_windows_of_places_that_are_refilled(monkeypatch: pytest.MonkeyPatch):
    """With sinks and a rotary embedding; answers of a group share their prompt's keys, and are longer than a
    window.
    """
    llm = gpt_oss(CONFIG.model.llm, "W*E")
    assert llm.window < NEW
    with with_llm(llm, monkeypatch), jax.enable_x64(True):
        own = engine()
        groups = drawn(own)
        assert_scored_alike(groups, "float64", 1e-10)
        assert_same_answers(drawn(engine(MeshConfig(context=2))), groups)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_drawn_as_they_are_trained(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    """Also on all axes, with the states and the last inputs of convolutions of each answer."""
    llm = HYBRIDS[name](CONFIG.model.llm)
    with with_llm(replace(llm, pattern=llm.letters[: len(llm.letters) // 2]), monkeypatch):
        with jax.enable_x64(True):
            groups = drawn(engine())
            assert_scored_alike(groups, "float64", 1e-10)
            assert_same_answers(drawn(engine(MeshConfig(1, 2, 2, 2))), groups)
            largest = {"float64": difference(groups, "float64")}
        groups = drawn(engine(dtype="float32"))
        assert_scored_alike(groups, "float32", 3e-5)
        largest["float32"] = difference(groups, "float32")
    for dtype, x in largest.items():
        record_property(f"rollouts, {dtype}", f"{x:.1e}")


def difference(groups: list[list[Rollout]], dtype: str) -> float:
    """The largest between drawn tokens' log-probabilities and those of the documents alone."""
    answers = [answer for group in groups for answer in group]
    scored = scored_alone(groups, dtype)
    return max(float(np.abs(x.log_probs - y).max()) for x, (y, _) in zip(answers, scored, strict=True))


@pytest.mark.exhaustive
def test_answers_are_drawn_on_another_mesh_than_the_one_of_the_weights(expected: list[list[Rollout]]):
    mesh, of_rollouts = MeshConfig(pipeline=2, tensor=2), MeshConfig(data=2, context=2)
    with jax.enable_x64(True):
        config = config_on(of_rollouts)
        config = replace(config, mesh=mesh, rollout=replace(config.rollout, mesh=of_rollouts))
        blueprint, devices = Blueprint(config), make_mesh(mesh)
        on = state_shardings(blueprint, devices)
        held = jax.device_put(to_stages(weights("float64"), blueprint.stages), (on.params, on.buffers))
        own = Rollouts(config, devices, stop_ids=STOPS)
        found = own.draw(*own.on_own_mesh(*held), prompts(), seed=5, step=2)
        assert_same_answers(found, expected)


def assert_same_answers(found: list[list[Rollout]], expected: list[list[Rollout]]) -> None:
    for group, wanted in zip(found, expected, strict=True):
        for one, other in zip(group, wanted, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.ended == other.ended
            for name in ("log_probs", "drawn_log_probs", "entropies"):
                np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=1e-10)


def test_draws_depend_on_their_keys_and_on_no_company(expected: list[list[Rollout]]):
    """Answers of one group are those of as many separate prompts; nothing is compiled anew."""
    with jax.enable_x64(True):
        own = engine()
        assert_same_answers(drawn(own, prompts()[::-1])[::-1], expected)
        separate = [drawn(own, group_size=1, first_sample=sample) for sample in range(GROUP)]
        assert_same_answers([[g[0] for g in groups] for groups in zip(*separate, strict=True)], expected)
        for changed in ({"seed": 6}, {"step": 3}, {"first_sample": GROUP}):
            other = drawn(own, prompts()[:2], **changed)
            for one, group in zip(other, expected, strict=False):
                assert not {tuple(a.tokens) for a in one} & {tuple(a.tokens) for a in group}
        assert drawn(own, []) == []
        assert own.programs.made == 3


def test_greedy_answers_are_the_generators():
    """With the log-probabilities of temperature 1, and drawn for certain."""
    with jax.enable_x64(True):
        greedy = drawn(engine(), temperature=0.0, group_size=1)
        sizes = {"batch": 4, "max_new_tokens": NEW}
        own = Generator(CONFIG, make_mesh(MeshConfig()), *weights("float64"), **sizes, stop_ids=STOPS)
        for group, wanted in zip(greedy, own.generate(conversations()), strict=True):
            tokens = group[0].tokens.tolist()
            assert tuple(tokens[: len(tokens) - group[0].ended]) == wanted.tokens
            assert group[0].ended == (wanted.end == "stop")
            assert (group[0].drawn_log_probs == 0).all()
            assert (group[0].log_probs < 0).all()


@pytest.mark.exhaustive
def test_in_float32_drawing_and_scoring_agree_to_rounding():
    assert_scored_alike(drawn(engine(dtype="float32")), "float32", 3e-5)


def test_what_cannot_be_drawn_is_refused_before_anything_is():
    with jax.enable_x64(True):
        own, none = engine(), np.zeros(300, bool)
    long = Document("long", np.zeros(300, np.int32), none, none)
    recording = np.zeros((100, 16), np.float32)
    loud = Document.splice("loud", [7], [False], [clip_of([recording] * 5)], placeholder=7)
    ok = prompts()[:1]
    has_answers = Document("both", np.zeros(3, np.int32), none[:3], none[:3], answers=(1, 1))
    for asked, settings, message in (
        ([*ok, long], {}, "'long' does not fit: its 300 token slots exceed the capacity of 256"),
        ([*ok, loud], {}, "'loud' does not fit: its 520 audio frames exceed the audio_capacity of 480"),
        ([has_answers], {}, "'both' has 2 answers already"),
        (ok, {"temperature": -1.0}, "temperature is -1"),
        (ok, {"group_size": 9}, "a group of 9 answers; expected 1 to 8"),
        (ok, {"group_size": 0}, "a group of 0 answers"),
    ):
        with pytest.raises(UserError, match=message):
            own.stream({}, {}, asked, **settings)
