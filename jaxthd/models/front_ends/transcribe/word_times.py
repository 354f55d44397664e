"""The head that finds words in time, and its CTC loss.

Legend: E outputs of the encoder on this rank, u frames of the head for each, N = u E, D model dim, C classes;
R rows, M outputs of these rows over all ranks that share them, in the order of `Order`, F = u M frames of
them, G the most recordings with labels in these rows, L the most labels of one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.config import ComputeConfig
from jaxthd.models.ctc import label_log_probs
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.stacked.module import Pieces, Transformer
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.front_ends.transcribe.order import Order, of_rank, over_ranks
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.layers import Linear
from jaxthd.ops.cross_entropy import HeadBlocks, HeadInputs, supervised_log_probs
from jaxthd.ops.ctc import Alignable, ctc_log_probs
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Init, applied, gathered_module


class _Frames(nnx.Module):
    """A linear layer that makes u frames of an output; they share a bias."""

    def __init__(self, dim: int, frames: int, init: Init) -> None:
        self.w, self.bias = init.normal((dim, frames * dim), projects=True), init.zeros((dim,))

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "N D"]:
        y_EF = x_ED @ self.w[...].astype(x_ED.dtype)
        return y_EF.reshape(-1, x_ED.shape[1]) + self.bias[...].astype(x_ED.dtype)


class WordTimesHead(Transformer):
    """x + scale * Transformer(x), x being several frames of each output; then the logits of the classes."""

    def __init__(self, config: Transcribe, blocks: Stacked, init: Init, compute: ComputeConfig) -> None:
        super().__init__(blocks, init, compute)
        self.upsample = _Frames(config.dim, config.word_times.upsampling, init)
        self.classes = Linear(config.dim, config.word_times.classes, init, bias=True)
        self.config = config
        self.blocks_of_classes = HeadBlocks(compute.blocks.loss, compute.blocks.vocabulary)

    def hidden(
        self,
        x_ED: Float[Array, "E D"],
        segments: Segments,
        hidden_E: Array,
        givers_E: Int32[Array, " E"],
        axes: tuple[str, ...],
        row_axes: tuple[str, ...],
    ) -> Float[Array, "N D"]:
        """The input of the classes. x: the encoder's outputs before their norm. segments: their pieces, which
        read the outputs of their neighbours as these give them (givers: Order.givers). hidden: as in Pieces.
        axes, row_axes: as in the contract (Encoder)."""
        frames, config = self.config.word_times.upsampling, self.config
        by_row = x_ED.reshape(segments.rows, -1, x_ED.shape[1])
        x_ED = over_ranks(by_row, row_axes).reshape(-1, x_ED.shape[1])[givers_E]
        x_ND = applied(self.upsample, x_ED, keeps_gathered=self.keeps_gathered)
        inside_F = jnp.arange(frames, dtype=jnp.int32)
        coarse = (x.reshape(segments.rows, -1) for x in (segments.ids, segments.positions))
        ids_RN, first_RN = (jnp.repeat(x, frames, axis=1) for x in coarse)
        positions_RN = (first_RN * frames + jnp.tile(inside_F, by_row.shape[1])) * (ids_RN > 0)
        finer = make_segments(ids_RN, positions_RN, block=segments.block, axis=None)
        longest = config.units(config.longest) * frames
        pieces = Pieces.of(finer, frames * jnp.repeat(hidden_E, frames), longest, axes, row_axes)
        scale = jnp.asarray(config.word_times.residual_scale, x_ND.dtype)
        return x_ND + scale * self.run(x_ND, pieces)

    def logits(self, h_ND: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """The logits of all classes."""
        found: Array = applied(self.classes, h_ND, keeps_gathered=self.keeps_gathered)
        return found

    def labels(self, recordings: Recordings, order: Order, axes: tuple[str, ...]) -> "Labels":
        """The recordings with labels. axes: of the ranks that share rows; each has all of a row's."""
        assert recordings.labels is not None
        return Labels.of(recordings.labels, recordings.most, order, axes, self.config)

    def scores(
        self, h_ND: Float[Array, "N D"], found: "Labels", rows: int, axes: tuple[str, ...]
    ) -> Float[Array, "N K"]:
        """Log-probabilities of the blank and of the labels of each frame's recording, K = 1 + L; 0 in frames
        of recordings without labels. h: as `hidden` gives it."""
        classes = gathered_module(self.classes, h_ND.dtype)
        assert classes.bias is not None
        # A bias is the row of an input that is always 1.
        head_CD = jnp.concatenate([classes.matrix(h_ND.dtype).T, classes.bias[...][:, None]], axis=1)
        h_ND = jnp.pad(h_ND, ((0, 0), (0, 1)), constant_values=1)
        document_N = of_rank(found.alignable.document, rows, axes)
        is_frame_N = document_N < found.most
        blank = self.config.word_times.blank
        inputs = HeadInputs(h_ND, head_CD.astype(h_ND.dtype), jnp.full_like(document_N, blank), is_frame_N)
        blank_N = supervised_log_probs(inputs, self.blocks_of_classes)
        rows_GLD = head_CD[found.ids]
        label_NL = label_log_probs(h_ND, blank_N, rows_GLD, head_CD[blank], document_N, is_frame_N)
        return jnp.concatenate([blank_N[:, None], label_NL], axis=1)

    def loss(
        self, scores_NK: Float[Array, "N K"], found: "Labels", rows: int, axes: tuple[str, ...]
    ) -> Float[Array, ""]:
        """This rank's share of the sum of -log p(labels) of all recordings with labels. Every rank of axes
        computes the same sum."""
        each_FK = over_ranks(scores_NK.reshape(rows, -1, scores_NK.shape[1]), axes)
        blank_F, label_FL = each_FK[..., 0].reshape(-1), each_FK[..., 1:].reshape(-1, each_FK.shape[2] - 1)
        return -ctc_log_probs(blank_F, label_FL, found.alignable).sum() / jax.lax.axis_size(axes)


