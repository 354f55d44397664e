"""A step keeps as many activations as the memory of the devices holds."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxthd.config import Config
from jaxthd.kernels.machine import host_memory
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning import fitting
from jaxthd.planning.fitting import CHOICES, ROOM, device_memory, fitting_step
from jaxthd.steps import blueprint as blueprints
from jaxthd.steps.blueprint import Blueprint
from tests.helpers import batch_of, filled_state
from tests.steps.test_remat import ENCODER, LLM


@pytest.fixture(scope="module")
def run() -> tuple[Any, ...]:
    config = Config()
    config = replace(config, model=replace(config.model, encoder=ENCODER, llm=LLM))
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    return blueprint, mesh, filled_state(blueprint, mesh), put_batch(batch_of([5, 20, 11], 1), mesh)


def _made(blueprint: Blueprint, _: Any) -> str:
    """A step that names its choice, and is not compiled."""
    compute = blueprint.config.compute
    return compute.remat + (", layers written out" if compute.unroll_layers else "")


def test_the_first_choice_that_fits_is_taken(run: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    needed = {"none, layers written out": 8000, "none": 4000, "selective": 2000}
    monkeypatch.setattr(fitting, "make_train_step", _made)
    monkeypatch.setattr(fitting, "_bytes_of", lambda step, *_: needed.get(step))
    said: list[str] = []
    expected = {
        10_000: "none, layers written out",
        9999: "none",
        5000: "none",
        4999: "selective",
        2500: "selective",
        2499: "full",
    }
    for memory, choice in expected.items():
        monkeypatch.setattr(fitting, "device_memory", lambda memory=memory: memory)
        assert fitting_step(*run, said.append) == choice
        assert f"compute.remat: {choice}; " in said[-1]
    monkeypatch.setattr(fitting, "device_memory", lambda: None)
    assert fitting_step(*run, said.append) == "full"
    assert len(said) == len(expected)


def test_loops_over_many_layers_stay_loops(run: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    """The decoder of `run` has two layers of each kind."""
    monkeypatch.setattr(fitting, "make_train_step", _made)
    monkeypatch.setattr(fitting, "_bytes_of", lambda *_: 1)
    monkeypatch.setattr(blueprints, "WRITTEN_LAYERS", 2)
    assert fitting_step(*run, [].append) == "none, layers written out"
    monkeypatch.setattr(blueprints, "WRITTEN_LAYERS", 1)
    assert fitting_step(*run, [].append) == "none"


def test_what_is_given_is_not_chosen(run: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    blueprint, *others = run
    monkeypatch.setattr(fitting, "make_train_step", _made)
    config = blueprint.config
    given = Blueprint(replace(config, compute=replace(config.compute, remat="layers")))
    assert fitting_step(given, *others, [].append) == "layers"


def test_a_step_that_is_taken_is_compiled_once(run: tuple[Any, ...]):
    said: list[str] = []
    step = fitting_step(*run, said.append)
    events: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step(*run[2:])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if "backend_compile" in event]
    assert "compute.remat: none, layers written out; " in said[0]


def test_simulated_devices_share_the_memory_of_their_machine():
    memory = device_memory()
    assert memory is not None
    assert memory * jax.local_device_count() == pytest.approx(host_memory(), rel=1e-6)
    assert set(CHOICES) == {"none", "selective"}
    assert 0 < ROOM < 1
