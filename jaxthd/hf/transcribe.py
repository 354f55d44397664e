"""Nemotron 3.5 Transcribe (transformers: Nemotron3_5TranscribeForConditionalGeneration): a stacked encoder
beside a diarizer, a linear projection, Nemotron-3 with experts, and a head for word times.

config.json is transformers', and the tensors have NeMo's names. Its model_type is that of NeMo's SALM too
(salm.py), whose settings are others. Weights are published in bfloat16; encoder and projection compute in
float32.

Source: transformers 5.24 (models/nemotron3_5_transcribe and nemotron3_diarization, conversion_mapping.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, tensors
from jaxthd.hf.decoder import token_fields
from jaxthd.hf.family import (
    ADAPTER,
    ENCODER,
    LLM,
    Family,
    Field,
    Settings,
    TokenIds,
    read_settings,
    write_settings,
)
from jaxthd.hf.fields import (
    EXTRACTOR,
    PROCESSOR,
    Fields,
    extractor_fields,
    must_be,
    read_object,
    required,
)
from jaxthd.hf.nemo_llm import Naming, llm_tensors
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.reader import Reader
from jaxthd.models.front_ends import Transcribe
from jaxthd.models.front_ends.transcribe.settings import Diarizer, SpeakerCache, WordTimes

KIND = "nemo_speechlm"
_BLOCKS: dict[str, Settings] = {
    "asr_config": {
        "layers": Field("num_hidden_layers", 32),
        "dim": Field("hidden_size", 1280),
        "heads": Field("num_attention_heads", 10),
        "ffn_dim": Field("intermediate_size", 5120),
        "mel_bands": Field("num_mel_bins", 128),
        "stack": Field("subsampling_factor", 8),
    },
    "audio_config": {
        "layers": Field("num_hidden_layers", 31),
        "dim": Field("hidden_size", 512),
        "heads": Field("num_attention_heads", 8),
        "ffn_dim": Field("intermediate_size", 2048),
    },
    "word_timestamp_config": {
        "layers": Field("num_hidden_layers", 2),
        "heads": Field("num_attention_heads", 16),
        "ffn_dim": Field("intermediate_size", 640),
        "classes": Field("vocab_size", 23863),
        "blank": Field("blank_token_id", 23862),
        "upsampling": Field("upsampling_factor", 2),
        "residual_scale": Field("residual_scale", 0.1),
    },
}
"""The settings of each encoder's blocks."""
_FRACTIONS = {"asr_config": 0.5, "audio_config": 1.0, "word_timestamp_config": 0.5}
"""Shares of a head that are rotated, where config.json does not say."""
_CACHE: Settings = {
    "size": Field("speaker_cache_length", 188),
    "silence": Field("speaker_cache_silence_frames_per_speaker", 1),
    "least_probability": Field("prediction_score_threshold", 0.25),
    "latest_boost": Field("latest_frames_score_boost", 0.05),
    "strong_share": Field("strong_boost_rate", 0.75),
    "weak_share": Field("weak_boost_rate", 1.5),
    "positive_share": Field("min_positive_scores_rate", 0.5),
}
_QUEUE: Settings = {"queue": Field("fifo_length", 40), "moved": Field("speaker_cache_update_period", 300)}
_PUBLISHED = Naming(True, "llm.model.embed_tokens.weight", "_fp32_params.", "columns")
"""The LLM's tensors as they are published."""
_EXPECTED = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400, "preemphasis": 0.97}
"""The feature extractor's settings."""
_PROMPT = (
    "Audio transcription. Language: as spoken. Wording: verbatim, including fillers and repetitions. "
    "Formatting: punctuation and capitalization. Output: transcript only."
)
_DATA = {
    "template": "chat_template",
    "prompt": f"{_PROMPT}{{audio}}",
    "template_options": '{"enable_thinking": false}',
}
"""The published model is asked for a transcript so, in the settings of a run."""
_CHUNKS = {"chunk_length": 500, "chunk_left_context": 50, "chunk_right_context": 50}


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The family with the folder's own names of the experts' tensors, and with its extractor's settings."""
    naming, extractor = Naming.of_folder(reader.shapes), extractor_fields(reader.path)
    must_be(extractor, _EXPECTED, f"the feature extractor in {reader.path}")
    rounded = extractor.get("mel_filters_dtype", "float32" if extractor else "bfloat16")
    if rounded not in ("bfloat16", "float32"):
        raise UserError(
            f"the feature extractor in {reader.path} has mel_filters_dtype {rounded!r}; expected bfloat16 or "
            "float32: choose another checkpoint"
        )
    in_bfloat16 = rounded == "bfloat16"
    changed = replace(
        family,
        configure=partial(_configure, bfloat16_filters=in_bfloat16),
        fields=partial(_fields, bfloat16_filters=in_bfloat16),
        tensors=partial(_tensors, naming=naming),
        data=lambda fields: {**_DATA, "prompt": _prompt(reader.path)},
    )
    return changed, fields, reader


