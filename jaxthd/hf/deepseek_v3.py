"""DeepSeek-V3, and Moonlight, which has its layout without a latent for queries (transformers:
DeepseekV3ForCausalLM).

A layer of theirs is two blocks of ours: latent attention, then an MLP ("L-") in the first layers and experts
("LE") in the others. Their rotated features are in pairs of neighbours, ours in halves: rows of the
projections are moved. A module of multi-token prediction is stored as one more layer, with copies of the
embedding and the head.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.config.listing import value_at
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Copy, Shape, Table, Tensor, tensors
from jaxthd.hf.decoder import ANY, SIZES, BlockFields, Decoder, mixer_block, paired_blocks
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.models.blocks import MLP, LatentAttention, MoE


class DeepseekV3(Decoder):
    """Checkpoints of DeepSeek-V3 and Moonlight."""

    def complete(self, fields: Fields) -> Fields:
        """The fields. Raises UserError where there are fewer heads of keys than of queries."""
        must_be(fields, {"num_key_value_heads": required(fields, "num_attention_heads")})
        return fields

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: latent attention, and an MLP in the first layers, experts in the others."""
        count = int(required(fields, "num_hidden_layers"))
        dense = min(int(fields.get("first_k_dense_replace", 3) or 0), count)
        return "L-" * dense + "LE" * (count - dense)

    def mtp(self, fields: Fields, letters: str) -> tuple[str, int]:
        """Modules of one layer with experts."""
        return "LE", int(fields.get("num_nextn_predict_layers") or 0)

    def mtp_prefixes(self, fields: Fields) -> tuple[str, ...]:
        """The layers behind the model's."""
        first, count = int(required(fields, "num_hidden_layers")), self.mtp(fields, "")[1]
        return tuple(f"model.layers.{first + module}." for module in range(max(count, 1)))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """Numbers of heads and layers. Raises UserError for another order of layers or form of experts."""
        if "LEL-" in llm.letters:
            raise UserError(
                f"model.llm.pattern is {llm.pattern!r}; expected L- in the first layers and LE in the others "
                f"for {self.title}: choose another format"
            )
        experts = llm.blocks.get("E", MoE())
        assert isinstance(experts, MoE)
        if experts.shared_inner % experts.inner:
            raise UserError(
                f"model.llm.blocks.E.shared_inner is {experts.shared_inner}; expected a multiple of inner "
                f"({experts.inner}) for {self.title}, whose shared experts are of the routed ones' size: "
                "choose another format"
            )
        if llm.mtp_pattern:
            self.must_hold(llm, {"mtp_pattern": "LE"})
        return {
            "num_key_value_heads": value_at(llm, "blocks.L.heads"),
            "first_k_dense_replace": llm.letters.count("-"),
            # Absent, an export like a checkpoint that has it keeps what that says: its tensors are copied.
            **({"num_nextn_predict_layers": llm.mtp_modules} if llm.mtp_pattern else {}),
            "rope_interleave": True,
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of latent attention, MLP and experts."""
        latent = llm.blocks["L"]
        assert isinstance(latent, LatentAttention)
        mixer = latent.tensors(is_paired=fields.get("rope_interleave", True))
        return paired_blocks(llm, {"L": mixer_block(mixer)})

    def mtp_tensors(self, llm: LLMConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """Each module is one more layer, with copies of the embedding and the head."""
        first, letters = len(llm.letters) // 2, "LE" * llm.mtp_modules
        yield from self.layer_tensors(llm, fields, shapes, letters, "model.", "mtp.", first)
        around: Table = {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "shared_head.norm": "final_layernorm",
            "embed_tokens.weight": Copy("embedding"),
            "shared_head.head.weight": Copy("embedding" if llm.tied_embedding else "head"),
        }
        for module in range(llm.mtp_modules):
            yield from tensors(around, shapes, f"model.layers.{first + module}.", "mtp.depths.", (module,))


DEEPSEEK_V3 = DeepseekV3(
    title="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3", "DeepseekV3ForCausalLM"),
    layers=("L-", "LE"),
    expected={
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    form={"mtp_pattern": ANY},
    sizes=SIZES,
    blocks={
        "L": BlockFields(
            LatentAttention(),
            {
                "heads": "num_attention_heads",
                # null stands for none; a default for what is absent.
                "q_lora_rank": Field(
                    "q_lora_rank", 1536, lambda x, _: x or 0, lambda block: block.q_lora_rank or None
                ),
                **{
                    name: name
                    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
                },
            },
        ),
        "-": BlockFields(MLP(form="swiglu"), {"inner": "intermediate_size"}),
        "E": BlockFields(
            MoE(form="swiglu"),
            {
                "experts": "n_routed_experts",
                "experts_per_token": "num_experts_per_tok",
                "inner": "moe_intermediate_size",
                "router.scale": "routed_scaling_factor",
                "router.normalised": Field("norm_topk_prob", True),
                "router.groups": Field("n_group", 8, lambda x, _: x or 1),
                "router.groups_per_token": Field(
                    "topk_group",
                    4,
                    lambda x, _: x or 1,
                    lambda block: min(block.router.groups_per_token, block.router.groups),
                ),
                "shared_inner": Field(
                    "n_shared_experts",
                    1,
                    lambda count, fields: (count or 0) * fields["moe_intermediate_size"],
                    lambda block: block.shared_inner // block.inner,
                ),
            },
        ),
    },
)
FAMILY = DEEPSEEK_V3.family()
