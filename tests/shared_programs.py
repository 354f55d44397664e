"""Runs of one test module share their programs: what a second run of a config would trace and compile anew
is the same."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from jaxthd.config import Config, DataConfig, TrainConfig

PLACES = (
    "jaxthd.planning.fitting.make_train_step",
    "jaxthd.rl.answers.AccumulatedStep",
    "jaxthd.rl.answers.UpdateMaker",
    "jaxthd.inference.evaluator.make_validation_step",
    "jaxthd.inference.drawing.make_drawing_steps",
    "jaxthd.training.cached_reference.make_log_probs",
)
"""What makes the programs of a run, by (blueprint, mesh, options)."""
BLUEPRINTS = ("jaxthd.training.loop.Blueprint",)


CLOCK = ("time", "tokens_per_second", "_seconds", "compilations", "goodput")
"""Endings of names of metrics that depend on the process and its clock."""


def without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without these metrics."""
    return [{name: x for name, x in line.items() if not name.endswith(CLOCK)} for line in lines]


@contextmanager
def shared_programs() -> Iterator[None]:
    """Inside, runs of the commands train and grpo use the programs of an earlier run inside, if there was one
    whose config differs only in settings that no program depends on."""
    with pytest.MonkeyPatch.context() as patch:
        for place in BLUEPRINTS:
            patch.setattr(place, functools.cache(_get(place)))
        for place in PLACES:
            patch.setattr(place, _shared(_get(place)))
        yield


def _get(place: str) -> Any:
    module, name = place.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _shared(make: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[Any, Any] = {}

    def of_run(blueprint: Any, mesh: Any, **options: Any) -> Any:
        key = _of_programs(blueprint.config), mesh, tuple(options.items())
        if key not in made:
            made[key] = make(blueprint, mesh, **options)
        return made[key]

    return of_run


def _of_programs(config: Config) -> Config:
    """The config without when a run validates and saves, and how it loads data."""
    train, data, plain = config.train, config.data, (TrainConfig(), DataConfig())
    return replace(
        config,
        train=replace(
            train,
            validate_every=plain[0].validate_every,
            checkpoint_every=plain[0].checkpoint_every,
        ),
        data=replace(data, workers=0, validation_manifest=plain[1].validation_manifest),
    )
