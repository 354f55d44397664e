"""The meaning of a model's settings for weights that were made under other values of them.

Two models of equal shapes can compute different functions. So every field of ModelConfig and AdaptConfig is
in one of these classes, which a test holds complete; weights are read only where the fields agree as their
class says.
"""

from collections.abc import Collection
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat

SHAPE = (
    "model.encoder",  # None on one side: the part is missing there, which is no difference
    "model.encoder.num_mels",
    "model.encoder.layers",
    "model.encoder.dim",
    "model.encoder.ffn_dim",
    "model.encoder.conv_kernel",
    "model.encoder.subsampling_channels",
    "model.encoder.*_bias",
    "model.adapter_dim",
    "model.adapter_bias",
    "model.llm.vocab_size",
    "model.llm.dim",
    "model.llm.head_dim",
    "model.llm.qk_norm",
    "model.llm.attention_sinks",
    "model.llm.attention_bias",
    "model.llm.attention_gate",
    "model.llm.latent_attention.*_rank",
    "model.llm.latent_attention.*_dim",
    "model.llm.ffn_dim",
    "model.llm.ffn_bias",
    "model.llm.tied_embedding",
    "model.llm.mamba_head_dim",
    "model.llm.mamba_state",
    "model.llm.mamba_conv",
    "model.llm.delta.*_dim",
    "model.llm.delta.conv",
    "model.llm.experts",
    "model.llm.expert_dim",
    "model.llm.shared_expert_dim",
    "model.llm.shared_expert_gate",
    "model.llm.latent_dim",
    "model.llm.router_bias",
    "model.llm.mtp_shared",
    "model.llm.mtp_depths",
    "adapt.lora_rank",
    "adapt.lora_targets",
)
"""They decide which arrays there are, or their shapes: other values are refused."""
MEANING = (
    "model.encoder.heads",
    "model.encoder.scale_input",
    "model.llm.pattern",  # letters can be exchanged for others with arrays of the same shapes
    "model.llm.mtp_pattern",
    "model.llm.norm_eps",
    "model.llm.norm_zero_centred",
    "model.llm.q_heads",
    "model.llm.kv_heads",
    "model.llm.rope.fraction",
    "model.llm.latent_attention.norm_eps",
    "model.llm.ffn_form",  # relu2 with 2 f features has the shapes of no other, but both gated forms agree
    "model.llm.swiglu_alpha",
    "model.llm.swiglu_limit",
    "model.llm.mamba_heads",
    "model.llm.mamba_groups",
    "model.llm.mamba_dt_limit",
    "model.llm.delta.*_heads",
    "model.llm.router",
    "model.llm.router_normalised",
    "model.llm.router_groups*",
    "model.llm.router_scale",
    "adapt.dora",
)
"""They change what arrays of the same shapes compute, and nobody changes them between runs: other values are
refused."""
SAID = (
    "model.encoder.chunk_seconds",
    "model.llm.rope.*",
    "model.llm.window",
    "model.llm.experts_per_token",
)
"""They change what the arrays compute too, and runs do change them: longer contexts by another base or
scaling of the rotary embedding or by a wider window, longer pieces of audio, more experts a token. Other
values are taken, and said. rope.fraction, and theta from or to 0, are refused."""
RESCALED = ("adapt.lora_alpha",)
"""The arrays are multiplied so that they mean the same, which is said."""
FREE = ("adapt.freeze", "adapt.unfreeze", "adapt.lora_dropout", "adapt.lr_factors")
"""They say how weights train, not what they are."""


def compare_models(path: Path, there: ModelConfig, here: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that are taken although they differ (SAID), with their values there and here.

    Raises UserError if the weights in `path`, of the model `there`, are not weights of the model `here`.
    Encoder and adapter, or multi-token prediction, may be missing on one side. Weights that all depths share
    fit any number of depths. A field that is in no class counts as MEANING.
    """
    then, now = (flat(asdict(model), "model.") for model in (there, here))
    free = []
    if there.encoder is None or here.encoder is None:
        free += ["model.encoder*", "model.adapter_*"]
    if not (there.llm.mtp_pattern and here.llm.mtp_pattern):
        free.append("model.llm.mtp_*")
    elif there.llm.mtp_shared and here.llm.mtp_shared:
        free.append("model.llm.mtp_depths")
    differing = {
        name: (then.get(name), now.get(name))
        for name in now | then
        if now.get(name) != then.get(name) and not _is_any(name, free)
    }
    said = {name: values for name, values in differing.items() if _is_said(name, values)}
    refused = [f"\n  {name}: {a} there, {b} here" for name, (a, b) in differing.items() if name not in said]
    if refused:
        raise UserError(
            f"{path} holds weights of another model:{''.join(refused)}\n"
            "Set these fields as they are there (of published checkpoints jaxthd.hf.checkpoint.model_config "
            "reads them), or choose other weights"
        )
    return said


def _is_said(name: str, values: tuple[Any, Any]) -> bool:
    if name == "model.llm.rope.theta" and not all(values):
        return False  # with and without a rotary embedding: no scaling leads from one to the other
    return _is_any(name, SAID) and not _is_any(name, MEANING)


def _is_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
