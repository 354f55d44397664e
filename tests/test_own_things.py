"""Blocks and front ends own what is theirs: their names stand nowhere else. Ones from outside are equal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_OLD_SETTINGS = "config/removed.py"
"""The one table from old settings to new ones."""


def lines_with(pattern: str, apart_from: tuple[str, ...]) -> list[str]:
    """Lines of jaxthd/ that match, outside of these folders and files."""
    found = []
    for path in sorted((ROOT / "jaxthd").rglob("*.py")):
        name = path.relative_to(ROOT / "jaxthd").as_posix()
        if not name.startswith(apart_from):
            lines = path.read_text().splitlines()
            found += [f"{name}:{n}: {x}" for n, x in enumerate(lines, 1) if re.search(pattern, x)]
    return found


def test_the_front_ends_names_stand_in_their_folder_alone():
    public = ("__init__.py", "config/__init__.py", "models/front_ends/__init__.py")
    own = (
        *(f"models/front_ends/{x}/" for x in ("fastconformer", "qformer", "granite_conformer")),
        "hf/",
        "nemo/",
    )
    words = "(?i)fastconformer|conformer|subsampling|EncoderConfig|num_mels"
    assert lines_with(words, (*own, *public, OF_OLD_SETTINGS)) == []
    assert lines_with(words, public), "the words are searched for"


def test_letters_of_blocks_stand_in_their_files_alone():
    """A letter compared or looked up elsewhere would be a block that others know by name."""
    letters = r"""(?:==|!=|\bin|\[|letters?=) *["'][MDEWL*][-"'\]]|startswith\(["'][MDEWL*]["']\)"""
    assert lines_with(letters, ("models/blocks/", "hf/", OF_OLD_SETTINGS)) == []
    assert lines_with('letter = "', ("hf/",)), "the letters are searched for"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["toy_block", "toy_front_end"])
def test_a_toy_of_a_users_own_trains_resumes_and_runs_every_command(name: str, tmp_path: Path):
    program = ROOT / "docs" / "examples" / f"{name}.py"
    assert len(program.read_text().splitlines()) <= 150
    told = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "ok"
