"""The decoder's mixers: their contract, the kinds, and the registry of kinds by letter."""

from jaxthd.models.mixers.attention import Attention
from jaxthd.models.mixers.contract import LayerKind, Mixer, Prefilled, RoutedMixer, Routing
from jaxthd.models.mixers.delta import GatedDelta
from jaxthd.models.mixers.latent_attention import LatentAttention
from jaxthd.models.mixers.mamba2 import Mamba2
from jaxthd.models.mixers.mlp import MLP
from jaxthd.models.mixers.moe import MoE
from jaxthd.models.mixers.registry import LAYER_KINDS, layer_kind, letters_and_titles
from jaxthd.models.mixers.window_attention import WindowAttention

__all__ = [
    "LAYER_KINDS",
    "MLP",
    "Attention",
    "GatedDelta",
    "LatentAttention",
    "LayerKind",
    "Mamba2",
    "Mixer",
    "MoE",
    "Prefilled",
    "RoutedMixer",
    "Routing",
    "WindowAttention",
    "layer_kind",
    "letters_and_titles",
]
