"""The settings of multi-head latent attention."""

from dataclasses import dataclass

from jaxthd.config.values import Index


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention, the letter L of model.llm.pattern (DeepSeek-V2, 2024; DeepSeek-V3;
    Moonlight): the keys and values of all model.llm.q_heads heads are expanded from one latent a token, which
    is all that decoding keeps."""

    q_lora_rank: Index = 0
    """Dim of the latent that queries are expanded from (DeepSeek-V3: 1536); 0: they are projected from the
    model dim (Moonlight)."""
    kv_lora_rank: int = 64
    """Dim of the latent that keys and values are expanded from (DeepSeek-V3: 512)."""
    qk_nope_head_dim: int = 32
    """Features of a query or key head that are not rotated (DeepSeek-V3: 128)."""
    qk_rope_head_dim: int = 16
    """Rotated features of a query head (DeepSeek-V3: 64); those of the key are shared by all heads."""
    v_head_dim: int = 32
    """Dim of a value head (DeepSeek-V3: 128)."""
    norm_eps: float = 1e-6
    """RMSNorm epsilon of the latents; that of published models, whatever their model.llm.norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        """Dim of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kept(self) -> int:
        """Numbers that decoding keeps of a token: the latent, and the rotated features of its key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kernel_head_dim(self) -> int:
        """Dim of a head in fused kernels, which take values of the keys' dim: zeros fill the smaller ones."""
        return max(self.qk_head_dim, self.v_head_dim)
