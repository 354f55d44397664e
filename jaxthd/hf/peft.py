"""LoRA as peft has it: its settings, and low-rank matrices beside a decoder's projections."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxthd.config import AdaptConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, matrix, tensors
from jaxthd.hf.family import Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be

_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "rank_pattern": {},
    "layers_to_transform": [],
    "fan_in_fan_out": False,
}
_TARGETS = {
    "q_proj": "decoder.layers.attention.mixer.q",
    "k_proj": "decoder.layers.attention.mixer.k",
    "v_proj": "decoder.layers.attention.mixer.v",
    "o_proj": "decoder.layers.attention.mixer.out",
    "gate_proj": "decoder.layers.mlp.mixer.gate",
    "up_proj": "decoder.layers.mlp.mixer.up",
    "down_proj": "decoder.layers.mlp.mixer.down",
}
"""The projections' names in peft's target_modules -> our projections."""
_SIZES: Settings = {
    "lora_rank": Field("r", 8),
    "lora_alpha": Field("lora_alpha", 8.0),
    "lora_dropout": Field("lora_dropout", 0.0),
}


def read_lora(fields: Fields) -> AdaptConfig | None:
    """The LoRA of a checkpoint, its field "lora", as settings of a run; None without one.

    Raises UserError for one that is not plain, or not on projections of the LLM alone.
    """
    lora = fields.get("lora")
    if not lora:
        return None
    must_be(lora, _PLAIN, "lora")
    targets = lora.get("target_modules") or ["q_proj", "v_proj"]  # peft's default for Llama and its kin
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(
            f"lora.target_modules is {targets!r}, which peft takes as a regular expression; expected a list "
            f'of names, or "all-linear": list those of {", ".join(_TARGETS)} that it matches'
        )
    chosen = list(_TARGETS) if targets == "all-linear" else list(targets)
    unknown = sorted(set(chosen) - set(_TARGETS))
    if unknown:
        raise UserError(
            f"lora.target_modules has {', '.join(unknown)}; expected some of {', '.join(_TARGETS)}: choose "
            "another checkpoint"
        )
    adapt = AdaptConfig(lora_targets=tuple(ours for name, ours in _TARGETS.items() if name in chosen))
    return updated(adapt, read_settings(lora, _SIZES))


def lora_fields(adapt: AdaptConfig, adapted: frozenset[str]) -> dict[str, Any]:
    """The field "lora" of an export. adapted: our projections with LoRA.

    Raises UserError for DoRA, and for projections that are not the LLM's.
    """
    if adapt.dora or not adapted <= {*_TARGETS.values()}:
        others = ", ".join(sorted(adapted - {*_TARGETS.values()})) or "DoRA"
        raise UserError(
            f"the run has LoRA on {others}; the format holds plain LoRA on projections of the LLM alone: "
            "choose --format parts, for which LoRA is merged"
        )
    return {
        "task_type": "CAUSAL_LM",
        **write_settings(adapt, _SIZES),
        "target_modules": [theirs for theirs, ours in _TARGETS.items() if ours in adapted],
    }


def with_lora(
    found: Iterable[Tensor], shapes: Mapping[str, Shape], *, base: str, low_rank: str
) -> Iterator[Tensor]:
    """The tensors with the low-rank matrices of their projections.

    base: what stands before ".weight" in the name of a projection with LoRA. low_rank: the same of its
    matrices, behind ".lora_A" and ".lora_B".
    """
    for tensor in found:
        module = tensor.slices[0].name.removesuffix(".w") if tensor.slices else ""
        name = tensor.name.removesuffix(".weight")
        if f"{module}.lora.a" in shapes:
            table = {f"{name}.lora_{x.upper()}{low_rank}.weight": matrix(x) for x in "ab"}
            yield from tensors(table, shapes, "", f"{module}.lora.", tensor.slices[0].at)
            name += base
            tensor = tensor._replace(name=f"{name}.weight")
        yield tensor
