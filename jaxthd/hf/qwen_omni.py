"""The thinkers of Qwen2.5-Omni and Qwen3-Omni (transformers: Qwen2_5OmniForConditionalGeneration,
Qwen3OmniMoeForConditionalGeneration): the parts that hear and write text.

The towers that see and speak are not read; an export copies them from the original. config.json has the
thinker under thinker_config. The rotary embedding's three axes are equal for audio and text.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Table
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields
from jaxthd.hf.llama import QWEN2
from jaxthd.hf.qwen2_audio import QWEN2_AUDIO, SIZES, heard
from jaxthd.hf.qwen3 import QWEN3_MOE
from jaxthd.hf.qwen3_asr import AUTHORS
from jaxthd.hf.speech_llm import AUDIO, WHISPER_NAMES, Names, Part
from jaxthd.models.front_ends import Qwen3Audio, Whisper

_UNREAD = ("thinker.visual.*", "talker.*", "token2wav.*", "code2wav.*")
_TOWERS = "towers that see and speak"
_HEARD = 300
"""Seconds of a recording that Qwen2.5-Omni hears."""


def _positions(count: int | None, fields: Fields) -> int:
    """Positions of a window. Raises UserError where the last window that is heard is none."""
    count = 100 if count is None else count
    if not count or 50 * _HEARD % count:
        raise UserError(
            f"audio_config has n_window {count}; expected a divisor of {50 * _HEARD}, so that the {_HEARD} s "
            "that are heard are whole windows: choose another checkpoint"
        )
    return count


_CHUNKS: Settings = {name: entry for name, entry in SIZES.items() if name != "positions"} | {
    "positions": Field("n_window", 100, _positions),
    "windows": heard(_HEARD, "n_window", 100),
}


def _expected(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"output_dim": dim, "activation_function": "gelu", "scale_embedding": False}


def _encoder(encoder: FrontEnd) -> Table:
    """Whisper's, without a table of positions."""
    usual = dict(encoder.tensors())
    del usual["embed_positions.weight"]
    usual["ln_post"] = usual.pop("layer_norm")
    return usual


QWEN2_5_OMNI = replace(
    QWEN2_AUDIO,
    format="qwen2_5_omni",
    title="Qwen2_5OmniForConditionalGeneration",
    model_types=("qwen2_5_omni",),
    decoders=(replace(QWEN2, model_types=("qwen2_5_omni_text",)),),
    text={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    ties=True,
    encoder=Whisper(join="mean", joined=2, silence="absent", whole_features=True, stored_positions=False),
    parts={
        AUDIO: Part(
            settings=_CHUNKS, type="qwen2_5_omni_audio_encoder", aliases=WHISPER_NAMES, expected=_expected
        )
    },
    audio_token="audio_token_index",
    names=Names(
        text=AUTHORS.names.text,
        audio=AUTHORS.names.audio,
        projector=AUTHORS.names.projector,
        projection={"proj": "out"},
        encoder=_encoder,
        memory=AUTHORS.names.memory,
    ),
    ignored=(*_UNREAD, "thinker.audio_tower.audio_bos_eos_token.weight"),
    unread=_TOWERS,
    data={"template": "chat_template"},
    above=AUTHORS.above,
    inner=("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker"),
)
QWEN3_OMNI = replace(
    AUTHORS,
    format="qwen3_omni",
    title="Qwen3OmniMoeForConditionalGeneration",
    model_types=("qwen3_omni_moe",),
    decoders=(replace(QWEN3_MOE, model_types=("qwen3_omni_moe_text",)),),
    text={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True},
    text_ties=False,
    encoder=Qwen3Audio(filled=False),
    parts={AUDIO: replace(AUTHORS.parts[AUDIO], type="qwen3_omni_moe_audio_encoder")},
    ignored=_UNREAD,
    unread=_TOWERS,
    data={"template": "chat_template"},
    inner=("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker"),
)
FAMILIES = (QWEN2_5_OMNI.family(), QWEN3_OMNI.family())
