"""LoRA in the folders of NeMo's SALM (peft's) and SALMAutomodel (Automodel's own)."""

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from jaxthd.config import AdaptConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be

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
_PEFT: Settings = {
    "lora_rank": Field("r", 8),
    "lora_alpha": Field("lora_alpha", 8.0),
    "lora_dropout": Field("lora_dropout", 0.0),
}
_AUTOMODEL: Settings = {
    "lora_rank": Field("dim", 8),
    "lora_alpha": Field("alpha", 32.0),
    "lora_dropout": Field("dropout", 0.0),
}
_TARGETS = {
    "q_proj": "attention.mixer.q",
    "k_proj": "attention.mixer.k",
    "v_proj": "attention.mixer.v",
    "o_proj": "attention.mixer.out",
    "gate_proj": "mlp.mixer.gate",
    "up_proj": "mlp.mixer.up",
    "down_proj": "mlp.mixer.down",
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


def lora_modules(names: Collection[str]) -> frozenset[str]:
    """The projections with LoRA among these tensors, by the ends of their names.

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


def read_lora(lora: Fields, modules: Collection[str], *, is_automodel: bool) -> AdaptConfig:
    """The LoRA of a checkpoint as settings of a run. lora: its settings. modules: of lora_modules.

    Raises UserError for one that is not plain.
    """
    must_be(lora, _PLAIN, "lora")
    targets = tuple(f"decoder.layers.{ours}" for name, ours in _TARGETS.items() if name in modules)
    settings = read_settings(lora, _AUTOMODEL if is_automodel else _PEFT)
    return updated(AdaptConfig(lora_targets=targets), settings)


def scale_of(lora: Fields, *, is_automodel: bool) -> float:
    """The factor on the products of low-rank matrices."""
    settings = read_settings(lora, _AUTOMODEL if is_automodel else _PEFT)
    return float(settings["lora_alpha"] / settings["lora_rank"])


def lora_fields(adapt: AdaptConfig, adapted: frozenset[str], *, is_automodel: bool) -> dict[str, Any]:
    """The field "lora" of an export. adapted: our projections with LoRA.

    Raises UserError for DoRA, and for projections that the format cannot name.
    """
    targets = {f"decoder.layers.{ours}": name for name, ours in _TARGETS.items()}
    if adapt.dora or not adapted <= targets.keys():
        others = ", ".join(sorted(adapted - targets.keys())) or "DoRA"
        raise UserError(
            f"the run has LoRA on {others}; the salm format holds plain LoRA on projections of the LLM "
            "alone: choose --format parts, for which LoRA is merged"
        )
    modules = [name for ours, name in targets.items() if ours in adapted]
    if is_automodel:  # its names are whole, or patterns
        modules = [f"*.{name}" if "." in name else name for name in modules]
        return {**write_settings(adapt, _AUTOMODEL), "target_modules": modules}
    return {"task_type": "CAUSAL_LM", **write_settings(adapt, _PEFT), "target_modules": modules}
