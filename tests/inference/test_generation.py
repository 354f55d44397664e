"""Answers to packed conversations are what each gets alone, token by token, on any mesh; streamed or not."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
from flax import nnx

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
)
from jaxthd.data.example import Clip, Example, Samples, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.inference.drawing import random_bits
from jaxthd.inference.generator import (
    Answer,
    AnswerDelta,
    Generator,
    for_generation,
    whole_answer,
)
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import to_stages
from jaxthd.ops.sampling import Sampling, draw
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps import blueprint as blueprints
from jaxthd.steps.blueprint import Blueprint
from tests.weights import random_state

NEW = 10
CONFIG = Config(
    data=DataConfig(template="chatml", capacity=448, audio_capacity=480),
    model=ModelConfig(
        encoder=EncoderConfig(
            layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
        ),
        llm=LLMConfig(
            pattern="M*M*",
            vocab_size=264,
            dim=16,
            blocks={
                "*": Attention(heads=2, kv_heads=2, head_dim=8),
                "M": Mamba2(heads=2, head_dim=8, state=8, groups=2),
            },
        ),
    ),
    compute=ComputeConfig(dtype="float64", block_sizes=BlockSizes(scan=16, attention=32)),
)
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 7}
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """Text alone, a file, part of one at another rate, an array, several turns; ragged."""
    folder, rng = tmp_path_factory.mktemp("audio"), np.random.default_rng(0)
    for name, rate in (("a.wav", 16000), ("b.wav", 8000)):
        soundfile.write(folder / name, rng.normal(0, 0.1, 2 * rate), rate)
    whole, part = Clip(folder / "a.wav"), Clip(folder / "b.wav", 0.5, 0.4)
    array = Samples(rng.normal(0, 0.1, (9600, 2)), 48000)
    said = [
        (("hi",),),
        ((whole, " What?"),),
        (("A ", part, array), ("yes",), ("And ", part, "?")),
        (("one two three four",),),
        ((array,), ("no",), ("é",), ("oui",), ("why",)),
    ]
    roles = ("user", "assistant") * 3
    return [
        Example(f"c{i}", tuple(Turn(role, parts) for role, parts in zip(roles, turns, strict=False)))
        for i, turns in enumerate(said)
    ]


@functools.cache
def weights() -> tuple[Any, Any]:
    """In the checkpoint layout. Small embeddings, so that more than the last token tells what comes next."""
    _, params, buffers = random_state(Blueprint(CONFIG).model)
    return {**params, "embedding": 0.1 * params["embedding"]}, buffers


def generator(mesh: MeshConfig = MeshConfig(), layout: Any = "buffer", **options: Any) -> Generator:  # noqa: B008  (frozen)
    config = replace(CONFIG, mesh=mesh, compute=replace(CONFIG.compute, context_layout=layout))
    data = replace(config.data, audio_capacity=config.data.audio_capacity * mesh.audio_ranks)
    config = replace(config, data=data)
    return made(config, tuple(sorted(({"batch": 4, "max_new_tokens": NEW} | options).items())))


@functools.cache
def made(config: Config, options: tuple[tuple[str, int], ...]) -> Generator:
    held = to_stages(weights(), Blueprint(config).stages)
    return Generator(config, make_mesh(config.mesh), *held, **dict(options))


@functools.cache
def next_token() -> Any:
    """(the document so far, key, the token's number, sampling) -> the token, by a whole forward pass over it
    alone: nothing cached or packed.
    """
    graph = Blueprint(CONFIG).graph

    def program(params: Any, buffers: Any, batch: Any, last: Any, *how: Any) -> Any:
        model = nnx.merge(graph, params, buffers)
        x_ND, _ = model.embed(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        logits_1V = jnp.einsum("d,vd->v", model.hidden(x_ND)[last], model.head[...])[None]
        return draw(logits_1V, *how, ()).tokens[0]

    jitted = jax.jit(program)

    def of(document: Document, *how: Any) -> int:
        sizes = {
            "capacity": 192,
            "audio_capacity": 480,
            "front_end": FastConformer(num_mels=16),
            "max_documents": 1,
        }
        batch, _ = pack_row([document], **sizes, order_seed=None)
        return int(jitted(*weights(), batch, len(document) - 1, *how))

    return of


def alone(conversations: list[Example], settings: dict[str, Any]) -> list[list[int]]:
    """Every answer's tokens, each conversation by itself."""
    name = repr(settings)
    if name not in _ALONE:
        _ALONE[name] = _alone(conversations, settings)
    return _ALONE[name]


_ALONE: dict[str, list[list[int]]] = {}


def _alone(conversations: list[Example], settings: dict[str, Any]) -> list[list[int]]:
    documents = SpeechDocuments(CONFIG, TOKENIZER, train=False)
    answers = []
    for example in conversations:
        key = random_bits(settings.get("seed", 0), example.key)[None]
        sampling = Sampling(
            np.float32(settings.get("temperature", 0)),
            np.int32(settings.get("top_k", 0)),
            np.float32(settings.get("top_p", 1)),
        )
        document, answer = documents.prompt(example), []
        while len(answer) < NEW:
            token = next_token()(document, key, len(answer), sampling)
            if token == TOKENIZER.eos_id:
                break
            answer.append(token)
            document = Document(
                document.key,
                np.append(document.tokens, np.int32(token)),
                np.append(document.is_audio, False),
                np.append(document.supervised, False),
                document.pieces,
            )
        answers.append(answer)
    return answers


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (MeshConfig(context=2), "buffer"),
        pytest.param(MeshConfig(context=2), "whole", marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(data=2, pipeline=2, tensor=2), "buffer", marks=pytest.mark.exhaustive),
    ],
)
def test_answers_are_those_of_each_conversation_alone_on_any_mesh(conversations, mesh, layout):
    """By a whole forward pass for every token, likeliest and drawn."""
    with jax.enable_x64(True):
        for settings in ({}, DRAWN):
            want = alone(conversations, settings)
            assert len({tuple(answer) for answer in want}) == len(want), "answers should differ"
            answers = generator(mesh, layout).generate(conversations, **settings)
            assert [list(answer.tokens) for answer in answers] == want
            assert [answer.key for answer in answers] == [example.key for example in conversations]
            assert [answer.text for answer in answers] == [TOKENIZER.decode(tokens) for tokens in want]
            assert [answer.end for answer in answers] == ["length" if len(t) == NEW else "stop" for t in want]


