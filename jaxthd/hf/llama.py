"""Llama and its kin: Mistral, Qwen2, Granite (transformers: LlamaForCausalLM, MistralForCausalLM,
Qwen2ForCausalLM, GraniteForCausalLM).

A layer of theirs is two blocks of ours, attention and a gated MLP. Mistral's attention may be in a window in
all layers, Qwen2's in some; Qwen2's queries, keys and values have biases; Granite has four multipliers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.files.tensor_names import Table
from jaxthd.hf.decoder import MULTIPLIERS, SIZES, BlockFields, Decoder, layer_types, paired_blocks
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields, required
from jaxthd.models.blocks import MLP, Attention

_TYPES = {"full_attention": "*", "sliding_attention": "W"}
_WINDOW = 4096
"""The library's window where config.json names none."""
HEADS: Settings = {
    "heads": "num_attention_heads",
    "kv_heads": Field("num_key_value_heads", read=lambda x, fields: x or fields["num_attention_heads"]),
    "head_dim": Field(
        "head_dim", read=lambda x, fields: x or fields["hidden_size"] // fields["num_attention_heads"]
    ),
}
BIASES: Settings = {**HEADS, "bias": Field("attention_bias", False)}
_IN_WINDOW: Settings = {**HEADS, "window": Field("sliding_window", _WINDOW)}
_INNER: Settings = {"inner": "intermediate_size"}
GATED = MLP(form="swiglu")


class Llama(Decoder):
    """Checkpoints without windows."""

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: attention and MLPs by turns."""
        return "*-" * int(required(fields, "num_hidden_layers", where))

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of attention and MLP."""
        return paired_blocks(llm, {})


class Mistral(Llama):
    """Checkpoints with a window in all layers, or in none."""

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks; a window of null is none."""
        letters = super().letters(fields, where)
        return letters if fields.get("sliding_window", _WINDOW) is None else letters.replace("*", "W")

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """null where there is no window: an absent one is the library's. Raises UserError for layers of both
        kinds."""
        if "W" in llm.letters:
            self.must_hold(llm, {"letters": "W-" * (len(llm.letters) // 2)})
            return {}
        return {"sliding_window": None}


class Qwen2(Llama):
    """Checkpoints with windows in some layers, or in none."""

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: layers from max_window_layers on have windows, unless layer_types say otherwise."""
        count = int(required(fields, "num_hidden_layers", where))
        if not fields.get("use_sliding_window") or fields.get("sliding_window", _WINDOW) is None:
            return "*-" * count
        full, in_window = _TYPES
        before = fields.get("max_window_layers", 28)
        default = [full] * min(before, count) + [in_window] * max(count - before, 0)
        return "".join(f"{mixer}-" for mixer in layer_types(fields, _TYPES, default))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The types of the layers."""
        types = {letter: name for name, letter in _TYPES.items()}
        return {
            "use_sliding_window": "W" in llm.letters,
            "layer_types": [types[letter] for letter in llm.letters[::2]],
        }


LLAMA = Llama(
    title="LlamaForCausalLM",
    model_types=("llama",),
    layers=("*-",),
    expected={"hidden_act": "silu"},
    sizes=SIZES,
    blocks={
        "*": BlockFields(Attention(), BIASES),
        "-": BlockFields(GATED, {**_INNER, "bias": Field("mlp_bias", False)}),
    },
)
MISTRAL = Mistral(
    title="MistralForCausalLM",
    model_types=("mistral",),
    layers=("*-", "W-"),
    expected={"hidden_act": "silu"},
    sizes=SIZES,
    blocks={
        "*": BlockFields(Attention(), HEADS),
        "W": BlockFields(Attention(window=_WINDOW), _IN_WINDOW),
        "-": BlockFields(GATED, _INNER),
    },
)
_QWEN2 = Attention(bias=True, out_bias=False)
QWEN2 = Qwen2(
    title="Qwen2ForCausalLM",
    model_types=("qwen2",),
    layers=("*-", "W-"),
    expected={"hidden_act": "silu"},
    sizes=SIZES,
    blocks={
        "*": BlockFields(_QWEN2, HEADS),
        "W": BlockFields(replace(_QWEN2, window=_WINDOW), _IN_WINDOW),
        "-": BlockFields(GATED, _INNER),
    },
)
SCALE = Field("attention_multiplier", 1.0, write=lambda block: block.scale or block.head_dim**-0.5)
"""Granite's factor on the scores of attention."""
MULTIPLIED: Settings = {name: Field(name, 1.0) for name in MULTIPLIERS}
"""Its other multipliers."""
GRANITE = Llama(
    title="GraniteForCausalLM",
    model_types=("granite",),
    layers=("*-",),
    expected={"hidden_act": "silu"},
    sizes={**SIZES, **MULTIPLIED},
    blocks={
        "*": BlockFields(Attention(), {**BIASES, "scale": SCALE}),
        "-": LLAMA.blocks["-"],
    },
)
FAMILIES = tuple(decoder.family() for decoder in (LLAMA, MISTRAL, QWEN2, GRANITE))
