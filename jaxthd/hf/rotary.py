"""The rotary embedding's settings in config.json: rope_parameters (transformers 5), or rope_theta,
rope_scaling and partial_rotary_factor (older). Families share these.
"""

from collections.abc import Mapping
from typing import Any, Literal

from jaxthd.config.rope import RopeConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import updated
from jaxthd.hf.fields import Fields

_KINDS: dict[str, Literal["none", "linear", "yarn", "llama3"]] = {
    "default": "none",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
}
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_FACTOR = {"factor": "factor"}
_LONGER = _FACTOR | {"original_max_position_embeddings": "original_positions"}
_SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "yarn": _LONGER
    | {name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")}
    | {name: name for name in ("mscale", "mscale_all_dim")},
    "llama3": _LONGER | {name: name for name in ("low_freq_factor", "high_freq_factor")},
}
"""Settings of each kind of scaling: their names -> those of RopeConfig."""


def rope_config(fields: Fields, *, partial: bool = False) -> RopeConfig:
    """The settings that `fields` give.

    partial: whether the family may rotate a share of each head; others ignore partial_rotary_factor.

    Raises UserError for a scaling that jaxthd does not compute, and for a share in a family without.
    """
    given: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    _refuse_unknown(given, kind)
    settings = {
        ours: given[theirs] for theirs, ours in _SETTINGS[kind].items() if given.get(theirs) is not None
    }
    most = fields.get("max_position_embeddings")
    if "original_max_position_embeddings" in _SETTINGS[kind]:
        settings.setdefault("original_positions", fields.get("original_max_position_embeddings") or most)
        if "factor" not in settings and most and settings["original_positions"]:
            settings["factor"] = most / settings["original_positions"]
    missing = [
        theirs for theirs, ours in _LONGER.items() if theirs in _SETTINGS[kind] and not settings.get(ours)
    ]
    if missing:
        raise UserError(
            f"config.json has a rotary embedding of type {kind!r} without {' and '.join(missing)}; expected "
            "them in rope_parameters or rope_scaling: complete it"
        )
    fraction = given.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if fraction != 1 and not partial:
        raise UserError(
            f"config.json has partial_rotary_factor {fraction}; expected 1 or none, because the library "
            "rotates whole heads in this family: remove it, or choose another checkpoint"
        )
    theta = given.get("rope_theta") or fields.get("rope_theta") or 10000.0
    return updated(RopeConfig(), {**settings, "theta": theta, "fraction": fraction, "scaling": _KINDS[kind]})


def has_axes_alone(name: str, fields: Fields) -> bool:
    """Whether the field is rope_scaling that scales nothing, but has the sections of axes: images, and the
    libraries of Qwen's authors, need them."""
    rope = fields.get(name)
    if name != "rope_scaling" or not isinstance(rope, Mapping):
        return False
    return {*(rope.get(x, "default") for x in ("rope_type", "type"))} <= {"default", "mrope"}


def without_axes(fields: Fields) -> dict[str, Any]:
    """The fields without the settings by which images have positions in several axes: those of audio and text
    are equal, so that what is left is the plain rotary embedding."""
    axes = ("mrope_section", "mrope_interleaved", "interleaved")
    plain = dict(fields)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := fields.get(name), Mapping):
            kept = {name: value for name, value in rope.items() if name not in axes}
            plain[name] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return plain


def _refuse_unknown(given: Mapping[str, Any], kind: str) -> None:
    if kind not in _KINDS:
        raise UserError(
            f"config.json has a rotary embedding of type {kind!r}; expected one of {', '.join(_KINDS)}: "
            "choose another checkpoint"
        )
    known = {*_SHARED, *(name for settings in _SETTINGS.values() for name in settings)}
    unknown = sorted(name for name, value in given.items() if name not in known and value is not None)
    if unknown:
        raise UserError(
            f"config.json has {', '.join(unknown)} among the settings of a rotary embedding of type "
            f"{kind!r}; expected only {', '.join(sorted(known))}: choose another checkpoint"
        )


def must_rotate(rope: RopeConfig, block: str, format: str, *, partial: bool = False) -> None:
    """Raises UserError for a block without rotary embedding; unless `partial`, for one on a part of heads."""
    if not rope.theta or (rope.fraction != 1 and not partial):
        raise UserError(
            f"{block}.rope has theta {rope.theta} and fraction {rope.fraction}; expected a theta"
            f"{'' if partial else ', and fraction 1,'} for {format}: choose another format"
        )


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The fields of an export, for libraries of either age. rope_config reads them back."""
    kind = next(theirs for theirs, ours in _KINDS.items() if ours == rope.scaling)
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    scaling = {
        theirs: getattr(rope, ours)
        for theirs, ours in _SETTINGS[kind].items()
        if ours not in optional or getattr(rope, ours)
    }
    partial = {"partial_rotary_factor": rope.fraction} if rope.fraction != 1 else {}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **scaling, **partial},
        **partial,
    }
