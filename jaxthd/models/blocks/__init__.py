"""The decoder's blocks: their settings and modules. A file here registers a kind of block
(jaxthd/config/block.py)."""

from jaxthd.models.blocks.attention import Attention, AttentionMixer
from jaxthd.models.blocks.contract import Mixer, Prefilled, RoutedMixer, Routing
from jaxthd.models.blocks.delta import DeltaMixer, GatedDelta
from jaxthd.models.blocks.kimi_delta import KimiDelta, KimiDeltaMixer
from jaxthd.models.blocks.latent_attention import LatentAttention, LatentAttentionMixer
from jaxthd.models.blocks.mamba2 import Mamba2, Mamba2Mixer
from jaxthd.models.blocks.mlp import MLP, MLPMixer
from jaxthd.models.blocks.moe import MoE, MoEMixer, Router
from jaxthd.models.blocks.parallel import Parallel, ParallelMixer
from jaxthd.models.blocks.short_conv import ShortConv, ShortConvMixer

__all__ = [
    "MLP",
    "Attention",
    "AttentionMixer",
    "DeltaMixer",
    "GatedDelta",
    "KimiDelta",
    "KimiDeltaMixer",
    "LatentAttention",
    "LatentAttentionMixer",
    "MLPMixer",
    "Mamba2",
    "Mamba2Mixer",
    "Mixer",
    "MoE",
    "MoEMixer",
    "Parallel",
    "ParallelMixer",
    "Prefilled",
    "RoutedMixer",
    "Router",
    "Routing",
    "ShortConv",
    "ShortConvMixer",
]