def _prompt(folder: Path) -> str:
    """The user's turn for a recording: the processor's text before it."""
    text = read_object(folder / PROCESSOR).get("default_transcription_prompt")
    return f"{text if isinstance(text, str) else _PROMPT}{{audio}}"


def _blocks(fields: Fields, name: str, dim: int = 0) -> dict[str, Any]:
    """The settings of an encoder's blocks. name: of _BLOCKS. dim: where it is not among them."""
    settings, where = read_settings(fields, _BLOCKS[name], name), f"{name} in config.json"
    heads = settings["heads"]
    must_be(fields, {"hidden_act": "gelu", "num_key_value_heads": heads, "attention_dropout": 0.0}, where)
    rope = fields.get("rope_parameters") or {}
    must_be(rope, {"rope_type": "default"}, f"rope_parameters of {where}")
    settings["head_dim"] = fields.get("head_dim") or settings.get("dim", dim) // heads
    settings["rope_theta"] = float(rope.get("rope_theta") or 1e4)
    fraction = rope.get("partial_rotary_factor") or _FRACTIONS[name]
    if name != "audio_config":
        return settings | {"rope_fraction": float(fraction)}
    must_be({"partial_rotary_factor": fraction}, {"partial_rotary_factor": 1.0}, where)
    return settings


def _block_fields(config: Any, name: str, dim: int, fraction: float) -> dict[str, Any]:
    """The inverse of _blocks."""
    head_dim = {} if config.heads * config.head_dim == dim else {"head_dim": config.head_dim}
    return {
        **write_settings(config, _BLOCKS[name]),
        "num_key_value_heads": config.heads,
        "hidden_act": "gelu",
        **head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": fraction,
        },
    }


def _diarizer(fields: Fields, encoder: Mapping[str, Any]) -> Diarizer:
    """The diarizer of diarization_config. encoder: the settings of the encoder beside it."""
    own, head, streaming = (fields.get(f"{name}_config") or {} for name in ("audio", "head", "streaming"))
    blocks, speakers = _blocks(own, "audio_config"), int(head.get("num_speakers") or 8)
    for name, given, default, value in (
        ("audio_config.num_mel_bins", own, 128, encoder["mel_bands"]),
        ("audio_config.subsampling_factor", own, 8, encoder["stack"]),
        ("head_config.subsampling_factor", head, 8, encoder["stack"]),
        ("streaming_config.subsampling_factor", streaming, 8, encoder["stack"]),
        ("head_config.audio_hidden_size", head, 512, blocks["dim"]),
        ("streaming_config.num_speakers", streaming, 8, speakers),
    ):
        found = given.get(name.rpartition(".")[2], default)
        must_be({name: found}, {name: value}, "diarization_config in config.json")
    cache = SpeakerCache(**read_settings(streaming, _CACHE), **read_settings(fields, _QUEUE))
    inner = int(head.get("hidden_size") or 192)
    return Diarizer(**blocks, head_inner=inner, speakers=speakers, cache=cache)


def _configure(fields: Fields, model: ModelConfig, *, bfloat16_filters: bool = True) -> ModelConfig:
    llm = NEMOTRON_H.read(required(fields, "text_config"), model.llm, "text_config").without_mtp()
    if model.encoder is None:
        return replace(model, llm=llm)
    audio = required(fields, "audio_config")
    diarization = audio.get("diarization_config") or {}
    encoder = _blocks(audio.get("asr_config") or {}, "asr_config")
    chunks = {name: x for name, x in diarization.items() if x is not None}
    length, left, right = (int(chunks.get(name, default)) for name, default in _CHUNKS.items())
    found = Transcribe(
        **encoder,
        chunk_outputs=length,
        context_outputs=(left, right),
        bfloat16_filters=bfloat16_filters,
        diarizer=_diarizer(diarization, encoder),
        threshold=float(audio.get("speaker_activity_threshold", 0.5)),
        word_times=_word_times(fields.get("word_timestamp_config"), encoder["dim"]),
    )
    own = model.encoder
    if isinstance(own, Transcribe):
        loss = replace(found.word_times, loss=own.word_times.loss)
        found = replace(found, float32=own.float32, word_times=loss)
    return replace(model, llm=llm, encoder=found, adapter_dim=0, adapter_bias=True)


def _word_times(fields: Fields | None, dim: int) -> WordTimes:
    """The head for word times. dim: of the encoder."""
    if not fields:
        return WordTimes()
    must_be({"hidden_size": 1280, **fields}, {"hidden_size": dim}, "word_timestamp_config in config.json")
    return WordTimes(**_blocks(fields, "word_timestamp_config", dim))


