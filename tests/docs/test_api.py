"""The examples of docs/api.md run, one after the other, as a reader would type them."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.exhaustive
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, in an empty working directory; tracebacks show the lines of the page."""
    monkeypatch.chdir(tmp_path)
    text, names = PAGE.read_text(), {"__name__": "docs_api"}
    examples = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(examples) >= 4
    for example in examples:
        first = text.count("\n", 0, example.start(1))
        code: Any = compile("\n" * first + example[1], str(PAGE), "exec")
        exec(code, names)
