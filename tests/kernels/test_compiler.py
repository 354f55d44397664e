"""XLA's options reach the compiler, exist in this XLA, and are refused by name where they do not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxthd.config import ComputeConfig, Config
from jaxthd.errors import UserError
from jaxthd.kernels import xla_options
from jaxthd.kernels.xla_options import (
    OPTIONS,
    check_options,
    compiler_options,
    given_options,
    jit_for,
    prepare_compiler,
)
from jaxthd.parallel.mesh import make_mesh


def with_options(*options: str) -> Config:
    return Config(compute=ComputeConfig(xla_options=options))


def test_this_xla_takes_every_option():
    for given in ((), ("xla_gpu_enable_command_buffer=",)):  # no CUDA graphs
        config = with_options(*given)
        options = compiler_options(config, "gpu")
        assert set(options) == set(OPTIONS)
        check_options(options)


def test_on_cpus_only_what_was_given_is():
    config = with_options("xla_llvm_disable_expensive_passes=TRUE")
    assert compiler_options(Config(), "cpu") == {}
    assert compiler_options(config, "cpu") == {"xla_llvm_disable_expensive_passes": True}


def test_given_options_go_before_ours():
    config = with_options("--xla_gpu_enable_latency_hiding_scheduler=false", "xla_gpu_graph_min_graph_size=7")
    options = compiler_options(config, "gpu")
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False
    assert options["xla_gpu_graph_min_graph_size"] == "7"
    check_options(options)
    without = compiler_options(with_options("xla_gpu_enable_command_buffer="), "gpu")
    assert without["xla_gpu_enable_command_buffer"] == ""


@pytest.mark.parametrize("text", ["xla_gpu_graph_min_graph_size", "=3", ""])
def test_an_option_is_a_name_and_a_value(text: str):
    with pytest.raises(UserError, match="expected NAME=VALUE"):
        given_options(with_options(text))


@pytest.mark.parametrize("option", ["xla_gpu_no_such_thing=1", "xla_gpu_graph_min_graph_size=many"])
def test_what_xla_does_not_know_is_named(option: str):
    with pytest.raises(UserError, match=option):
        check_options(given_options(with_options(option)))


@pytest.fixture
def cache_dir() -> Iterator[Callable[[], str | None]]:
    """Returns the cache folder, which is None when a run begins."""
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", kept)


@pytest.mark.parametrize(
    ("platform", "processes", "folder"),
    [("gpu", 1, ""), ("gpu", 2, None), ("cpu", 1, "cpu-here"), ("cpu", 2, None), ("cpu", 1, None)],
)
def test_programs_are_kept(
    platform: str,
    processes: int,
    folder: str | None,
    cache_dir: Callable[[], str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With several processes only in a folder that the user names. Each kind of CPU has its own."""
    monkeypatch.setattr(xla_options, "_cpu_kind", lambda: folder or "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    prepare_compiler(Config())
    assert cache_dir() == (None if folder is None else str(tmp_path / "jaxthd" / "compiled" / folder))
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    prepare_compiler(Config())
    assert cache_dir() == "elsewhere"


def test_a_kind_of_cpu_is_its_model_and_instructions(tmp_path: Path):
    first = "processor : 0\nmodel name : A\nflags : x y\ncpu MHz : 1\n\nprocessor : 1\n"
    kinds = []
    for text in (first, first.replace("MHz : 1", "MHz : 2"), first.replace("x y", "x z"), "nothing", None):
        file = tmp_path / "cpuinfo"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        kinds.append(xla_options._cpu_kind(file))
    assert kinds[0] == kinds[1] != kinds[2]
    assert kinds[3:] == ["", ""]


def test_no_collective_is_recorded_in_a_graph():
    """In loops and conditionals they would be nodes that CUDA's conditional graphs refuse."""
    assert "COLLECTIVES" not in str(compiler_options(Config(), "gpu")["xla_gpu_enable_command_buffer"])


def test_options_reach_the_compiler():
    mesh = make_mesh(Config().mesh)
    step = jit_for(with_options("xla_gpu_no_such_thing=1"), mesh, lambda x: x + 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_thing"):
        step(1.0)
