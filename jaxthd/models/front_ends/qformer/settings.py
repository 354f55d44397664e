"""The settings of FastConformer with a Q-Former, its features, and what the rest of the program asks of it.
Without jax: the loader's workers import it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import Piece, register_front_end
from jaxthd.config.values import DERIVED, Index
from jaxthd.files.tensor_names import Arrays, Below, Table
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING, FastConformer

_ATTENTION: Table = {
    "self.query": "q",
    "self.key": "k",
    "self.value": "v",
    "output.dense": "out",
}
_LAYER: Table = {
    "attention.": Below("self_attention.", _ATTENTION),
    "attention.output.LayerNorm": "norm_self",
    "crossattention.": Below("cross_attention.", _ATTENTION),
    "crossattention.output.LayerNorm": "norm_cross",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm_ffn",
}


@dataclass(frozen=True, kw_only=True)
class QFormer(FastConformer):
    """FastConformer and a Q-Former: each chunk has the same number of audio tokens (NeMo's QformerConnector).

    Queries of each block in output_layers attend to each other and to that block's outputs; an audio token is
    a weighted mean of those of all blocks. They also attend to the frames of padding that NeMo computes
    behind a chunk: all chunks of a recording are padded to as many mel frames as the longest has and one
    more, or to the next multiple of pad_to.
    """

    title = "FastConformer with a Q-Former"
    divisible = "pieces"
    module = "jaxthd.models.front_ends.qformer.module:QFormerEncoder"
    feature_settings = (*FastConformer.feature_settings, "conv_kernel", "queries", "pad_to")
    kind: Annotated[Literal["fastconformer_qformer"], DERIVED] = "fastconformer_qformer"  # type: ignore[assignment]
    queries: int = 64
    """Audio tokens of a chunk."""
    query_layers: int = 6
    """Layers of the Q-Former."""
    query_heads: int = 8
    """Attention heads of the Q-Former."""
    query_ffn_dim: int = 3072
    """Inner dim of the Q-Former's feed-forward modules."""
    pad_to: Index = 0
    """NeMo pads mel frames to a multiple of this (its preprocessor's pad_to); 0: it does not."""

    @property
    def width(self) -> int:
        """The bands; and, on the last frame of a unit of padding, the number of units that it stands for."""
        return self.num_mels + 1

    @property
    def output_dim(self) -> int:
        return self.dim

    @property
    def longest(self) -> int | None:
        longest = super().longest
        if longest is None:
            return None
        return max(longest + self._most_padding * SUBSAMPLING, self.queries * SUBSAMPLING)

    @property
    def _most_padding(self) -> int:
        """Units of padding that differ: those whose convolution reads frames of the chunk, and another."""
        return self.conv_kernel // 2 + 1

    def _padding(self, frames: Sequence[int]) -> list[int]:
        """Units of padding that NeMo computes behind each chunk. frames: of all chunks of a recording."""
        columns = max(frames) + 1
        if self.pad_to:
            columns = -(-columns // self.pad_to) * self.pad_to
        units = self.units(columns)
        return [units - self.units(n) for n in frames]

    def pieces(self, samples: int) -> list[Piece]:
        chunks = super().pieces(samples)
        padding = self._padding([chunk.frames for chunk in chunks])
        return [self._piece(chunk, units) for chunk, units in zip(chunks, padding, strict=True)]

    def _piece(self, chunk: Piece, padding: int) -> Piece:
        kept = min(padding, self._most_padding)
        frames = (self.units(chunk.frames) + kept) * SUBSAMPLING if kept else chunk.frames
        return chunk._replace(frames=frames, tokens=self.queries, padding=frames - chunk.frames)

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        mels = super().features(samples, dither)
        padding = self._padding([len(x) for x in mels])
        return [self._padded(x_FM, units) for x_FM, units in zip(mels, padding, strict=True)]

    def _padded(self, mels_FM: Float32[np.ndarray, "F M"], padding: int) -> Float32[np.ndarray, "R W"]:
        units, kept = self.units(len(mels_FM)), min(padding, self._most_padding)
        rows = (units + kept) * SUBSAMPLING if kept else len(mels_FM)
        padded_RW = np.zeros((rows, self.width), np.float32)
        padded_RW[: len(mels_FM), :-1] = mels_FM
        if kept:
            last_U = padded_RW[SUBSAMPLING - 1 :: SUBSAMPLING, -1]
            last_U[units:] = 1
            last_U[-1] = padding - kept + 1  # the others are like it
        return padded_RW

    def faults(self, where: str) -> Iterator[Finding]:
        """Also checks the Q-Former's heads."""
        yield from super().faults(where)
        if self.dim % self.query_heads:
            yield Finding(
                f"{where}.dim is {self.dim} with {self.query_heads} query_heads",
                f"a multiple of {where}.query_heads",
                f"set {where}.dim to {multiples(self.dim, self.query_heads)}, or change {where}.query_heads",
            )

    def query_tensors(self) -> Table:
        """The names of the Q-Former's tensors in NeMo's checkpoints."""
        prompt = Arrays(("prompts",), (1, self.queries, self.dim), (0, 1, 2))
        return {
            "layer_prompts.{}": Below("qformer.", {"": prompt}, over="prompts"),
            "layer_weights": "qformer.layer_weights",
            "qformer.layer.{}.": Below("qformer.layers.", _LAYER, over="norm_ffn.weight"),
            "proj.0": "qformer.norm",
        }

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if path[0] != "qformer":
            return super().parameters(path)
        return "Q-Former", self.query_layers if path[1] == "layers" else 1


register_front_end(QFormer)
