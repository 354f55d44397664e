"""The contract of a front end's module. Its settings and its work on the host are a FrontEnd
(jaxthd/config/front_end.py).

Legend: A audio frames on this rank, W numbers of a frame, E outputs of these frames (A / E is the front end's
unit), D dim of an output.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.packing.segments import Segments

LABEL_LOSS, LABEL_SCORES = "label_loss", "label_scores"


class Recordings(NamedTuple):
    """The recordings of the outputs on this rank: Batch.recording_ids and recording_positions; and
    recording_labels, where the module shall look at them, else None. most: the most recordings with labels in
    a row. asked: what the module computes from labels, LABEL_LOSS or LABEL_SCORES."""

    ids: Int32[Array, "R E"]
    positions: Int32[Array, "R E"]
    labels: Int32[Array, "R E labels"] | None = None
    most: int = 0
    asked: str = LABEL_LOSS


@runtime_checkable
class Encoder(Protocol):
    """An nnx.Module. keeps_gathered: whether weights that FSDP shards are kept, once gathered, for the
    backward pass.

    With FrontEnd.label_loss its buffers have a further entry where recordings have labels, Recordings.asked.
    LABEL_LOSS is this rank's share of the sum of the losses of all recordings, which the ranks' shares add up
    to. LABEL_SCORES are log-probabilities [E * frames of an output, 1 + L]: of the blank, and of label k of
    the frame's recording; 0 in frames of recordings without labels.
    """

    keeps_gathered: bool

    def __call__(
        self,
        features_AW: Float[Array, "A W"],
        mask_A: Bool[Array, " A"],
        pieces: Segments,
        *,
        recordings: Recordings | None,
        train: bool,
        axes: tuple[str, ...],
        row_axes: tuple[str, ...],
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """Encodes every piece on this rank: (outputs, 0 in padding; the module's buffers after it).

        An output depends only on its own piece; with FrontEnd.divisible "recordings", on its recording. Every
        rank calls it, with pieces or without.
        features: in the compute dtype, or float32 if FrontEnd.is_wide; a piece starts at a unit. mask: True
        on valid frames; others may hold any values. pieces: the outputs' pieces as documents. recordings:
        None unless FrontEnd.reads_recordings.
        axes: of the mesh, over which pieces are sharded; () on one device. row_axes: those of them whose
        ranks share a row; there pieces may go on in the next rank's frames if FrontEnd.divisible is "frames".
        The buffers are those of nnx.to_pure_dict(nnx.state(self, Buffer)).
        """
        ...
