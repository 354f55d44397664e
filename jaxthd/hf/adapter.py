"""The adapter alone, in a format of our own: no other holds an adapter without the rest of the model."""

from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.files.tensor_names import tensors
from jaxthd.hf.family import ADAPTER, Family, Field, Settings, read_settings, updated, write_settings

_SIZES: Settings = {
    "adapter_dim": "inner_dim",
    "adapter_bias": Field("bias", False),
    "adapter_form": Field("form", "relu2"),
}


def _fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "jaxthd_adapter",
        **write_settings(model, _SIZES),
        "encoder_dim": model.audio_encoder.output_dim,
        "llm_dim": model.llm.dim,
    }


FAMILY = Family(
    format="adapter",
    title="jaxthd_adapter",
    gives="the adapter",
    model_types=("jaxthd_adapter",),
    covers=ADAPTER,
    configure=lambda fields, model: updated(model, read_settings(fields, _SIZES)),
    fields=_fields,
    tensors=lambda model, fields, shapes: tensors(
        {name: name for name in ("norm", "up", "out", "norm_after")}, shapes, ours="adapter."
    ),
)
