"""The settings of the data: what is read, filtered, augmented and packed."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jaxthd.config.values import Index, Range, Unset, UnsetText, numbers_of
from jaxthd.errors import UserError

Bounds = tuple[float, float]
Packing = Literal["first_fit", "best_fit", "best_fit_decreasing", "padded"]
HELD_OUT = "held_out"
"""The validation set that is a share of the training sets."""


def is_built_in(manifest: str) -> bool:
    """Whether a manifest is one of the synthetic data sets."""
    return manifest.partition(":")[0] == "synthetic"


def is_held_out(manifest: str) -> bool:
    """Whether a validation manifest is held_out, or held_out:SHARE."""
    return manifest.partition(":")[0] == HELD_OUT


@dataclass(frozen=True)
class SpecAugmentConfig:
    """Masks over the features of a training document (Park et al., 2019), drawn anew every epoch."""

    freq: tuple[int, int] = (0, 27)
    """Number of masks over mel bands, and bands of the widest."""
    time: tuple[int, float] = (0, 0.05)
    """Number of masks over time, and the longest as a fraction of the recording."""


@dataclass(frozen=True)
class AugmentConfig:
    """Changes to training recordings, drawn anew every epoch, each by itself: speed, then room, noise and
    low-pass. All are off by default. Validation is never changed."""

    speed: tuple[float, ...] = ()
    """Speeds, one of which is drawn for each recording, such as 0.9 1.0 1.1. The pitch changes with them."""
    room_manifest: str = ""
    """Manifest of rooms' impulse responses ({"audio_filepath": "room.wav"} a line); "" for none."""
    noise_manifest: str = ""
    """Manifest of noises ({"audio_filepath": "noise.wav"} a line, with offset and duration if wanted); ""
    for none."""
    noise_snr: tuple[float, float] = (5.0, 20.0)
    """Least and most ratio of signal to noise, in dB; drawn uniformly."""
    low_pass_hz: tuple[float, float] = (2000.0, 4000.0)
    """Least and most cut-off, in Hz; drawn uniformly. What lies above is lost, as in a narrow channel."""
    shares: tuple[str, ...] = ()
    """Shares of the recordings that are changed, as CHANGE=SHARE: "room=0.3 noise=1 low_pass=0.2". Where none
    is given, half of the recordings are heard in a room, half get a noise, and none is low-passed."""

    @property
    def probabilities(self) -> dict[str, float]:
        """The share of each change, from shares. Raises UserError for one that is not CHANGE=SHARE."""
        defaults = {"room": 0.5, "noise": 0.5, "low_pass": 0.0}
        return numbers_of("data.augment.shares", "CHANGE=SHARE", self.shares, defaults)


@dataclass(frozen=True)
class FilterConfig:
    """Bounds on training items. What they drop is listed in skipped.jsonl, and does not count towards
    data.max_skipped_share. Each setting is the least and the most that is kept; a most of 0: no bound. Items
    without a recording are kept; preferences and prompts have no rates."""

    seconds: Bounds = (0.0, 0.0)
    """Seconds of all recordings of the item."""
    tokens_per_second: Bounds = (0.0, 0.0)
    """Tokens of the answers' texts a second of the recordings. A transcript that is too long for its
    recording seldom belongs to it."""
    characters_per_second: Bounds = (0.0, 0.0)
    """Characters of the answers' texts a second of the recordings."""


class ValidationSet(NamedTuple):
    """One validation set. tars: as split_tars has them. is_named: its results carry its name, because it was
    given one or because there are several."""

    name: str
    path: str
    tars: str
    is_named: bool


def split_name(manifest: str) -> tuple[str, str, str]:
    """Splits NAME=PATH into (NAME, "=", PATH). A path without a name, or one that exists, is ("", "", it)."""
    name, mark, path = manifest.partition("=")
    if not mark or os.path.exists(os.path.expanduser(manifest)):
        return "", "", manifest
    return name, mark, path


def split_tars(manifest: str) -> tuple[str, str]:
    """Splits MANIFEST::TARS into (MANIFEST, TARS); (it, "") of one without tar files, or that exists."""
    if os.path.exists(os.path.expanduser(manifest)):
        return manifest, ""
    path, _, tars = manifest.partition("::")
    return path, tars


