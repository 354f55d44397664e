"""The mixture of experts of Nemotron 3 (2025), with one that all tokens share, and of Qwen3 and
GPT-OSS (2025), without.

Legend: N tokens, D model dim, E experts, k experts a token; in decoding n documents of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import register_block
from jaxthd.config.findings import Finding
from jaxthd.config.values import DERIVED, Index
from jaxthd.files.tensor_names import Below, Table, matrix
from jaxthd.models.blocks.contract import Routing, Stateless, residual_std
from jaxthd.models.blocks.mlp import FFN, TENSORS, MLPMixer
from jaxthd.models.layers import Linear
from jaxthd.ops.grouped_matmul import IN_ROUNDS, combine, dispatch, expert_layout
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.product import narrowed
from jaxthd.packing.prompts import Now
from jaxthd.packing.segments import Segments
from jaxthd.parallel.experts import Experts, exchanged_experts, expert_mlp, expert_sharding
from jaxthd.parallel.mesh import TOKEN_AXES
from jaxthd.parallel.params import Init, ShardedDim, once, over_tensor
from jaxthd.parallel.tensor import psum_live


@dataclass(frozen=True, kw_only=True)
class Router:
    """The choice of a token's experts."""

    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    """"sigmoid": of each expert by itself, with a correction bias in the choice that
    evens out the load (Nemotron-3); "softmax", over all experts (Qwen3), to be used with train.aux_loss."""
    normalised: bool = True
    """Whether the weights of a token's experts are their scores over their sum; otherwise their scores."""
    bias: bool = False
    """Whether the projection has a bias (GPT-OSS)."""
    groups: int = 1
    """Groups that the experts are divided into (DeepSeek-V3: 8); 1: none."""
    groups_per_token: int = 1
    """Groups that a token's experts are chosen from (DeepSeek-V3: 4): those whose two best experts have the
    largest sum of scores."""
    scale: float = 1.0
    """Factor on the sum of the routed experts' outputs."""


