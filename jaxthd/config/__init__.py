"""Every setting of a run, as frozen dataclasses. configs/*.py return a Config; the command line overrides it.

The docstring under a field is its text in --help and in docs/configuration.md.
"""

from jaxthd.config.adapt import AdaptConfig
from jaxthd.config.compute import BlockSizes, ComputeConfig
from jaxthd.config.data import (
    AugmentConfig,
    DataConfig,
    FilterConfig,
    Packing,
    SpecAugmentConfig,
    ValidationSet,
)
from jaxthd.config.delta import DeltaConfig
from jaxthd.config.latent_attention import LatentAttentionConfig
from jaxthd.config.mesh import MeshConfig
from jaxthd.config.model import EncoderConfig, LLMConfig, ModelConfig
from jaxthd.config.posttraining import PostTrainingConfig, RolloutConfig
from jaxthd.config.rope import RopeConfig
from jaxthd.config.run import Config
from jaxthd.config.train import TrainConfig

__all__ = [
    "AdaptConfig",
    "AugmentConfig",
    "BlockSizes",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DeltaConfig",
    "EncoderConfig",
    "FilterConfig",
    "LLMConfig",
    "LatentAttentionConfig",
    "MeshConfig",
    "ModelConfig",
    "Packing",
    "PostTrainingConfig",
    "RolloutConfig",
    "RopeConfig",
    "SpecAugmentConfig",
    "TrainConfig",
    "ValidationSet",
]
