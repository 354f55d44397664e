"""A share of the training sets' items that is held out for validation, and not trained on.

An item is held out by its name alone, which is its recording's path or its id: whatever the order of the
items, and whatever is added to the set, it stays on its side. All items of one recording are on one side.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path

from jaxthd.config import DataConfig
from jaxthd.data.example import Cell, Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.source import Containers, Likeness, Source, SourceSetting
from jaxthd.errors import UserError

USUAL, FEWEST, MOST, LARGEST = 0.05, 50, 1000, 0.2
"""A share that is not given is a twentieth of the items, but 50 or more, and 1,000 or less. A small set gives
a fifth at most."""
Read = tuple[list[Example], list[Skipped]]


def place_of(item: Example | Skipped) -> float:
    """The place of an item's name, from 0 to below 1 and evenly spread: it is held out below the share.

    Rows of a table are named by their numbers, because their recordings often have no names.
    """
    _, _, name = item.key.partition(":")
    clips = item.clips if isinstance(item, Example) else []
    if not name or any(isinstance(clip, Clip) and isinstance(clip.member, Cell) for clip in clips):
        name = item.key
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64


def share_for(places: Iterable[float]) -> float:
    """The share to hold out of items at these places (place_of), rounded up; 0.0 where none can be: they are
    all of one recording, or of so few that more than half would be held out."""
    sizes = Counter(places)
    items = sizes.total()
    wanted = min(max(items * USUAL, min(FEWEST, items * LARGEST)), MOST)
    held, last = 0, None
    for place, size in sorted(sizes.items()):
        if held >= wanted or held + size > items / 2:
            break
        held, last = held + size, place
    if last is None:
        return 0.0
    following = min((place for place in sizes if place > last), default=1.0)
    rounded = ((math.floor(last * 10**digits) + 1) / 10**digits for digits in count(3))
    return next(share for share in rounded if last < share <= following)


class Division:
    """The training sets, divided into what is trained on and what is held out. Both are read at once.

    sources: the data sets, whole. share: of the items that is held out; None: share_for. data: how the sets
    are read.
    """

    def __init__(self, sources: Sequence[Source], share: float | None, data: DataConfig) -> None:
        self.sources, self._given, self._data = sources, share, data
        self._parts: dict[int | None, Read] = {}
        self.training: list[Source] = [_TrainingPart(self, number) for number in range(len(sources))]
        self.held_out = _HeldOutPart(self)

    @property
    def title(self) -> str:
        """The names of the data sets."""
        return ", ".join(source.title for source in self.sources)

    @cached_property
    def share(self) -> float:
        """The share that is held out; 0.0 where none can be."""
        if self._given is not None:
            return self._given
        whole = [source.read(self._data) for source in self.sources]
        share = share_for(place_of(x) for examples, _ in whole for x in examples)
        self._divide(whole, share)
        return share

    def part(self, number: int | None) -> Read:
        """Returns what is trained on of a data set by its number, or, for None, what is held out of all.

        Raises UserError for a side that has no item.
        """
        share = self.share
        if number is None and not share:
            raise UserError(
                f"nothing can be held out of {self.title} for validation, because more than half of its "
                "items are of one recording; expected items of several: set data.validation_manifest to "
                'another data set, or to "" for no validation'
            )
        if number not in self._parts:
            self._divide([source.read(self._data) for source in self.sources], share)
        examples, skipped = self._parts.pop(number)
        if not examples:
            side = "leaves" if number is not None else "holds out"
            title = self.title if number is None else self.sources[number].title
            raise UserError(
                f"the share {share:g} that data.validation_manifest holds out {side} no item of {title}; "
                f"expected some on both sides: set data.validation_manifest to held_out:0.2, for example, "
                "or to another data set"
            )
        return examples, skipped

    def _divide(self, whole: Sequence[Read], share: float) -> None:
        """Divides the items of all sets; keys of what is held out are numbered through them."""
        held: Read = ([], [])
        before = 0
        for number, (examples, skipped) in enumerate(whole):
            own: Read = ([], [])
            for example in examples:
                if place_of(example) >= share:
                    own[0].append(example)
                else:
                    held[0].append(replace(example, key=_numbered(example.key, before)))
            for item in skipped:
                if place_of(item) >= share:
                    own[1].append(item)
                else:
                    held[1].append(item._replace(key=_numbered(item.key, before)))
            self._parts[number] = own
            keys = [*(x.key for x in examples), *(x.key for x in skipped)]
            before += 1 + max(map(_number, keys), default=0)
        self._parts[None] = held


def _number(key: str) -> int:
    number = key.partition(":")[0]
    return int(number) if number.isdecimal() else 0  # registry.read_source refuses such a key


def _numbered(key: str, before: int) -> str:
    """The key of an item with so many numbers before its own."""
    return f"{_number(key) + before}:{key.partition(':')[2]}" if before else key


class _TrainingPart(Source):
    """A training set without what is held out of it."""

    def __init__(self, division: Division, number: int) -> None:
        self._whole = division.sources[number]
        super().__init__(self._whole.setting)
        self.division, self._number = division, number
        self.title, self.columns = self._whole.title, self._whole.columns
        self.unread_recordings = self._whole.unread_recordings

    def read(self, data: DataConfig) -> Read:
        """See Source.read; and Division.part."""
        return self.division.part(self._number)

    @property
    def _mark(self) -> str:
        return f" without {self.division.share}"

    def extent(self) -> int | None:
        """See Source.extent."""
        return self._whole.extent()

    def likeness(self, digest: str, extent: int | None) -> Likeness:
        """See Source.likeness. With another share held out it is another set."""
        whole = digest.removesuffix(self._mark)
        return self._whole.likeness(whole, extent) if whole != digest else "other"

    def digest(self) -> str:
        """See Source.digest."""
        return self._whole.digest() + self._mark

    def containers(self) -> Containers | None:
        """See Source.containers."""
        return self._whole.containers()

    def files(self) -> list[Path]:
        """See Source.files."""
        return self._whole.files()


def held_out_of(training: Sequence[Source]) -> "_HeldOutPart":
    """Returns what is held out of the training sets of a Division."""
    return next(x.division.held_out for x in training if isinstance(x, _TrainingPart))


class _HeldOutPart(Source):
    """The items held out of all training sets, as one validation set."""

    def __init__(self, division: Division) -> None:
        super().__init__(SourceSetting("held_out", "data.validation_manifest", split="validation"))
        self.division, self.title = division, f"held out of {division.title}"

    def read(self, data: DataConfig) -> Read:
        """See Source.read; and Division.part."""
        found = self.division.part(None)
        self.columns = min((x.columns for x in self.division.sources), key=lambda names: len(names.absent))
        return found

    def digest(self) -> str:
        """See Source.digest."""
        parts = [source.digest() for source in self.division.sources]
        return f"{' '.join(parts)} held out {self.division.share}"

    def files(self) -> list[Path]:
        """See Source.files."""
        return [path for source in self.division.sources for path in source.files()]
