"""Settings that there were: an old config that gives one is accepted, and told what replaced it."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """was: its default, which an old config.json has whether or not it was given. now: what replaced it, for
    the message. becomes: (value, the fields beside it) -> fields that now say the same; none where nothing
    can be said any more.
    """

    was: Any
    now: str
    becomes: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda value, fields: {}


def _bound(name: str, end: int) -> Removed:
    """A bound of data.filter that has become one of a pair. end: 0 for the least, 1 for the most."""

    def pair(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The pair with one end replaced."""
        both = list(fields.get(name, (0.0, 0.0)))
        both[end] = value
        return {name: tuple(both)}

    return Removed(0.0, f"data.filter.{name} has the least and the most", pair)


def _factor(part: str) -> Removed:
    """A factor of adapt on the learning rate of a part."""

    def listed(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The factor as an item of adapt.lr_factors."""
        return {"lr_factors": (*fields.get("lr_factors", ()), f"{part}={value}")}

    return Removed(1.0, f'adapt.lr_factors names it, as "{part}=FACTOR"', listed)


def _kept(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the model that was not recomputed."""
    return {"remat": "none"}


def _kept_of_recomputed(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept of the parts that were recomputed."""
    if fields.get("remat") == "none":
        return {}
    return {"remat": "selective" if value == "products" else value}


_REMAT = "compute.remat says it of the whole model, and by default keeps what fits (docs/decisions/remat.md)"
_SIZES = "it follows from compute.dtype and the device (jaxthd/config/compute.py), and affects speed only"
_ONE_SIZE = "a run has one size of buffers, which jaxthd plan recommends for its data"
REMOVED: dict[str, dict[str, Removed]] = {
    "data": {
        "prefetch": Removed(2, "two batches are made ahead where there are data.workers, else none"),
        "rungs": Removed((), _ONE_SIZE),
        "most_rungs": Removed(4, _ONE_SIZE),
    },
    "data.filter": {
        f"{end}_{name}": _bound(name, number)
        for name in ("seconds", "tokens_per_second", "characters_per_second")
        for number, end in enumerate(("min", "max"))
    },
    "adapt": {f"{part}_lr_factor": _factor(part) for part in ("encoder", "adapter", "llm")},
    "compute": {
        "fp8_experts": Removed(
            False,
            'compute.fp8 names them, as "experts"',
            lambda value, fields: {"fp8": (*fields.get("fp8", ()), *["experts"] * bool(value))},
        ),
        "attention_block": Removed(128, _SIZES),
        "loss_block": Removed(256, _SIZES),
        "vocab_block": Removed(8192, _SIZES),
        "expert_block": Removed(32, _SIZES),
        "expert_products": Removed("auto", _SIZES),
        "expert_capacity": Removed(1.5, _SIZES),
        "scan_chunk": Removed(64, _SIZES),
        "subsampling_frames": Removed(0, _SIZES),
        "expert_parallel": Removed(
            True, "experts are sharded over the data and context ranks that divide their number"
        ),
        "mamba_chunk": Removed(64, _SIZES),
        "remat_encoder": Removed(True, _REMAT, _kept),
        "remat_llm": Removed(True, _REMAT, _kept),
        "remat_keep": Removed("nothing", _REMAT, _kept_of_recomputed),
        "remat_stage": Removed(
            "auto", _REMAT, lambda value, fields: {"remat": "none"} if value == "nothing" else {}
        ),
    },
    "model.llm": {
        "rope_theta": Removed(
            0.0, "model.llm.rope has it as theta", lambda value, fields: {"rope": {"theta": value}}
        ),
    },
    "train": {
        "tensorboard": Removed(
            True,
            "train.trackers names it",
            lambda value, fields: {"trackers": ("tensorboard",) if value else ()},
        ),
        "max_skipped_steps": Removed(10, "a run stops after 10 steps in a row that are not finite"),
        "draw_last_batch": Removed(
            False, "docs/packing.md has pictures of buffers, by scripts/draw_guide.py"
        ),
    },
}
"""Group of settings -> name -> what became of it."""

_BOUND = "a step on an H100 was bound to take twice as long as with pallas (docs/decisions/attention.md)"
REPLACED: dict[tuple[str, str, Any], tuple[Any, str]] = {
    ("compute", "context_layout", "document"): (
        "buffer",
        "the loss is the same, to rounding (docs/decisions/context_layouts.md)",
    ),
    ("compute", "attention_backend", "batched"): ("auto", _BOUND),
    ("compute", "encoder_attention", "banded"): ("auto", _BOUND),
}
"""(group of settings, name, a value that it had once) -> (the value that takes its place, why)."""


def renewed(group: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the fields of a group without the removed ones, in whose place stand those that replaced them, and
    without removed values; a note on each that had another value than its old default). group: its path in
    Config, such as "compute"."""
    removed, notes = REMOVED.get(group, {}), []
    present = {name: value for name, value in fields.items() if name not in removed}
    for (where, name, old_value), (now, why) in REPLACED.items():
        if where == group and present.get(name) == old_value:
            present[name] = now
            notes.append(f"{group}.{name} {old_value!r} is no choice any more, {now!r} is: {why}")
    for name, old in removed.items():
        value = fields.get(name, old.was)
        if (tuple(value) if isinstance(value, list) else value) != old.was:  # JSON has no tuples
            present |= old.becomes(value, present)
            notes.append(f"{group}.{name} {value!r} is no setting any more: {old.now}")
    return present, notes


def renewed_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted paths, such as "compute.fp8", in which removed ones are replaced."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        group, dot, name = path.rpartition(".")
        groups.setdefault(group + dot, {})[name] = value
    each = ((group, renewed(group.removesuffix("."), own)[0]) for group, own in groups.items())
    return {group + name: value for group, present in each for name, value in present.items()}


@cache
def warn_once(file: str, note: str) -> None:
    """Prints the note of `renewed` on stderr. A command may read a file several times: it says so once."""
    print(f"warning: {file}: {note}", file=sys.stderr)
