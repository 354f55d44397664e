"""The group `model` of a NeMo experiment: the checkpoints of the model, and the parameters that train."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import ModelConfig
from jaxthd.data.text.special_tokens import read_special_tokens
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.nemo_encoder import encoder_config
from jaxthd.hf.nemo_perception import CONNECTORS, IDENTITY, front_end_of, reading
from jaxthd.hf.parakeet import own_encoder
from jaxthd.models.front_ends import FastConformer
from jaxthd.nemo.keys import row_of
from jaxthd.nemo.parameters import LLM, Names, frozen, lora_targets, names_of, usual_names
from jaxthd.nemo.translation import Code, Translation

EVERYTHING = "*"


class ModelText(NamedTuple):
    """The parts of the config file that are about the model.

    llm, encoder: paths of the checkpoints; encoder "": a new one. front_end: its settings that no checkpoint
    has. reading: the expression for the encoder, given as `encoder`. mtp: that for the LLM, given as `llm`.
    """

    llm: str
    encoder: str
    front_end: FastConformer
    reading: str
    mtp: str


def translate_model(found: Translation) -> ModelText:
    """The settings of the model, and of what trains. Raises UserError where no LLM is named."""
    llm = _checkpoint(found, "model.pretrained_llm")
    has_weights = found.get("model.pretrained_weights", True)
    perception = _with_connector(found, found.get("model.perception") or {})
    encoder = _checkpoint(found, "model.pretrained_asr") if has_weights else ""
    front_end = _front_end(found, perception, encoder)
    text = ModelText(llm, encoder, front_end, _reading(perception, encoder), _mtp(found))
    if encoder and perception["modality_adapter"].get("include_final_output") is False:
        why = "of a checkpoint with blocks behind the last one that is read nothing is read: cut it first"
        found.note("model.perception.modality_adapter.include_final_output", why)
    sources: list[str] = [Code("LLM")] if has_weights else []
    if encoder:
        sources.append(Code("ENCODER"))
    if start := found.get("model.init_from_checkpoint"):
        sources.append(found.path(start))
        if Path(start).suffix in (".ckpt", ".pt") or (Path(start) / ".metadata").exists():
            why = "it is no Hugging Face folder: let NeMo's to_hf.py write one, and name that"
            found.note("model.init_from_checkpoint", why)
    found.set("train.init_from", tuple(sources), "model.pretrained_weights", "model.init_from_checkpoint")
    _text(found)
    names = _names(found, text, perception)
    _trained(found, names)
    _spec_augment(found, perception.get("spec_augment") or {})
    if weight := found.get("model.aux_loss_coeff"):
        found.set("train.aux_loss", float(weight), "model.aux_loss_coeff")
    return text


def _checkpoint(found: Translation, key: str) -> str:
    """The path of a checkpoint, as the config file has it. A folder with one .nemo archive stands for that.

    A name that is no path here is that of a folder into which it is to be downloaded.
    """
    name = found.get(key)
    if not name:
        raise UserError(
            f"{key} is missing; expected the folder of a checkpoint: give {key}=FOLDER behind the file"
        )
    path = Path(name).expanduser()
    archives = sorted(path.glob("*.nemo")) if path.is_dir() and not (path / "config.json").is_file() else []
    if len(archives) == 1:
        path = archives[0]
    if not path.exists():
        is_encoder = key.endswith("asr")
        if is_encoder and path.suffix != ".nemo":
            path = path / f"{path.name}.nemo"
        why = f"there is no {path}, and nothing is downloaded: hf download {name} --local-dir {name}"
        found.note(key, f"{why}, then run import-config again")
    return found.path(path)


def _with_connector(found: Translation, perception: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group `perception` with a connector that jaxthd has."""
    adapter = perception.get("modality_adapter") or {}
    name = str(adapter.get("_target_", "")).rpartition(".")[2]
    if name in CONNECTORS and name != IDENTITY:
        return perception
    if name not in ("", IDENTITY):
        key = "model.perception.modality_adapter._target_"
        found.lose(key, name, "a linear layer, randomly initialised, takes the place of this adapter")
    return {**perception, "modality_adapter": {"_target_": IDENTITY, "d_model": adapter.get("d_model")}}


