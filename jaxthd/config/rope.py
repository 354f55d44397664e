"""The settings of the rotary position embedding."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxthd.config.findings import Finding, multiples
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

    def rotated(self, head_dim: int) -> int:
        """The features of a head that are rotated."""
        return int(head_dim * self.fraction)

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


def rope_faults(rope: RopeConfig, block: str, name: str, dim: int) -> Iterator[Finding]:
    """Faults of a block's rotary embedding. block: the path of its settings. name, dim: of its rotated
    heads."""
    where = f"{block}.rope"
    if not rope.theta and rope.scaling != "none":
        yield Finding(
            f"{where}.scaling is {rope.scaling!r} with theta 0",
            "a theta, because without one nothing is rotated and the scaling has no effect",
            f"give {where}.theta as config.json has it (rope_theta), or no {where}.scaling",
            is_warning=True,
        )
    if not rope.theta:
        return
    features = rope.rotated(dim)
    if features % 2 or not 0 < features <= dim:
        yield Finding(
            f"{where}.fraction is {rope.fraction}, which is {features} features of {block}.{name} {dim}",
            f"an even number from 2 to {dim}, because pairs are rotated",
            f"set {block}.{name} to {multiples(dim, 2)}"
            if rope.fraction == 1
            else f"change {where}.fraction",
        )
    if rope.theta <= 1 or rope.factor < 1:
        yield Finding(
            f"{where}.theta is {rope.theta} and factor {rope.factor}",
            "theta above 1 (or 0 for no rotary embedding) and factor 1 or more",
            f"correct {where}.theta and {where}.factor",
        )
    if rope.scaling in ("yarn", "llama3") and rope.original_positions <= 0:
        yield Finding(
            f"{where}.original_positions is {rope.original_positions} with scaling {rope.scaling!r}",
            "more than 0, the positions of the pre-training",
            f"set {where}.original_positions as config.json has it (original_max_position_embeddings)",
        )
    ends = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
    names = ends.get(rope.scaling, ())
    low, high = [getattr(rope, name) for name in names] or (1.0, 2.0)
    if not 0 < low < high:
        yield Finding(
            f"{where} has {' and '.join(names)} {low} and {high}",
            "the first less than the second and both above 0, because they are the ends of a ramp",
            f"correct {where}",
        )
