"""Tests run on 8 simulated CPU devices; public signatures' shapes and dtypes are checked at run time."""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.quick_compilation import quick_on_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "32"  # threads; see jaxthd.run.startup.simulate_devices
os.environ["XLA_FLAGS"] = quick_on_devices()

from tests.typechecks import install_type_checks

# A program that two tests compile is compiled only once: the workers of pytest-xdist inherit this folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="jaxthd-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
install_type_checks("jaxthd", Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "typechecks")
# Tracing makes millions of objects that stay: looking through them again and again costs a tenth of the time.
gc.set_threshold(100_000, 50, 1000)

import jax  # noqa: E402  (after its environment is set)
import pytest  # noqa: E402

from tests.costs import Costs  # noqa: E402
from tests.nightly import Nightly  # noqa: E402

jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Nobody reads where in the sources an operation of these programs comes from.
jax.config.update("jax_traceback_in_locations_limit", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", choices=("file", "test"), help="print the CPU seconds of each file or test")
    parser.addoption(
        "--python-reference", default=sys.executable, help="an interpreter with torch and transformers"
    )
    parser.addoption("--minutes", type=float, help="tests that have not begun after so many are skipped")
    parser.addoption("--vllm-source", default="", help="a folder with the unpacked wheel of vLLM 0.33")


def pytest_configure(config: pytest.Config) -> None:
    if by := config.getoption("--costs"):
        config.pluginmanager.register(Costs(by))
    config.pluginmanager.register(Nightly())


_BEGUN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _BEGUN > 60 * minutes:
        pytest.skip(f"not begun within {minutes:g} minutes (--minutes)")


# The files that take longest, the longest first: started last, one of them would keep one worker busy alone.
LONGEST = (
    "docs/test_examples.py",
    "test_adapting.py",
    "parallel/test_grpo_in_processes.py",
    "test_objectives_on_meshes.py",
    "parallel/test_distributed.py",
    "test_meshes.py",
    "test_exactness.py",
    "test_shared_prompts.py",
    "test_gpu.py",
    "test_families.py",
    "models/test_decoding.py",
    "test_train.py",
    "test_estimate.py",
    "models/test_hybrid.py",
    "models/test_adapt.py",
    "test_grpo.py",
    "ops/test_prefixes.py",
    "ops/test_split_documents.py",
    "steps/test_state.py",
    "test_cached_reference.py",
    "steps/test_optimizer.py",
    "steps/test_accumulation.py",
    "models/test_alone.py",
    "models/test_mtp.py",
    "models/test_fastconformer.py",
    "inference/test_generation.py",
    "rl/test_rollouts.py",
    "steps/test_step.py",
    "steps/test_bridge.py",
    "test_score.py",
    "test_doctor.py",
    "test_commands.py",
    "test_extending.py",
    "ops/test_scan.py",
    "docs/test_api.py",
    "ops/test_fp8.py",
    "ops/test_ring.py",
    "inference/test_preference_evaluator.py",
    "test_evaluate.py",
    "test_convert.py",
    "hf/test_families.py",
    "models/test_ctc.py",
    "test_context_costs.py",
    "steps/test_resumed.py",
    "models/test_dropout.py",
    "test_describe.py",
    "test_preferences.py",
    "rl/rewards/test_rewarder.py",
    "data/test_loader.py",
    "test_generate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


_MAPS, _MOST_MAPS, _LOADS = Path("/proc/self/maps"), 20_000, 32
_loaded = 0
"""Programs compiled, or read from the cache, since the regions were counted."""


def _count_program(event: str, *_: object, **__: object) -> None:
    global _loaded
    _loaded += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_program)


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> Iterator[None]:
    """A collection of garbage looks through what the module's tests have made. Through all that was traced
    before it takes four seconds, and each checkpoint that is saved asks for one.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def programs_make_room() -> Iterator[None]:
    """Drops compiled programs before there are too many: each maps 16 regions of memory or more, a process
    may map 65,530 (vm.max_map_count), and beyond that XLA crashes with a segmentation fault.

    Counting 12,000 regions takes 15 ms, so it is done after 32 programs, which map far fewer than are left.
    """
    global _loaded
    yield
    if _loaded >= _LOADS and _MAPS.exists():
        _loaded = 0
        if _regions() > _MOST_MAPS:
            jax.clear_caches()
        if _regions() > _MOST_MAPS:  # programs in garbage
            gc.unfreeze()
            gc.collect()
            gc.freeze()


def _regions() -> int:
    return _MAPS.read_bytes().count(b"\n")
