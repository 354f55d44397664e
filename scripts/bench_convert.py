"""Host memory of import and export: it should be the devices' arrays and about one tensor. A table.

    python scripts/bench_convert.py [--check] [--layers N]

Writes random MoE checkpoints with --layers and with twice as many layers of each kind (0.7 and 1.4 GB, in
several files), reads them into the arrays of 1 and of 8 simulated devices (FSDP, tensor and pipeline
parallel), and exports them again. Each step runs in a process of its own; all take about four minutes.

"peak" is anonymous memory, sampled every 2 ms, above what was in use before. It includes what jax compiles
but not the pages of mapped files, which the kernel can drop. "arrays" are the bytes of all devices' shards,
which are in the same memory here. "besides" is the peak without them. "largest" is the largest array of the
run's checkpoint (all experts of all layers); in an export orbax reads one such array whole. --check exits 1
if "besides" grows by more than 64 MB when the layers double, which is two of the published checkpoint's
largest tensors; an export may also grow by the growth of "largest".
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from jaxthd.checkpoints.weights import Weights, load_weights, named_weights
from jaxthd.config import Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.hf import nemotron_omni
from jaxthd.hf.export import export
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.terminal.tables import Claim, conclude, show, size_text

MESHES = ((1, 1, 1, 1), (8, 1, 1, 1), (2, 2, 1, 2), (2, 1, 2, 2))
GROWTH = 64 * 2**20


def model_of(layers: int) -> ModelConfig:
    llm = LLMConfig(
        pattern="ME" * layers,
        vocab_size=8192,
        dim=1024,
        mamba_heads=32,
        mamba_head_dim=64,
        mamba_state=64,
        experts=16,
        expert_dim=1024,
        shared_expert_dim=2048,
    )
    return ModelConfig(encoder=EncoderConfig(layers=2, dim=256), llm=llm, adapter_dim=512)


def anonymous() -> int:
    """Bytes of this process's memory that are not backed by a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def peak(told: dict[str, int]) -> Iterator[None]:
    """Stores under "peak" the most memory added while the block ran."""
    most, done, before = 0, threading.Event(), anonymous()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, anonymous() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        told["peak"] = most


def shard_bytes(weights: Weights) -> int:
    return sum(s.data.nbytes for x in jax.tree.leaves(weights) for s in x.addressable_shards)


def measure(what: str, config: Config, folder: Path) -> dict[str, int]:
    published, imported = folder / "published", folder / "imported"
    specs = jax.eval_shape(lambda: Blueprint(config).initial_weights())
    told = {"read_whole": 0, "largest": max(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs))}
    mesh = make_mesh(config.mesh)
    match what:
        case "write":
            state = init_state(Blueprint(config), mesh)
            arrays = named_weights(Weights(state.params, state.buffers))
            shapes = {name: x.shape for name, x in arrays.items()}
            whole = {name: np.asarray(x) for name, x in arrays.items()}
            take = lambda part: whole[part.name][part.at]  # noqa: E731
            export(config.model, shapes, take, nemotron_omni.FAMILY, published, limit=200 * 2**20)
            import_weights([str(published)], imported)
        case "import":
            with peak(told):
                weights = jax.block_until_ready(
                    load_weights([published], Blueprint(config), mesh, partly=False)
                )
            told["arrays"] = shard_bytes(weights)
        case "export":
            with peak(told):
                export_weights(imported, folder / "exported")
            files = (folder / "exported").glob("*.safetensors")
            told["arrays"] = sum(file.stat().st_size for file in files)
            told["read_whole"] = told["largest"]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--layers", type=int, default=4, help="of each kind")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        what, sizes, folder = options.serve
        jax.config.update("jax_num_cpu_devices", 8)
        config = Config(mesh=MeshConfig(*json.loads(sizes)), model=model_of(options.layers))
        print(json.dumps(measure(what, config, Path(folder))))
        return

    with tempfile.TemporaryDirectory() as scratch:

        def run(what: str, layers: int, mesh: tuple[int, ...] = (1, 1, 1, 1)) -> dict[str, int]:
            command = [sys.executable, __file__, "--layers", str(layers)]
            served = [*command, "--serve", what, json.dumps(mesh), f"{scratch}/{layers}"]
            done = subprocess.run(served, capture_output=True, text=True, env=dict(os.environ))
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            return json.loads(done.stdout.splitlines()[-1])

        rows, claims = [], []
        besides: dict[str, list[int]] = {}
        allowed: dict[str, list[int]] = {}
        for layers in (options.layers, 2 * options.layers):
            run("write", layers)
            for what, mesh in [*(("import", mesh) for mesh in MESHES), ("export", MESHES[0])]:
                found = run(what, layers, mesh)
                name = f"{what} {'x'.join(map(str, mesh))}"
                besides.setdefault(name, []).append(found["peak"] - found["arrays"])
                allowed.setdefault(name, []).append(found["read_whole"])
                sizes = (found["peak"], found["arrays"], besides[name][-1], found["largest"])
                rows.append((name, layers, *map(size_text, sizes)))
        for name, (once, twice) in besides.items():
            bound = GROWTH + allowed[name][1] - allowed[name][0]
            more, most = size_text(twice - once), size_text(bound)
            text = f"{name}: {more} more besides for twice the layers (at most {most})"
            claims.append(Claim(text, twice - once <= bound))
    show("Host memory", "what|layers|peak|arrays|besides|largest", rows)
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
