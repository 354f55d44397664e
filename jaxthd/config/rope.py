"""The settings of the rotary position embedding."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxthd.config.values import Index


@dataclass(frozen=True)
class RopeConfig:
    """The rotary position embedding of attention's queries and keys (Su et al., RoFormer, 2021), and how its
    frequencies are scaled for documents that are longer than those of the pre-training."""

    theta: float = 0.0
    """Base of the frequencies (Qwen3: 1e6); 0: no rotary embedding (Nemotron-H)."""
    fraction: float = 1.0
    """Share of a head's features that are rotated, from the first on (Qwen3-Next: 0.25)."""
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    """Change of the frequencies. "linear": divided by factor. "yarn" (Peng et al., 2023; GPT-OSS,
    DeepSeek-V3): low ones divided by factor, high ones kept, a ramp between. "llama3": the same with the ramp
    of Llama 3.1."""
    factor: float = 1.0
    """Factor by which documents are longer. With "none" it has no effect."""
    original_positions: Index = 0
    """Positions of the pre-training, for "yarn" and "llama3"."""
    beta_fast: float = 32.0
    """"yarn": frequencies that turn as often or more in original_positions are kept."""
    beta_slow: float = 1.0
    """"yarn": frequencies that turn as often or less in original_positions are divided by factor."""
    truncate: bool = True
    """"yarn": whether the ends of the ramp are rounded outwards to whole features (GPT-OSS: no)."""
    attention_factor: float = 0.0
    """"yarn": factor on the rotated queries and keys; 0: it follows from factor and the two fields below."""
    mscale: float = 0.0
    """"yarn", with attention_factor 0: weight of log(factor) in that factor's numerator; only where
    mscale_all_dim is given too (DeepSeek-V3: 1)."""
    mscale_all_dim: float = 0.0
    """"yarn", with attention_factor 0: the same in its denominator. Multi-head latent attention also takes
    the scale of its scores from it."""
    low_freq_factor: float = 1.0
    """"llama3": frequencies that turn as often or less in original_positions are divided by factor."""
    high_freq_factor: float = 4.0
    """"llama3": frequencies that turn as often or more in original_positions are kept."""

    @property
    def rotation_factor(self) -> float:
        """The factor on rotated queries and keys."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _growth(self.factor, self.mscale) / _growth(self.factor, self.mscale_all_dim)
        return _growth(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """The factor on attention's scores in models that also scale the features without rotation
        (DeepSeek-V3)."""
        if self.scaling != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _growth(self.factor, self.mscale_all_dim) ** 2


def _growth(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
