"""Compiles a training step for an H100 on a machine without a GPU: everything that needs no timing.

    pip install --no-deps jax-cuda13-pjrt==VERSION jax-cuda13-plugin==VERSION nvidia-cudnn-cu13
    python scripts/compile_for_gpu.py [--model 1b] [--tokens 8192] [--mesh 1 1 1 1] [--set NAME=VALUE ...]

VERSION: jax's own, 0.11 or later. CUDA's ptxas must be on the PATH. XLA's GPU compiler needs no device if it
is given a description of one; it then does not autotune kernels and asks cuDNN for no plans.

The step is that of scripts/check_gpu.py: a tiny or a 1B hybrid with packed audio, bfloat16, the scan by
Pallas kernels. Printed are its memory, the operations that are recorded in CUDA graphs, those the host still
launches between them (loops driven by the host, kernels), and where collectives are: CUDA is reported to
refuse those that are nodes of a loop or conditional inside a graph. Exits 1 where there are any.

--set NAME=VALUE may be repeated: an option of compute.xla_options if NAME begins with xla_, else a setting
such as compute.attention_block or mesh.fsdp.
"""

import argparse
import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src import xla_bridge  # the public interface finds plugins only when a back-end starts
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxthd.config import Config, DataConfig, MeshConfig
from jaxthd.kernels.choose import using
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.mesh import AXES, batch_specs
from jaxthd.planning.compiled_step import abstract_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, state_shardings
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.tables import size_text
from jaxthd.validate import DeviceFacts, validate
from scripts.check_gpu import base_config

FRAMES = 6.25
"""Mel frames for each token slot, from recordings with their transcripts."""
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
COLLECTIVES = (
    "kAllGather",
    "kAllReduce",
    "kReduceScatter",
    "kCollectivePermute",
    "kAllToAll",
    "kRaggedAllToAll",
    "kGroup",
)


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


def changed(config: Config, settings: list[str]) -> Config:
    for text in settings:
        name, _, value = text.partition("=")
        if name.startswith("xla_"):
            options = (*config.compute.xla_options, text)
            config = using(config, xla_options=options)
            continue
        part, field = name.split(".")
        old = getattr(getattr(config, part), field)
        new = value if isinstance(old, str) else type(old)(float(value))
        config = replace(config, **{part: replace(getattr(config, part), **{field: new})})
    return config


def thunks(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(what is launched, its enclosing operations from the outside in) of each entry in XLA's list."""
    stack: list[tuple[int, str]] = []
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", text, re.MULTILINE):
        while stack and stack[-1][0] >= len(indent):
            stack.pop()
        yield kind, tuple(outer for _, outer in stack)
        stack.append((len(indent), kind))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("tiny", "1b"), default="tiny")
    parser.add_argument("--tokens", type=int, default=0, help="of a buffer; by default 512, 8192 of 1b")
    parser.add_argument("--mesh", type=int, nargs=4, default=[1, 1, 1, 1], metavar=tuple("DCPT"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if shutil.which("ptxas") is None:
        sys.exit("CUDA's ptxas is not on the PATH; expected it, for XLA's kernels: add CUDA's bin")

    sizes, tiny = MeshConfig(*given.mesh), given.model == "tiny"
    tokens = given.tokens or (512 if tiny else 8192)
    unit = 128 * sizes.audio_ranks  # each rank takes a chunk of 30 s
    frames = max(int(FRAMES * tokens), 24 * unit)
    microbatches = 2 * sizes.pipeline if sizes.pipeline > 1 else 1
    data = DataConfig(
        rows=sizes.data * microbatches,
        capacity=tokens,
        audio_capacity=unit * -(-frames // unit),
        max_documents=max(4, tokens // 128),
    )
    config = using(base_config(tiny, kernels=False), scan_backend="pallas")
    train = replace(config.train, microbatches=microbatches)
    config = changed(replace(config, mesh=sizes, data=data, train=train), given.set)
    for warning in validate(config, DeviceFacts("gpu", sizes.devices, "NVIDIA H100", "9.0")):
        print(f"warning: {warning}")

    mesh = Mesh(
        np.array(devices(sizes.devices)).reshape(sizes.sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
        )

    in_stages = jax.eval_shape(
        partial(to_stages, stages=Blueprint(config).stages), abstract_state(Blueprint(config))
    )
    state = placed(in_stages, state_shardings(Blueprint(config), mesh))
    batch = placed(
        abstract_batch(config),
        jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), jax.tree.broadcast(batch_specs(), abstract_batch(config))
        ),
    )
    program: Any = make_train_step(Blueprint(config), mesh)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        # Autotuning needs the device.
        unmeasured = {"xla_gpu_autotune_level": 0, "xla_dump_to": folder}
        compiled = program.lower(state, batch).compile(compiler_options=unmeasured)
        took = time.perf_counter() - start
        (listed,) = Path(folder).glob("*train_step*thunk_sequence_after_thunk_passes.txt")
        launched = list(thunks(listed.read_text()))
    memory = compiled.memory_analysis()
    print(f"jax {jax.__version__}, {config.compute.dtype}, {tokens:,} tokens a buffer, mesh {given.mesh}")
    print(f"compiled in {took:.0f} s")
    print(f"memory: arguments {size_text(memory.argument_size_in_bytes)}", end=", ")
    print(f"temporary {size_text(memory.temp_size_in_bytes)}")
    outside = Counter(kind for kind, outer in launched if "kCommandBuffer" not in outer)
    graphs = outside.pop("kCommandBuffer", 0)
    print(f"CUDA graphs: {graphs}; outside of them: {counted(outside)}")
    found = Counter(
        (kind, tuple(x for x in outer if x in ("kCommandBuffer", "kWhile", "kConditional")))
        for kind, outer in launched
        if kind in COLLECTIVES
    )
    print(f"collectives: {counted(lying(found))}")
    refused = sum(n for (_, outer), n in found.items() if "kCommandBuffer" in outer[:-1])
    if refused:
        print(
            f"{refused} collectives in a loop or conditional inside a graph: CUDA is reported to refuse them"
        )
        sys.exit(1)


def lying(found: Counter[tuple[str, tuple[str, ...]]]) -> Counter[str]:
    """Counts by name and enclosing operations."""
    return Counter({" in ".join([kind, *reversed(outer)]): n for (kind, outer), n in found.items()})


def counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{n} {kind.replace('k', '', 1)}" for kind, n in kinds.most_common()) or "nothing"


if __name__ == "__main__":
    main()