def test_deltas_are_the_whole_answer_and_three_programs_serve_all(conversations):
    """Whatever is asked, however long, and however often one looks: nothing is compiled anew."""
    with jax.enable_x64(True):
        own = generator()
        for settings in ({}, DRAWN, {"max_new_tokens": 4}, {"temperature": 0.3, "seed": 1}):
            whole = own.generate(conversations, **settings)
            for every in (1, 3):
                found: list[list[AnswerDelta]] = [[] for _ in conversations]
                for delta in own.stream(conversations, every=every, **settings):
                    assert not (found[delta.number] and found[delta.number][-1].end), "after its end"
                    assert len(delta.tokens) <= every
                    found[delta.number].append(delta)
                streamed = [
                    whole_answer(e.key, deltas) for e, deltas in zip(conversations, found, strict=True)
                ]
                assert streamed == whole
            most = settings.get("max_new_tokens", NEW)
            assert all(len(a.tokens) == most for a in whole if a.end == "length")
        for length in (1, 5, 60, 406):
            own.generate([Example("x", (Turn("user", ("a" * length,)),))])
        assert own.programs.made == 3


def test_draws_depend_on_seed_and_key_and_not_on_company(conversations):
    with jax.enable_x64(True):
        own = generator()
        whole = own.generate(conversations, **DRAWN)
        one_by_one = [own.generate([example], **DRAWN)[0] for example in conversations]
        backwards = own.generate(conversations[::-1], **DRAWN)[::-1]
        assert whole == one_by_one == backwards
        other_seed = own.generate(conversations, **DRAWN | {"seed": 8})
        renamed = own.generate([replace(e, key=e.key + "'") for e in conversations], **DRAWN)
        for changed in (other_seed, renamed):
            assert all(a.tokens != b.tokens for a, b in zip(whole, changed, strict=True))


