"""Values that settings of earlier versions had: config files and runs that name them go on, and say so."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxthd.config import Config
from jaxthd.config.compute import REPLACED
from jaxthd.files.run_folder import FILE

READ = """
import sys
from dataclasses import replace
from jaxthd.files.config_file import load_config
from jaxthd.files.run_folder import read_config
for config in (load_config(sys.argv[1] + "/my.py"), read_config(__import__("pathlib").Path(sys.argv[1]))):
    print(getattr(replace(config.compute, dtype="bfloat16"), sys.argv[2]))
"""


@pytest.mark.parametrize(("name", "old"), REPLACED)
def test_what_takes_its_place_is_taken_and_told_once(name: str, old: str, tmp_path: Path):
    """In a process of its own, without the tests' type checks, which refuse the old value."""
    (tmp_path / "my.py").write_text(
        "from jaxthd.config import ComputeConfig, Config\n"
        f"def config():\n    return Config(compute=ComputeConfig({name}={old!r}))\n"
    )
    stored = asdict(Config())
    stored["compute"][name] = old
    (tmp_path / FILE).write_text(json.dumps(stored))
    command = [sys.executable, "-c", READ, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    now = REPLACED[name, old][0]
    assert done.stdout.split() == [now, now]
    assert done.stderr.count(f"compute.{name} {old!r} is no choice any more, {now!r} is: ") == 2
