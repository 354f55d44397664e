"""The table of NeMo's keys, keys.toml, with the counterpart of each; docs/coming_from_nemo.md renders it."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("keys.toml")
SETS = ("train_ds", "validation_ds", "test_ds", "predict_ds")
"""Groups of `data` that describe data sets."""
ANY_SET = ("data", "train_ds")
"""The beginning of a data set's keys in the table, whatever data set it is."""

Place = tuple[str | int, ...]
"""A path in an experiment: names, and numbers of a list's items."""


class Row(NamedTuple):
    """A row of the table.

    section: the group of the experiment that it belongs to. keys: whole dotted paths, or "PATH.*" for all
    below. to: the settings that they become. text: for the page, in Markdown. is_needed: whether a value is
    lost where there is no `to`. neutral: values with which nothing is lost, by the last names of keys. short:
    what the page shows in place of the keys.
    """

    section: str
    keys: tuple[str, ...]
    to: tuple[str, ...]
    text: str
    is_needed: bool
    neutral: Mapping[str, Any]
    short: str

    def is_off(self, key: str, value: Any) -> bool:
        """Whether nothing is lost with this value of a key: it is empty, 0, false or neutral."""
        return not value or value == self.neutral.get(key.rpartition(".")[2])


@cache
def rows() -> tuple[Row, ...]:
    """The whole table."""
    tables: Mapping[str, list[dict[str, Any]]] = tomllib.loads(FILE.read_text())
    return tuple(
        Row(
            section,
            tuple(key if section == "other" else f"{section}.{key}" for key in row["keys"]),
            tuple(row.get("to", ())),
            " ".join(row.get("text", "").split()),
            not row.get("unneeded", False),
            row.get("neutral", {}),
            row.get("short", ""),
        )
        for section, of_section in tables.items()
        for row in of_section
    )


@cache
def _by_key() -> dict[str, Row]:
    return {key: row for row in rows() for key in row.keys}


def row_of(key: str) -> Row | None:
    """The row of a key as `canonical` has it: its own, or that of the longest PATH.* above; None: unknown."""
    table = _by_key()
    above = key
    while key not in table and f"{above}.*" not in table:
        above, dot, _ = above.rpartition(".")
        if not dot:
            return None
    return table[key] if key in table else table[f"{above}.*"]


def canonical(place: Place) -> str:
    """A path as the table has it: without numbers of items; the keys of any data set are below train_ds."""
    names = [str(name) for name in place if not isinstance(name, int)]
    if len(names) < 3 or names[0] != "data" or names[1] not in SETS[:2]:
        return ".".join(names)
    group, rest = names[1], names[2:]
    if group == "validation_ds" and rest[0] == "datasets":
        if len(rest) < 3:
            return "data.validation_ds.datasets"
        rest = rest[2:]
    while rest[0] == "input_cfg" and len(rest) > 1:
        rest = rest[1:]
    return ".".join((*ANY_SET, *rest))


def leaves(values: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(path, value) of all that the table has by itself, in the order of the file."""
    if _is_group(values, place):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves(value, (*place, name))
    else:
        yield place, values


def _is_group(value: Any, place: Place) -> bool:
    """Whether the value is a group of keys, or a list of such."""
    if not (isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict) for x in value))):
        return False
    if not value:
        return False
    names = [name for name in place if isinstance(name, str)]
    is_of_sets = names[:1] == ["data"] and (len(names) < 3 or names[-1] in ("input_cfg", "datasets"))
    is_set = len(names) > 2 and names[-2] == "datasets"
    key = canonical(place)
    has_keys = any(each.startswith(f"{key}.") for each in _by_key())
    return not place or is_of_sets or is_set or isinstance(place[-1], int) or has_keys or row_of(key) is None


def nearest(key: str) -> list[str]:
    """Known keys that may be meant by an unknown one: of its own group, or else of any with such a name."""
    known = [each.removesuffix(".*") for each in _by_key()]
    group, _, last = key.rpartition(".")
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == group]
    if close := get_close_matches(last, beside, n=2, cutoff=0.7):
        return [f"{group}.{name}".removeprefix(".") for name in close]
    return [each for each in known if get_close_matches(last, [each.rpartition(".")[2]], cutoff=0.85)][:2]


def page(section: str) -> str:
    """The table of a section, in Markdown."""
    lines = ["| NeMo | jaxthd |", "|---|---|"]
    for row in rows():
        if row.section == section:
            lines.append(f"| {_shown(row)} | {_answer(row)} |")
    return "\n".join(lines)


def _answer(row: Row) -> str:
    """The second cell of a row."""
    if row.to:
        return row.text or ", ".join(f"`--{name.replace('_', '-')}`" for name in row.to)
    if not row.is_needed:
        return f"not needed: {row.text}"
    is_one = len(row.keys) == 1 and not row.keys[0].endswith(".*") and not row.short
    return f"{'does' if is_one else 'do'} not exist: {row.text}"


def _shown(row: Row) -> str:
    """The first cell of a row: its keys, those of one group behind its name."""
    if row.short:
        return row.short
    front = {"other": "", "data": "data."}.get(row.section, f"{row.section}.")
    keys = [key.removeprefix(".".join((*ANY_SET, ""))).removeprefix(front) for key in row.keys]
    cells: list[str] = []
    for group, of_group in _grouped(list(dict.fromkeys(keys))).items():
        if group and len(of_group) > 1:
            names = ", ".join(f"`{key.removeprefix(f'{group}.')}`" for key in of_group)
            cells.append(f"`{group}`: {names}")
        else:
            cells.append(", ".join(f"`{key}`" for key in of_group))
    return "; ".join(cells) if any(":" in cell for cell in cells) else ", ".join(cells)


def _grouped(keys: Sequence[str]) -> dict[str, list[str]]:
    """The keys by the group that they are in."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(key.rpartition(".")[0] if not key.endswith(".*") else "", []).append(key)
    return found
