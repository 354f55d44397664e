"""The folders of NeMo's SALM and SALMAutomodel: FastConformer, a connector, an LLM with or without LoRA.

config.json is NeMo's settings of the model. The LLM's settings lie beside it or elsewhere (nemo_llm.py); an
export has them in all places where NeMo and its vLLM plugin look.

Source: NeMo 3.0, collections/speechlm2 (models/salm.py, models/salm_automodel.py, parts/hf_hub.py,
vllm/salm/config.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor
from jaxthd.hf.decoder import token_fields
from jaxthd.hf.family import ADAPTER, ENCODER, LLM, Family, Settings, TokenIds
from jaxthd.hf.fields import Fields
from jaxthd.hf.generation_config import one_or_all
from jaxthd.hf.lora import AUTOMODEL, MERGED, PEFT, lora_fields, read_lora, scale_of, stored_modules
from jaxthd.hf.nemo_llm import (
    PUBLISHED,
    Naming,
    decoder_for,
    decoder_of,
    llm_settings,
    llm_tensors,
    named_folders,
)
from jaxthd.hf.nemo_perception import (
    are_rounded,
    perception_fields,
    perception_tensors,
    read_perception,
    unread_perception,
)
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.reader import Reader, merged_lora
from jaxthd.hf.salm_files import AUDIO_TAG, complete_folder

KIND = "nemo_salm"
"""Stands for the model_type: older folders have none, and newer ones that of another model of NeMo too."""

CHATML = {"template": "chatml", "prompt": "Transcribe the following: {audio}"}
"""The turns of SALM's prompt format "qwen", with the prompt of Canary-Qwen. Others have a chat template."""


def is_salm(fields: Fields) -> bool:
    """Whether a config.json is NeMo's for a SALM."""
    return {"perception", "pretrained_llm"} <= fields.keys()


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The family of a folder with its own names of tensors, and its settings with the LLM's."""
    settings = llm_settings(fields, reader.path)
    decoder_of(settings)
    naming, modules = Naming.of_folder(reader.shapes), stored_modules(reader.shapes)
    lora = fields.get("lora") or {}
    if modules & {*MERGED}:
        scale = scale_of(lora, _lora_form(naming))
        reader, modules = merged_lora(reader, scale, only=MERGED), modules - {*MERGED}
    fields = {
        "use_nemo_automodel": naming.is_automodel,
        **fields,
        "llm_config": settings,
        "lora": lora if modules else None,
    }
    bands = (fields["perception"].get("preprocessor") or {}).get("features")
    rounded = isinstance(bands, int) and are_rounded(reader, bands)
    changed = replace(
        family,
        data=lambda fields: CHATML if fields.get("prompt_format", "qwen") == "qwen" else {},
        configure=partial(_configure, bfloat16_filters=rounded),
        tensors=partial(_tensors, naming=naming),
        ignored=(*family.ignored, *unread_perception(fields["perception"])),
        lora=partial(_lora, modules=modules, naming=naming),
        lora_fields=lambda model, adapt, adapted: lora_fields(adapt, adapted, _lora_form(naming)),
    )
    return changed, {name: x for name, x in fields.items() if name != "lora" or x}, reader


def _configure(fields: Fields, model: ModelConfig, *, bfloat16_filters: bool = False) -> ModelConfig:
    settings = fields["llm_config"]
    llm = decoder_of(settings).read(settings, model.llm, "the LLM's config.json")
    model = replace(model, llm=llm.without_mtp())
    if model.encoder is None:
        return model
    return read_perception(fields, model, bfloat16_filters=bfloat16_filters)


def _lora(fields: Fields, *, modules: frozenset[str], naming: Naming) -> AdaptConfig | None:
    lora = fields.get("lora")
    return read_lora(lora, modules, _lora_form(naming)) if lora else None


def _lora_form(naming: Naming) -> Settings:
    return AUTOMODEL if naming.is_automodel else PEFT


def _fields(model: ModelConfig) -> dict[str, Any]:
    decoder = decoder_for(model.llm)
    settings = decoder.write(model.llm)
    is_automodel = Naming.of_model(decoder, model.llm).is_automodel
    chunk = getattr(model.audio_encoder, "chunk_seconds", 0.0)
    return {
        "model_type": "nemo_speechlm",
        "architectures": ["NeMoSpeechLMForConditionalGeneration"],
        "pretrained_llm": _published_name(settings),
        "pretrained_asr": "unknown",
        "pretrained_weights": False,
        "freeze_params": [],
        "prevent_freeze_params": [],
        "prompt_format": "nemotron-nano-v3" if decoder is NEMOTRON_H else "qwen",
        "audio_locator_tag": AUDIO_TAG,
        "use_nemo_automodel": is_automodel,
        "encoder_chunk_size_seconds": chunk or None,
        "perception": perception_fields(model),
        "llm_config": settings,
    }


def _published_name(settings: Fields) -> str:
    """The name of the published LLM with these settings; "" for another."""
    alike = (name for name, x in PUBLISHED.items() if all(settings.get(k) == v for k, v in x.items()))
    return next(alike, "")


def _tensors(
    model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape], naming: Naming | None = None
) -> Iterator[Tensor]:
    if naming is None and model.audio_encoder.features_identity.get("bfloat16_filters"):
        raise UserError(
            "model.encoder.bfloat16_filters is True, and an export has no filters but those of its original; "
            "expected the folder that they came from: give it as --like"
        )
    if model.encoder is not None:
        yield from perception_tensors(model, fields["perception"], shapes)
    settings = fields["llm_config"]
    naming = naming or Naming.of_model(decoder_of(settings), model.llm)
    if naming.is_automodel and model.llm.tied_embedding:
        naming = naming._replace(embedding="llm.lm_head.weight")
    yield from llm_tensors(model.llm, settings, shapes, naming, has_lora=bool(fields.get("lora")))


def _token_fields(tokens: TokenIds) -> dict[str, Any]:
    return {"llm_config": token_fields(tokens), "eos_token_id": one_or_all(tokens.eos_ids)}


def _lora_fields(model: ModelConfig, adapt: AdaptConfig, adapted: frozenset[str]) -> dict[str, Any]:
    return lora_fields(adapt, adapted, _lora_form(Naming.of_model(decoder_for(model.llm), model.llm)))


def _tokenizers(path: Path, fields: Fields) -> Iterable[Path]:
    """The folders that NeMo takes the tokenizer from, where the checkpoint's has none."""
    for name in ("tokenizer_path", "pretrained_llm"):
        yield from named_folders(str(fields.get(name) or ""), path)


FAMILY = Family(
    format="salm",
    title="NeMo's SALM and SALMAutomodel",
    gives="encoder, adapter and LLM, with its LoRA",
    model_types=(KIND,),
    covers=(*LLM, *ENCODER, *ADAPTER),
    configure=_configure,
    fields=_fields,
    tensors=_tensors,
    # A tied head; multi-token prediction; what Transformer Engine keeps.
    ignored=("perception.*", "llm.*lm_head.weight", "*._extra_state"),
    opened=_opened,
    lora_fields=_lora_fields,
    mtp_tensors=lambda fields: ("llm.mtp.",),
    token_fields=_token_fields,
    tokenizers=_tokenizers,
    finish=lambda folder, template, _: complete_folder(folder, template),
    by_default=False,
)
