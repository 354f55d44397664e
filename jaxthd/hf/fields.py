"""config.json of a published checkpoint: read, and checked before any family makes settings of it."""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxthd.errors import UserError

Fields = Mapping[str, Any]
"""A config.json, or NeMo's settings of a model."""


def _is_number(value: Any) -> bool:
    """Whether the value is a finite number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any, least: int = 0) -> bool:
    """Whether the value is a whole number from `least` on."""
    return _is_number(value) and value == int(value) and value >= least


def _is_pair(value: Any) -> bool:
    """Whether the value is two numbers."""
    # JSON has no infinity: some checkpoints write it like this.
    infinite = (math.inf, {"__float__": "Infinity"})
    return isinstance(value, list) and len(value) == 2 and all(_is_number(x) or x in infinite for x in value)


def _is_list(value: Any, kind: type) -> bool:
    """Whether the value is a list of such elements, which booleans are not."""
    return isinstance(value, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer from 0 on": _is_integer,
    "an integer from 1 on": lambda value: _is_integer(value, 1),
    "a finite number": _is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "a list of integers": lambda value: _is_list(value, int),
    "a list of texts": lambda value: _is_list(value, str),
    "a list": lambda value: isinstance(value, list),
    "two numbers": _is_pair,
    "a list of numbers": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "an integer from 1 on, or ${a setting}": lambda value: isinstance(value, str) or _is_integer(value, 1),
    "a list of texts, or a text": lambda value: isinstance(value, str) or _is_list(value, str),
    "an integer from 1 on, or -1": lambda value: _is_integer(value, 1) or value == -1,
    'an integer from 1 on, or "auto"': lambda value: value == "auto" or _is_integer(value, 1),
}
"""What a value may be, in words -> whether it is that. null stands for an absent field everywhere."""
(
    _COUNT,
    _SIZE,
    _NUMBER,
    _FLAG,
    _TEXT,
    _INTEGERS,
    _TEXTS,
    _LIST,
    _PAIR,
    _NUMBERS,
    _LINKED,
    _TARGETS,
    _OR_SAME,
    _AUTO,
) = _KINDS


def _each(kind: str, names: str) -> dict[str, Any]:
    """Returns names, separated by spaces, each with this kind."""
    return dict.fromkeys(names.split(), kind)


_ROPE = {
    **_each(_TEXT, "rope_type type"),
    **_each(_NUMBER, "rope_theta partial_rotary_factor factor beta_fast beta_slow attention_factor"),
    **_each(_NUMBER, "mscale mscale_all_dim low_freq_factor high_freq_factor"),
    "original_max_position_embeddings": _COUNT,
    "truncate": _FLAG,
}
_NEMO: dict[str, Any] = {
    "preprocessor": {"features": _SIZE},
    "encoder": {
        "feat_in": _LINKED,
        "att_context_size": _LIST,
        **_each(_SIZE, "n_layers d_model n_heads ff_expansion_factor conv_kernel_size"),
        "subsampling_conv_channels": _OR_SAME,
        "feat_out": _NUMBER,
        **_each(_FLAG, "use_bias xscaling"),
    },
}
_CONNECTOR: dict[str, Any] = {
    **_each(_SIZE, "d_model input_dim output_dim prompt_size qformer_num_hidden_layers"),
    "_target_": _TEXT,
    "target_layer_ids": _INTEGERS,
    "include_final_output": _FLAG,
    "encoder_config": _each(_SIZE, "d_model encoder_attention_heads"),
    "llm_config": {"hidden_size": _SIZE},
}
_BLOCKS: dict[str, Any] = {
    **_each(_SIZE, "hidden_size intermediate_size num_hidden_layers num_attention_heads num_mel_bins"),
    **_each(_COUNT, "num_key_value_heads head_dim vocab_size blank_token_id"),
    **_each(_SIZE, "subsampling_factor upsampling_factor"),
    **_each(_NUMBER, "residual_scale"),
    "rope_parameters": _ROPE,
}
_DIARIZATION: dict[str, Any] = {
    "audio_config": _BLOCKS,
    "head_config": _each(_SIZE, "hidden_size num_speakers audio_hidden_size subsampling_factor"),
    "streaming_config": {
        **_each(_SIZE, "speaker_cache_length num_speakers subsampling_factor"),
        "speaker_cache_silence_frames_per_speaker": _COUNT,
        **_each(_NUMBER, "prediction_score_threshold latest_frames_score_boost strong_boost_rate"),
        **_each(_NUMBER, "weak_boost_rate min_positive_scores_rate"),
    },
    **_each(_SIZE, "chunk_length fifo_length speaker_cache_update_period"),
    **_each(_COUNT, "chunk_left_context chunk_right_context"),
}
_PART: dict[str, Any] = {
    **_each(_SIZE, "hidden_size num_hidden_layers num_attention_heads"),
    **_each(_COUNT, "vocab_size num_key_value_heads head_dim intermediate_size max_position_embeddings"),
    **_each(_COUNT, "original_max_position_embeddings sliding_window max_window_layers decoder_sparse_step"),
    **_each(_COUNT, "full_attention_interval first_k_dense_replace num_nextn_predict_layers"),
    **_each(_COUNT, "mtp_num_hidden_layers num_experts_per_token num_shared_experts num_expert_group"),
    **_each(_COUNT, "linear_num_heads linear_head_dim"),
    **_each(_COUNT, "num_experts num_local_experts num_experts_per_tok n_routed_experts n_shared_experts"),
    **_each(_COUNT, "moe_intermediate_size shared_expert_intermediate_size n_group topk_group"),
    **_each(_COUNT, "moe_shared_expert_intermediate_size moe_latent_size q_lora_rank kv_lora_rank"),
    **_each(_COUNT, "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_num_key_heads"),
    **_each(_COUNT, "linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    **_each(_COUNT, "linear_conv_kernel_dim mamba_num_heads mamba_head_dim ssm_state_size n_groups"),
    **_each(_COUNT, "conv_kernel attention_head_dim mamba_n_groups mamba_d_conv projection_hidden_size"),
    **_each(_COUNT, "num_mel_bins conv_kernel_size subsampling_conv_channels inner_dim"),
    **_each(_COUNT, "encoder_layers d_model encoder_attention_heads encoder_ffn_dim downsample_hidden_size"),
    **_each(_COUNT, "input_dim num_layers hidden_dim num_heads dim_head feedforward_mult context_size"),
    **_each(_COUNT, "max_pos_emb conv_expansion_factor cross_attention_frequency encoder_hidden_size"),
    **_each(_COUNT, "window_size downsample_rate"),
    **_each(_COUNT, "n_window n_window_infer output_dim max_source_positions"),
    **_each(_NUMBER, "rms_norm_eps layer_norm_epsilon rope_theta partial_rotary_factor swiglu_alpha"),
    **_each(_NUMBER, "swiglu_limit routed_scaling_factor embedding_multiplier residual_multiplier"),
    **_each(_NUMBER, "attention_multiplier logits_scaling"),
    **_each(_FLAG, "tie_word_embeddings norm_topk_prob attention_bias rope_interleave bias mlp_bias"),
    **_each(_FLAG, "convolution_bias scale_input use_sliding_window mamba_proj_bias mamba_conv_bias"),
    **_each(_FLAG, "projectors_bias mamba_rms_norm mamba_norm_before_gate"),
    **_each(_SIZE, "mamba_n_heads mamba_d_state mamba_expand mamba_d_ssm"),
    **_each(_NUMBER, "lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier"),
    **_each(_NUMBER, "ssm_in_multiplier ssm_out_multiplier"),
    **_each(_SIZE, "conv_L_cache block_ff_dim block_multiple_of"),
    **_each(_FLAG, "conv_bias block_auto_adjust_ff_dim tie_embedding"),
    **_each(_NUMBER, "norm_eps block_ffn_dim_multiplier"),
    **_each(_NUMBERS, "mlp_multipliers ssm_multipliers"),
    "mamba_d_head": _AUTO,
    "shared_intermediate_size": _COUNT,
    **_each(_TEXT, "model_type hybrid_override_pattern mtp_hybrid_override_pattern pretrained_llm"),
    **_each(_TEXT, "position_embedding_type"),
    **_each(_FLAG, "moe_renormalize linear_allow_neg_eigval"),
    **_each(_TEXTS, "mlp_layer_types"),
    **_each(_TEXTS, "architectures layer_types layers_block_type mtp_layers_block_type"),
    **_each(_INTEGERS, "mlp_only_layers attn_layer_indices full_attn_idxs"),
    **_each(_PAIR, "time_step_limit mamba_dt_limit"),
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "linear_attn_config": {
        **_each(_SIZE, "head_dim num_heads short_conv_kernel_size"),
        **_each(_INTEGERS, "kda_layers full_attn_layers"),
    },
}
EXTRACTOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_PARTS = ("text_config", "llm_config", "audio_config", "sound_config", "encoder_config", "projector_config")
FIELDS: dict[str, Any] = {
    **_PART,
    **dict.fromkeys(_PARTS, _PART),
    "audio_config": {
        **_PART,
        "asr_config": _BLOCKS,
        "diarization_config": _DIARIZATION,
        "speaker_activity_threshold": _NUMBER,
    },
    "word_timestamp_config": _BLOCKS,
    "thinker_config": {**_PART, "text_config": _PART, "audio_config": _PART, "classify_num": _SIZE},
    **_each(_SIZE, "num_labels timestamp_segment_time"),
    **_each(_COUNT, "timestamp_token_id"),
    "token_classification_bias": _FLAG,
    "id2label": {},
    **_NEMO,
    "perception": {**_NEMO, "modality_adapter": _CONNECTOR},
    "encoder_chunk_size_seconds": _NUMBER,
    **_each(_TEXT, "tokenizer_path audio_locator_tag prompt_format"),
    "lora": {
        **_each(_SIZE, "r dim"),
        "target_modules": _TARGETS,
        **_each(_NUMBER, "lora_alpha lora_dropout alpha dropout"),
    },
    "quantization_config": {**_each(_TEXT, "quant_method fmt"), "weight_block_size": _INTEGERS},
}
"""Every field that a family reads -> the kind of its value, or the fields of the object that it is."""


def check_fields(fields: Any, where: str, kinds: Mapping[str, Any] = FIELDS, above: str = "") -> None:
    """Raises UserError for a field whose value is not of its kind.

    where: the file, for the message. kinds: as FIELDS. above: what the fields' names have in front of them.
    """
    for name in (name for name in kinds if fields.get(name) is not None):
        kind, value = kinds[name], fields[name]
        if isinstance(kind, str):
            is_right, expected = _KINDS[kind](value), kind
        else:
            is_right, expected = isinstance(value, Mapping), "an object of settings"
        if not is_right:
            raise UserError(
                f"{where} has {above}{name} {reprlib.repr(value)}; expected {expected}: correct it, or copy "
                "the file anew"
            )
        if not isinstance(kind, str):
            check_fields(value, where, kind, f"{above}{name}.")


def read_fields(path: Path) -> dict[str, Any]:
    """config.json in the folder `path`. Raises UserError where it cannot be read, and as check_fields."""
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the checkpoint's settings: copy it anew"
        ) from error
    if not isinstance(fields, dict):
        raise UserError(f"{file} holds no JSON object; expected the checkpoint's settings: copy it anew")
    check_fields(fields, str(file))
    return fields


def read_object(file: Path) -> Fields:
    """A file's JSON object; {} without the file. Raises UserError where it cannot be read."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected what transformers writes: copy it anew"
        ) from error
    return found


