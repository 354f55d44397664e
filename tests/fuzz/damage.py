"""Damages bytes, and the values of JSON objects, in ways that a random generator chooses."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np


def damaged_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    """Damages the bytes one or more times: truncates them, flips bits, or removes, repeats, overwrites or
    inserts a range."""
    for _ in range(rng.choice([1, 1, 1, 3])):
        start, stop = sorted(int(x) for x in rng.integers(0, len(data) + 1, 2))
        stop = min(stop, start + int(rng.choice([1, 8, 10_000])))
        out = bytearray(data)
        match rng.integers(7):
            case 0:
                del out[start:]
            case 1:
                for _ in range(rng.choice([1, 2, 20]) if data else 0):
                    # Half of the positions are in a possible header.
                    at = int(rng.integers(min(len(out), 64) if rng.random() < 0.5 else len(out)))
                    out[at] ^= 1 << int(rng.integers(8))
            case 2:
                del out[start:stop]
            case 3:
                out[start:start] = out[start:stop]
            case 4:
                out[start:stop] = rng.bytes(stop - start)
            case 5:
                out[start:start] = rng.choice(
                    [b"\x00", b"\xff\xfe", b'"', b"\n", b"}", b"[" * 2000, b"9" * 5000, b"\xed\xa0\x80"]
                )
            case 6:
                out[start:stop] = bytes(stop - start)
        data = bytes(out)
    return data


RAW = {f"raw {depth}": b"[" * depth + b"]" * depth for depth in (100, 900, 2000)} | {"raw 9": b"9" * 5000}
"""Marker -> the text that replaces it, which json would not write."""
VALUES: list[Any] = [
    *(None, True, 0, -1, 1e-300, 1e308, -0.0, 10**400, float("nan"), float("inf"), float("-inf")),
    *("", " ", "\x00", "\ud800", "a" * 100_000, "{audio}", "<|im_end|>", ".", "/", "..", "ä" * 300, "0.5"),
    *([], {}, [None], ["s16.wav"], {"path": "s16.wav"}, {"type": "audio"}, *RAW),
]
"""Values that replace a field's. Python's json accepts NaN and infinities."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value inside, at any depth."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damaged_entry(rng: np.random.Generator, entry: dict[str, Any]) -> bytes:
    """Replaces, removes, renames, repeats or exchanges one to three values anywhere in the object."""
    entry = copy.deepcopy(entry)
    twice = b""
    for _ in range(rng.integers(1, 4)):
        found = list(places(entry))
        if not found:
            break
        container, key = found[rng.integers(len(found))]
        match rng.integers(6):
            case 0 | 1:
                container[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[str(key).upper()] = container.pop(key)
            case 3:
                container.insert(key, copy.deepcopy(container[key]))
            case 4:
                other, place = found[rng.integers(len(found))]
                container[key] = copy.deepcopy(other[place]) if place in other or place != key else None
            case 5 if container is entry:
                twice = json.dumps({key: VALUES[rng.integers(len(VALUES))]}).encode()[1:-1] + b", "
    line = b"{" + twice + json.dumps(entry).encode()[1:]
    for name, text in RAW.items():
        line = line.replace(json.dumps(name).encode(), text)
    return line
