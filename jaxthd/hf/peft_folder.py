"""The LoRA of a run as a folder that peft writes and opens: for servers with one base and many adapters.

adapter_config.json has the settings, adapter_model.safetensors the low-rank matrices. Their names are those
that the family's projections have in transformers' memory, behind "base_model.model.".
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import ArraySlice, Shape, Tensor
from jaxthd.hf.adapter_files import write_adapter
from jaxthd.hf.family import Family, write_settings
from jaxthd.hf.lora import PEFT, with_lora

Take = Callable[[ArraySlice], Shaped[np.ndarray, "..."]]


def export_adapter(
    model: ModelConfig,
    adapt: AdaptConfig,
    shapes: Mapping[str, Shape],
    take: Take,
    family: Family,
    folder: Path,
    *,
    dtype: str = "float32",
    base: str = "",
) -> list[str]:
    """Writes the folder; returns the names of its tensors.

    shapes, take: as for export, with the low-rank matrices. base: the folder or hub name of the model that
    the adapter is for, which peft opens by itself. Raises UserError where the family has no names for it.
    """
    plain = {name: shape for name, shape in shapes.items() if ".lora." not in name}
    adapted = {name.removesuffix(".lora.a") for name in shapes if name.endswith(".lora.a")}
    if not adapted or adapt.dora:
        has = "DoRA" if adapted else "no LoRA"
        raise UserError(
            f"the run has {has}; expected plain LoRA (adapt.lora_rank above 0, adapt.dora False) for the "
            "peft format: choose another --format, for which it is merged"
        )
    table = list(family.tensors(model, family.fields(model), plain))
    chosen = list(_chosen(table, adapted, family.title))
    low_rank = [x for x in with_lora(chosen, shapes) if ".lora_" in x.name]
    named = [x._replace(name=family.in_memory(x.name)) for x in low_rank]
    modules = [family.in_memory(x.name).removesuffix(".weight") for x in chosen]
    others = {family.in_memory(x.name).removesuffix(".weight") for x in table} - set(modules)
    settings = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        **write_settings(adapt, PEFT),
        "bias": "none",
        "target_modules": _targets(modules, others),
    }
    kinds = {x.name: (x.shape, dtype) for x in named}
    write_adapter(folder, settings, kinds, (x.join([take(part) for part in x.slices]) for x in named))
    return list(kinds)


def _chosen(table: list[Tensor], adapted: set[str], title: str) -> Iterator[Tensor]:
    """The projections with LoRA, as the family has them. Raises UserError where it has not each by itself."""
    left = set(adapted)
    for tensor in table:
        own = {part.name.removesuffix(".w") for part in tensor.slices} & adapted
        if own and not _is_plain(tensor):
            raise UserError(
                f"the run has LoRA on {', '.join(sorted(own))}, which {title} holds otherwise, in "
                f"{tensor.name}; peft adapts whole projections: choose another --format, for which LoRA is "
                "merged"
            )
        if own:
            left -= own
            yield tensor
    if left:
        raise UserError(
            f"the run has LoRA on {', '.join(sorted(left))}, which {title} does not hold; expected it on "
            f"{title}'s projections alone: choose --format parts, for which it is merged"
        )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one matrix of ours as it is, so that its low-rank matrices are too."""
    (first, *others), is_weight = tensor.slices, tensor.name.endswith(".weight")
    return is_weight and not others and tensor.groups == 1 and first.order == (1, 0) and not first.block


def _targets(modules: list[str], others: set[str]) -> list[str]:
    """The names that peft matches modules by: their ends, or where those match others too, the whole
    names."""
    ends = sorted({name.rpartition(".")[2] for name in modules})
    is_clear = not any(name.rpartition(".")[2] in ends for name in others)
    return ends if is_clear else modules
