"""Checks everything on this machine's GPU: correctness, speed and memory. Tables, and a report.

    python scripts/check_gpu.py [--only SECTION ...] [--minutes 9.5] [--out FOLDER] [--check]
    python scripts/check_gpu.py --tiny           # a small version, to try the script on a CPU

Each section runs in its own process, one after the other, so one that fails or hangs does not affect the
others; compiled side by side, programs take many times as long:
    machine      devices, versions; the rate of a large bf16 matrix product and of a copy
    kernels      python -m jaxthd.doctor --kernels: which kernels are admitted, with their errors
    exact        loss and every gradient of packed ragged documents on the GPU, against float64 on the CPU
    models       the steps of scripts/gpu_models.py at 8,192 tokens: tokens/s, memory, share of the bf16 peak
    dense        packed recordings against one document of as many tokens: 95% of its rate or more is right
    step         a training step of a 1B hybrid with packed audio: tokens/s, memory, share of the bf16 rate;
                 with XLA's loops and with the kernels; with and without command buffers
    packing      the same documents packed and padded, one in a row
    scan         bench_kernels.py scan: the scan kernel and XLA's
    attention    bench_kernels.py attention: of recordings and of long documents, by admitted back-end
    options      the step without each option of jaxthd/kernels/xla_options.py; in FP8 (fp8_products: those
                 cuBLASLt or Triton compute in 8 bits); with loops unrolled into one CUDA graph; with
                 larger blocks in blockwise attention
Admission chooses the back-ends; each run names them. Time is a median, synchronized. Shares of the peak count
6 FLOPs for each weight and each token (or frame) that it is multiplied with, and attention over allowed pairs
only; recomputation does not count. Needs neither grain nor tyro nor Transformer Engine; a part that needs one
of them is reported as not run. --out keeps each section's output, its results, and report.md with a table of
each; a section that ended well there is not run again: after a fault, or where the minutes were too few, give
the same command. --check exits 1 where a section fails.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, TimeoutExpired, run
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxthd.config import ComputeConfig, Config
from jaxthd.config.values import with_value
from jaxthd.files.atomic import write_atomically
from jaxthd.kernels.choose import using, with_admitted
from jaxthd.kernels.xla_options import OPTIONS
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import AXES, make_mesh, put_batch
from jaxthd.planning.model_flops import model_flops
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import loss_and_gradient
from scripts import bench_kernels
from scripts.benchmark import Step, benchmark, show
from scripts.gpu_models import (
    MODELS,
    TINY,
    attention_and_scan_flops,
    base_config,
    recordings,
    report_of,
    rows_of,
)
from tests.errors import relative_errors

ROOT = Path(__file__).parent.parent
RESULT = "RESULT "
"""Marks a line of a section's output that goes into results.json."""


def told(section: str, **found: Any) -> None:
    """Prints one line of results.json."""
    print(RESULT + json.dumps({"section": section, **found}), flush=True)


def seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call, after two warm-up calls: XLA may record a CUDA graph in the second."""
    jax.block_until_ready(call())
    return bench_kernels.seconds(call, repeats, calls=1)


# --- steps ---


def run_step(
    name: str, config: Config, groups: Sequence[Sequence[Document]], peak: float, repeats: int
) -> dict[str, Any]:
    """Compiles and times a training step with the admitted back-ends; returns a row of a table."""
    documents = [d for group in groups for d in group]
    batch, data = rows_of(groups, config.model)
    config = with_admitted(replace(config, data=data), lambda line: print(f"{name}: {line}", flush=True))
    step, losses = Step(config, put_batch(batch, make_mesh(config.mesh))), []
    sizes = step.program.memory_analysis()

    def call() -> Any:
        losses.append(step()[1].loss)
        return losses[-1]

    took = seconds(call, repeats)
    tokens, slots = sum(map(len, documents)), data.rows * data.capacity
    flops = model_flops(config)(report_of(documents, config)) + attention_and_scan_flops(config, documents)
    found = {
        "name": name,
        "attention": config.compute.attention_backend,
        "scan": config.compute.scan_backend,
        "documents": len(documents),
        "slots": slots,
        "tokens": tokens,
        "ms": round(1e3 * took, 2),
        "tokens_per_s": round(tokens / took),
        "audio_s_per_s": round(
            sum(config.model.audio_encoder.taken(d.pieces) for d in documents) / 100 / took
        ),
        "share_of_peak": round(flops / took / peak, 4),
        "arguments_GiB": round(sizes.argument_size_in_bytes / 2**30, 2),
        "temporary_GiB": round(sizes.temp_size_in_bytes / 2**30, 2),
        "compile_s": round(step.compile_seconds, 1),
        "fp8_products": fp8_products(step.program.as_text()),
        "losses": [round(float(loss), 4) for loss in (losses[0], losses[-1])],
    }
    told("step", **found)
    return found


def fp8_products(program: str) -> int:
    """The number of FP8 products in a compiled program: cuBLASLt's, and those in Triton's fusions."""
    in_triton = re.findall(r"= \S+ dot\(.*", program)
    types = dict(re.findall(r"%(\S+) = (f8e\w+)\[", program))
    fused = sum(any(x in types for x in re.findall(r"%([\w.-]+)", line)) for line in in_triton)
    return program.count("__cublas$lt$matmul$f8") + fused


def show_steps(title: str, found: Sequence[dict[str, Any]]) -> None:
    if not found:
        sys.exit("nothing could be run")
    columns = [name for name in found[0] if name != "losses"]
    show(title, "|".join(columns), [[row[name] for name in columns] for row in found])


def variations(config: Config, changes: dict[str, Config], *arguments: Any) -> list[dict[str, Any]]:
    """Runs every variation; prints the reason for each that cannot run."""
    found = []
    for name, changed in changes.items():
        try:
            found.append(run_step(name, changed, *arguments))
        except Exception as fault:
            first = (str(fault).splitlines() or [""])[0][:300]
            print(f"{name}: not run ({type(fault).__name__}: {first})", flush=True)
        jax.clear_caches()
    return found


# --- sections ---


def machine(tiny: bool) -> float:
    """Shows the machine; returns the rate of a large matrix product, to which shares refer."""
    device, rate = jax.devices()[0], bench_kernels.matrix_rate(256 if tiny else 8192)
    x = jnp.ones(2**20 if tiny else 2**30, jnp.float32)
    copied = 2 * x.nbytes / seconds(lambda: x.copy(), 20)
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "bf16_tflops": round(rate / 1e12, 1),
        "copy_gb_s": round(copied / 1e9),
        "memory_GiB": round(memory / 2**30, 1),
    }
    told("machine", **found)
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return rate


def become(*arguments: str) -> None:
    """Replaces this process by another Python program; a child process would outlive this one's end."""
    sys.stdout.flush()
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, *arguments])


def kernels(tiny: bool) -> None:
    become("-m", "jaxthd.doctor", "--kernels")


def exact(tiny: bool) -> None:
    """Compares the GPU, in float32 with exact products and then in bfloat16, with float64 on the CPU."""
    jax.config.update("jax_enable_x64", True)
    model = replace(TINY, encoder=with_value(TINY.audio_encoder, "chunk_seconds", 2.0))
    documents = recordings(600, model, most_seconds=6.0)

    def gradients(dtype: Any, device: jax.Device) -> tuple[float, Any]:
        config = Config(model=model, compute=ComputeConfig(dtype=dtype))
        batch, data = rows_of([documents], model)
        config = replace(config, data=data)
        axis_types = (AxisType.Auto,) * len(AXES)
        mesh = Mesh(np.array([device]).reshape(1, 1, 1, 1), AXES, axis_types=axis_types)
        with jax.default_device(device):
            start = init_state(Blueprint(using(config, dtype="float32")), mesh)
            wide = jnp.float64 if dtype == "float64" else jnp.float32
            params, buffers = jax.tree.map(lambda x: x.astype(wide), (start.params, start.buffers))
            batch = batch._replace(features=batch.features.astype(wide)) if dtype == "float64" else batch
            found = jax.jit(loss_and_gradient(Blueprint(config), mesh))(
                params, buffers, put_batch(batch, mesh)
            )
        return float(found.loss), jax.tree.map(lambda x: np.asarray(x, np.float64), found.gradients)

    with jax.default_matmul_precision("highest"):
        loss, want = gradients("float64", jax.devices("cpu")[0])
        results = {dtype: gradients(dtype, jax.devices()[0]) for dtype in ("float32", "bfloat16")}
    rows = []
    for dtype, (got_loss, got) in results.items():
        errors = relative_errors(got, want)
        worst = max(errors, key=lambda name: errors[name])
        found = {
            "dtype": dtype,
            "loss_error": f"{abs(got_loss - loss) / loss:.1e}",
            "median": f"{np.median(list(errors.values())):.1e}",
            "worst": f"{errors[worst]:.1e}",
            "of": worst,
        }
        told("exact", **found)
        rows.append(list(found.values()))
        if dtype == "float32" and errors[worst] > 1e-3:
            raise SystemExit(f"{worst} is off by {errors[worst]:.1e} in float32")
    show("Gradients on the GPU against float64 on the CPU", "dtype|loss|median|worst|of", rows)


def step(tiny: bool) -> None:
    peak, found = machine(tiny), []
    for tokens in (256, 512) if tiny else (8192, 16384, 32768):
        plain, fast = (base_config(tiny, kernels=kernels) for kernels in (False, True))
        unbuffered = using(fast, xla_options=("xla_gpu_enable_command_buffer=",))
        changes = {f"xla {tokens}": plain, f"kernels {tokens}": fast}
        if tokens != 8192:
            changes[f"kernels {tokens}, no command buffers"] = unbuffered
        documents = recordings(tokens, fast.model, 4.0 if tiny else 60.0)
        found += variations(fast, changes, [documents], peak, 3 if tiny else 8)
    show_steps("A training step, 1B hybrid with packed audio", found)


def packing(tiny: bool) -> None:
    peak, config = machine(tiny), base_config(tiny, kernels=True)
    documents = recordings(256 if tiny else 8192, config.model, 4.0 if tiny else 60.0)
    found = [run_step("packed", config, [documents], peak, 3 if tiny else 8)]
    jax.clear_caches()
    found.append(run_step("padded", config, [[d] for d in documents], peak, 3 if tiny else 8))
    show_steps("The same documents, packed and padded", found)
    ratio, ideal = found[1]["ms"] / found[0]["ms"], found[1]["slots"] / found[1]["tokens"]
    told("packing", times_as_fast=round(ratio, 2), ideal=round(ideal, 2))
    print(f"packed is {ratio:.2f} times as fast; padded slots / real tokens = {ideal:.2f}")


def scan(tiny: bool) -> None:
    become(str(ROOT / "scripts" / "bench_kernels.py"), "scan", *["--interpret"] * tiny)


def attention(tiny: bool) -> None:
    bench_kernels.attention(tiny, machine(tiny), lambda row: told("attention", **row))


def options(tiny: bool) -> None:
    peak, config = machine(tiny), base_config(tiny, kernels=True)
    documents = recordings(256 if tiny else 16384, config.model, 4.0 if tiny else 60.0)
    defaults = {"enable_command_buffer": "", "graph_min_graph_size": "5", "dot_merger_threshold_mb": "32"}
    changes = {"all options": config}
    for option in OPTIONS if jax.default_backend() == "gpu" else ():
        # Combining collectives needs several devices.
        if "gather" not in option and "scatter" not in option:
            name = option.removeprefix("xla_gpu_")
            text = f"{option}={defaults.get(name, 'false')}"
            changes[f"without {name}"] = using(config, xla_options=(text,))
    fp8 = ("decoder.layers.*", "encoder.blocks.*")
    unrolled = ("xla_gpu_command_buffer_unroll_loops=true",)
    changes["loops unrolled into the graph"] = using(config, xla_options=unrolled)
    changes["attention blocks of 512"] = using(
        config, block_sizes=replace(config.compute.blocks, attention=512)
    )
    changes["fp8"] = using(config, fp8=fp8)
    show_steps("XLA's options; FP8", variations(config, changes, [documents], peak, 3 if tiny else 8))


def models(tiny: bool) -> None:
    """A step of each model, by the admitted kernels."""
    peak, found = machine(tiny), []
    for name in ("tiny",) if tiny else ("dense-1b", "moe", "hybrid-4b"):
        config = replace(base_config(tiny, kernels=True), model=MODELS[name])
        documents = recordings(256 if tiny else 8192, config.model, 4.0 if tiny else 60.0)
        found += variations(config, {name: config}, [documents], peak, 3 if tiny else 8)
    show_steps("A training step of each model", found)


def whole(documents: list[Document]) -> Document:
    """All of their audio and text as one document."""
    chunks = [piece for document in documents for piece in document.pieces]
    text = sum(int(document.supervised.sum()) for document in documents)
    tokens = [3, *np.random.default_rng(1).integers(4, 260, text).tolist()]
    return Document.splice("whole", tokens, [False] + [True] * text, [chunks], 3)


