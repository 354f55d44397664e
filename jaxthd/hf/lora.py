"""LoRA in checkpoints, as peft stores it and as NeMo Automodel does: its settings, and low-rank matrices
beside an LLM's projections."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxthd.config import AdaptConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, matrix, tensors
from jaxthd.hf.family import Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be

PEFT: Settings = {
    "lora_rank": Field("r", 8),
    "lora_alpha": Field("lora_alpha", 8.0),
    "lora_dropout": Field("lora_dropout", 0.0),
}
AUTOMODEL: Settings = {
    "lora_rank": Field("dim", 8),
    "lora_alpha": Field("alpha", 32.0),
    "lora_dropout": Field("dropout", 0.0),
}
_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "rank_pattern": {},
    "fan_in_fan_out": False,
    "moe_rank_scaling": False,
}
"""Settings of plain LoRA."""
_DENSE = {
    "q_proj": "attention.mixer.q",
    "k_proj": "attention.mixer.k",
    "v_proj": "attention.mixer.v",
    "o_proj": "attention.mixer.out",
    "gate_proj": "mlp.mixer.gate",
    "up_proj": "mlp.mixer.up",
    "down_proj": "mlp.mixer.down",
}
_TARGETS = {
    **_DENSE,
    "out_proj": "mamba.mixer.out",
    "shared_experts.up_proj": "moe.mixer.shared.up",
    "shared_experts.down_proj": "moe.mixer.shared.down",
    "fc1_latent_proj": "moe.mixer.latent_in",
    "fc2_latent_proj": "moe.mixer.latent_out",
}
"""Projections, by the ends of their names -> ours, below decoder.layers."""
MERGED = ("in_proj",)
"""Projections that are several of ours: their low-rank matrices are merged into them as they are read."""
_MODULE = re.compile(r"llm\..*\.layers\.(\d+)\.(?:self_attn|mlp|mixer)\.(.+?)\.lora_A\.(?:default\.)?weight$")


def target_modules(lora: Fields) -> Collection[str]:
    """The projections that peft's target_modules names, of an LLM of attention and MLPs.

    Raises UserError for a regular expression, for others than the LLM's projections, and for some layers'.
    """
    must_be(lora, {"layers_to_transform": []}, "lora")
    targets = lora.get("target_modules") or ["q_proj", "v_proj"]  # peft's default for Llama and its kin
    if targets == "all-linear":
        return _DENSE
    if isinstance(targets, str):
        raise UserError(
            f"lora.target_modules is {targets!r}, which peft takes as a regular expression; expected a list "
            f'of names, or "all-linear": list those of {", ".join(_DENSE)} that it matches'
        )
    if unknown := sorted({*targets} - {*_DENSE}):
        raise UserError(
            f"lora.target_modules has {', '.join(unknown)}; expected some of {', '.join(_DENSE)}: choose "
            "another checkpoint"
        )
    return targets


def stored_modules(names: Collection[str]) -> frozenset[str]:
    """The projections with LoRA among these tensors of NeMo's, by the ends of their names.

    Raises UserError for others than those of the LLM, and where a projection has LoRA in some layers alone.
    """
    layers = defaultdict(set)
    for name in (name for name in names if ".lora_A." in name):
        match = _MODULE.match(name)
        if match is None or match[2] not in {*_TARGETS, *MERGED}:
            raise UserError(
                f"the checkpoint has LoRA on {name.partition('.lora_A.')[0]}; expected it on "
                f"{', '.join(_TARGETS)} of the LLM's layers: choose another checkpoint"
            )
        layers[match[2]].add(match[1])
    for module, found in layers.items():
        end = rf"\.layers\.(\d+)\.(?:self_attn|mlp|mixer)\.{re.escape(module)}\.(?:base_layer\.)?weight$"
        every = {m[1] for name in names if (m := re.search(end, name))}
        if every != found:
            raise UserError(
                f"the checkpoint has LoRA on {module} of layers {', '.join(sorted(found, key=int))} alone; "
                "expected it in all layers or in none (layers_to_transform: null): choose another checkpoint"
            )
    return frozenset(layers)


def read_lora(lora: Fields, modules: Collection[str], form: Settings = PEFT) -> AdaptConfig:
    """The LoRA of a checkpoint as settings of a run. lora: its settings. modules: of target_modules or
    stored_modules.

    Raises UserError for one that is not plain.
    """
    must_be(lora, _PLAIN, "lora")
    targets = tuple(f"decoder.layers.{ours}" for name, ours in _TARGETS.items() if name in modules)
    return updated(AdaptConfig(lora_targets=targets), read_settings(lora, form))


def scale_of(lora: Fields, form: Settings) -> float:
    """The factor on the products of low-rank matrices."""
    settings = read_settings(lora, form)
    return float(settings["lora_alpha"] / settings["lora_rank"])


def lora_fields(adapt: AdaptConfig, adapted: frozenset[str], form: Settings = PEFT) -> dict[str, Any]:
    """The field "lora" of an export. adapted: our projections with LoRA.

    Raises UserError for DoRA, and for projections that the format cannot name.
    """
    targets = {f"decoder.layers.{ours}": name for name, ours in _TARGETS.items()}
    if adapt.dora or not adapted <= targets.keys():
        others = ", ".join(sorted(adapted - targets.keys())) or "DoRA"
        raise UserError(
            f"the run has LoRA on {others}; the format holds plain LoRA on projections of the LLM alone: "
            "choose --format parts, for which LoRA is merged"
        )
    modules = [name for ours, name in targets.items() if ours in adapted]
    if form is AUTOMODEL:  # its names are whole, or patterns
        modules = [f"*.{name}" if "." in name else name for name in modules]
        return {**write_settings(adapt, form), "target_modules": modules}
    return {"task_type": "CAUSAL_LM", **write_settings(adapt, form), "target_modules": modules}


def with_lora(
    found: Iterable[Tensor], shapes: Mapping[str, Shape], *, base: str = "", low_rank: str = ""
) -> Iterator[Tensor]:
    """The tensors with the low-rank matrices of their projections.

    base: what stands before ".weight" in the name of a projection with LoRA. low_rank: the same of its
    matrices, behind ".lora_A" and ".lora_B".
    """
    for tensor in found:
        module = tensor.slices[0].name.removesuffix(".w") if len(tensor.slices) == 1 else ""
        if f"{module}.lora.a" in shapes:
            name = tensor.name.removesuffix(".weight")
            table = {f"{name}.lora_{x.upper()}{low_rank}.weight": matrix(x) for x in "ab"}
            yield from tensors(table, shapes, "", f"{module}.lora.", tensor.slices[0].at)
            tensor = tensor._replace(name=f"{name}{base}.weight")
        yield tensor
