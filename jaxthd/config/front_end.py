"""The contract of an audio front end: its settings, and all that the rest of the program asks of it.

A front end turns a recording into vectors that stand at the audio slots of a document. On the host it makes
features of the recording alone and divides them into pieces (no jax: the loader's workers do it); on devices
its module encodes the packed pieces. A kind of front end is a subclass of FrontEnd: a folder of
jaxthd/models/front_ends/; or a class anywhere that is registered with register_front_end (docs/extending.md).

Legend: S samples at 16 kHz, F frames of features, W numbers of a frame.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Int

from jaxthd.config.findings import Finding
from jaxthd.config.kinds import Kinds

SAMPLE_RATE = 16_000
"""Sampling rate in Hz of the recordings that front ends get."""


class Piece(NamedTuple):
    """Frames of a recording that are encoded without its others.

    run: the number of the features' run that they are of (FrontEnd.features). start: the first frame in that
    run. frames: their number; frames that other pieces own may be read too. first, tokens: which of the
    outputs of these frames are audio tokens, `tokens` of them from the one with number `first` on.
    owned: how many of the frames no other piece owns, so that those of all pieces are the recording; None:
    all of them. padding: how many of the frames are zeros behind the recording's last, where the mask is
    False.
    """

    run: int
    start: int
    frames: int
    first: int
    tokens: int
    owned: int | None = None
    padding: int = 0


class SpeakerSegment(NamedTuple):
    """A part of a recording in which somebody speaks. start, end: seconds from the recording's beginning.
    speaker: a name."""

    start: float
    end: float
    speaker: str


def units_taken(frames: int, outputs: int, unit: tuple[int, int]) -> int:
    """Whole units of the audio arrays with so many frames and outputs. unit: (frames, outputs) of one."""
    return max(-(-frames // unit[0]), -(-outputs // unit[1]))


class LabelledText(NamedTuple):
    """A word of a text. labels: token ids. speaker: that its text names; "" without."""

    text: str
    labels: Sequence[int]
    speaker: str


class Labeller(Protocol):
    """Makes labels of texts. most: how many a text may have, and the setting that says so."""

    most: tuple[int, str]

    def __call__(self, text: str, outputs: int) -> Sequence[int]:
        """The labels of a recording with so many outputs; () for a text without any, or with too many."""
        ...

    def words(self, text: str) -> list[LabelledText]:
        """The words of a text, whose labels are those of the text."""
        ...


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """Settings of a front end, and answers about them.

    kind: its name in settings. title: for people.
    divisible: what ranks that share a buffer may divide. "frames": a piece may go on in the frames of the
        next rank; its module exchanges what it needs. "pieces": each piece lies on one rank; every rank has
        room for one more. "recordings": so do all pieces of a recording, in order; every rank has room for
        all audio.
    adds: whether its vectors are added to the embeddings of the tokens at the audio slots, or replace them.
    reads_recordings: whether its module is told the recordings of the outputs.
    is_wide: whether its module is given features and weights in float32 where compute.dtype is narrower, and
        products of float32 numbers, the adapter's too, are not rounded to fewer bits.
    frame_samples: samples from one frame to the next.
    module: the module's class as "package.file:Class", where `build` is not given. It is imported when it is
        built, since settings are imported without jax.
    longest_setting: the setting that bounds a piece, for messages.
    feature_settings: names of settings that features and pieces depend on.
    read_with_others: settings that change what the arrays compute, which runs do change.
    """

    title: ClassVar[str]
    divisible: ClassVar[Literal["frames", "pieces", "recordings"]] = "pieces"
    adds: ClassVar[bool] = False
    reads_recordings: ClassVar[bool] = False
    is_wide: ClassVar[bool] = False
    frame_samples: ClassVar[int] = 160
    module: ClassVar[str] = ""
    longest_setting: ClassVar[str] = ""
    feature_settings: ClassVar[tuple[str, ...]] = ()
    read_with_others: ClassVar[tuple[str, ...]] = ()
    kind: str = ""
    """The kind's name."""

    @property
    def width(self) -> int:
        """W, the numbers of a frame."""
        raise NotImplementedError

    @property
    def bands(self) -> int:
        """The number of a frame's first numbers that are bands of a spectrum, 0 on average, which
        data.spec_augment masks."""
        return 0

    @property
    def unit(self) -> tuple[int, int]:
        """(frames, outputs) of a unit: a piece takes whole units of the audio arrays, whose frames make these
        outputs; as many as its frames need, and its audio tokens."""
        return 1, 1

    @property
    def positions_per_unit(self) -> int:
        """Positions of a unit that the module's layers compute, for counts of operations."""
        return self.unit[1]

    @property
    def dim(self) -> int:
        """The model dim."""
        raise NotImplementedError

    @property
    def output_dim(self) -> int:
        """The dim of its outputs."""
        return self.dim

    @property
    def longest(self) -> int | None:
        """Most frames that a piece reads; None: a recording is one piece, however long."""
        raise NotImplementedError

    def heard(self, samples: int) -> int:
        """The number of a recording's samples that are heard; those behind them are cut off."""
        return samples

    def marks(self, tokens: int) -> Sequence[tuple[int, str]]:
        """Texts that stand between a recording's audio tokens: (the number of audio tokens before it, the
        text) of each, in order. tokens: the recording's."""
        return ()

    def pieces(self, samples: int) -> Sequence[Piece]:
        """The pieces of a recording of so many samples, in order; from its length alone, so that sizes can be
        planned without audio."""
        raise NotImplementedError

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        """The features of a recording alone, in the runs that `pieces` names.

        dither: draws the noise that training adds to the samples; None: none. Raises ValueError for a
        recording that is too short.
        """
        raise NotImplementedError

    def with_speakers(
        self, runs: list[Float32[np.ndarray, "F W"]], segments: Sequence[SpeakerSegment]
    ) -> list[Float32[np.ndarray, "F W"]]:
        """The features of a recording of which the data says who speaks when: here they stay as they are.

        Raises ValueError for segments that the front end cannot hold.
        """
        return runs

    @property
    def label_loss(self) -> float:
        """Weight in training of the loss that its module has on labels of recordings; 0: it has none."""
        return 0.0

    @property
    def labels_per_output(self) -> int:
        """The most labels of a recording for each of its outputs, if label_loss is more than 0."""
        return 0

    def labeller(self, tokenizer: str) -> "Labeller":
        """Returns what makes labels. tokenizer: data.tokenizer. Raises UserError where that has no labels."""
        raise NotImplementedError

    @property
    def aligning(self) -> "FrontEnd | None":
        """These settings, with labels, where its module has a head that finds words in time; else None."""
        return None

    @property
    def features_identity(self) -> dict[str, Any]:
        """The settings that features and pieces depend on, by name, as JSON: a run goes on with the same data
        if they stay."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.feature_settings}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in found.items()}

    def build(self, init: Any, compute: Any) -> Any:
        """The module, a jaxthd.models.front_ends.contract.Encoder: here that of `module`. init:
        parallel.params.Init. compute: ComputeConfig."""
        file, _, name = self.module.partition(":")
        return getattr(import_module(file), name)(self, init, compute)

    def faults(self, where: str) -> Iterable[Finding]:
        """Faults of the settings. where: their path, "model.encoder"."""
        return ()

    def kernel_shapes(self, dtype: str) -> Sequence[Any]:
        """Shapes of its attention for compute.encoder_attention (ops/attention/relative.py); () without."""
        return ()

    def tensors(self) -> Mapping[str, Any]:
        """The usual names of its module's tensors in checkpoints, which families may have otherwise. {}: no
        family has it. A Table of jaxthd/files/tensor_names.py."""
        return {}

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        """(the label of the group of one of its module's parameters, layers that have one). path: below the
        module."""
        return path[0], 1

    def keeps_statistics(self, is_trained: Mapping[str, Any]) -> bool:
        """Whether its module shall run as in evaluation while it is trained, because what gathers statistics
        is frozen. is_trained: a bool for each parameter, as the module's tree."""
        return False

    # --- what follows from these ---

    def units(self, frames: int) -> int:
        """Units that a piece of so many frames takes."""
        return -(-frames // self.unit[0])

    def seconds(self, frames: int | float) -> float:
        """Seconds of so many frames."""
        return frames * self.frame_samples / SAMPLE_RATE

    def frame_of_output(self, outputs: Int[np.ndarray, " outputs"]) -> Int[np.ndarray, " outputs"]:
        """The frame of the audio arrays at which each of these of their outputs begins: those of a unit begin
        evenly, so its last may have fewer frames."""
        frames, made = self.unit
        units, inside = np.divmod(outputs, made)
        return units * frames + inside * -(-frames // made)

    def taken(self, pieces: Iterable[Any]) -> int:
        """Frames of the audio arrays that pieces take. pieces: packing.document.AudioPiece."""
        return sum(piece.units(self.unit) for piece in pieces) * self.unit[0]

    @property
    def longest_taken(self) -> int | None:
        """Frames of the audio arrays that the longest piece takes; None: there is no longest."""
        return None if self.longest is None else self.units(self.longest) * self.unit[0]


_KINDS: Kinds[FrontEnd] = Kinds("the front end", "jaxthd.models.front_ends")


def register_front_end(kind: type[FrontEnd]) -> None:
    """Makes a kind of front end known by its name. Raises ValueError as Kinds.register."""
    _KINDS.register(kind)


def front_ends() -> dict[str, type[FrontEnd]]:
    """All kinds of front ends by name: those of jaxthd, then registered ones."""
    return _KINDS.all()


def default_front_end() -> FrontEnd:
    """The front end of a model that names none, with its default settings."""
    return next(iter(front_ends().values()))()
