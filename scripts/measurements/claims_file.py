"""docs/claims/claims.toml: what is claimed, how to measure it again, what was measured last.

A claim is a table of the file:

    [packing]
    what = "Packed batches are as fast as padded ones, times what the padding cost."
    command = "python scripts/bench_packing.py --manifest FILE --check"
    of = ["jaxthd/packing", "jaxthd/steps"]
    minutes = 12
    measured = { date = 2026-11-20, commit = "546d7b1", machine = "2", versions = "jax 0.10.2", code = "1f" }
    [packing.values]
    random = { value = 11.4, unit = "times", bound = ">= 9.5", read = 'packed over random +([\\d.]+)' }

`command` is one bash line, run from the root of the repository. In it FILE, PYTHON and the like are names of
[inputs]; WORK is a new, empty folder. `shown` is the command as the pages print it, where that differs.
`of` are the files and folders whose code the values depend on, besides the scripts, tests and configs that
the command names. `code` in `measured` is the digest of that code (scripts/measurements/running.py) as it was
then, so a claim is stale once the code has changed. `minutes` is about how long it takes. A claim has
`by_hand` in place of a command where no command prints its values: it says how they were found.

A value is one line. `read` is a regular expression for what the command prints, searched line by line; its
group is a number. `take` says which match counts, if it has several: first (the default), last, max, min,
median, sum, or count (of the matches). `bound` is `<= X`, `>= X`, `== X` or `X to Y`.
"""

import datetime
import operator
import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically

Number = int | float
INPUTS = "inputs"
"""The table that is no claim: paths that commands need."""
RESERVED = {"command", "date"}
"""What the pages can name of a claim besides its values."""
SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TAKES: dict[str, Any] = {
    "first": lambda found: found[0],
    "last": lambda found: found[-1],
    "max": max,
    "min": min,
    "median": statistics.median,
    "sum": sum,
    "count": len,
}
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
VALUE_LINE = re.compile(r"^(\w+) = \{ value = ([^,\s]+)(, .*)$")


class Measured(NamedTuple):
    """When, where and of which code a claim was measured.

    versions: of Python, jax and jaxlib. code: the digest of the claim's code; "" where it was measured before
    there were digests."""

    date: datetime.date
    commit: str
    machine: str
    versions: str
    code: str = ""


@dataclass(frozen=True)
class Value:
    """A number that a claim names, as it was measured last."""

    value: Number
    unit: str
    bound: str
    read: str = ""
    take: str = "first"

    def holds(self, found: Number) -> bool:
        """Whether a number is within the bound."""
        least, between, most = self.bound.partition(" to ")
        if between:
            return float(least) <= found <= float(most)
        sign, limit = self.bound.split()
        return COMPARISONS[sign](found, float(limit))

    def find(self, text: str) -> Number | None:
        """The number in what a command has printed; None where it is not there. Raises ValueError where
        something else is there."""
        found = re.findall(self.read, text, re.M)
        if not found:
            return 0 if self.take == "count" else None
        return TAKES[self.take](found if self.take == "count" else [number(x, self.unit) for x in found])


@dataclass(frozen=True)
class Claim:
    """A claim of the pages. Fields: see the head of this file."""

    name: str
    what: str
    minutes: Number
    measured: Measured
    values: Mapping[str, Value]
    of: Sequence[str]
    command: str = ""
    shown: str = ""
    by_hand: str = ""

    @property
    def code(self) -> list[str]:
        """Paths of the code that the values depend on, below the root of the repository."""
        return [*self.of, *re.findall(r"\b(?:scripts|configs|tests)/[\w/]+\.py\b", self.command)]


class Claims(NamedTuple):
    """inputs: what a command's capital words stand for, by default."""

    inputs: Mapping[str, str]
    claims: Mapping[str, Claim]

    def chosen(self, names: Sequence[str]) -> list[Claim]:
        """The claims of these names, in the file's order; "all" stands for all of them."""
        if unknown := set(names) - self.claims.keys() - {"all"}:
            raise UserError(
                f"no claim is called {', '.join(sorted(unknown))}; expected all, stale or some of "
                f"{', '.join(self.claims)}"
            )
        return [claim for name, claim in self.claims.items() if name in names or "all" in names]