def _padding(found: Translation, encoder: str) -> Mapping[str, Any]:
    """The preprocessor's settings, and those of the encoder's checkpoint where that is on this disk."""
    path, own = found.folder / encoder, {"pad_to": 0}
    if encoder and path.exists():
        own = open_checkpoint(path).fields.get("preprocessor") or own
    return {**(own if encoder else {}), **(found.get("model.perception.preprocessor") or {})}


def _reading(perception: Mapping[str, Any], encoder: str) -> str:
    """The expression for the encoder that is read, given as `encoder`."""
    adapter = perception["modality_adapter"]
    if not encoder or adapter["_target_"] == IDENTITY:
        return "encoder"
    last = "" if adapter.get("include_final_output", True) else ", and_last=False"
    return f"encoder.reading({adapter['target_layer_ids']}{last})"


def _front_end(found: Translation, perception: Mapping[str, Any], encoder: str) -> FastConformer:
    """The settings of a new encoder, or the usual ones with what no checkpoint says of one that is read."""
    key = "model.encoder_chunk_size_seconds"
    seconds, made = found.get(key), front_end_of(perception, _padding(found, encoder))
    given = perception.get("encoder") or {}
    if encoder:
        for name, value in given.items():
            place = f"model.perception.encoder.{name}"
            row = row_of(place)
            if name != "_target_" and row and not row.is_off(place, value):
                found.lose(place, value, "the encoder has the settings of its checkpoint")
    elif given:
        made = reading(perception, encoder_config(perception, ModelConfig(encoder=made), "model.perception"))
    else:
        raise UserError(
            "model.pretrained_weights is false and model.perception.encoder is missing; expected settings of "
            "a new encoder: give them, or model.pretrained_weights=true"
        )
    if seconds is None:
        usual = f"here those over {made.chunk_seconds:g} s are encoded in chunks"
        found.note(key, f"NeMo without it encodes recordings whole; {usual}")
        return made
    return replace(made, chunk_seconds=float(seconds))


def _mtp(found: Translation) -> str:
    """The LLM's multi-token prediction: none unless it is enabled; the checkpoint's own, or a new one."""
    mtp = found.get("model.mtp") or {}
    if not mtp.get("enabled"):
        return "llm.without_mtp()"
    found.set("train.mtp_loss", float(mtp.get("loss_scaling_factor", 0.1)), "model.mtp.loss_scaling_factor")
    new = (
        f"replace(llm, mtp_pattern={mtp.get('hybrid_override_pattern', '*')!r}, "
        f"mtp_depths={int(mtp.get('num_nextn_predict_layers', 1))}, "
        f"mtp_shared={bool(mtp.get('use_repeated_layer', False))})"
    )
    return new if mtp.get("replace_existing_head") else f"llm if llm.mtp_pattern else {new}"


def _text(found: Translation) -> None:
    """The tokenizer and the form of turns."""
    tokenizer = found.get("model.tokenizer_path")
    value = found.path(tokenizer) if tokenizer else Code("LLM")
    found.set("data.tokenizer", value, "model.tokenizer_path", "model.pretrained_llm")
    form = str(found.get("model.prompt_format", "plain"))
    template = {"plain": "plain", "qwen": "chatml"}.get(form, "chat_template")
    folder = Path(tokenizer or found.get("model.pretrained_llm")).expanduser()
    if template == "chat_template":
        has_template = not folder.is_dir() or read_special_tokens(folder).chat_template is not None
        if has_template:
            found.note(
                "model.prompt_format", f"{form!r}: turns are written by the checkpoint's own chat template"
            )
        else:
            template = "chatml"
            found.note(
                "model.prompt_format", f"{form!r}: {folder} has no chat template; turns are written as chatml"
            )
    found.set("data.template", template, "model.prompt_format")


def _names(found: Translation, text: ModelText, perception: Mapping[str, Any]) -> Names:
    """The names of parameters: of the checkpoints, if they are there, else those that any model may have."""
    is_salm = not found.get("model.use_nemo_automodel", False)
    paths = [found.folder / path for path in (text.llm, text.encoder) if path]
    if not text.encoder or not all(path.exists() for path in paths):
        return usual_names(perception, embedding_outside=is_salm)
    model = model_config(*paths, model=ModelConfig(encoder=text.front_end, adapter_bias=True))
    encoder = reading(perception, own_encoder(model))
    model = replace(model, encoder=encoder, llm=model.llm.without_mtp())
    return names_of(model, open_checkpoint(paths[0]), perception, embedding_outside=is_salm)


