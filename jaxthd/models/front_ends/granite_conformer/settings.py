"""The settings of the Conformer in blocks, its features, and what the rest of the program asks of it. Without
jax: the loader's workers import it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Table
from jaxthd.models.front_ends.granite_conformer.mel import log_mel
from jaxthd.models.front_ends.granite_conformer.tensors import encoder_table, projector_table
from jaxthd.models.front_ends.log_mel import HOP

_GROUPS = {"ffn1": "feed-forward", "ffn2": "feed-forward", "attention": "attention", "conv": "convolution"}


@dataclass(frozen=True, kw_only=True)
class GraniteConformer(FrontEnd):
    """A Conformer over a whole recording, whose attention is in blocks, and a Q-Former, which makes a few
    audio tokens of each of its windows."""

    title = "Granite Speech"
    divisible = "frames"
    frame_samples = 2 * HOP
    module = "jaxthd.models.front_ends.granite_conformer.module:GraniteConformerEncoder"
    feature_settings = ("mel_bands", "window", "queries")
    kind: Annotated[Literal["granite_conformer"], DERIVED] = "granite_conformer"
    mel_bands: int = 80
    """Mel bands of the features; a frame is two of them (20 ms)."""
    layers: int = 4
    """Conformer blocks."""
    model_dim: int = 128
    """Model dim of the Conformer."""
    heads: int = 4
    """Attention heads of the Conformer."""
    head_dim: int = 32
    """Dim of a head of the Conformer."""
    ffn_dim: int = 512
    """Inner dim of each of the two feed-forward modules."""
    block: int = 200
    """Frames of a block, inside which frames attend to each other."""
    distances: int = 512
    """Distances of two frames, either way, that the table of relative positions has rows for."""
    conv_kernel: int = 15
    """Taps of the depthwise convolution; odd."""
    conv_dim: int = 256
    """Channels of the depthwise convolution."""
    labels: int = 42
    """Labels whose probabilities, read off the middle block, are added to what goes on (self-conditioned
    CTC)."""
    joined_layers: tuple[int, ...] = ()
    """Conformer blocks, from 1 on, whose outputs the Q-Former reads beside those of the last one; 0: what the
    first one reads (Granite Speech 4.1 "plus")."""
    window: int = 15
    """Frames of a window of the Q-Former."""
    queries: int = 3
    """Audio tokens of a window."""
    query_dim: int = 128
    """Model dim of the Q-Former."""
    query_layers: int = 2
    """Layers of the Q-Former."""
    query_heads: int = 4
    """Attention heads of the Q-Former."""
    query_ffn_dim: int = 512
    """Inner dim of the Q-Former's feed-forward module."""
    cross_every: Annotated[int, DERIVED] = 1
    """Every so many layers of the Q-Former, from the first on, attend to frames."""

    @property
    def width(self) -> int:
        return 2 * self.mel_bands

    @property
    def bands(self) -> int:
        return self.width

    @property
    def read_dim(self) -> int:
        """Numbers of a frame that the Q-Former reads."""
        return self.model_dim * (1 + len(self.joined_layers))

    @property
    def unit(self) -> tuple[int, int]:
        return self.window, self.queries

    @property
    def positions_per_unit(self) -> int:
        """The Conformer's. The Q-Former, which has fewer, counts like it."""
        return self.window

    @property
    def dim(self) -> int:
        return self.query_dim

    @property
    def longest(self) -> None:
        return None

    def pieces(self, samples: int) -> list[Piece]:
        frames = (samples // HOP + 1) // 2
        return [Piece(0, 0, frames, 0, self.units(frames) * self.queries)]

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        mel = log_mel(samples, self.mel_bands)
        return [mel[: len(mel) // 2 * 2].reshape(-1, self.width)]

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks sizes that the encoder divides."""
        if self.query_dim % self.query_heads:
            yield Finding(
                f"{where}.query_dim is {self.query_dim} with query_heads {self.query_heads}",
                f"a multiple of {self.query_heads}",
                f"set {where}.query_dim to {multiples(self.query_dim, self.query_heads)}",
            )
        if self.conv_kernel % 2 == 0:
            expected = "an odd number, because there are as many taps before a frame as after it"
            change = f"set {where}.conv_kernel to {self.conv_kernel - 1} or {self.conv_kernel + 1}"
            yield Finding(f"{where}.conv_kernel is {self.conv_kernel}", expected, change)
        if self.joined_layers != tuple(sorted({*self.joined_layers} & {*range(self.layers)})):
            expected = f"numbers of blocks that rise, from 0 to {self.layers - 1}"
            found, change = f"{where}.joined_layers is {self.joined_layers}", f"correct {where}.joined_layers"
            yield Finding(found, expected, change)
        if self.distances < self.block:
            yield Finding(
                f"{where}.distances is {self.distances} with blocks of {self.block} frames",
                f"{self.block} or more, because two frames of a block may be so far apart",
                f"set {where}.distances to {self.block}",
            )

    def tensors(self) -> Table:
        projector = projector_table(self.queries, self.query_dim, self.query_layers)
        return {**encoder_table(self.layers), **projector}

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if path[0] != "blocks":
            return path[0], 1
        name = str(path[1])
        return _GROUPS.get(name, "LayerNorms" if name.startswith("norm") else name), self.layers

    def keeps_statistics(self, is_trained: Mapping[str, Any]) -> bool:
        """BatchNorms that are frozen normalise by their running statistics, which do not change."""
        return not any(is_trained["blocks"]["conv"]["norm"].values())


register_front_end(GraniteConformer)
