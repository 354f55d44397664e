"""The names of Whisper's tensors in checkpoints, as transformers has them (WhisperEncoder)."""

from jaxthd.files.tensor_names import Arrays, Below, Table

BLOCK: Table = {
    "self_attn.": Below("attention.", {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}),
    "self_attn_layer_norm": "norm1",
    "final_layer_norm": "norm2",
    "fc1": "up",
    "fc2": "down",
}
"""A Transformer block's."""


def encoder_table(bands: int, dim: int) -> Table:
    """The table of an encoder's tensors. bands: of its features. dim: of the model."""

    def taps(name: str, channels: int) -> Arrays:
        """A convolution of three taps, [out, in, taps] on disk; ours has a row for each tap and input."""
        return Arrays((name,), view=(dim, channels, 3), order=(2, 1, 0), tail=(channels, 3))

    return {
        "conv1.weight": taps("stem.first.w", bands),
        "conv1.bias": "stem.first.bias",
        "conv2.weight": taps("stem.second.w", dim),
        "conv2.bias": "stem.second.bias",
        "embed_positions.weight": "positions",
        "layers.{}.": Below("transformer.blocks.", BLOCK, over="norm1.weight"),
        "layer_norm": "transformer.norm",
    }
