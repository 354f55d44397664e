"""The names of the tensors in checkpoints, as NeMo has them."""

from jaxthd.files.tensor_names import Arrays, Below, Table, matrix

_BLOCK: Table = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.w_qkv.weight": matrix("attention.q.w", "attention.k.w", "attention.v.w"),
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "attn.out_proj": "attention.out",
    "ffn.net.0": "up",
    "ffn.net.3": "down",
}
_ENCODER: Table = {
    "pre_encode.proj": "projection",
    "embed_norm": "input_norm",
    "layers.{}.": Below("blocks.", _BLOCK, over="norm1.weight"),
    "final_norm": "final_norm",
}
"""The names of Transformer and StackedEncoder."""


def encoder_table(dim: int, inner: int, frames: int, upsampling: int) -> Table:
    """The table of all tensors. dim: of an output. inner: of the diarizer's head. frames: of an output.
    upsampling: frames of the head for word times for each output; 0: there is none."""
    # Kernels are (outputs, inputs, taps) on disk; those that make more frames are (inputs, outputs, taps).
    upsample = Arrays(("head.upsample.w",), view=(frames * inner, inner, 3), order=(2, 1, 0), tail=(inner, 3))
    modules: Table = {
        "encoder_proj": "inward",
        "subpixel_upsample.weight": upsample,
        "subpixel_upsample.bias": "head.upsample.bias",
        "first_hidden_to_hidden": "head.hidden",
        "single_hidden_to_spks": "head.out",
        "learnable_sil_emb": "silence",
    }
    diarizer: Table = {
        "encoder.": Below("encoder.", _ENCODER),
        "sortformer_modules.": Below("", modules),
    }
    words: Table = {
        "transformer.": Below("", _ENCODER),
        "upsample.weight": Arrays(
            ("upsample.w",), view=(dim, dim, upsampling), order=(0, 2, 1), tail=(dim, upsampling)
        ),
        "upsample.bias": "upsample.bias",
        "decoder_layers.0.weight": matrix("classes.w", tail=(0, 1)),
        "decoder_layers.0.bias": "classes.bias",
    }
    return {
        "perception.encoder.asr_encoder.": Below("", _ENCODER),
        "perception.encoder.diarization_model.": Below("diarizer.", diarizer),
        "perception.encoder.asr_norm": "output_norm",
        "perception.encoder.diar_norm": "speaker_norm",
        **({"ctc_timestamp.decoder.": Below("word_times.", words)} if upsampling else {}),
    }
