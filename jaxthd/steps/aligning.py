"""The aligning step: CTC at the frames of recordings, for the blank and the labels of their documents."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from jaxthd.models.ctc import transcripts
from jaxthd.models.front_ends.contract import LABEL_SCORES
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import AUDIO_AXES, AXES, CONTEXT, DATA, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import Forward


class FrameScores(NamedTuple):
    """Log-probabilities at frames, 0 elsewhere. blank: of the blank. label: of label k of the frame's
    document. Both 0 for a document that cannot be aligned. loudness: of each audio frame, the mean of its
    bands (FrontEnd.bands); 0 without bands.

    With FrontEnd.label_loss F are the frames of the front end's own head, so many for each of its outputs,
    and labels are Batch.recording_labels. Else F are the slots of the tokens, frames stand in audio slots,
    and the labels are the supervised targets.
    """

    blank: Float[Array, "R F"]
    label: Float[Array, "R F L"]
    loudness: Float[Array, "R A"]


def make_aligning_step(blueprint: Blueprint, mesh: Mesh) -> Callable[[Tree, Tree, Batch], FrameScores]:
    """(params, buffers, batch) -> FrameScores in the batch's layout and sharding, with stored batch
    statistics. The batch has audio; with FrontEnd.label_loss it has labels too."""
    config = blueprint.config
    by_token: Any = PartitionSpec(DATA, CONTEXT)
    by_frame: Any = PartitionSpec(DATA, AUDIO_AXES)

    def of_tokens(model: SpeechLM, batch: Batch) -> tuple[Array, Array]:
        """Scores at token slots, by the decoder's head."""
        embedded_nD, _ = model.embed(batch, axes=AXES, train=False)
        found = transcripts(batch, config.data.max_documents, config.train.ctc_max_labels, CONTEXT)
        blank_N, label_NL = model.ctc_frames(embedded_nD, batch, found, model.gathered_head())
        slots = batch.tokens.shape
        return blank_N.reshape(slots), label_NL.reshape(*slots, -1)

    def of_outputs(model: SpeechLM, batch: Batch) -> tuple[Array, Array]:
        """Scores at the frames of the front end's head."""
        _, state = model.embed(batch, axes=AXES, train=False, labels=LABEL_SCORES)
        scores_NK = state[LABEL_SCORES]
        scores_RFK = scores_NK.reshape(len(batch.tokens), -1, scores_NK.shape[1])
        return scores_RFK[..., 0], scores_RFK[..., 1:]

    has_own = config.model.audio_encoder.label_loss > 0
    scored = of_outputs if has_own else of_tokens

    def rank(params: Tree, buffers: Tree, batch: Batch) -> FrameScores:
        """Scores of the frames of this rank."""
        model = Forward(blueprint, params, buffers, None, batch_statistics=False).model(buffers)
        bands = batch.features[..., : config.model.audio_encoder.bands]
        loudness_RA = bands.sum(-1) / max(bands.shape[-1], 1)
        return FrameScores(*scored(model, batch), loudness_RA)

    by_score = by_frame if has_own else by_token
    out_specs = FrameScores(by_score, by_score, by_frame)
    return on_ranks(rank, mesh, (*blueprint.specs, batch_specs()), out_specs)
