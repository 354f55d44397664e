"""An H100 without one: XLA's GPU compiler is given a description of the device.

    pip install --no-deps jax-cuda13-pjrt==VERSION jax-cuda13-plugin==VERSION nvidia-cudnn-cu13

VERSION: jax's own, 0.11 or later. CUDA's ptxas must be on the PATH. The compiler then does not autotune
kernels and asks cuDNN for no plans. Import this before a back-end of jax starts.
"""

import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import xla_bridge  # the public interface finds plugins only when a back-end starts
from jax.experimental import topologies

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
jax.config.update("jax_platforms", "cpu")

H100 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.19.0"
}
"""
"""The device, in XLA's own form of description."""


def devices(count: int) -> list[Any]:
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # it reports that there is no GPU
    xla_bridge.discover_pjrt_plugins()
    # What Pallas would ask the device.
    gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
    for name, answer in {"get_device_kind": "NVIDIA H100 80GB HBM3", "get_device_platform": "gpu"}.items():
        if hasattr(gpu_info, name):
            setattr(gpu_info, name, lambda answer=answer: answer)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{count}")
    return list(topology.devices)


class Files(NamedTuple):
    """What XLA wrote. text: the optimised program. sequence, metadata: the tree of what is launched, and the
    instruction of each entry."""

    text: str
    sequence: str
    metadata: str


def read(folder: str, name: str) -> Files:
    """XLA's files about the program whose function's name holds `name`."""

    def written(ending: str) -> str:
        (found,) = Path(folder).glob(f"*{name}*{ending}.txt")
        return found.read_text()

    endings = "gpu_after_optimizations", "thunk_sequence_after_thunk_passes", "thunk_metadata"
    return Files(*map(written, endings))


class Compiled(NamedTuple):
    """program: jax's. seconds: that the compiler took."""

    program: Any
    files: Files
    seconds: float


def compiled(lowered: Any, name: str, keep: str | None = None) -> Compiled:
    """Compiles a lowered program whose function's name holds `name`. Exits if ptxas is missing.

    keep: a folder for all that XLA writes about the program.
    """
    if shutil.which("ptxas") is None:
        sys.exit("CUDA's ptxas is not on the PATH; expected it, for XLA's kernels: add CUDA's bin")
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        # Autotuning needs the device.
        options = {"xla_gpu_autotune_level": 0, "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program = lowered.compile(compiler_options=options)
        return Compiled(program, read(folder, name), time.perf_counter() - start)
