"""The adapter alone, in a format of our own: where no other holds encoder, adapter and LLM together."""

from dataclasses import replace

from jaxthd.config import ModelConfig
from jaxthd.hf.family import Family, Fields, required
from jaxthd.hf.names import Names


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    adapter = names.within("", "adapter.")
    if model.adapter_dim:
        adapter.same("norm.weight", "norm.weight")
        adapter.linear("up", "up")
    adapter.linear("out", "out")


ADAPTER = Family(
    model_types=("jaxthd_adapter",),
    covers=("adapter.",),
    configure=lambda fields, model: replace(model, adapter_dim=int(required(fields, "inner_dim"))),
    fields=lambda model: {
        "model_type": "jaxthd_adapter",
        "inner_dim": model.adapter_dim,
        "encoder_dim": model.audio_encoder.dim,
        "llm_dim": model.llm.dim,
    },
    write=_write,
)