class Labels(NamedTuple):
    """Recordings with labels. ids: of the classes; 0 behind a recording's last. alignable: as ops/ctc.py
    takes them; its slots are the frames of all ranks."""

    ids: Int32[Array, "G L"]
    alignable: Alignable

    @property
    def most(self) -> int:
        """G."""
        return len(self.ids)

    @classmethod
    def of(
        cls,
        labels_REu: Int32[Array, "R E u"],
        most: int,
        order: Order,
        axes: tuple[str, ...],
        config: Transcribe,
    ) -> "Labels":
        """labels, most: as in Recordings. A recording's first label is at its first output."""
        u, most_labels = labels_REu.shape[2], config.word_times.most_labels
        labels_Mu = over_ranks(labels_REu, axes).reshape(-1, u)[order.source]
        count, at = len(labels_Mu), partial(jnp.take, axis=0, mode="clip")
        recordings = min(count, len(labels_REu) * most)
        is_first_M = (order.positions == 0) & (labels_Mu[:, 0] >= 0)
        (start_G,) = jnp.nonzero(is_first_M, size=recordings, fill_value=count)
        is_there_G = start_G < count
        stop_G = jnp.where(is_there_G, at(order.stop, start_G), count)
        labels_F = labels_Mu.reshape(-1)
        before_F = jnp.pad(jnp.cumsum(labels_F >= 0), (1, 0))
        number_G = jnp.where(is_there_G, at(before_F, u * stop_G) - at(before_F, u * start_G), 0)
        k_L = jnp.arange(most_labels, dtype=jnp.int32)
        is_label_GL = k_L < number_G[:, None]
        ids_GL = jnp.where(is_label_GL, at(labels_F, u * start_G[:, None] + k_L), 0)
        repeats_GL = jnp.pad(ids_GL[:, 1:] == ids_GL[:, :-1], ((0, 0), (1, 0))) & is_label_GL
        inside_u = jnp.arange(u, dtype=jnp.int32)
        slots_F = (u * order.source[:, None] + inside_u).reshape(-1)
        place_M = jnp.arange(count, dtype=jnp.int32)
        number_M = jnp.searchsorted(start_G, place_M, side="right").astype(jnp.int32) - 1
        is_inside_M = (number_M >= 0) & (place_M < at(stop_G, number_M)) & at(is_there_G, number_M)
        document_M = jnp.where(is_inside_M, number_M, recordings)
        document_F = jnp.repeat(document_M[order.place], u)
        frames_G = jnp.where(is_there_G, u * (stop_G - start_G), 0)
        found = Alignable(
            slots_F,
            (u * jnp.minimum(start_G, count)).astype(jnp.int32),
            frames_G.astype(jnp.int32),
            number_G.astype(jnp.int32),
            repeats_GL,
            document_F,
        )
        return cls(ids_GL, found)
