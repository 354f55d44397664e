"""Single values: each must have the annotated type, and not be too small."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxthd.config import Config
from jaxthd.ops.attention import backends as attention_backends
from jaxthd.ops.scan import backends as scan_backends
from jaxthd.validate.rules import Finding

_MINIMUM: dict[str, float] = {
    "data.audio_capacity": 0,
    "data.workers": 0,
    "data.spec_augment.freq_masks": 0,
    "data.spec_augment.time_masks": 0,
    "data.seed": 0,
    "model.encoder.chunk_seconds": 0.02,
    "compute.context_cuts": 0,
    "model.llm.latent_dim": 0,
    "model.llm.latent_attention.q_lora_rank": 0,
    "model.llm.shared_expert_dim": 0,
    "model.llm.rope.original_positions": 0,
    "model.adapter_dim": 0,
    "adapt.lora_rank": 0,
    "posttraining.reference_every": 0,
    "rollout.group_size": 2,
    "rollout.top_k": 0,
    "rollout.validation_prompts": 0,
    "train.warmup_steps": 0,
    "train.seed": 0,
    "train.validate_every": 0,
    "train.max_new_tokens": 0,
}
"""Least values of numbers, where they are not 1 (integers) or 0 (real numbers)."""
_SEEDS = ("data.seed", "train.seed")
"""Settings that random generators take as 32 bits; other integers reach arrays of int32."""
_LARGEST_FLOAT = 3.4e38
_WHY_AT_MOST = "because arrays hold numbers in 32 bits"
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "compute.attention_backend": lambda: (*attention_backends.BACKENDS, "auto"),
    "compute.scan_backend": lambda: (*scan_backends.BACKENDS, "auto"),
}
"""Settings that take the name of something registered, with the names."""


def faulty_values(config: Config) -> dict[str, Finding]:
    """What is wrong with single settings, by their dotted paths."""
    return {path: finding for path, hint, value in _leaves(config) for finding in _check(path, hint, value)}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, annotated type, value) of every setting. A group that is None is a setting itself."""
    for name, hint in get_type_hints(type(node)).items():
        value = getattr(node, name)
        if is_dataclass(value) and _has_type(value, hint):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def _check(path: str, hint: Any, value: Any) -> Iterator[Finding]:
    if not _has_type(value, hint):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        name = hint.__name__ if isinstance(hint, type) else str(hint)
        expected = f"one of {', '.join(map(repr, choices))}" if choices else f"a value of type {name}"
        yield Finding(f"{path} is {value!r}", expected, f"correct {path}")
    elif path in _NAMES:
        names = tuple(_NAMES[path]())
        if value not in names:
            yield Finding(f"{path} is {value!r}", f"one of {', '.join(map(repr, names))}", f"correct {path}")
    elif hint in (int, float):
        least = _MINIMUM.get(path, 1 if hint is int else 0)
        if not least <= value < math.inf:
            yield Finding(f"{path} is {value}", f"{least} or more, and finite", f"correct {path}")
        elif value > (most := _LARGEST_FLOAT if hint is float else _most(path)):
            yield Finding(f"{path} is {value}", f"{most} at most, {_WHY_AT_MOST}", f"correct {path}")
    elif large := [x for x in _integers(value) if abs(x) > _most(path)]:
        yield Finding(f"{path} has {large[0]}", f"{_most(path)} at most, {_WHY_AT_MOST}", f"correct {path}")


def _most(path: str) -> int:
    """The largest value of a setting that is an integer."""
    return 2**32 - 1 if path in _SEEDS else 2**31 - 1


def _integers(value: Any) -> Iterator[int]:
    """The integers in a value, or in a tuple, which may be nested."""
    if isinstance(value, tuple):
        for one in value:
            yield from _integers(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


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