def test_any_of_several_tokens_ends_an_answer(conversations, monkeypatch: pytest.MonkeyPatch):
    """And when all have ended, nothing more is computed."""
    with jax.enable_x64(True):
        never = alone(conversations, {})
        stops = {tokens[min(k + 1, len(tokens) - 1)] for k, tokens in enumerate(never)}
        monkeypatch.setattr(ByteTokenizer, "eos_ids", (TOKENIZER.eos_id, *stops))
        own, reached = generator(batch=5), []
        steps = own._drawing._steps

        def noted(*arguments: Any) -> Any:
            places, found = steps.decode(*arguments)
            reached.append(int(places.decoding.steps[0]))
            return places, found

        monkeypatch.setattr(own._drawing, "_steps", steps._replace(decode=noted))
        answers = own.generate(conversations)
        cuts = [next((i for i, t in enumerate(tokens) if t in stops), len(tokens)) for tokens in never]
        want = [tokens[:cut] for tokens, cut in zip(never, cuts, strict=True)]
        assert [list(answer.tokens) for answer in answers] == want
        assert all(answer.end == "stop" for answer in answers)
        assert len(set(cuts)) > 1
        assert reached == [max(cuts) + 1], "all in one batch"
        assert reached[0] < NEW


def test_what_cannot_be_answered_is_refused_before_anything_is(conversations):
    def ask(*turns: Turn, **settings: Any) -> list[Answer]:
        return list(own.stream([conversations[0], Example("bad", turns)], **settings))

    def user(*parts: Any) -> Turn:
        return Turn("user", parts)

    with jax.enable_x64(True):
        own = generator()
        for turns, message in (
            ((user("a" * 420),), "'bad' does not fit: its 461 token slots exceed the capacity of 448"),
            ((user(Clip(Path("none.wav"))),), "'bad': none.wav: no such file"),
            ((user(Samples(np.zeros(160000), 16000)),), "'bad': more than 4.81 s, which is all"),
            ((user("a"), Turn("assistant", ("b",))), "'bad' has no turn to answer"),
            ((), "'bad' has no turn to answer"),
            ((user("<|im_end|>"),), "'bad': text .* holds <|im_end|>"),
            (
                (user(Samples(np.zeros(9, np.int16), 16000)),),
                "'bad': samples of shape .* int16; expected floating",
            ),
        ):
            with pytest.raises(UserError, match=message):
                ask(*turns)
        for settings, message in (
            ({"temperature": -1.0}, r"temperature is -1\.0; expected 0 or more"),
            ({"temperature": float("nan")}, "temperature is nan"),
            ({"top_k": -1}, "top_k is -1"),
            ({"top_p": 0.0}, r"top_p is 0\.0; expected more than 0"),
            ({"max_new_tokens": NEW + 1}, f"max_new_tokens is 11; expected 1 to the generator's {NEW}"),
            ({"every": 0}, "every is 0"),
        ):
            with pytest.raises(UserError, match=message):
                own.stream(conversations, **settings)
        assert own.generate([]) == []


def test_a_generators_buffers_follow_the_mesh_and_its_batch():
    config = for_generation(replace(CONFIG, mesh=MeshConfig(data=2)), 5)
    assert (config.data.rows, config.data.max_documents) == (2, 3)


def test_layers_are_written_out_on_one_cpu_device(monkeypatch: pytest.MonkeyPatch):
    """The decoder has two of each kind, in a loop of two turns."""

    def program() -> str:
        """The step of decoding before it is compiled."""
        sampling = Sampling(np.float32(0), np.int32(0), np.float32(1))
        with jax.enable_x64(True):
            one = made.__wrapped__(CONFIG, (("batch", 4), ("max_new_tokens", NEW)))
            return str(one._drawing.lowered(*one._weights, sampling, 1)["decode"].as_text())

    monkeypatch.setattr(blueprints, "WRITTEN_LAYERS", 2)
    written = program()
    monkeypatch.setattr(blueprints, "WRITTEN_LAYERS", 1)
    looped = program()
    assert written.count("stablehlo.while") != looped.count("stablehlo.while")
    blueprint, two = Blueprint(replace(CONFIG, compute=ComputeConfig())), make_mesh(MeshConfig(data=2))
    monkeypatch.undo()
    assert blueprint.writes_layers(make_mesh(MeshConfig()))
    assert not blueprint.writes_layers(two)
