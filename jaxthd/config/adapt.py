"""The settings of what trains: frozen parts, LoRA."""

from dataclasses import dataclass
from typing import Literal

from jaxthd.config.values import Decay, Index, numbers_of


@dataclass(frozen=True)
class AdaptConfig:
    """The parts of the model that train, and their learning rates. The parts are encoder, adapter and LLM
    (all the rest).

    Patterns match names, and * matches anything: jaxthd describe runs/my --names lists the names.
    """

    freeze: tuple[str, ...] = ()
    """Patterns of parameters that do not train, such as "encoder.*" or "decoder.layers.mamba.*"; and, with a
    "!" before them, of those that train nevertheless, such as "!decoder.*.norm.weight" beside LoRA. A new run
    must have what is frozen from train.init_from. A tied embedding is the head by name too. Frozen BatchNorms
    of the encoder keep their running statistics and normalise by them; frozen routers keep the correction
    biases of their experts."""
    lora_rank: Index = 0
    """Rank of the low-rank matrices (LoRA) added to projections; 0 for none. They train, whatever freeze
    says; everything else in a part that has LoRA is frozen."""
    lora_alpha: float = 16.0
    """The product of the low-rank matrices is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("decoder.layers.*",)
    """Patterns of the projections that get LoRA, such as "decoder.*.q"; "*.q" is the encoder's too. Routers
    and routed experts never do."""
    lora_dropout: Decay = 0.0
    """Share of the features that do not enter the low-rank matrices of the decoder's projections in a
    training step. The draws are the same on every mesh; encoder and adapter have none."""
    lora_documents: Literal["all", "audio"] = "all"
    """Documents in which the low-rank matrices of the decoder are on: all, or those with audio alone, which
    Granite Speech does: text by itself then goes through the model as it was."""
    dora: bool = False
    """Also train the magnitude of each column of the projections that get LoRA (DoRA)."""
    lr_factors: tuple[str, ...] = ()
    """Factors on the learning rate, as PART=FACTOR, such as "encoder=0.1"."""

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each part, from lr_factors. Raises UserError for one that is not PART=FACTOR."""
        return numbers_of(
            "adapt.lr_factors",
            "PART=FACTOR",
            self.lr_factors,
            dict.fromkeys(("encoder", "adapter", "llm"), 1.0),
        )
