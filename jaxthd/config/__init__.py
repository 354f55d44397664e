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
from jaxthd.config.front_end import FrontEnd, default_front_end, register_front_end
from jaxthd.config.mesh import MeshConfig
from jaxthd.config.model import LLMConfig, MarksConfig, ModelConfig
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
    "DeltaConfig",
    "EncoderConfig",
    "FilterConfig",
    "FrontEnd",
    "LLMConfig",
    "LatentAttentionConfig",
    "MarksConfig",
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
    "register_front_end",
]


def __getattr__(name: str) -> Any:
    """Names that old config files import: the default front end's settings, and fields of blocks that
    jaxthd/config/removed.py moves."""
    if name == "EncoderConfig":
        return type(default_front_end())
    from jaxthd.config.removed import OLD_GROUPS

    if name in OLD_GROUPS:
        return OLD_GROUPS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
