"""The names of the encoder's and the Q-Former's tensors in checkpoints, as transformers has them
(GraniteSpeechForConditionalGeneration)."""

from jaxthd.files.tensor_names import Arrays, Below, Table, matrix

_POINT, _TAPS = (0, 1), (1, 0)
"""Kernels of convolutions, behind the output channels; 0 is the number of input channels or of taps."""
_FFN: Table = {"pre_norm": "norm", "up_proj": "up", "down_proj": "down"}
_ATTENTION: Table = {
    "pre_norm": "norm",
    "to_q": "q",
    "to_kv.weight": matrix("k.w", "v.w"),
    "to_out": "out",
    "rel_pos_emb.weight": "distances",
}
_CONV: Table = {
    "norm": "norm_in",
    "up_conv.weight": matrix("up.w", tail=_POINT),
    "up_conv.bias": "up.bias",
    "depth_conv.conv.weight": matrix("depthwise", tail=_TAPS),
    "batch_norm": "norm",
    "batch_norm.running_mean": "norm.mean",
    "batch_norm.running_var": "norm.variance",
    "batch_norm.num_batches_tracked": None,
    "down_conv.weight": matrix("down.w", tail=_POINT),
    "down_conv.bias": "down.bias",
}
_BLOCK: Table = {
    "ff1.": Below("ffn1.", _FFN),
    "attn.": Below("attention.", _ATTENTION),
    "conv.": Below("conv.", _CONV),
    "ff2.": Below("ffn2.", _FFN),
    "post_norm": "norm",
}


def encoder_table(layers: int) -> Table:
    """The table of the Conformer's tensors."""
    return {
        "encoder.input_linear": "input",
        "encoder.layers.{}.": Below("blocks.", _BLOCK, over="norm.weight"),
        "encoder.out": "middle.labels",
        "encoder.out_mid": "middle.back",
    }


def projector_table(queries: int, dim: int, layers: int) -> Table:
    """The table of the Q-Former's tensors. queries, dim: of its queries."""
    attention: Table = {
        **{f"attention.{theirs}": ours for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v"))},
        "output.dense": "out",
        "output.LayerNorm": "norm",
    }
    layer: Table = {
        "attention.": Below("self_attention.", attention),
        "crossattention.": Below("cross_attention.", attention),
        "intermediate_query.dense": "up",
        "output_query.dense": "down",
        "output_query.LayerNorm": "norm",
    }
    return {
        "projector.query": Arrays(("qformer.queries",), view=(1, queries, dim), order=(0, 1, 2)),
        "projector.qformer.layernorm": "qformer.norm",
        **{
            f"projector.qformer.encoder.layer.{number}.": Below(f"qformer.layers.{number}.", layer)
            for number in range(layers)
        },
    }
