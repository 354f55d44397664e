"""Tests run on 8 simulated CPU devices; public signatures' shapes and dtypes are checked at run time."""

import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "32"  # threads; see jaxthd.run.startup.simulate_devices
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    # A deadlock aborts instead of hanging.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=120 "
    # Programs here are compiled once and run few times; without optimization compiling takes 60% of the time.
    "--xla_backend_optimization_level=0"
)
if version("jaxlib").startswith("0.10."):
    # Without the MLIR emitters too it takes 35%. Later versions have no others, and abort on an unknown flag.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

from jaxtyping import install_import_hook

install_import_hook("jaxthd", "beartype.beartype")

import jax  # noqa: E402  (after its environment is set)
import pytest  # noqa: E402

# A program that two tests compile is compiled only once.
_CACHE = tempfile.TemporaryDirectory(prefix="jaxthd-test-cache-")
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", _CACHE.name))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

_MAPS, _MOST_MAPS = Path("/proc/self/maps"), 20_000


@pytest.fixture(autouse=True)
def programs_make_room() -> Iterator[None]:
    """Drops compiled programs before there are too many: each maps 16 regions of memory or more, a process
    may map 65,530 (vm.max_map_count), and beyond that XLA crashes with a segmentation fault.
    """
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
