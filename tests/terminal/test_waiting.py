"""What takes long is said to take long."""

import io
import re
import time

import pytest

from jaxthd.terminal import waiting as module
from jaxthd.terminal.waiting import waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_say_how_long_it_has_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.02)
    with waiting("compiling"):
        time.sleep(0.2)
    shown = capsys.readouterr()
    first, *others = shown.err.splitlines()
    assert first == "compiling"
    assert len(others) > 2
    assert all(re.fullmatch(r"compiling: \d+ s", line) for line in others)
    assert not shown.out


def test_on_a_terminal_it_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(ValueError, match="no"), waiting("compiling"):
        raise ValueError("no")
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
