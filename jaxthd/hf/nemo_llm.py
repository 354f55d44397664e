"""The LLM in the folders of NeMo's SALM and SALMAutomodel: where its settings lie, how its tensors are named.

SALM has the LLM as transformers does in memory, and its embedding outside of it. SALMAutomodel has NeMo
Automodel's, whose experts are packed. LoRA is peft's in one, Automodel's own in the other.

Source: NeMo 3.0 (collections/speechlm2: models/salm.py, models/salm_automodel.py, parts/hf_hub.py) and NeMo
Automodel 0.7 (components/models, components/moe).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import LLMConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor
from jaxthd.hf.decoder import Decoder
from jaxthd.hf.fields import Fields, read_fields, required
from jaxthd.hf.lora import with_lora
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.packed_experts import PACKED, ExpertForm, packed
from jaxthd.hf.qwen3 import QWEN3, QWEN3_MOE

DECODERS: tuple[Decoder, ...] = (QWEN3, QWEN3_MOE, NEMOTRON_H)
"""The LLMs that are read and written."""
BACKBONE = "llm_backbone"
"""The folder with the LLM's config.json in a checkpoint's folder, which NeMo reads before all else."""
SETTINGS = ("llm_config", "text_config")
"""Fields of config.json that may hold the LLM's settings."""

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
}
_NEMOTRON_3_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
_DIFFERING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rope_theta")
PUBLISHED: dict[str, dict[str, Any]] = {
    **{
        name: _QWEN3 | {"tie_word_embeddings": tied} | dict(zip(_DIFFERING, values, strict=True))
        for name, tied, values in (
            ("Qwen/Qwen3-0.6B", True, (1024, 28, 16, 3072, 1e6)),
            ("Qwen/Qwen3-1.7B", True, (2048, 28, 16, 6144, 1e6)),
            ("Qwen/Qwen3-4B", True, (2560, 36, 32, 9728, 1e6)),
            ("Qwen/Qwen3-4B-Instruct-2507", True, (2560, 36, 32, 9728, 5e6)),
            ("Qwen/Qwen3-8B", False, (4096, 36, 32, 12288, 1e6)),
            ("Qwen/Qwen3-14B", False, (5120, 40, 40, 17408, 1e6)),
            ("Qwen/Qwen3-32B", False, (5120, 64, 64, 25600, 1e6)),
        )
    },
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON_3_NANO,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": _NEMOTRON_3_NANO,
}
"""Names of LLMs, which NeMo looks up on the Hugging Face Hub -> their settings."""

_LAYER = re.compile(r"\.layers\.\d+\.")
_OF_AUTOMODEL = (
    (r"^backbone\.embeddings\.", "model.embed_tokens."),
    (r"^backbone\.norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
)
"""Beginnings of transformers' names -> Automodel's."""
_IN_PEFT = "base_model.model."
"""Stands before the names of a model that peft has wrapped."""
_HELD = re.compile(r"(\.mixer\.)(?=(A_log|D|dt_bias)$)")


class Naming(NamedTuple):
    """The names and forms of the LLM's tensors in a folder.

    is_automodel: whether they are SALMAutomodel's. embedding: the embedding's name. holder: what stands
    before A_log, D and dt_bias of a Mamba2 mixer. experts: how they are stored.
    """

    is_automodel: bool
    embedding: str
    holder: str = ""
    experts: ExpertForm = "each"

    @classmethod
    def of_folder(cls, names: Collection[str]) -> "Naming":
        """The naming of a folder with these tensors."""
        found = next((x for x in _EMBEDDINGS if x in names), _EMBEDDINGS[0])
        experts: ExpertForm = "each"
        for form, (inward, _) in PACKED.items():
            if any(f".experts.{inward}" in name for name in names):
                experts = form
        holder = "_fp32_params." if any("._fp32_params." in name for name in names) else ""
        return cls(found != _EMBEDDINGS[0], found, holder, experts)

    @classmethod
    def of_model(cls, decoder: Decoder, llm: LLMConfig) -> "Naming":
        """The naming in which a new folder is written: SALMAutomodel's for what SALM does not take."""
        if decoder is NEMOTRON_H:
            return cls(True, _EMBEDDINGS[1], "_fp32_params.", "columns")
        return cls(False, _EMBEDDINGS[0], experts="rows" if "E" in llm.letters else "each")


_EMBEDDINGS = ("embed_tokens.weight", "llm.model.embed_tokens.weight", "llm.lm_head.weight")
"""SALM's name of the embedding; SALMAutomodel's; and its where the head is tied, which alone is stored."""


def llm_settings(fields: Fields, folder: Path) -> Fields:
    """The LLM's config.json: in BACKBONE, in one of SETTINGS, in the folder that pretrained_llm names, or of
    the published LLM of that name.

    Raises UserError where it is in none of them.
    """
    if (folder / BACKBONE / "config.json").is_file():
        return read_fields(folder / BACKBONE)
    for name in SETTINGS:
        if fields.get(name):
            settings: Fields = fields[name]
            return settings
    named = str(required(fields, "pretrained_llm"))
    for path in named_folders(named, folder):
        if (path / "config.json").is_file():
            return read_fields(path)
    if named in PUBLISHED:
        return PUBLISHED[named]
    raise UserError(
        f"{folder / 'config.json'} has pretrained_llm {named!r}, where there is no config.json; expected a "
        f"folder with one, or one of {', '.join(PUBLISHED)}: put the LLM's config.json into "
        f"{folder / BACKBONE}"
    )


def named_folders(named: str, folder: Path) -> tuple[Path, ...]:
    """The folders that a path in the config.json of `folder` may mean."""
    return (Path(named).expanduser(), folder / named) if named else ()


def decoder_of(settings: Fields) -> Decoder:
    """The family of an LLM's config.json. Raises UserError for one that is not read here."""
    kinds = {settings.get("model_type"), *(settings.get("architectures") or ())}
    for decoder in DECODERS:
        if kinds & {*decoder.model_types, decoder.title}:
            return decoder
    raise UserError(
        f"the LLM's config.json has model_type {settings.get('model_type')!r}; expected one of "
        f"{', '.join(x for decoder in DECODERS for x in decoder.model_types)} in NeMo's folders: choose "
        "another checkpoint"
    )


def decoder_for(llm: LLMConfig) -> Decoder:
    """The family that holds this LLM. Raises the last one's UserError where none does."""
    for decoder in DECODERS[:-1]:
        try:
            decoder.write(llm)
        except UserError:
            continue
        return decoder
    DECODERS[-1].write(llm)
    return DECODERS[-1]


def llm_tensors(
    llm: LLMConfig, settings: Fields, shapes: Mapping[str, Shape], naming: Naming, *, has_lora: bool
) -> Iterator[Tensor]:
    """The LLM's tensors by NeMo's names. settings: its config.json. has_lora: whether its low-rank matrices
    are there too."""
    found = decoder_of(settings).tensors(llm, settings, shapes)
    embedding = next(found)  # the first is the embedding
    yield embedding._replace(name=naming.embedding)
    found, theirs = packed(found, lambda _: naming.experts), "llm."
    if has_lora and naming.is_automodel:
        found = with_lora(found, shapes)
    elif has_lora:
        found, theirs = with_lora(found, shapes, base=".base_layer", low_rank=".default"), f"llm.{_IN_PEFT}"
    for tensor in found:
        name = tensor.name
        if naming.is_automodel:
            for pattern, new in _OF_AUTOMODEL:
                name = re.sub(pattern, new, name)
            name = _HELD.sub(rf"\1{naming.holder}", name)
        yield tensor._replace(name=theirs + name)
