"""`import jaxthd`: each public name is imported when it is first used."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxthd
from jaxthd import config
from jaxthd.config import Config
from jaxthd.config.listing import groups
from jaxthd.config.removed import OLD_GROUPS


def test_every_name_is_there_and_documented():
    for name in jaxthd.__all__:
        value = getattr(jaxthd, name)
        if callable(value):
            assert value.__doc__, name
            assert value.__module__.startswith("jaxthd."), name


def test_nothing_else_is_public():
    """Also not what the module imports for itself; modules of the package are no names of it."""
    assert [name for name in dir(jaxthd) if not name.startswith("_")] == jaxthd.__all__
    modules = {name for name, x in vars(jaxthd).items() if isinstance(x, ModuleType)}
    others = {name for name in vars(jaxthd) if not name.startswith("_")} - {*jaxthd.__all__}
    assert others <= modules, "leaked"
    assert all(getattr(jaxthd, name).__name__.startswith("jaxthd.") for name in others)


def test_every_class_of_settings_is_public():
    """Those that a config file may need: all dataclasses in the tree of Config, of every kind of block and of
    front end."""
    kinds = {group.kind for group in groups()} | {Config}
    own = {kind.__name__ for kind in kinds if kind.__module__.startswith("jaxthd.")}
    assert len(own) > 20
    assert own <= {*jaxthd.__all__}
    named = {name for name in config.__all__ if name.endswith("Config")}
    assert named - OLD_GROUPS.keys() <= {*jaxthd.__all__}


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
