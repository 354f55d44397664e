"""Single values: of the annotated type, and not too small."""

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxthd.config import Config
from jaxthd.validate.rules import Problem

_MINIMUM: dict[str, float] = {
    "data.audio_capacity": 0,
    "data.workers": 0,
    "data.prefetch": 0,
    "data.spec_augment.freq_masks": 0,
    "data.spec_augment.time_masks": 0,
    "data.seed": 0,
    "model.encoder.chunk_seconds": 0.02,
    "compute.expert_capacity": 0.1,
    "model.llm.latent_dim": 0,
    "model.adapter_dim": 0,
    "adapt.lora_rank": 0,
    "train.warmup_steps": 0,
    "train.seed": 0,
    "train.validate_every": 0,
    "train.max_new_tokens": 0,
}
"""Least value of a number, where it is not 1 for an integer and 0 for a real number."""


def faults(config: Config) -> dict[str, Problem]:
    """By the path of the setting."""
    return {path: problem for path, hint, value in _leaves(config) for problem in _fault(path, hint, value)}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, annotated type, value) of every setting."""
    for name, hint in get_type_hints(type(node)).items():
        value = getattr(node, name)
        if is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def _fault(path: str, hint: Any, value: Any) -> Iterator[Problem]:
    if not _has_type(value, hint):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        name = hint.__name__ if isinstance(hint, type) else str(hint)
        expected = f"one of {', '.join(map(repr, choices))}" if choices else f"a value of type {name}"
        yield Problem(f"{path} is {value!r}", expected, f"correct {path}")
    elif hint in (int, float):
        least = _MINIMUM.get(path, 1 if hint is int else 0)
        if not least <= value < math.inf:
            yield Problem(f"{path} is {value}", f"{least} or more, and finite", f"correct {path}")


def _has_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_has_type(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(value)
        return len(value) == len(hints) and all(map(_has_type, value, hints))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)
