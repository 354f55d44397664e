"""Settings that there were: an old config that gives one is accepted, and told what replaced it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, is_dataclass, make_dataclass
from functools import cache
from typing import Any, NamedTuple

from jaxthd.config.block import usual_blocks
from jaxthd.config.model import LLMConfig
from jaxthd.config.rope import RopeConfig
from jaxthd.config.values import with_value
from jaxthd.errors import UserError


class Removed(NamedTuple):
    """was: its default, which an old config.json has whether or not it was given. now: what replaced it, for
    the message; or makes it from the fields that replaced it. becomes: (value, the fields beside it)
    -> fields that now say the same; none where nothing can be said any more.
    """

    was: Any
    now: str | Callable[[Mapping[str, Any]], str]
    becomes: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda value, fields: {}
    is_moved: bool = False


def _half(name: str, end: int, now: str, defaults: tuple[Any, Any] = (0.0, 0.0)) -> Removed:
    """A setting that has become one of a pair, the first (end 0) or the second (1) of the field `name`."""

    def pair(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The pair with this half."""
        both = list(fields.get(name, defaults))
        both[end] = value
        return {name: tuple(both)}

    return Removed(defaults[end], now, pair)


def _tars(name: str, was: Any, default: Any) -> Removed:
    """The tar files of a setting's manifests, which are now named with them. default: of the manifests."""

    def joined(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The manifests, each with its tar files. Raises UserError where their numbers differ."""
        given = fields.get(name, default)
        manifests, tars = ((x,) if isinstance(x, str) else tuple(x) for x in (given, value))
        if not any(tars):
            return {}
        if len(tars) != len(manifests):
            raise UserError(
                f"{len(tars)} sets of tar files are given for {len(manifests)} manifests in data.{name}; "
                f'expected one for each ("" for plain files): write data.{name} as MANIFEST::TARS'
            )
        both = tuple(f"{path}::{tar}" if tar else path for path, tar in zip(manifests, tars, strict=True))
        return {name: both[0] if isinstance(given, str) else both}

    return Removed(was, f"data.{name} names them, as MANIFEST::TARS", joined)


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


def _share(change: str, was: float) -> Removed:
    """The share of the recordings that data.augment changes in one way."""

    def listed(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The shares with this one."""
        return {"shares": (*fields.get("shares", ()), f"{change}={value}")}

    return Removed(was, f'data.augment.shares names it, as "{change}=SHARE"', listed)


def _advantages(was: bool, become: Mapping[str, str]) -> Removed:
    """One of two switches of advantages, which one setting names. become: its values with the switch."""

    def renamed(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The way of advantages that has this switch too."""
        return {"advantages": become[fields.get("advantages", "normalised")]}

    return Removed(was, "rollout.advantages names both", renamed)


def _beta(name: str, was: float) -> Removed:
    """A decay of AdamW's moments, which the optimizers that have them take as an option."""

    def option(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's options with this one; no change for an optimizer without it."""
        if fields.get("optimizer", "adamw") not in ("adamw", "muon"):
            return {}
        return {"optimizer_options": (*fields.get("optimizer_options", ()), f"{name}={value}")}

    return Removed(was, f'train.optimizer_options has it, as "{name}={was}"', option)


def _of_blocks(was: Any, letters: str, name: str) -> Removed:
    """A setting that each kind of block of these letters now has, by the name `name`.

    A dot in a name parts a group of settings and one of these. Blocks that the pattern does not have did not
    read the setting: nothing becomes of it there.
    """

    def moved(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The blocks with this setting."""
        if any(isinstance(block, Mapping) for block in fields.get("blocks", {}).values()):
            return {}  # of a run that has settings of blocks: the old default beside them said nothing
        known, usual = ("blocks", "pattern", "mtp_pattern"), usual_blocks()
        model = LLMConfig(**{x: fields[x] for x in known if x in fields})
        stacks = {usual[letter].stack for letter in letters}
        blocks = {
            letter: with_value(block, name, _plain(value))
            for letter, block in model.blocks.items()
            if block.stack in stacks
        }
        return {"blocks": {**model.blocks, **blocks}}

    def now(fields: Mapping[str, Any]) -> str:
        """The new names in a model with these blocks."""
        present = [x for x in letters if x in fields.get("blocks", letters)]
        used = [f"model.llm.blocks.{x}.{name}".rstrip(".") for x in present]
        return f"is {' and '.join(used)}" if used else "had no effect"

    return Removed(was, now, moved, is_moved=True)


_REMAT = "compute.remat says it of the whole model, and by default keeps what fits (docs/decisions/remat.md)"
_SIZES = "it follows from compute.dtype and the device (jaxthd/config/compute.py), and affects speed only"
_NO_GRAPHS = "xla_gpu_enable_command_buffer="
_ONE_SIZE = "a run has one size of buffers, which jaxthd plan recommends for its data"
_LATENT_ATTENTION = {
    "q_lora_rank": 0,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "norm_eps": 1e-6,
}
_DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 32, "conv": 4}
OLD_GROUPS = {
    name: make_dataclass(name, [(x, type(y), field(default=y)) for x, y in fields.items()], frozen=True)
    for name, fields in (("DeltaConfig", _DELTA), ("LatentAttentionConfig", _LATENT_ATTENTION))
}
"""Groups of settings that there were, as old config files make them."""
REMOVED: dict[str, dict[str, Removed]] = {
    "data": {
        "prefetch": Removed(2, "two batches are made ahead where there are data.workers, else none"),
        "tarred_audio": _tars("manifest", (), ("synthetic",)),
        "validation_tarred_audio": _tars("validation_manifest", "", "synthetic"),
        "rungs": Removed((), _ONE_SIZE),
        "most_rungs": Removed(4, _ONE_SIZE),
    },
    "data.filter": {
        f"{end}_{name}": _half(name, number, f"data.filter.{name} has the least and the most")
        for name in ("seconds", "tokens_per_second", "characters_per_second")
        for number, end in enumerate(("min", "max"))
    },
    "data.spec_augment": {
        f"{dim}_{end}": _half(
            dim, number, f"data.spec_augment.{dim} has the number and the width of masks", defaults
        )
        for dim, defaults in (("freq", (0, 27)), ("time", (0, 0.05)))
        for number, end in enumerate(("masks", "width"))
    },
    "data.augment": {
        "room_probability": _share("room", 0.5),
        "noise_probability": _share("noise", 0.5),
        "low_pass_probability": _share("low_pass", 0.0),
    },
    "adapt": {
        **{f"{part}_lr_factor": _factor(part) for part in ("encoder", "adapter", "llm")},
        "unfreeze": Removed(
            (),
            'adapt.freeze has it, as "!PATTERN"',
            lambda value, fields: {"freeze": (*fields.get("freeze", ()), *(f"!{x}" for x in value))},
        ),
    },
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
        "context_cuts": Removed(
            8, "compute.context_splits has it", lambda value, fields: {"context_splits": value}
        ),
        "remat_encoder": Removed(True, _REMAT, _kept),
        "remat_llm": Removed(True, _REMAT, _kept),
        "remat_keep": Removed("nothing", _REMAT, _kept_of_recomputed),
        **{
            name: Removed(
                "auto",
                "on GPUs it is kernels that are admitted, and XLA's with compute.attention_backend xla",
                lambda value, fields, name=name: {} if value == "banded" else {name: value},  # type: ignore[misc]
            )
            for name in ("encoder_attention", "scan_backend")
        },
        "kernels_unverified": Removed(
            False,
            "a back-end that the measurement refuses is not used; compute.attention_backend xla goes on",
        ),
        "command_buffers": Removed(
            True,
            f'compute.xla_options names what is recorded, as "{_NO_GRAPHS}" for nothing',
            lambda value, fields: {"xla_options": (_NO_GRAPHS, *fields.get("xla_options", ()))},
        ),
        "remat_stage": Removed(
            "auto", _REMAT, lambda value, fields: {"remat": "none"} if value == "nothing" else {}
        ),
    },
    "posttraining": {
        "share_prompts": Removed(
            True,
            "answers share the slots of their prompt; those of this config go on without",
            lambda value, fields: {"share_prompts": value},
        )
    },
    "rollout": {
        "tokens_at_once": Removed(8, "the host looks for ended answers every 8 tokens"),
        "reward_workers": Removed(1, "rewards are computed on half of the machine's cores"),
        "max_failed_rewards": Removed(0.1, "data.max_skipped_share bounds the groups without rewards too"),
        "max_logprob_difference": Removed(0.0, "the bound follows from compute.dtype"),
        "leave_one_out": _advantages(
            False, {"normalised": "leave_one_out_normalised", "centred": "leave_one_out"}
        ),
        "normalise_advantages": _advantages(
            True, {"normalised": "centred", "leave_one_out_normalised": "leave_one_out"}
        ),
    },
    "model.llm": {
        "q_heads": _of_blocks(4, "*WL", "heads"),
        "kv_heads": _of_blocks(2, "*W", "kv_heads"),
        "head_dim": _of_blocks(32, "*W", "head_dim"),
        "rope_theta": _of_blocks(0.0, "*WL", "rope.theta"),
        "rope": _of_blocks(asdict(RopeConfig()), "*WL", "rope"),
        "qk_norm": _of_blocks(False, "*W", "qk_norm"),
        "window": _of_blocks(128, "W", "window"),
        "attention_sinks": _of_blocks(False, "*W", "sinks"),
        "attention_bias": _of_blocks(False, "*W", "bias"),
        "attention_gate": _of_blocks(False, "*W", "gate"),
        "latent_attention": _of_blocks(_LATENT_ATTENTION, "L", ""),
        "ffn_dim": _of_blocks(512, "-", "inner"),
        "ffn_form": _of_blocks("relu2", "-E", "form"),
        "swiglu_alpha": _of_blocks(1.702, "-E", "alpha"),
        "swiglu_limit": _of_blocks(7.0, "-E", "limit"),
        "ffn_bias": _of_blocks(False, "-E", "bias"),
        "mamba_heads": _of_blocks(8, "M", "heads"),
        "mamba_head_dim": _of_blocks(32, "M", "head_dim"),
        "mamba_state": _of_blocks(32, "M", "state"),
        "mamba_groups": _of_blocks(2, "M", "groups"),
        "mamba_conv": _of_blocks(4, "M", "conv"),
        "mamba_dt_limit": _of_blocks((0.0, float("inf")), "M", "dt_limit"),
        "delta": _of_blocks(_DELTA, "D", ""),
        "experts": _of_blocks(8, "E", "experts"),
        "experts_per_token": _of_blocks(2, "E", "experts_per_token"),
        "expert_dim": _of_blocks(128, "E", "inner"),
        "shared_expert_dim": _of_blocks(256, "E", "shared_inner"),
        "shared_expert_gate": _of_blocks(False, "E", "shared_gate"),
        "latent_dim": _of_blocks(0, "E", "latent"),
        "router": _of_blocks("sigmoid", "E", "router.scores"),
        "router_normalised": _of_blocks(True, "E", "router.normalised"),
        "router_bias": _of_blocks(False, "E", "router.bias"),
        "router_groups": _of_blocks(1, "E", "router.groups"),
        "router_groups_per_token": _of_blocks(1, "E", "router.groups_per_token"),
        "router_scale": _of_blocks(1.0, "E", "router.scale"),
    },
    "train": {
        "beta1": _beta("beta1", 0.9),
        "beta2": _beta("beta2", 0.95),
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
    moved = []
    for name, old in removed.items():
        value = fields.get(name, old.was)
        was_default = _plain(value) == _plain(old.was)
        if name not in fields or (was_default and not old.is_moved):
            continue
        present |= old.becomes(value, present)
        if was_default:
            continue
        if old.is_moved:
            moved.append(f"{group}.{name} {old.now(present) if callable(old.now) else old.now}")
        else:
            notes.append(f"{group}.{name} {value!r} is no setting any more: {old.now}")
    return present, [*notes, *([f"settings of another name: {', '.join(moved)}"] if moved else [])]


def _plain(value: Any) -> Any:
    """The value as JSON and config files both write it: a group of settings as a dict, a list as a tuple."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return tuple(value) if isinstance(value, list) else value


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
