"""The settings that a checkpoint of the model depends on: encoder, LLM, adapter."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxthd.config.delta import DeltaConfig
from jaxthd.config.latent_attention import LatentAttentionConfig
from jaxthd.config.rope import RopeConfig
from jaxthd.config.values import Index, Range
from jaxthd.errors import UserError


@dataclass(frozen=True)
class EncoderConfig:
    """FastConformer over packed log-mel frames."""

    num_mels: int = 80
    """Mel bands of the features."""
    layers: int = 4
    """Conformer blocks."""
    dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    ffn_dim: int = 512
    """Inner dim of each of the two feed-forward modules."""
    conv_kernel: int = 9
    """Taps of the depthwise convolution; odd."""
    subsampling_channels: int = 64
    """Channels of the stride-2 convolutions."""
    linear_bias: bool = True
    """Biases in attention and feed-forward modules."""
    conv_bias: bool = True
    """Biases in convolution modules."""
    scale_input: bool = True
    """Multiply the subsampled features by sqrt(dim)."""
    chunk_seconds: Annotated[float, Range(0.02)] = 30.0
    """Longer audio is encoded in chunks of this length. A property of the model, not of the mesh."""

    @property
    def chunk_frames(self) -> int:
        """Most mel frames of an encoder chunk. A tail of one frame joins the chunk before it."""
        return round(self.chunk_seconds * 100) + 1


@dataclass(frozen=True)
class LLMConfig:
    """The decoder: blocks of any kinds in any order; docs/backbones.md has the families' patterns."""

    pattern: str = "M-M*-"
    """One letter per block: M Mamba2, D gated delta rule, * attention, W attention in a window, L latent
    attention, - MLP, E mixture of experts. A | marks where pipeline stages are divided; without any, they are
    divided by cost."""
    vocab_size: int = 260
    """Rows of the embedding and of the head."""
    dim: int = 128
    """Model dim."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    norm_zero_centred: bool = False
    """Whether the weights of RMSNorms are stored as their difference from 1 (Qwen3-Next): those of the
    blocks, of attention's queries and keys, the final one, and those of multi-token prediction."""
    q_heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; must divide q_heads."""
    head_dim: int = 32
    """Dim of an attention head."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    """Whether attention's queries and keys are normalised, each head by itself (Qwen3)."""
    window: int = 128
    """Tokens that a token sees in attention with the letter W: itself and those before it (GPT-OSS: 128)."""
    attention_sinks: bool = False
    """Whether each attention head has a learnt score that stands beside its keys in the softmax (GPT-OSS)."""
    attention_bias: bool = False
    """Whether attention's four projections have biases (GPT-OSS)."""
    attention_gate: bool = False
    """Whether attention's outputs are multiplied by the sigmoid of a projection of its input (Qwen3-Next)."""
    latent_attention: LatentAttentionConfig = field(default_factory=LatentAttentionConfig)
    ffn_dim: int = 512
    """Inner dim of the MLP."""
    ffn_form: Literal["relu2", "swiglu", "clamped_swiglu"] = "relu2"
    """The MLP's and the experts' form. "relu2": down(relu(up x)^2). "swiglu": down(silu(gate x) * up x).
    "clamped_swiglu": down((up + 1) * gate * sigmoid(alpha * gate)) of a gate of at most limit and an up from
    -limit to limit (GPT-OSS)."""
    swiglu_alpha: float = 1.702
    """alpha of "clamped_swiglu"."""
    swiglu_limit: float = 7.0
    """limit of "clamped_swiglu"."""
    ffn_bias: bool = False
    """Whether the projections of the MLP and of the experts have biases (GPT-OSS)."""
    tied_embedding: bool = False
    """Whether the head is the embedding: one matrix for both."""
    mamba_heads: int = 8
    """Mamba2 heads."""
    mamba_head_dim: int = 32
    """Dim of a Mamba2 head."""
    mamba_state: int = 32
    """State size N of a Mamba2 head."""
    mamba_groups: int = 2
    """Groups of heads that share B and C; must divide mamba_heads."""
    mamba_conv: int = 4
    """Taps of the causal convolution."""
    mamba_dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Lower and upper limit of the time step after softplus."""
    delta: DeltaConfig = field(default_factory=DeltaConfig)
    experts: int = 8
    """Routed experts."""
    experts_per_token: int = 2
    """Experts a token is sent to."""
    expert_dim: int = 128
    """Inner dim of a routed expert."""
    shared_expert_dim: Index = 256
    """Inner dim of the shared expert; 0: there is none (Qwen3)."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of one number a token (Qwen3-Next)."""
    latent_dim: Index = 0
    """Dim of the latent projection around the routed experts; 0 for none."""
    router: Literal["sigmoid", "softmax"] = "sigmoid"
    """The router's scores: "sigmoid", of each expert by itself, with a correction bias in the choice that
    evens out the load (Nemotron-3); "softmax", over all experts (Qwen3), to be used with train.aux_loss."""
    router_normalised: bool = True
    """Whether the weights of a token's experts are their scores over their sum; otherwise their scores."""
    router_bias: bool = False
    """Whether the router's projection has a bias (GPT-OSS)."""
    router_groups: int = 1
    """Groups that the experts are divided into (DeepSeek-V3: 8); 1: none."""
    router_groups_per_token: int = 1
    """Groups that a token's experts are chosen from (DeepSeek-V3: 4): those whose two best experts have the
    largest sum of scores."""
    router_scale: float = 1.0
    """Factor on the sum of the routed experts' outputs."""
    mtp_pattern: str = ""
    """Blocks of one depth of multi-token prediction, such as "*E"; "" for none. It is trained beside
    next-token prediction (train.mtp_loss) and exported; validation, scoring and generation do not use it."""
    mtp_depths: int = 1
    """Depths of multi-token prediction: depth k predicts the token k positions beyond the next."""
    mtp_shared: bool = True
    """All depths share one set of weights (Nemotron-3); otherwise each depth has its own."""

    @property
    def is_gated(self) -> bool:
        """Whether the MLP and the experts have a gate."""
        return self.ffn_form != "relu2"

    @property
    def ffn_matrices(self) -> int:
        """Matrices of an MLP or of an expert."""
        return 3 if self.is_gated else 2

    @property
    def letters(self) -> str:
        """The letters of the blocks: the pattern without its stage marks."""
        return self.pattern.replace("|", "")

    @property
    def kinds(self) -> str:
        """The letters of all kinds of blocks in the model."""
        return "".join(sorted(set(self.letters + self.mtp_pattern)))

    @property
    def mtp_modules(self) -> int:
        """Number of weight sets for multi-token prediction."""
        return (1 if self.mtp_shared else self.mtp_depths) if self.mtp_pattern else 0


@dataclass(frozen=True)
class ModelConfig:
    """The speech LLM: encoder, adapter, decoder. A checkpoint depends on all of it, and on nothing else."""

    encoder: EncoderConfig | None = field(default_factory=EncoderConfig)
    """None: a text-only model, without encoder and adapter. Only a config file can say so."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    adapter_dim: Index = 0
    """Inner dim of the RMSNorm-linear-relu^2-linear adapter; 0 for a single linear layer."""
    adapter_bias: bool = False
    """Whether the adapter's last linear layer has a bias (Canary-Qwen)."""

    @property
    def audio_encoder(self) -> EncoderConfig:
        """The encoder, for what cannot do without one. Raises UserError for a text-only model."""
        if self.encoder is None:
            raise UserError(
                "the model is text-only (model.encoder is None); expected one with an encoder for this: give "
                "model.encoder"
            )
        return self.encoder