def extractor_fields(folder: Path) -> Fields:
    """The settings of a folder's feature extractor; {} where it has none. Raises UserError as read_object,
    and for a chunk_length that is no number of seconds."""
    for name in (PROCESSOR, EXTRACTOR):
        found = read_object(folder / name)
        settings = found.get("feature_extractor", found)
        if isinstance(settings, Mapping) and settings.get("feature_size") is not None:
            check_fields(settings, str(folder / name), {"chunk_length": _SIZE})
            return settings
    return {}


def required(fields: Fields, name: str, where: str = "config.json") -> Any:
    """A field that has no default."""
    if fields.get(name) is None:
        raise UserError(f"{where} has no {name!r}; expected the settings of a whole checkpoint: complete it")
    return fields[name]


def must_be(fields: Fields, expected: Fields, where: str = "config.json") -> None:
    """Raises UserError where a setting has another value than the one that jaxthd's model computes with.

    A setting that is absent or null passes.
    """
    differing = [
        f"\n  {name}: {fields[name]!r} (jaxthd computes {value!r})"
        for name, value in expected.items()
        if fields.get(name, value) != value and fields[name] is not None
    ]
    if differing:
        raise UserError(
            f"{where} describes a model that jaxthd does not have:{''.join(differing)}\n"
            "Expected a checkpoint with these settings: choose another"
        )
