"""Every setting of a run, as frozen dataclasses. configs/*.py return a Config; the command line overrides it.

The docstring under a field is its text in --help and in docs/configuration.md.
"""

from typing import Any

from jaxthd.config.adapt import AdaptConfig
from jaxthd.config.block import Block, Blocks, register_block
from jaxthd.config.compute import BlockSizes, ComputeConfig
from jaxthd.config.data import (
    AugmentConfig,
    DataConfig,
    FilterConfig,
    Packing,
    SpecAugmentConfig,
    ValidationSet,
)
from jaxthd.config.mesh import MeshConfig
from jaxthd.config.model import EncoderConfig, LLMConfig, ModelConfig
from jaxthd.config.posttraining import PostTrainingConfig, RolloutConfig
from jaxthd.config.rope import RopeConfig
from jaxthd.config.run import Config
from jaxthd.config.train import TrainConfig

__all__ = [
    "AdaptConfig",
    "AugmentConfig",
    "Block",
    "BlockSizes",
    "Blocks",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "EncoderConfig",
    "FilterConfig",
    "LLMConfig",
    "MeshConfig",
    "ModelConfig",
    "Packing",
    "PostTrainingConfig",
    "RolloutConfig",
    "RopeConfig",
    "SpecAugmentConfig",
    "TrainConfig",
    "ValidationSet",
    "register_block",
]


def __getattr__(name: str) -> Any:
    """Settings of blocks that old config files import: fields that jaxthd/config/removed.py moves."""
    if name in ("DeltaConfig", "LatentAttentionConfig"):
        return dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
