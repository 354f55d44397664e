"""Arguments of the Python API that cannot work are refused by name, as the command line refuses settings."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import jaxthd
from jaxthd import Config, Example, LLMConfig, MeshConfig, ModelConfig, Turn, UserError
from jaxthd.data.mixing import mixing_weights
from jaxthd.models.blocks import MLP

CONFIG = Config(
    data=jaxthd.DataConfig(capacity=128, audio_capacity=0, max_documents=8),
    model=ModelConfig(encoder=None, llm=LLMConfig(pattern="-", dim=32, blocks={"-": MLP(inner=64)})),
)
EXAMPLES = [Example(str(n), (Turn("user", ("hi",)), Turn("assistant", ("ho",)))) for n in range(4)]


def data(**changes: Any) -> Config:
    """Faulty types too, which the constructors refuse while tests run."""
    changed = replace(CONFIG, data=replace(CONFIG.data))
    for name, value in changes.items():
        object.__setattr__(changed.data, name, value)
    return changed


def train(**changes: Any) -> Config:
    changed = replace(CONFIG, train=replace(CONFIG.train))
    for name, value in changes.items():
        object.__setattr__(changed.train, name, value)
    return changed


def document(example: Any, epoch: int) -> jaxthd.Document:
    return jaxthd.Document.splice(example.key, [1, 2, 3], [True] * 3, [], 0)


def load(config: Config = CONFIG, sources: Any = (EXAMPLES, EXAMPLES), **options: Any) -> jaxthd.Loader:
    return jaxthd.make_loader(list(sources), document, config, **options)


WEIGHTS = [
    ((-1.0, 2.0), r"data.weights is \(-1.0, 2.0\); expected finite numbers above 0"),
    ((0.0, 0.0), r"data.weights is \(0.0, 0.0\); expected finite numbers above 0"),
    ((math.nan, 1.0), r"data.weights is \(nan, 1.0\); expected finite numbers above 0"),
    ((math.inf, 1.0), r"data.weights is \(inf, 1.0\); expected finite numbers above 0"),
    ((1.0,), "data.weights has 1 numbers for 2 manifests; expected one for each"),
    ((1.0, 2.0, 3.0), "data.weights has 3 numbers for 2 manifests; expected one for each"),
]


@pytest.mark.parametrize(("weights", "message"), WEIGHTS, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_weights_that_cannot_mix_are_named(weights: tuple[float, ...], message: str, temperature: float):
    with pytest.raises(UserError, match=message):
        mixing_weights(data(weights=weights, weights_temperature=temperature).data, [30, 40])
    with pytest.raises(UserError, match=message):
        load(weights=weights)


OTHERS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: mixing_weights(data(weights_temperature=0.0).data, [3, 4]),
        "weights_temperature is 0; exp",
    ),
    (lambda: load(sources=()), "there is no data set to load"),
    (lambda: load(rows=[7]), r"rows is \[7\]; expected one or more from 0 to 0"),
    (lambda: load(rows=[]), r"rows is \[\]; expected one or more"),
    (lambda: load(prefetch=-1), "prefetch -1; expected 0 or more"),
    (lambda: load(workers=-1), "workers is -1"),
    (lambda: load(data(rows=0)), "data.rows is 0 .*expected 1 row or more"),
    (lambda: load(data(seed=10**20)), "data.seed 100000000000000000000; expected .* from 0 to 4294"),
    (lambda: load(data(seed=-1)), "data.seed -1; expected"),
    (lambda: jaxthd.pack_documents(data(capacity=0)), "capacity, max_documents, .* must be at least 1: 0, 8"),
    (lambda: jaxthd.PackDocuments(128, -8, 8), "audio_capacity is -8 .*expected at least 0"),
    (lambda: jaxthd.make_mesh(MeshConfig(context=0)), r"the mesh is \(1, 0, 1, 1\).*expected 1 or"),
    (lambda: jaxthd.make_mesh(MeshConfig(context=-2)), r"the mesh is \(1, -2, 1, 1\)"),
    (
        lambda: jaxthd.SpeechDocuments(data(template="chat"), jaxthd.load_tokenizer("bytes"), train=True),
        "data.template is 'chat'; expected one of plain, chatml, chat_template",
    ),
    (lambda: step(train(optimizer="sgd")), "train.optimizer is 'sgd'; expected one of adamw"),
    (lambda: step(train(schedule="step")), "train.schedule is 'step'; expected one of cosine"),
    (
        lambda: jaxthd.Blueprint(train(seed=10**20)).initial_weights(),
        "train.seed is 1000.*expected 0",
    ),
]


def step(config: Config) -> Any:
    return jaxthd.make_train_step(jaxthd.Blueprint(config), jaxthd.make_mesh(config.mesh))


@pytest.mark.parametrize(("call", "message"), OTHERS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_an_argument_that_cannot_work_is_named(call: Callable[[], Any], message: str):
    with pytest.raises(UserError, match=message):
        call()


def test_documents_and_rows_that_cannot_be_made_say_why():
    with pytest.raises(ValueError, match="2 tokens and 1 marks of what is supervised"):
        jaxthd.Document.splice("k", [1, 2], [True], [], 0)
    with pytest.raises(ValueError, match="there is no batch"):
        jaxthd.concatenate_rows([])