@dataclass(frozen=True)
class DataConfig:
    """Data sets, and how they are packed."""

    manifest: tuple[str, ...] = ("synthetic",)
    """NeMo JSONL manifests, with shards in braces ("manifest_{0..15}.json" or
    "manifest__OP_0..15_CL_.json"); Lhotse Shar directories and manifests of cuts (cuts.jsonl.gz); or
    "synthetic": spoken digits and commands, made on first use and cached. Also Hugging Face data sets on
    disk: parquet or arrow files, with shards in braces, or a folder (pip install 'jaxthd[parquet]').
    MANIFEST::TARS: its recordings are in tar files, as NeMo's are ("m_{0..15}.json::audio_{0..15}.tar").
    "synthetic:sums": spoken sums without transcripts, for jaxthd grpo. "synthetic:spanish",
    "synthetic:german": 4,000 utterances as those of "synthetic", in these languages."""
    columns: tuple[str, ...] = ()
    """Names that fields have in the data, as FIELD=COLUMN: "audio=speech text=utterance". They are those of a
    manifest's lines and of their messages (role=speaker content=said), of the columns of parquet and arrow
    files, and of the custom fields of Lhotse's cuts and supervisions. NAME= leaves a field out. An item
    without the column keeps its field; a column that no training set has is an error. In tables without this,
    audio is "audio" or "audio_filepath", text is "text", "sentence", "transcription" or "transcript"."""
    weights: tuple[float, ...] = ()
    """Weights by which documents of each manifest are drawn. Empty: in proportion to their numbers
    of documents."""
    weights_temperature: Annotated[float, Range(0.1)] = 1.0
    """Weights are raised to the power 1 / this: 1 keeps them, more draws small data sets more often, up to
    all alike. Without data.weights it is applied to the numbers of documents."""
    validation_manifest: str | tuple[str, ...] = UnsetText("synthetic")
    """Manifest or Shar directory for validation, as in manifest; "" for none. "held_out:0.05" holds that
    share of the items of data.manifest out of training, by their names; "held_out" derives the share, which
    the run keeps. Not given, it is "held_out" where data.manifest names data of your own. Several sets each
    have a name: NAME=PATH, or the name of the file. The results of each set are logged as
    validation_NAME_loss and so on, and the means over all sets as validation_loss and so on."""
    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes, needs no file), "synthetic" (a small BPE of the words in the synthetic data), the
    path of a tokenizer.json or a tekken.json, or the folder of a checkpoint in Hugging Face's format, whose
    other files then say which tokens are special."""
    template: Literal["plain", "chatml", "chat_template", "mistral", "marks"] = "plain"
    """The form of turns: "plain" (the text, and an end-of-text token after an answer), "chatml"
    (<|im_start|>), "chat_template" (the template of the checkpoint in data.tokenizer), "mistral" (as
    mistral-common writes them for the tekken.json in data.tokenizer), or "marks" (a recording and the words
    of its text, two marks behind each: for a model with model.marks)."""
    template_source: str = ""
    """A chat template, in Jinja, in place of the one of the checkpoint in data.tokenizer; "": that."""
    template_options: str = ""
    """Variables of the checkpoint's chat template, as a JSON object such as {"enable_thinking": false}."""
    answer: str = "plain"
    """Form of the answers: "plain" (the text), or a published model's: "qwen3_asr" (language
    NAME<asr_text>TEXT), "audio_flamingo3" (a sentence that quotes the text), "moss" ([0.00][S01]TEXT[2.50]
    of each speaker's segment, with seconds). Transcripts are written in it, and read off answers before they
    are compared."""
    system_prompt: str = ""
    """System turn placed before every document that has none of its own; "" for none."""
    prompt: str = "{audio}"
    """The user's turn for a manifest line that has a text. The recording goes where data.audio_placeholder
    stands."""
    audio_placeholder: str = "{audio}"
    """The text that stands for a recording in data.prompt and in conversations."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    packing: Packing = "first_fit"
    """The packer of documents into buffers: "first_fit" and "best_fit" are grain's packers;
    "best_fit_decreasing" packs windows of about data.packing_bins buffers, the largest documents first, which
    pads least; "padded" puts one document in a row."""
    rows: int = 1
    """Buffers in a step, over all data ranks. Each row is a stream of its own, so the mesh never changes
    the data."""
    capacity: int = Unset(2048)
    """Token slots of a buffer. A training run derives it from the lengths of its documents where it is not
    given, as jaxthd plan does, and keeps it. jaxthd score and evaluate have room for their longest one
    at least. Other commands take the default."""
    max_documents: int = Unset(64)
    """Most documents in a buffer; the packer never exceeds it. Not given, it is derived as data.capacity."""
    audio_capacity: Index = Unset(16000)  # noqa: RUF009 - it cannot be changed
    """Most frames of the front end (10 ms of mel features) of the documents in a buffer. It shapes the stream
    of buffers. The ranks that share a buffer share its frames evenly. Not given, it is derived as
    data.capacity."""
    packing_bins: int = 8
    """Buffers that the packer keeps open at a time. More of them pack tighter and shuffle more."""
    max_skipped_share: float = 0.1
    """The run stops where more than this share of the training items cannot be used: unreadable, faulty, or
    larger than a buffer; and where so many of the last 100 groups of jaxthd grpo have no rewards."""
    accept_changes: bool = False
    """Continue a run whose training data has changed since: a new epoch begins with all that is there now.
    Lines that were appended need no such setting: the epoch under way ends first, without them."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this (1: no rounding). It shapes the stream of
    buffers."""
    shuffle: bool = True
    """Shuffle the documents anew every epoch."""
    seed: Index = 0
    """Seed of the shuffle, of dither, of augmentation and of SpecAugment."""
    workers: Index = 2
    """Processes that decode audio and compute features; two batches are then made before the step needs them.
    0: the step waits for each batch. Processes of a machine that read the same rows have theirs together."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """template_options, parsed. Raises UserError where it is not a JSON object."""
        try:
            options = json.loads(self.template_options or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise UserError(
                f"data.template_options is {self.template_options!r}; expected a JSON object such as "
                '{"enable_thinking": false}: correct data.template_options'
            )
        return options

    def described(self, which: ValidationSet) -> str:
        """The path of a validation set; of a share that is held out also what it is held out of."""
        return f"{which.path} of {', '.join(self.manifest)}" if is_held_out(which.path) else which.path

    @property
    def held_out_share(self) -> float | None:
        """The share of the training items that is held out for validation: 0 for none, None for one that is
        derived. Raises UserError for one that is no share."""
        texts = [each.path for each in self.validation_sets if is_held_out(each.path)]
        if not texts:
            return 0.0
        _, colon, number = texts[0].partition(":")
        try:
            share = float(number) if colon else None
        except ValueError:
            share = 0.0
        if share is None or 0 < share < 1:
            return share
        raise UserError(
            f"data.validation_manifest is {texts[0]!r}; expected a share of the training items above 0 and "
            "below 1: set it to held_out:0.05, for example, or to held_out for one that is derived"
        )

    @property
    def validation_sets(self) -> tuple[ValidationSet, ...]:
        """validation_manifest as sets, in the order given; a share that is held out where it was not given
        and the training data is not built in. A path that contains "=" needs a name before it, unless it
        exists."""
        given = self.validation_manifest
        if isinstance(given, UnsetText) and not all(map(is_built_in, self.manifest)):
            given = HELD_OUT
        manifests = [given] if isinstance(given, str) else given
        manifests = [] if list(manifests) == [""] else manifests
        sets = []
        for manifest in manifests:
            name, mark, path = split_name(manifest)
            path, tars = split_tars(path)
            if not mark:
                stem = HELD_OUT if is_held_out(path) else re.sub(r"[^\w.-]+", "-", Path(path).stem)
                name = stem.strip("-.") or "validation"
            sets.append(ValidationSet(name, path, tars, bool(mark) or len(manifests) > 1))
        return tuple(sets)
