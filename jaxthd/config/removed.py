"""Settings that there were: an old config that gives one is accepted, and told what replaced it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """was: its default, which an old config.json has whether or not it was given. now: what replaced it, for
    the message. becomes: (value, the fields beside it) -> fields that now say the same; none where nothing
    can be said any more.
    """

    was: Any
    now: str
    becomes: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda value, fields: {}


_SIZES = "it follows from compute.dtype and the device (jaxthd/config/compute.py), and affects speed only"
REMOVED: dict[str, dict[str, Removed]] = {
    "compute": {
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
    },
}
"""Group of settings -> name -> what became of it."""


def renewed(group: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the fields of a group without the removed ones, in whose place stand those that replaced them; a note
    on each that had another value than its old default). group: its path in Config, such as "compute"."""
    removed, notes = REMOVED.get(group, {}), []
    present = {name: value for name, value in fields.items() if name not in removed}
    for name in fields.keys() & removed.keys():
        value, old = fields[name], removed[name]
        if value != old.was:
            present |= old.becomes(value, present)
            notes.append(f"{group}.{name} {value!r} is no setting any more: {old.now}")
    return present, sorted(notes)
