"""Faults of settings, as the validator tells them."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A fault of a configuration: what was found, expected, and to be changed. An error unless is_warning."""

    found: str
    expected: str
    change: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}: {self.change}"


def multiples(value: int, unit: int) -> str:
    """The multiples of unit next to value, without 0, such as "8 or 16"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def divisors(size: int, at_most: int) -> str:
    """The divisors of size up to at_most, such as "1, 2 or 4"."""
    found = [str(n) for n in range(1, at_most + 1) if size % n == 0]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
