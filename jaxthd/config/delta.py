"""The settings of the gated delta rule's layers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaConfig:
    """The layers of the letter D: the gated delta rule (Yang et al., Gated Delta Networks, 2024), as in
    Qwen3-Next."""

    key_heads: int = 2
    """Heads of queries and keys; must divide value_heads."""
    value_heads: int = 4
    """Heads of values, decays and output gates; each has a state [key_dim, value_dim]."""
    key_dim: int = 32
    """Dim of a query or key head."""
    value_dim: int = 32
    """Dim of a value head."""
    conv: int = 4
    """Taps of the causal convolution over queries, keys and values."""

    @property
    def keys(self) -> int:
        """Features of all keys."""
        return self.key_heads * self.key_dim

    @property
    def inner(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim
