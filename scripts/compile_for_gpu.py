"""Compiles a training step for an H100 on a machine without a GPU, and says what it would cost there.

    pip install --no-deps jax-cuda13-pjrt==VERSION jax-cuda13-plugin==VERSION nvidia-cudnn-cu13
    python scripts/compile_for_gpu.py [--costs] [--model 1b] [--tokens 8192] [--mesh 1 1 1 1]
        [--set NAME=VALUE ...]

VERSION: jax's own, 0.11 or later. CUDA's ptxas must be on the PATH. XLA's GPU compiler needs no device if it
is given a description of one; it then does not autotune kernels and asks cuDNN for no plans.

The step is one of scripts/gpu_models.py with packed audio, bfloat16, and what "auto" means on GPUs: Pallas
kernels, experts in rounds. --loops: loops over small blocks instead, as on a CPU. Printed are its memory,
the operations that are recorded in CUDA graphs, those the host still launches between them (loops driven by
the host, kernels), and where collectives are: CUDA is reported to refuse those that are nodes of a loop or
conditional inside a graph. Exits 1 where there are any.

--costs prints what the step would take (scripts/gpu_costs.py): kernels, operations, bytes and a
bound on the time, by part of the model, by kind, by loop and by line of source; and a bound on the share of
the bf16 peak. What GPUs exchange may go on beside their kernels; the bound if it never does is printed too.
Loops whose trips depend on the data turn as often as real lengths of recordings ask for.
--set NAME=VALUE may be repeated: an option of compute.xla_options if NAME begins with xla_, else a setting
such as compute.block_sizes.attention, mesh.fsdp or train.optimizer_options=first_moment=bfloat16.
"""

import argparse
import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from jax._src import xla_bridge  # the public interface finds plugins only when a back-end starts
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxthd.config import BlockSizes, Config, DataConfig, MeshConfig
from jaxthd.config.compute import LARGE_BLOCKS
from jaxthd.kernels.choose import LARGE_KERNELS, using
from jaxthd.models.stacks import to_stages
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import AXES, batch_specs
from jaxthd.planning.compiled_step import abstract_batch
from jaxthd.planning.model_flops import model_flops
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, state_shardings
from jaxthd.steps.training import make_train_step
from jaxthd.validate import DeviceFacts, validate
from scripts.benchmark import changed, show, size_text
from scripts.gpu_costs import H100, Launched, StepCosts, by, expected_trips, pallas_work, step_costs
from scripts.gpu_models import MODELS, attention_and_scan_flops, base_config, recordings, report_of, rows_of
from scripts.gpu_program import GRAPH, Thunk, parse, recorded, thunks

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
jax.config.update("jax_platforms", "cpu")

LOOK_AHEAD = 8
"""Documents that wait for a buffer they fit in, as the packer's open buffers hold them."""
FRAMES = 6.25
"""Mel frames for each token slot, from recordings with their transcripts."""
AS_ON_A_GPU: dict[str, Any] = {
    "attention_backend": "pallas",
    "encoder_attention": "pallas",
    "scan_backend": "pallas",
    "block_sizes": replace(LARGE_BLOCKS, **LARGE_KERNELS, loss=2048),
}
"""What compute.* means on a GPU that admits no fused library; and supervised rows in few large blocks."""
LOOPS: dict[str, Any] = {
    "attention_backend": "xla",
    "scan_backend": "xla",
    "encoder_attention": "blocks",
    "block_sizes": BlockSizes(),
}
"""What it means on a CPU."""
_KINDS = "AllGather", "AllReduce", "ReduceScatter", "CollectivePermute", "AllToAll", "RaggedAllToAll", "Group"
COLLECTIVES = tuple(f"k{name}" for name in _KINDS)
DESCRIPTION = """
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
"""An H100, in XLA's own form of description."""


def devices(count: int) -> list[Any]:
    """So many H100s that are described and not there. Call it before a back-end of jax starts."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # it reports that there is no GPU
    xla_bridge.discover_pjrt_plugins()
    # What Pallas would ask the device.
    gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
    for name, answer in {"get_device_kind": "NVIDIA H100 80GB HBM3", "get_device_platform": "gpu"}.items():
        if hasattr(gpu_info, name):
            setattr(gpu_info, name, lambda answer=answer: answer)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DESCRIPTION, topology=f"1x1x{count}"
    )
    return list(topology.devices)


class Files(NamedTuple):
    """What XLA wrote. text: the optimised program. sequence, metadata: the tree of what is launched, and the
    instruction of each entry."""

    text: str
    sequence: str
    metadata: str


def read_files(folder: str, name: str) -> Files:
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
        return Compiled(program, read_files(folder, name), time.perf_counter() - start)


def config_of(given: argparse.Namespace) -> Config:
    """The step's config, from the command line."""
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
    config = using(base_config(tiny, kernels=False), **AS_ON_A_GPU)
    train = replace(config.train, microbatches=microbatches)
    config = replace(config, model=MODELS[given.model], mesh=sizes, data=data, train=train)
    return changed(using(config, **LOOPS) if given.loops else config, given.set)


def lowered(config: Config) -> Any:
    """The training step, lowered for H100s."""
    mesh = Mesh(
        np.array(devices(config.mesh.devices)).reshape(config.mesh.sizes),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
        )

    in_stages = jax.eval_shape(
        partial(to_stages, stages=Blueprint(config).stages), abstract_state(Blueprint(config))
    )
    state = placed(in_stages, state_shardings(Blueprint(config), mesh))
    specs = jax.tree.broadcast(batch_specs(), abstract_batch(config))
    batch = placed(abstract_batch(config), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    program: Any = make_train_step(Blueprint(config), mesh)
    return program.lower(state, batch)


def documents_of(config: Config) -> list[Document]:
    """As many recordings as a buffer takes. Like the packer, it passes over one that does not fit: here among
    the next LOOK_AHEAD."""
    tokens, frames = config.data.capacity, config.data.audio_capacity
    found, passed_over, encoder = [], 0, config.model.audio_encoder
    for document in recordings(2 * tokens, config.model, 4.0 if tokens < 2048 else 60.0):
        if len(document) > tokens or encoder.taken(document.pieces) > frames:
            passed_over += 1
            if passed_over > LOOK_AHEAD:
                break
            continue
        tokens, frames = tokens - len(document), frames - encoder.taken(document.pieces)
        found.append(document)
    return found


def show_costs(config: Config, found: Files) -> None:
    documents = documents_of(config)
    batch, _ = rows_of([documents], config.model)
    trips = expected_trips(config, batch)
    costs = step_costs(
        parse(found.text),
        H100,
        lambda part, name: trips.get(part),
        recorded(found.sequence, found.metadata),
        pallas_work(config, batch),
    )
    show_sums("By part of the model", costs, lambda k: k.part)
    show_sums("By kind of kernel", costs, lambda k: k.kind)
    show_loops(costs)
    show_sums("The ten costliest places", costs, lambda k: k.place, most=10)
    kernels = sum(k.times for k in costs.kernels)
    own = sum(k.times * k.roofline for k in costs.kernels if k.kind != "collective")
    bound = max(own, costs.exchange)
    on_host = sum(k.times for k in costs.kernels if k.by_host)
    turned = sum(loop.trips for loop in costs.loops if loop.by_host)
    flops = model_flops(config)(report_of(documents, config))
    flops += attention_and_scan_flops(config, documents)
    flops *= config.data.rows / config.mesh.devices  # of one GPU
    update = sum(k.times * k.seconds for k in costs.kernels if k.part == "update")
    share, ideal, without = (
        flops / (H100.peak["bf16"] * t) for t in (costs.seconds, bound, costs.seconds - update)
    )
    print(
        f"a step: {kernels:,.0f} kernels, of which the host launches {on_host:,.0f}; "
        f"{costs.graphs:,.0f} graphs; {turned:,.0f} trips of loops that the host drives"
    )
    print(
        f"bound: {1e3 * costs.seconds:,.0f} ms with launches, {1e3 * bound:,.0f} ms without; model FLOPs "
        f"{flops / 1e12:,.1f} T; at most {share:.1%} of the bf16 peak, {ideal:.1%} without launches"
    )
    print(f"the update takes {1e3 * update:,.1f} ms of it: without it at most {without:.1%}")
    if costs.exchange:
        in_turn = flops / (H100.peak["bf16"] * costs.in_turn)
        print(
            f"GPUs exchange for {1e3 * costs.exchange:,.0f} ms beside the kernels; in turn with them the "
            f"step takes {1e3 * costs.in_turn:,.0f} ms: {in_turn:.1%}"
        )


def show_sums(title: str, costs: StepCosts, key: Any, most: int = 100) -> None:
    def row(name: str, k: Launched, on_host: float) -> list[str]:
        figures = k.flops / 1e9, k.bytes / 1e9, 1e3 * k.roofline, 1e3 * k.seconds
        return [name, f"{k.times:,.0f}", f"{on_host:,.0f}", *(f"{x:,.1f}" for x in figures)]

    on_host: Counter[str] = Counter()
    for k in costs.kernels:
        on_host[key(k)] += k.times * k.by_host  # type: ignore[assignment]
    rows = [row(name, k, on_host[name]) for name, k in by(costs, key)][:most]
    show(title, "|kernels|by host|GFLOP|GB|roofline ms|with launches ms", rows)


def show_loops(costs: StepCosts) -> None:
    sums: dict[tuple[str, ...], list[float]] = {}
    for loop in costs.loops:
        told = "XLA" if loop.known else "nobody: one" if loop.assumed else "the data"
        kind = f"{loop.part}, {loop.place}", told, "host" if loop.by_host else "graph"
        sums.setdefault(kind, [0, 0, 0])
        sums[kind] = [a + b for a, b in zip(sums[kind], (1, loop.entries, loop.trips), strict=True)]
    rows = [
        [where, *(f"{x:,.0f}" for x in found), *told]
        for (where, *told), found in sorted(sums.items(), key=lambda item: -item[1][2])
    ]
    show("Loops", "|loops|entries|trips|trips are told by|driven by", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--tokens", type=int, default=0, help="of a buffer; by default 8192, 512 of tiny")
    parser.add_argument("--mesh", type=int, nargs=4, default=[1, 1, 1, 1], metavar=tuple("DCPT"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--loops", action="store_true", help="loops over small blocks, as on a CPU")
    parser.add_argument("--costs", action="store_true", help="what the step would take")
    parser.add_argument("--keep", metavar="FOLDER", help="an empty folder for what XLA writes")
    parser.add_argument("--read", metavar="FOLDER", help="of an earlier --keep: costs without compiling")
    given = parser.parse_args()
    config = config_of(given)
    for warning in validate(config, DeviceFacts("gpu", config.mesh.devices, "NVIDIA H100", "9.0")):
        print(f"warning: {warning}")
    if given.read:
        show_costs(config, read_files(given.read, "train_step"))
        return
    found = compiled(lowered(config), "train_step", given.keep)
    memory, launched = found.program.memory_analysis(), list(thunks(found.files.sequence))
    tokens = config.data.capacity
    print(f"jax {jax.__version__}, {config.compute.dtype}, {tokens:,} tokens a buffer, mesh {given.mesh}")
    print(f"compiled in {found.seconds:.0f} s")
    print(f"memory: arguments {size_text(memory.argument_size_in_bytes)}", end=", ")
    print(f"temporary {size_text(memory.temp_size_in_bytes)}")
    outside = Counter(thunk.kind for thunk in launched if GRAPH not in thunk.outer)
    graphs = outside.pop(GRAPH, 0)
    print(f"CUDA graphs: {graphs}; outside of them: {counted(outside)}")
    if given.costs:
        show_costs(config, found.files)
    refuse_collectives(launched)


def refuse_collectives(launched: list[Thunk]) -> None:
    """Prints where collectives are. Exits 1 where CUDA would refuse some."""
    found = Counter(
        (thunk.kind, tuple(x for x in thunk.outer if x in (GRAPH, "kWhile", "kConditional")))
        for thunk in launched
        if thunk.kind in COLLECTIVES
    )
    print(f"collectives: {counted(lying(found))}")
    refused = sum(n for (_, outer), n in found.items() if GRAPH in outer[:-1])
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
