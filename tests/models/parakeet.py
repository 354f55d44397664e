"""The transformers library's ParakeetEncoder names and shapes -> FastConformer's."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxthd.config import EncoderConfig

Tree = dict[str, Any]


def encoder_config(fields: Mapping[str, Any]) -> EncoderConfig:
    """From fields of a ParakeetEncoderConfig."""
    return EncoderConfig(
        num_mels=int(fields["num_mel_bins"]),
        layers=int(fields["num_hidden_layers"]),
        dim=int(fields["hidden_size"]),
        heads=int(fields["num_attention_heads"]),
        ffn_dim=int(fields["intermediate_size"]),
        conv_kernel=int(fields["conv_kernel_size"]),
        subsampling_channels=int(fields["subsampling_conv_channels"]),
    )


def from_parakeet(named: Mapping[str, np.ndarray], config: EncoderConfig) -> tuple[Tree, Tree]:
    """(parameters, buffers) as pure dicts, from weights; or, from gradients, (their gradients, {})."""

    def linear(name: str) -> Tree:
        """A linear layer or a convolution of one tap."""
        weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
        return {"w": weight.reshape(weight.shape[:2]).T, "bias": bias}

    def norm(name: str) -> Tree:
        return {"weight": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}

    def taps(name: str) -> np.ndarray:
        """[channels, 1, taps...] -> [all taps, channels]."""
        return named[f"{name}.weight"].reshape(len(named[f"{name}.weight"]), -1).T

    def ffn(name: str) -> Tree:
        return {"up": linear(f"{name}.linear1"), "down": linear(f"{name}.linear2")}

    def block(i: int) -> Tree:
        at, conv = f"layers.{i}.self_attn", f"layers.{i}.conv"
        return {
            "ffn1": ffn(f"layers.{i}.feed_forward1"),
            "ffn2": ffn(f"layers.{i}.feed_forward2"),
            "attention": {
                **{
                    x: linear(f"{at}.{name}_proj")
                    for x, name in zip(("q", "k", "v", "out"), "qkvo", strict=True)
                },
                "position": named[f"{at}.relative_k_proj.weight"].T,
                "content_bias": named[f"{at}.bias_u"],
                "position_bias": named[f"{at}.bias_v"],
            },
            "conv": {
                "up": linear(f"{conv}.pointwise_conv1"),
                "depthwise": taps(f"{conv}.depthwise_conv"),
                "depthwise_bias": named[f"{conv}.depthwise_conv.bias"],
                "norm": norm(f"{conv}.norm"),
                "down": linear(f"{conv}.pointwise_conv2"),
            },
            "norm_ffn1": norm(f"layers.{i}.norm_feed_forward1"),
            "norm_attention": norm(f"layers.{i}.norm_self_att"),
            "norm_conv": norm(f"layers.{i}.norm_conv"),
            "norm_ffn2": norm(f"layers.{i}.norm_feed_forward2"),
            "norm_out": norm(f"layers.{i}.norm_out"),
        }

    def stacked(make: Callable[[int], Tree]) -> Tree:
        return _zip([make(i) for i in range(config.layers)])

    def later(depthwise: int, pointwise: int) -> Tree:
        at = "subsampling.layers"
        bias = named[f"{at}.{depthwise}.bias"]
        return {"w": taps(f"{at}.{depthwise}"), "bias": bias, "pointwise": linear(f"{at}.{pointwise}")}

    # The reference flattens (channels, bands), we (bands, channels).
    out = named["subsampling.linear.weight"].reshape(config.dim, config.subsampling_channels, -1)
    parameters = {
        "subsampling": {
            "first": {"w": taps("subsampling.layers.0"), "bias": named["subsampling.layers.0.bias"]},
            "later": {0: later(2, 3), 1: later(5, 6)},
            "out": {
                "w": out.transpose(2, 1, 0).reshape(-1, config.dim),
                "bias": named["subsampling.linear.bias"],
            },
        },
        "blocks": stacked(block),
    }
    if "layers.0.conv.norm.running_mean" not in named:
        return parameters, {}
    return parameters, running_statistics(named, config)


def running_statistics(named: Mapping[str, np.ndarray], config: EncoderConfig) -> Tree:
    """The buffers alone."""
    names = {"mean": "running_mean", "variance": "running_var"}
    layers = range(config.layers)
    stacked = {
        x: np.stack([named[f"layers.{i}.conv.norm.{name}"] for i in layers]) for x, name in names.items()
    }
    return {"blocks": {"conv": {"norm": stacked}}}


def _zip(trees: list[Tree]) -> Tree:
    """A list of equal trees -> one tree of stacked arrays."""
    return {
        k: _zip([t[k] for t in trees]) if isinstance(v, dict) else np.stack([t[k] for t in trees])
        for k, v in trees[0].items()
    }
