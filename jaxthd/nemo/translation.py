"""A NeMo experiment as settings, each with the keys that it comes from, and the keys that are lost."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.nemo.experiment import Experiment
from jaxthd.nemo.keys import Place, canonical, nearest, row_of


class Code(str):
    """A Python expression, for the file."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Setting(NamedTuple):
    """A setting's value, and the keys that it comes from, in words."""

    value: Any
    source: str


class Loss(NamedTuple):
    """A key that has no counterpart. why: the reason."""

    key: str
    value: Any
    why: str


@dataclass
class Translation:
    """An experiment, and what is found of it so far.

    folder: of the config file, which its relative paths are of. settings: by their paths in Config. losses:
    keys of which something is lost, beside those of the table. notes: of what is to be looked at, by key.
    """

    experiment: Experiment
    folder: Path
    settings: dict[str, Setting] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def get(self, path: str, default: Any = None) -> Any:
        """The experiment's value at a path."""
        return self.experiment.get(path, default)

    def set(self, setting: str, value: Any, *keys: str) -> None:
        """Gives a setting its value, which comes from these keys of the experiment; or from what NeMo does
        without them."""
        given = [key for key in keys if self.experiment.has(key)]
        without = f"NeMo without {keys[0]}" if keys else ""
        self.settings[setting] = Setting(value, ", ".join(given) or without)

    def lose(self, key: str, value: Any, why: str) -> None:
        """Lists a key of which something is lost."""
        self.losses.append(Loss(key, value, why))

    def note(self, key: str, why: str) -> None:
        """Lists what is to be looked at."""
        self.notes.append((key, why))

    def path(self, path: Any) -> str:
        """A path of the experiment, which is of the working directory, as one of the config file's folder."""
        text = os.path.expanduser(str(path))
        if os.path.isabs(text) or "://" in text:
            return text
        return os.path.relpath(Path.cwd() / text, self.folder)


class Report(NamedTuple):
    """Where each key of an experiment went, by groups."""

    converted: list[str]
    lost: list[Loss]
    unknown: list[Loss]
    unneeded: list[Loss]
    off: list[str]
    notes: list[tuple[str, str]]

    def __str__(self) -> str:
        counts = {
            "became settings": len(self.converted),
            "are not needed": len(self.unneeded),
            "are off": len(self.off),
            "have no counterpart": len(self.lost),
            "are unknown": len(self.unknown),
        }
        listed = ", ".join(f"{count} {what}" for what, count in counts.items())
        return "\n".join([f"{sum(counts.values())} keys: {listed}", *self._lines()])

    def _lines(self) -> Iterator[str]:
        parts = (
            ("unknown to NeMo 3.0, and left out", [f"{x.key} = {x.value!r}{x.why}" for x in self.unknown]),
            ("no counterpart", [f"{x.key} = {x.value!r}: {x.why}" for x in self.lost]),
            ("to look at", [f"{key}: {why}" for key, why in self.notes]),
            ("not needed", [f"{', '.join(keys)}: {why}" for why, keys in _by_reason(self.unneeded).items()]),
            ("off, and nothing is lost", [", ".join(self.off)] if self.off else []),
        )
        for title, lines in parts:
            if lines:
                yield f"\n{title}"
                yield from (f"  {line}" for line in lines)


def report(translation: Translation) -> Report:
    """Sorts all keys of the experiment by the table, and by what the translation has lost."""
    found = Report([], [], [], [], [], list(translation.notes))
    lost = {loss.key: loss for loss in translation.losses}
    for place, value in translation.experiment.leaves():
        key, row = _text(place), row_of(canonical(place))
        if key in lost:
            found.lost.append(lost.pop(key))
        elif row is None:
            close = nearest(canonical(place))
            found.unknown.append(Loss(key, value, f"; did you mean {' or '.join(close)}?" if close else ""))
        elif row.to:
            found.converted.append(key)
        elif not row.is_needed:
            found.unneeded.append(Loss(key, value, _plain(row.text)))
        elif row.is_off(canonical(place), value) or _is_in_off_group(translation.experiment, place):
            found.off.append(key)
        else:
            found.lost.append(Loss(key, value, _plain(row.text)))
    found.lost.extend(lost.values())
    return found


def _by_reason(losses: Iterable[Loss]) -> dict[str, list[str]]:
    """The keys by the reason."""
    found: dict[str, list[str]] = {}
    for key, _, why in losses:
        found.setdefault(why, []).append(key)
    return found


def _is_in_off_group(experiment: Experiment, place: Place) -> bool:
    """Whether a group that the key is in is switched off."""
    groups = (_text(place[:end]) for end in range(1, len(place)))
    return any(experiment.get(f"{group}.enabled") is False for group in groups)


def _text(place: Place) -> str:
    return ".".join(map(str, place))


def _plain(text: str) -> str:
    """Text of the page without its Markdown."""
    return text.replace("`", "")
