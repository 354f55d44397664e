"""A thousand GPUs on paper: Nemotron-3-Nano and -Super on meshes of 1,024 devices, side by side.

    python scripts/thousand_gpus.py [--models nano super]

Closed forms alone (jaxthd/planning/cluster.py); nothing is compiled, and nothing was measured on GPUs. Every
mesh has machines of 8 GPUs with the tensor axis inside. The first is that of the config; the others have the
same number of token slots in a step. Speech: four fifths of the slots. Text: the same without audio. "First"
is what fails first, with the share that it takes of what there is: over 1 the step waits for it. Saving: a
checkpoint of the whole state.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from jaxthd.config import Config, MeshConfig
from jaxthd.files.config_file import load_config
from jaxthd.planning.cluster import Cluster, cluster_cost
from jaxthd.planning.memory import temporary_memory
from jaxthd.planning.parameters import state_bytes
from jaxthd.terminal.tables import show

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = {"nano": "nemotron3_nano_1024.py", "super": "nemotron3_super.py"}
MESHES = ((2, 32, 2, 8), (4, 32, 1, 8), (16, 8, 1, 8), (128, 1, 1, 8))
GIB = 2**30


def variants(config: Config) -> Iterator[tuple[str, Config]]:
    """(what it is, config) of every row of the table."""
    slots = config.data.rows * config.data.capacity
    for sizes in MESHES:
        mesh = MeshConfig(*sizes, fsdp=sizes[2] == 1)
        rows = max(config.data.rows, mesh.data)
        data = replace(
            config.data,
            rows=rows,
            capacity=slots // rows,
            audio_capacity=config.data.audio_capacity * config.data.rows // rows // 8 * 8,
        )
        micro = 8 if mesh.pipeline > 1 else max(1, rows // mesh.data // 2)
        train = replace(config.train, microbatches=micro)
        made = replace(config, mesh=mesh, data=data, train=train)
        if sizes == MESHES[0]:
            made = config
        yield "speech", made
        if sizes == MESHES[0]:
            model, spec = (
                replace(made.model, encoder=None, adapter_dim=0),
                replace(made.data, audio_capacity=0),
            )
            yield "text", replace(made, model=model, data=spec)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    cluster = Cluster()
    for name in options.models:
        rows = []
        for what, config in variants(load_config(CONFIGS / MODELS[name])):
            cost, state = cluster_cost(config, cluster), state_bytes(config)
            memory = sum(state.values()) - state["gradients"] + temporary_memory(config).most
            first, second, *_ = cost.limits
            saving = cost.checkpoint / (config.mesh.devices / cluster.gpus) / cluster.storage
            rows.append(
                [
                    "x".join(map(str, config.mesh.sizes)),
                    what,
                    f"{config.data.rows} x {config.data.capacity // 1024}k",
                    f"{memory / GIB:.1f}",
                    f"{sum(x.nvlink for x in cost.exchanges) / GIB:.0f}",
                    f"{sum(x.network for x in cost.exchanges) / GIB:.0f}",
                    f"{cost.seconds['computing']:.2f}",
                    f"{cost.seconds['network']:.2f}",
                    f"{cost.bubble:.1%}",
                    f"{cost.imbalance:.2f}",
                    f"{saving:.1f}",
                    f"{first.name} {first.share:.1f}, {second.name} {second.share:.1f}",
                ]
            )
        show(
            f"{name}: a step on 1,024 GPUs; a device's memory and what it receives in GiB, times in seconds",
            "mesh||rows|memory|NVLink|network|computing|network s|bubble|imbalance|saving|first",
            rows,
        )


if __name__ == "__main__":
    main()