def _fields(model: ModelConfig, *, bfloat16_filters: bool | None = None) -> dict[str, Any]:
    """bfloat16_filters: as the extractor's settings of an original say; None without one."""
    encoder = model.audio_encoder
    if not isinstance(encoder, Transcribe) or model.adapter_dim or not model.adapter_bias:
        raise UserError(
            f"model.encoder is {encoder.title}, model.adapter_dim {model.adapter_dim} and model.adapter_bias "
            f"{model.adapter_bias}; the transcribe format holds a transcribe front end and an adapter of one "
            "linear layer with a bias (0, True): choose another --format"
        )
    for name, has, held in (
        ("qk_norm", encoder.qk_norm, True),
        ("bfloat16_filters", encoder.bfloat16_filters, bfloat16_filters),
    ):
        if held is not None and has != held:
            raise UserError(
                f"model.encoder.{name} is {has}; this folder in the transcribe format holds a front end with "
                f"{held}: choose another --format, or the original of the model for --like"
            )
    text = NEMOTRON_H.write(model.llm)
    del text["architectures"]
    words = encoder.word_times
    return {
        "architectures": ["Nemotron3_5TranscribeForConditionalGeneration"],
        "model_type": KIND,
        "text_config": text,
        "audio_config": _audio_fields(encoder),
        "word_timestamp_config": {
            **_block_fields(words, "word_timestamp_config", encoder.dim, words.rope_fraction),
            "hidden_size": encoder.dim,
        }
        if words.classes
        else None,
    }


def _audio_fields(encoder: Transcribe) -> dict[str, Any]:
    of, stack = encoder.diarizer, {"subsampling_factor": encoder.stack}
    left, right = encoder.context_outputs
    return {
        "model_type": "nemotron3_5_transcribe_audio",
        "asr_config": {
            "model_type": "nemotron3_5_transcribe_asr_audio",
            **_block_fields(encoder, "asr_config", encoder.dim, encoder.rope_fraction),
        },
        "diarization_config": {
            "model_type": "nemotron3_diarization",
            "audio_config": {
                "model_type": "nemotron3_diarization_audio",
                **_block_fields(of, "audio_config", of.dim, 1.0),
                "num_mel_bins": encoder.mel_bands,
                **stack,
            },
            "head_config": {
                "hidden_size": of.head_inner,
                "num_speakers": of.speakers,
                "audio_hidden_size": of.dim,
                **stack,
            },
            "streaming_config": {**write_settings(of.cache, _CACHE), "num_speakers": of.speakers, **stack},
            **dict(zip(_CHUNKS, (encoder.chunk_outputs, left, right), strict=True)),
            **write_settings(of.cache, _QUEUE),
        },
        "speaker_activity_threshold": encoder.threshold,
    }


def _tensors(
    model: ModelConfig,
    fields: Fields,
    shapes: Mapping[str, Shape],
    naming: Naming = _PUBLISHED,
) -> Iterator[Tensor]:
    if model.encoder is not None:
        yield from tensors(model.encoder.tensors(), shapes, ours="encoder.")
        yield from tensors({"perception.proj": "out"}, shapes, ours="adapter.")
    settings = {**fields["text_config"], "model_type": "nemotron_h"}
    yield from llm_tensors(model.llm, settings, shapes, naming, has_lora=False)


def _token_fields(tokens: TokenIds) -> dict[str, Any]:
    return {"text_config": token_fields(tokens), "audio_token_id": tokens.audio_id}


def _finish(folder: Path, template: str | None, model: ModelConfig) -> None:
    """Writes the extractor's settings where no original's were copied, and the run's template."""
    encoder = model.audio_encoder
    if isinstance(encoder, Transcribe) and not extractor_fields(folder):
        extractor = {
            "feature_extractor_type": "NemotronAsrStreamingFeatureExtractor",
            "feature_size": encoder.mel_bands,
            "mel_filters_dtype": "bfloat16" if encoder.bfloat16_filters else "float32",
        }
        (folder / EXTRACTOR).write_text(json.dumps(extractor, indent=2) + "\n")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


FAMILY = Family(
    format="transcribe",
    title="Nemotron3_5TranscribeForConditionalGeneration",
    gives="encoder with its diarizer and its head for word times, adapter and LLM",
    model_types=(KIND, "Nemotron3_5TranscribeForConditionalGeneration"),
    covers=(*LLM, *ENCODER, *ADAPTER),
    configure=_configure,
    fields=_fields,
    tensors=_tensors,
    ignored=(
        "perception.preprocessor.*",
        "perception.encoder.diarization_model.preprocessor.*",
        "perception.encoder.diarization_model.sortformer_modules.hidden_to_spks.*",
        "*._extra_state",
        "ctc_timestamp.decoder.residual_scale",
        "ctc_timestamp.decoder.upsample_factor",
        "ctc_timestamp.tokenizer.model_proto",
    ),
    token_fields=_token_fields,
    opened=_opened,
    mtp_tensors=lambda fields: ("llm.mtp.",),
    finish=_finish,
    data=lambda fields: _DATA,
    meaningless=lambda model: NEMOTRON_H.meaningless_fields(model.llm),
)
