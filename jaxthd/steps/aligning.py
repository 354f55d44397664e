"""The aligning step: CTC at each audio slot, for the blank and the labels of its document."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from jaxthd.models.ctc import transcripts
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import AUDIO_AXES, AXES, CONTEXT, DATA, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import Forward


class FrameScores(NamedTuple):
    """Log-probabilities at audio slots, 0 elsewhere. blank: of the blank. label: of label k of the slot's
    document, the k-th of its supervised targets. Both 0 for a document that cannot be aligned. loudness: of
    each audio frame, the mean of its bands (FrontEnd.bands); 0 without bands."""

    blank: Float[Array, "R T"]
    label: Float[Array, "R T L"]
    loudness: Float[Array, "R A"]


def make_aligning_step(blueprint: Blueprint, mesh: Mesh) -> Callable[[Tree, Tree, Batch], FrameScores]:
    """(params, buffers, batch) -> FrameScores in the batch's layout and sharding, with stored batch
    statistics. L is train.ctc_max_labels. The batch has audio."""
    config = blueprint.config

    def rank(params: Tree, buffers: Tree, batch: Batch) -> FrameScores:
        """Scores of the slots and frames of this rank."""
        model = Forward(blueprint, params, buffers, None, batch_statistics=False).model(buffers)
        embedded_nD, _ = model.embed(batch, axes=AXES, train=False)
        found = transcripts(batch, config.data.max_documents, config.train.ctc_max_labels, CONTEXT)
        blank_N, label_NL = model.ctc_frames(embedded_nD, batch, found, model.gathered_head())
        slots, bands = batch.tokens.shape, batch.features[..., : config.model.audio_encoder.bands]
        loudness_RA = bands.sum(-1) / max(bands.shape[-1], 1)
        return FrameScores(blank_N.reshape(slots), label_NL.reshape(*slots, -1), loudness_RA)

    by_token: Any = PartitionSpec(DATA, CONTEXT)
    by_frame: Any = PartitionSpec(DATA, AUDIO_AXES)
    out_specs = FrameScores(by_token, by_token, by_frame)
    return on_ranks(rank, mesh, (*blueprint.specs, batch_specs()), out_specs)