def _trained(found: Translation, names: Names) -> None:
    """Sets adapt.freeze, and LoRA."""
    lora, is_automodel = found.get("model.lora"), bool(found.get("model.use_nemo_automodel", False))
    keys = (
        "model.freeze_params",
        "model.prevent_freeze_params",
        "model.train_gate",
        "model.mtp.training_mode",
    )
    chosen = frozen(names, *(found.get(key) or [] for key in keys[:2]))
    for name in chosen.partly:
        found.lose(
            keys[0], found.get(keys[0]), f"some of the layers of {name}; layers are stacked, and it trains"
        )
    for pattern in chosen.unmatched:
        found.note(keys[0], f"{pattern} matches no parameter{_where_instead(names, pattern)}")
    patterns = list(chosen.patterns)
    has_routers = any(".router." in ours for _, ours in names.parameters) if names.is_exact else False
    if is_automodel and has_routers and not found.get("model.train_gate", False):
        patterns += ["*.router.*"] * ("decoder.*" not in patterns and not lora)
    if found.get("model.mtp.enabled") and found.get("model.mtp.training_mode") == "head_only":
        patterns = [EVERYTHING, "!mtp.*"]
    if lora:
        # A part that has LoRA trains nothing else by itself.
        patterns = [x for x in patterns if not x.startswith(LLM)]
        _lora(found, names, lora, is_automodel=is_automodel)
    if patterns:
        found.set("adapt.freeze", tuple(patterns), *keys)


def _where_instead(names: Names, pattern: str) -> str:
    """The reason why a pattern matches nothing with this connector, if it would with another one."""
    inner = ".encoder_multilayer.encoder."
    plain = [theirs.replace(inner, ".encoder.") for theirs, _ in names.parameters if inner in theirs]
    if not any(re.match(pattern, name) for name in plain):
        return ""
    return f": with this connector NeMo's encoder is perception{inner}*, and trains"


def _lora(found: Translation, names: Names, lora: Mapping[str, Any], *, is_automodel: bool) -> None:
    rank = int(lora.get("r", lora.get("dim", 8)))
    alpha = float(lora.get("lora_alpha", lora.get("alpha", 32 if is_automodel else 8)))
    if lora.get("use_rslora"):
        alpha *= rank**0.5
    found.set("adapt.lora_rank", rank, "model.lora.r", "model.lora.dim")
    found.set("adapt.lora_alpha", alpha, "model.lora.lora_alpha", "model.lora.alpha", "model.lora.use_rslora")
    key = "model.lora.target_modules"
    if targets := lora_targets(names, lora, is_automodel=is_automodel):
        found.set(
            "adapt.lora_targets", targets, key, "model.lora.exclude_modules", "model.lora.match_all_linear"
        )
        if not names.is_exact:
            found.note(
                key,
                "the LLM is not here: `jaxthd describe` says whether these patterns are of its projections",
            )
    else:
        found.note(
            key, f"{lora.get('target_modules')!r} matches no projection; here all of the LLM's have LoRA"
        )
    if dropout := lora.get("lora_dropout", lora.get("dropout")):
        found.set("adapt.lora_dropout", float(dropout), "model.lora.lora_dropout", "model.lora.dropout")
    if lora.get("use_dora"):
        found.set("adapt.dora", True, "model.lora.use_dora")


def _spec_augment(found: Translation, masks: Mapping[str, Any]) -> None:
    """Masks over bands and over time; a width in frames has no counterpart."""
    where = "model.perception.spec_augment"
    if count := masks.get("freq_masks"):
        found.set(
            "data.spec_augment.freq", (int(count), int(masks.get("freq_width", 10))), f"{where}.freq_masks"
        )
    if count := masks.get("time_masks"):
        width = masks.get("time_width", 10)
        if not isinstance(width, float):
            found.lose(
                f"{where}.time_width", width, "the widest mask is a share of the recording; here it is 0.05"
            )
            width = 0.05
        found.set("data.spec_augment.time", (int(count), width), f"{where}.time_masks", f"{where}.time_width")
