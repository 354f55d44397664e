"""Requirements are met or not, by what is installed."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxthd.run import installation
from jaxthd.run.installation import PURPOSES, unmet

ROOT = Path(__file__).parents[2]
METADATA = """\
Metadata-Version: 2.1
Name: mine
Version: 1
Provides-Extra: new
Provides-Extra: gone
Provides-Extra: all
Requires-Dist: numpy>=1
Requires-Dist: only-on-windows; sys_platform == "win32"
Requires-Dist: numpy>=99; extra == "new"
Requires-Dist: nothing-of-that-name; extra == "gone"
Requires-Dist: numpy; extra == "fine"
Requires-Dist: mine[gone,new]; extra == "all"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    installation._all_requirements.cache_clear()


def test_what_is_missing_or_of_another_version_is_said(mine: None):
    numpy = f"numpy is {version('numpy')}, expected >=99"
    assert unmet("", "mine") == []
    assert unmet("fine", "mine") == []
    assert unmet("new", "mine") == [numpy]
    assert unmet("gone", "mine") == ["nothing-of-that-name is missing"]
    assert unmet("all", "mine") == ["nothing-of-that-name is missing", numpy]
    assert unmet("", "no-such-distribution") == []


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PURPOSES.keys() == project["optional-dependencies"].keys()
    assert unmet() == []
    assert unmet("test") == []
    missing = {name for name in PURPOSES if unmet(name)}
    assert all(
        re.fullmatch(r"[\w.-]+ is (missing|.+, expected .+)", x) for name in missing for x in unmet(name)
    )
