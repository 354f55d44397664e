"""The names of FastConformer's tensors in checkpoints, as transformers has them (ParakeetEncoder)."""

from typing import Any

from jaxthd.files.tensor_names import Arrays, Below, Table, matrix

_SQUARE, _POINT_2D, _POINT_1D, _TAPS = (1, 3, 3), (0, 1, 1), (0, 1), (1, 0)
"""Kernels of convolutions, behind the output channels; 0 is the number of input channels or of taps."""
_FFN: Table = {"linear1": "up", "linear2": "down"}
_CONV: Table = {
    "pointwise_conv1.weight": matrix("up.w", tail=_POINT_1D),
    "pointwise_conv1.bias": "up.bias",
    "depthwise_conv.weight": matrix("depthwise", tail=_TAPS),
    "depthwise_conv.bias": "depthwise_bias",
    "pointwise_conv2.weight": matrix("down.w", tail=_POINT_1D),
    "pointwise_conv2.bias": "down.bias",
    "norm": "norm",
    "norm.running_mean": "norm.mean",
    "norm.running_var": "norm.variance",
    "norm.num_batches_tracked": None,
}
_BLOCK: Table = {
    "feed_forward1.": Below("ffn1.", _FFN),
    "feed_forward2.": Below("ffn2.", _FFN),
    "self_attn.": Below(
        "attention.",
        {
            "q_proj": "q",
            "k_proj": "k",
            "v_proj": "v",
            "o_proj": "out",
            "relative_k_proj.weight": matrix("position"),
            "bias_u": "content_bias",
            "bias_v": "position_bias",
        },
    ),
    "conv.": Below("conv.", _CONV),
    "norm_feed_forward1": "norm_ffn1",
    "norm_self_att": "norm_attention",
    "norm_conv": "norm_conv",
    "norm_feed_forward2": "norm_ffn2",
    "norm_out": "norm_out",
}


def encoder_table(dim: int, channels: int, bands: int) -> Table:
    """The table of an encoder's tensors. channels, bands: of what its subsampling flattens."""
    # The library flattens (channels, bands), jaxthd (bands, channels).
    view = (dim, channels, bands)
    flattened = Arrays(("out.w",), view, order=(2, 1, 0), tail=(view[1] * view[2],))
    subsampling: dict[str, Any] = {
        "layers.0.weight": matrix("first.w", tail=_SQUARE),
        "layers.0.bias": "first.bias",
    }
    for ours, depthwise, pointwise in (("later.0", 2, 3), ("later.1", 5, 6)):
        subsampling |= {
            f"layers.{depthwise}.weight": matrix(f"{ours}.w", tail=_SQUARE),
            f"layers.{depthwise}.bias": f"{ours}.bias",
            f"layers.{pointwise}.weight": matrix(f"{ours}.pointwise.w", tail=_POINT_2D),
            f"layers.{pointwise}.bias": f"{ours}.pointwise.bias",
        }
    subsampling |= {"linear.weight": flattened, "linear.bias": "out.bias"}
    return {
        "subsampling.": Below("subsampling.", subsampling),
        "layers.{}.": Below("blocks.", _BLOCK, over="norm_out.weight"),
    }