@dataclass(frozen=True, kw_only=True)
class MoE(FFN):
    """A mixture of experts: routed ones, and one that all tokens share (Nemotron 3; Qwen3: none)."""

    title = "mixture of experts"
    letter = "E"
    routes = True
    read_with_others = ("experts_per_token",)
    equal_sizes = ("inner", "shared_inner")
    kind: Annotated[Literal["moe"], DERIVED] = "moe"
    experts: int = 8
    """Routed experts."""
    experts_per_token: int = 2
    """Experts a token is sent to."""
    inner: int = 128
    """Inner dim of a routed expert."""
    shared_inner: Index = 256
    """Inner dim of the shared expert; 0: there is none (Qwen3)."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of one number a token (Qwen3-Next)."""
    latent: Index = 0
    """Dim of the latent projection around the routed experts; 0 for none."""
    router: Router = field(default_factory=Router)

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "MoEMixer":
        return MoEMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        width = self.latent or dim
        routed = self.experts_per_token * width * self.inner
        mlps = self.matrices * (routed + dim * self.shared_inner)
        return float(dim * self.experts + 2 * dim * self.latent + mlps)

    @property
    def experts_to_share(self) -> int:
        return self.experts

    @property
    def evens_load(self) -> bool:
        return self.router.scores == "sigmoid"

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        yield from super().faults(where, dim)
        groups, most, per_token = self.router.groups, self.router.groups_per_token, self.experts_per_token
        if per_token > self.experts:
            yield Finding(
                f"{where}.experts_per_token is {per_token}",
                f"at most the {self.experts} of {where}.experts",
                f"set {where}.experts_per_token to {self.experts} or less",
            )
        if self.shared_gate and not self.shared_inner:
            yield Finding(
                f"{where}.shared_inner is 0 with {where}.shared_gate True",
                "more than 0, because the gate is the shared expert's",
                f"set {where}.shared_gate to False, or raise {where}.shared_inner",
            )
        least = -(-per_token * groups // self.experts)
        if groups > 1 and (self.experts % groups or self.experts < 2 * groups):
            yield Finding(
                f"{where}.router.groups is {groups} with {self.experts} experts",
                "equal groups of two or more, because a group's score is the sum of its two best experts'",
                f"set {where}.router.groups to a divisor of {self.experts} up to {self.experts // 2}, or "
                "to 1",
            )
        elif groups > 1 and not least <= most <= groups:
            yield Finding(
                f"{where}.router.groups_per_token is {most}",
                f"{least} to {groups}: of the {groups} groups, as many as hold a token's {per_token} experts",
                f"set {where}.router.groups_per_token to {max(least, min(most, groups))}",
            )

    @property
    def without_effect(self) -> tuple[str, ...]:
        of_groups = ("router.groups_per_token",) if self.router.groups == 1 else ()
        return *super().without_effect, *of_groups

    def tensors(self) -> Table:
        of_expert: Table = {f"{part}_proj.weight": matrix(part) for part in ("gate", "up", "down")}
        return {
            "gate": "router",
            "gate.e_score_correction_bias": "correction_bias",
            "experts.{}.": Below("", of_expert, "up"),
            "shared_experts.": Below("shared.", TENSORS),
            "fc1_latent_proj": "latent_in",
            "fc2_latent_proj": "latent_out",
        }

    def parameters(self, name: str) -> tuple[str, float]:
        if name == "router":
            return "router", 1.0
        if name.startswith("shared"):
            return "shared expert", 1.0
        if name.startswith("latent"):
            return "latent projection", 1.0
        return "routed experts", self.experts_per_token / self.experts


class MoEMixer(Stateless):
    """Routed experts with a float32 router (block.router), plus one shared expert if it has a dim.

    The sigmoid router's correction bias enters the choice of experts only. Padding is not routed.
    """

    no_lora = ("router", "up", "down")

    def __init__(
        self, block: MoE, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init, router = Init.of(init, compute), block.router
        width = block.latent or llm.dim
        owners = expert_sharding(block.experts, init.mesh)
        columns = over_tensor(block.inner)
        self.router = Linear(llm.dim, block.experts, init, bias=router.bias)
        self.router.w.set_metadata(cast=False)
        is_sigmoid = router.scores == "sigmoid"
        self.correction_bias = init.buffer(jnp.zeros(block.experts)) if is_sigmoid else None
        inward = (block.experts, width, block.inner), (owners, None, columns)
        self.up = init.normal(*inward, projects=True)
        std = residual_std(block.inner, llm)
        shape = block.experts, block.inner, width
        self.down = init.normal(shape, (owners, columns, None), std, projects=True)
        self.latent_in = Linear(llm.dim, width, init) if block.latent else None
        self.latent_out = Linear(width, llm.dim, init) if block.latent else None
        shared = replace(block, inner=block.shared_inner)
        self.shared = MLPMixer(shared, llm, init, compute) if block.shared_inner else None
        is_gated = block.shared_inner > 0 and block.shared_gate
        self.shared_gate = Linear(llm.dim, 1, init) if is_gated else None
        self.gate = init.normal(*inward, projects=True) if block.is_gated else None
        self._add_biases(block, init, owners, width)
        self.form = block.function._replace(in_fp8=compute.fp8_experts)
        self.per_token = block.experts_per_token
        self.groups, self.groups_per_token = router.groups, router.groups_per_token
        self.scale, self.is_normalised = router.scale, router.normalised
        self.block = IN_ROUNDS if compute.blocks.expert_rounds else compute.blocks.experts
        self.capacity = compute.blocks.expert_slots
        self.axes = owners.axes if owners else ()
        self.column_axes = columns.axes if columns.is_sharded(init.mesh) else ()
        self.mesh = init.mesh

    def _add_biases(self, block: MoE, init: Init, owners: ShardedDim | None, width: int) -> None:
        has, columns = block.bias, over_tensor(block.inner)
        inner = (block.experts, block.inner), (owners, columns)
        self.up_bias = init.zeros(*inner) if has else None
        self.gate_bias = init.zeros(*inner) if has and block.is_gated else None
        self.down_bias = init.zeros((block.experts, width), (owners, None)) if has else None
        self.columns = columns

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self.routed(x_ND, segments)[0]

    def routed(self, x_ND: Float[Array, "N D"], segments: Segments) -> tuple[Float[Array, "N D"], Routing]:
        """As a call, and where the tokens went."""
        y_ND, chosen_Nk, score_NE = self._experts(x_ND, segments.valid)
        if self.shared is not None:
            y_ND = y_ND + self._gated(self.shared(x_ND, segments), x_ND)
        return y_ND, self._routing(chosen_Nk, score_NE, segments.valid)

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        y_nD = self._experts(x_nD, now.active)[0]
        if self.shared is not None:
            y_nD = y_nD + self._gated(self.shared.step(x_nD, [], [], now)[0], x_nD)
        return y_nD, state

    def _gated(self, shared_ND: Array, x_ND: Array) -> Array:
        """The shared expert's part of the outputs."""
        return shared_ND if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x_ND)) * shared_ND

    def _experts(self, x_ND: Array, routed_N: Array) -> tuple[Array, Array, Array]:
        """(the routed experts' weighted sum, the experts chosen, the scores of all)."""
        acc = accumulation_dtype(x_ND)
        with jax.default_matmul_precision("highest"):  # GPUs would round to 10 bits of mantissa
            logit_NE = self.router(x_ND.astype(acc))
        if self.correction_bias is None:
            score_NE = jax.nn.softmax(logit_NE)
            ranked_NE = jax.lax.stop_gradient(score_NE)
        else:
            score_NE = jax.nn.sigmoid(logit_NE)
            ranked_NE = jax.lax.stop_gradient(score_NE) + self.correction_bias[...]
        if self.groups > 1:
            ranked_NE = of_best_groups(ranked_NE, self.groups, self.groups_per_token)
        _, chosen_Nk = jax.lax.top_k(ranked_NE, self.per_token)
        weight_Nk = jnp.take_along_axis(score_NE, chosen_Nk, axis=1)
        scaled_Nk = self.scale * weight_Nk
        weight_Nk = (
            scaled_Nk / (weight_Nk.sum(-1, keepdims=True) + 1e-20) if self.is_normalised else scaled_Nk
        )
        routed = x_ND if self.latent_in is None else self.latent_in(x_ND)
        experts = self._weights(x_ND.dtype)
        if self.axes:
            how = self.form, self.axes, self.column_axes, self.capacity, self.block
            out = exchanged_experts(routed, experts, chosen_Nk, weight_Nk, routed_N, *how)
        else:
            layout = expert_layout(chosen_Nk, routed_N, self.up.shape[0], self.block)
            mlp = expert_mlp(dispatch(routed, layout), experts, layout, self.form)
            out = combine(mlp, weight_Nk, layout)
        return out if self.latent_out is None else self.latent_out(out), chosen_Nk, score_NE

    def _weights(self, dtype: Any) -> Experts:
        """Matrices in the compute dtype, biases in that of the parameters."""
        up, down = (narrowed(w[...], dtype) for w in (self.up, self.down))
        gate = None if self.gate is None else narrowed(self.gate[...], dtype)
        if self.up_bias is None or self.down_bias is None:
            return Experts(up, down, gate)
        down_bias = once(self.down_bias[...], self.columns, self.mesh)
        gate_bias = None if self.gate_bias is None else self.gate_bias[...]
        return Experts(up, down, gate, self.up_bias[...], down_bias, gate_bias)

    def _routing(self, chosen_Nk: Array, score_NE: Array, routed_N: Array) -> Routing:
        experts = score_NE.shape[1]
        weight_N1 = routed_N[:, None].astype(score_NE.dtype)
        load_E = jnp.zeros(experts, score_NE.dtype).at[chosen_Nk].add(weight_N1)
        load_E, tokens = psum_live((load_E, weight_N1.sum()), TOKEN_AXES, self.mesh)
        share_NE = score_NE / score_NE.sum(-1, keepdims=True)
        some = jnp.maximum(tokens, 1)
        fraction_E = jax.lax.stop_gradient(load_E) / (some * self.per_token)
        aux = experts * (fraction_E * (weight_N1 * share_NE).sum(0)).sum() / self.mesh.tensor
        return Routing(load_E, tokens, aux)


def of_best_groups(ranked_NE: Float[Array, "N E"], groups: int, most: int) -> Float[Array, "N E"]:
    """-inf for the experts outside the `most` best groups of each token (DeepSeek-V3, 2024).

    A group is a run of E / groups experts, at least two; its score is the sum of its two best experts'.
    """
    ranked_NGe = ranked_NE.reshape(len(ranked_NE), groups, -1)
    score_NG = jax.lax.top_k(ranked_NGe, 2)[0].sum(-1)
    _, best_Nm = jax.lax.top_k(score_NG, most)
    is_best_NG = (best_Nm[..., None] == jnp.arange(groups)).any(1)
    return jnp.where(is_best_NG[..., None], ranked_NGe, -jnp.inf).reshape(ranked_NE.shape)


register_block(MoE)
