"""Pages that are followed: their sections, the code and the commands in them."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxthd.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, title: str) -> str:
    """The text below a heading of docs/PAGE."""
    text = (DOCS / page).read_text()
    (level,) = re.findall(rf"^(##+) {re.escape(title)}$", text, re.M)
    pattern = rf"^{level} {re.escape(title)}\n(.*?)(?=^##{{1,{len(level) - 1}}} |\Z)"
    (found,) = re.findall(pattern, text, re.M | re.S)
    return found


def code_of(text: str, language: str) -> list[str]:
    """The fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands_of(text: str, shown: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of each command of a text. shown: words of the page -> those that are run."""
    blocks = code_of(text, "bash")
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [[(shown or {}).get(word, word) for word in words] for words in lines]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command of the page in this process; returns what it printed."""
    assert words[0] == "jaxthd"
    capsys.readouterr()
    main(words[1:])
    return capsys.readouterr().out


def no_simulation(patch: pytest.MonkeyPatch) -> None:
    """The tests' devices are simulated already."""
    for module in ("run.startup", "inference.model"):
        patch.setattr(f"jaxthd.{module}.simulate_devices", lambda devices: True)
