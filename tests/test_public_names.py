"""`import jaxthd`: each public name is imported when it is first used."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxthd


def test_every_name_is_there_and_documented():
    for name in jaxthd.__all__:
        value = getattr(jaxthd, name)
        if callable(value):
            assert value.__doc__, name
            assert value.__module__.startswith("jaxthd."), name


def test_the_names_are_marked_as_typed():
    assert (Path(jaxthd.__file__).parent / "py.typed").exists()


def test_the_import_alone_does_not_import_jax():
    code = "import jaxthd, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="PackDocument"):
        _ = jaxthd.PackDocument  # type: ignore[attr-defined]


def test_no_name_hides_a_module():
    """Otherwise importing jaxthd.NAME would replace the name by the module."""
    folder = Path(jaxthd.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir()}
    assert not modules & set(jaxthd.__all__)
