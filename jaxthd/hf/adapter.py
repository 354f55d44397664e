"""The adapter alone, in a format of our own: no other holds an adapter without the rest of the model."""

from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.hf.family import ADAPTER, Family, Fields, encoder_of, required
from jaxthd.hf.names import Names


def _fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "jaxthd_adapter",
        "inner_dim": model.adapter_dim,
        "bias": model.adapter_bias,
        "encoder_dim": encoder_of(model, "adapter").dim,
        "llm_dim": model.llm.dim,
    }


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    adapter = names.within("", "adapter.")
    if model.adapter_dim:
        adapter.same("norm.weight", "norm.weight")
        adapter.linear("up", "up")
    adapter.linear("out", "out")


FAMILY = Family(
    format="adapter",
    title="jaxthd_adapter",
    gives="the adapter",
    model_types=("jaxthd_adapter",),
    covers=ADAPTER,
    configure=lambda fields, model: replace(
        model,
        adapter_dim=int(required(fields, "inner_dim")),
        adapter_bias=bool(fields.get("bias", False)),
    ),
    fields=_fields,
    write=_write,
)
