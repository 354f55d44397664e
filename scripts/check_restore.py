"""A run continues on any mesh: saved on one, restored on others, with the same losses and documents.

    python scripts/check_restore.py [--after 20] [--meshes 8x1x1x1 1x1x1x1 ...]

A run on 2 x 2 x 1 x 1 (data x context x pipeline x tensor, simulated devices) is checkpointed half way,
mid-epoch, and goes on. From that checkpoint it is continued on other meshes, of 1 to 8 devices. Each is
compared with the uninterrupted run: the loss of the next step, to 1e-6; the losses of the --after next ones,
to 1e-3 (rounding grows: see docs/benchmarks.md); and the documents of each of these steps exactly, none read
twice and none missing.

The model has all four mixers, experts and an audio encoder; the data is the synthetic speech. Exits 1 when a
claim fails.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.quick_compilation import quick_on_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")  # threads; see jaxthd.run.startup.simulate_devices
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = quick_on_devices()

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.data.dataset import SpeechData
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, canonical_shardings
from jaxthd.terminal.tables import table
from jaxthd.train import train
from jaxthd.validate import DeviceFacts, validate

SAVED_ON = MeshConfig(2, 2, 1, 1)
MESHES = ("8x1x1x1", "1x1x1x1", "1x2x2x2", "2x1x4x1", "1x8x1x1")


def config_for(mesh: MeshConfig, after: int) -> Config:
    """8 rows for 8 data ranks, with audio room for 8 ranks, so that every mesh packs the same buffers."""
    return Config(
        mesh=mesh,
        data=DataConfig(rows=8, capacity=128, max_documents=16, audio_capacity=8 * 640, workers=0),
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=1, dim=32, heads=2, ffn_dim=32, subsampling_channels=4, chunk_seconds=2.0
            ),
            llm=LLMConfig(
                pattern="ME*-ME*-",
                vocab_size=264,
                dim=32,
                head_dim=8,
                ffn_dim=32,
                mamba_heads=4,
                mamba_head_dim=16,
                mamba_state=8,
                expert_dim=16,
                shared_expert_dim=16,
            ),
        ),
        # A mesh of 2 x 1 x 4 x 1 has unequal stages.
        compute=ComputeConfig(context_exchange="ring" if mesh.pipeline < 4 else "all_gather"),
        train=TrainConfig(
            steps=2 * after,
            warmup_steps=4,
            checkpoint_every=after,
            validate_every=0,
            trackers=(),
        ),
    )


def run(config: Config, workdir: Path) -> dict[int, float]:
    """Trains or continues the run; returns the loss of every step it wrote."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        validate(config, DeviceFacts.of_this_machine(260))
        train(config, workdir)
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def documents(config: Config, position: dict | None, steps: int) -> list[list[str]]:
    """The documents of the next steps, sorted."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(redirect_stdout(StringIO()))
        data = stack.enter_context(closing(SpeechData(config, Path(folder))))
        loader = stack.enter_context(closing(data.training()))
        if position is not None:
            loader.set_state(position)
        return [sorted(key for row in r.keys for key in row) for _, r in islice(loader, steps)]


def restored_position(config: Config, workdir: Path) -> dict:
    mesh = make_mesh(config.mesh)
    with Checkpoints(workdir / "checkpoints", 3) as checkpoints:
        restored = checkpoints.restore_latest(
            abstract_state(Blueprint(config)), canonical_shardings(Blueprint(config), mesh)
        )
    assert restored is not None
    return restored[1]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--after", type=int, default=20, help="steps before and after the checkpoint")
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="meshes to restore on")
    options = parser.parse_args(argv)
    after, failed, rows = options.after, 0, []
    with tempfile.TemporaryDirectory() as folder:
        whole = config_for(SAVED_ON, after)
        losses = run(whole, Path(folder) / "whole")
        read = documents(whole, None, 2 * after)
        for name in options.meshes:
            data, context, pipeline, tensor = map(int, name.split("x"))
            config = config_for(MeshConfig(data, context, pipeline, tensor), after)
            workdir = Path(folder) / name
            shutil.copytree(Path(folder) / "whole", workdir)
            shutil.rmtree(workdir / "checkpoints" / str(2 * after))
            position = restored_position(config, workdir)
            again = run(config, workdir)
            off = [abs(again[s] / losses[s] - 1) for s in range(after + 1, 2 * after + 1)]
            same = documents(config, position, after) == read[after:]
            holds = off[0] <= 1e-6 and max(off) <= 1e-3 and same
            failed += not holds
            cells = [f"{off[0]:.1e}", f"{max(off):.1e}", "the same" if same else "OTHERS"]
            rows.append([name, *cells, "holds" if holds else "FAILS"])
            print("  ".join(rows[-1]), flush=True)
    title = f"saved on {'x'.join(map(str, SAVED_ON.sizes))} at step {after}"
    print(f"\n{table(title, f'|next loss|next {after} losses|documents|', rows)}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