def number(text: str, unit: str) -> Number:
    """A number as commands print it: 4,096 or 1.2e-07, or a size such as 12.50 MiB, in `unit`.

    Raises ValueError for other text."""
    digits, _, printed = text.replace(",", "").partition(" ")
    found = float(digits) if re.search(r"[.e]", digits) else int(digits)
    if not printed:
        return found
    if {printed, unit} - SIZES.keys():
        raise ValueError(f"{text!r} is no number of {unit}")
    return float(f"{found * SIZES[printed] / SIZES[unit]:.4g}")


def load(file: Path) -> Claims:
    """The claims of a file. Raises UserError, naming what is wrong, for a file that has not the form."""
    try:
        tables = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from error
    inputs = tables.pop(INPUTS, {})
    lines = [line for line in file.read_text().splitlines() if VALUE_LINE.match(line)]
    claims = {}
    for name, table in tables.items():
        try:
            claims[name] = _claim(name, table)
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise UserError(
                f"{file}, [{name}]: {error}; expected the form that {__file__} describes"
            ) from error
    if (count := sum(len(claim.values) for claim in claims.values())) != len(lines):
        raise UserError(
            f"{file} has {count} values, and {len(lines)} lines that begin with "
            "NAME = { value = X,; expected one such line for each value"
        )
    return Claims(inputs, claims)


def _claim(name: str, table: Mapping[str, Any]) -> Claim:
    values = {key: Value(**value) for key, value in table["values"].items()}
    if not table["of"]:
        raise ValueError("of is empty; expected the files or folders that the values depend on")
    claim = Claim(name, **{**table, "measured": Measured(**table["measured"]), "values": values})
    if bool(claim.command) == bool(claim.by_hand):
        raise ValueError("it has both command and by_hand, or neither")
    if taken := RESERVED & values.keys():
        raise ValueError(f"a value is called {taken}")
    for key, value in values.items():
        value.holds(value.value)
        if value.take not in TAKES:
            raise ValueError(f"take of {key} is {value.take!r}, not one of {', '.join(TAKES)}")
        if re.compile(value.read).groups > 1 or bool(value.read) != bool(claim.command):
            raise ValueError(f"read of {key} is {value.read!r}: it needs one group, and a command")
    return claim


def write_measured(
    file: Path, name: str, measured: Measured, minutes: Number, values: Mapping[str, Number]
) -> None:
    """Puts new values, and when and where they were measured, into a claim's lines; nothing else changes."""
    fields_of = measured._asdict() | {"date": measured.date.isoformat()}
    inside = [f"{key} = {x if key == 'date' else toml_text(x)}" for key, x in fields_of.items() if x]
    fields = {"measured": "{ " + ", ".join(inside) + " }", "minutes": str(minutes)}
    lines, section = [], ""
    for line in file.read_text().splitlines():
        section = line if line.startswith("[") else section
        key = line.partition(" = ")[0]
        if section == f"[{name}]" and key in fields:
            line = f"{key} = {fields[key]}"
        elif section == f"[{name}.values]" and key in values and (old := VALUE_LINE.match(line)):
            line = f"{key} = {{ value = {shown(values[key], plain=True)}{old[3]}"
        lines.append(line)
    write_atomically(file, "\n".join(lines) + "\n")
    again = load(file).claims[name]
    assert again.measured == measured
    assert all(again.values[key].value == x for key, x in values.items())


def toml_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def shown(value: Number, spec: str = "", *, plain: bool = False) -> str:
    """A number as the pages print it: 4,096 and 1.2e-7. spec: of str.format. plain: as TOML reads it."""
    text = (
        format(value, spec) if spec else f"{value:,}" if isinstance(value, int) and not plain else str(value)
    )
    return re.sub(r"e-0(\d)", r"e-\1", text)