def dense(tiny: bool) -> None:
    """The same audio and text as recordings and as one document."""
    peak, config = machine(tiny), base_config(tiny, kernels=True)
    documents = recordings(256 if tiny else 8192, config.model, 4.0 if tiny else 60.0)
    groups = {"packed recordings": documents, "one document": [whole(documents)]}
    found = []
    for name, group in groups.items():
        found += variations(config, {name: config}, [group], peak, 3 if tiny else 8)
    if len(found) == len(groups):
        packed, one = (row["tokens_per_s"] for row in found)
        told("dense", packed_share_of_dense=round(packed / one, 3))


SECTIONS: dict[str, Callable[[bool], Any]] = {
    "machine": machine,
    "kernels": kernels,
    "exact": exact,
    "models": models,
    "dense": dense,
    "step": step,
    "packing": packing,
    "attention": attention,
    "options": options,
    "scan": scan,
}
"""By name, the most important first."""


def kept(section: str, out: Path, tiny: bool) -> dict[str, Any] | None:
    """What a section left; None if it has not run, or not at this size."""
    path = out / f"{section}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found if found and found["tiny"] == tiny else None


def report(out: Path, tiny: bool) -> str:
    """The page: a table of each section's results."""
    told_machine = ((kept("machine", out, tiny) or {}).get("results") or [{}])[0]
    where = ", ".join(f"{k} {v}" for k, v in told_machine.items() if k != "section") or "not known"
    page = ["# What was checked on this machine\n", f"{where}\n"]
    if tiny or told_machine.get("device", "cpu").lower() == "cpu":
        page.append("A trial on a CPU: **nothing here has run on a GPU.**\n")
    for section in SECTIONS:
        found = kept(section, out, tiny)
        page.append(f"## {section}\n\n{found['outcome'] if found else 'not yet run'}\n")
        page += tables(found["results"] if found else [])
    return "\n".join(page)


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Markdown tables: rows with the same columns under one head."""
    by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in results:
        by_columns.setdefault(tuple(k for k in row if k not in ("section", "losses")), []).append(row)
    found = []
    for columns, rows in by_columns.items():
        lines = [columns, ["---"] * len(columns), *([str(row[c]) for c in columns] for row in rows)]
        found.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return found


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--out", type=Path, help="keeps what was found, and goes on from it")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        SECTIONS[given.section](given.tiny)
        return
    out = given.out or Path(tempfile.mkdtemp(prefix="check-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    # Sections share compiled programs and XLA's kernel choices.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out.resolve() / "compiled"))
    end, failed = time.monotonic() + 60 * given.minutes, []
    for name in given.only:
        if (kept(name, out, given.tiny) or {}).get("outcome") == "ran":
            print(f"{name}: ran before", flush=True)
            continue
        left = end - time.monotonic()
        print(f"\n=== {name} ({left:.0f} s left)", flush=True)
        command = [sys.executable, __file__, "--section", name, *["--tiny"] * given.tiny]
        text, outcome = run_section(command, left)
        print("".join(line for line in text.splitlines(True) if not line.startswith(RESULT)), end="")
        results = [json.loads(x.removeprefix(RESULT)) for x in text.splitlines() if x.startswith(RESULT)]
        found = {"outcome": outcome or "ran", "tiny": given.tiny, "results": results}
        (out / f"{name}.txt").write_text(text)
        write_atomically(out / f"{name}.json", [json.dumps(found, indent=1) + "\n"])
        write_atomically(out / "report.md", [report(out, given.tiny)])
        if outcome:
            failed.append(name)
            print(f"{name}: {outcome}")
    ran = f"{len(given.only) - len(failed)} of {len(given.only)} sections ran"
    print(f"\n{ran}; failed: {', '.join(failed) or 'none'}; {out}/report.md")
    if given.check and failed:
        sys.exit(1)


def run_section(command: Sequence[str], left: float) -> tuple[str, str]:
    """Runs a section; returns (its output, the reason it failed or "")."""
    if left < 5:
        return "", "not run, no time left"
    # Output is shown at once, so a section that is stopped loses none.
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    try:
        done = run(command, stdout=PIPE, stderr=STDOUT, text=True, timeout=left, cwd=ROOT, env=env)
    except TimeoutExpired as late:
        printed = late.stdout or b""
        return printed.decode() if isinstance(printed, bytes) else printed, "stopped, no time left"
    return done.stdout, f"failed with exit code {done.returncode}" * (done.returncode != 0)


if __name__ == "__main__":
    main()
