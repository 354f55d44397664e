"""Checks everything on this machine's GPU: correctness, speed and memory. Tables.

    python scripts/check_gpu.py [--only SECTION ...] [--minutes 9.5] [--out FOLDER] [--check]
    python scripts/check_gpu.py --tiny           # a small version, to try the script on a CPU

Each section runs in its own process, so one that fails or hangs does not affect the others:
    machine      devices, versions; the rate of a large bf16 matrix product and of a copy
    kernels      python -m jaxthd.doctor: which attention and scan kernels are admitted, with their errors
    exact        loss and every gradient of packed ragged documents on the GPU, against float64 on the CPU
    step         a training step of a 1B hybrid with packed audio: tokens/s, memory, share of the bf16 rate;
                 with XLA's loops and with the kernels; with and without command buffers
    packing      the same documents packed and padded, one in a row
    scan         scripts/bench_scan.py: the scan kernel, XLA's, and mamba_ssm's where it can be imported
    attention    scripts/bench_attention.py: packed attention of recordings and of long documents, by
                 admitted back-end; FlexAttention where torch can be imported
    options      the step without each option of jaxthd/kernels/xla_options.py; in FP8 (fp8_products: those
                 cuBLASLt or Triton compute in 8 bits); with loops unrolled into one CUDA graph; with
                 larger blocks in blockwise attention
    conditionals what a skipped `lax.cond` costs
Admission chooses the back-ends; each run names them. Time is a median, synchronized. Model FLOPs: 6 for each
parameter and each token (or frame) that it is multiplied with, and attention over allowed pairs only;
recomputation does not count. Needs neither grain nor tyro nor Transformer Engine; a part that needs one of
them is reported as not run. --out keeps each section's output and results.json.
--check exits 1 where a section fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AxisType, Mesh

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.config.compute import SMALL_BLOCKS
from jaxthd.kernels.choose import using, with_admitted
from jaxthd.kernels.xla_options import OPTIONS
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import AXES, make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import loss_and_gradient, make_train_step
from jaxthd.terminal.tables import show
from scripts import bench_attention, bench_scan
from tests.errors import relative_errors

ROOT = Path(__file__).parent.parent
RESULT = "RESULT "
"""Marks a line of a section's output that goes into results.json."""

ONE_BILLION = ModelConfig(
    encoder=EncoderConfig(layers=17, dim=512, heads=8, ffn_dim=2048, subsampling_channels=256),
    llm=LLMConfig(
        pattern="M-M-M*-" * 5,
        vocab_size=32768,
        dim=2048,
        q_heads=16,
        kv_heads=4,
        head_dim=128,
        ffn_dim=8192,
        mamba_heads=64,
        mamba_head_dim=64,
        mamba_state=128,
        mamba_groups=8,
    ),
    adapter_dim=2048,
)
TINY = ModelConfig(
    encoder=EncoderConfig(layers=1, dim=32, heads=2, ffn_dim=64, subsampling_channels=8),
    llm=LLMConfig(
        pattern="M-M*-",
        dim=64,
        q_heads=2,
        kv_heads=1,
        head_dim=32,
        ffn_dim=128,
        mamba_heads=4,
        mamba_head_dim=16,
        mamba_state=16,
    ),
    adapter_dim=32,
)


def told(section: str, **found: Any) -> None:
    """Prints one line of results.json."""
    print(RESULT + json.dumps({"section": section, **found}), flush=True)


def seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call, after two warm-up calls."""
    jax.block_until_ready(call())
    return bench_scan.seconds(call, jax.block_until_ready, repeats, calls=1)


# --- documents and steps ---


def recordings(slots: int, model: ModelConfig, most_seconds: float = 60.0, seed: int = 0) -> list[Document]:
    """Documents of one recording and its transcript, with the lengths of real recordings: 1 s to a minute,
    half of them under 8 s. Together they take at most `slots` token slots.
    """
    rng = np.random.default_rng(seed)
    documents: list[Document] = []
    while True:
        length = float(np.clip(rng.lognormal(np.log(min(8.0, most_seconds / 4)), 0.8), 1, most_seconds))
        frames, text = round(100 * length), 6 + round(3.5 * length)
        chunks, per_chunk = [], model.audio_encoder.chunk_frames - 1
        for start in range(0, frames, per_chunk):
            size = (min(per_chunk, frames - start), model.audio_encoder.num_mels)
            chunks.append(rng.standard_normal(size, np.float32))
        tokens = [3, *rng.integers(4, min(model.llm.vocab_size, 260), text).tolist()]
        document = Document.splice(str(len(documents)), tokens, [False] + [True] * text, [chunks], 3)
        slots -= len(document)
        if slots < 0:
            return documents
        documents.append(document)


def rows_of(groups: Sequence[Sequence[Document]], model: ModelConfig) -> tuple[Batch, DataConfig]:
    """One row for each group; all rows are as long as the longest needs."""

    def multiple(n: int, of: int) -> int:
        return -(-n // of) * of

    capacity = multiple(max(sum(map(len, group)) for group in groups), 128)
    frames = multiple(max(sum(d.mel_frames for d in group) for group in groups), 128)
    sizes: dict[str, Any] = {
        "capacity": capacity,
        "audio_capacity": frames,
        "max_documents": max(map(len, groups)),
    }
    rows = [pack_row(group, **sizes, num_mels=model.audio_encoder.num_mels)[0] for group in groups]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    return batch, DataConfig(rows=len(groups), workers=0, **sizes)


def parameters(config: Config) -> dict[str, int]:
    """Numbers of matrix elements that one token, or one encoder frame, is multiplied with."""
    found = {"encoder": 0, "decoder": 0}
    for path, variable in nnx.to_flat_state(nnx.state(Blueprint(config).model, nnx.Param)):
        if variable.get_metadata("decayed") and path[0] not in ("embedding", "head"):
            found["encoder" if path[0] in ("encoder", "adapter") else "decoder"] += variable.size
    return found


def model_flops(config: Config, documents: Sequence[Document]) -> float:
    """FLOPs of a step, forward and backward, without recomputation and padding."""
    llm, matrices = config.model.llm, parameters(config)
    tokens = sum(map(len, documents))
    frames = sum(d.mel_frames for d in documents) / 8
    supervised = sum(int(d.supervised.sum()) for d in documents)
    of_weights = (
        matrices["decoder"] * tokens + matrices["encoder"] * frames + llm.vocab_size * llm.dim * supervised
    )
    return 6 * of_weights + attention_and_scan_flops(config, documents)


def attention_and_scan_flops(config: Config, documents: Sequence[Document]) -> float:
    """Of attention's scores and values over allowed pairs only, in decoder and encoder, and of Mamba2's
    states, as a recurrence would compute them; forward and backward."""
    llm, encoder = config.model.llm, config.model.audio_encoder
    pairs = sum(len(d) * (len(d) + 1) / 2 for d in documents) * llm.letters.count("*")
    chunks = [-(-len(chunk) // 8) for d in documents for chunk in d.chunks]
    attended = sum(n * n for n in chunks) * encoder.layers
    state = 2 * llm.mamba_heads * llm.mamba_head_dim * llm.mamba_state
    scanned = llm.letters.count("M") * sum(map(len, documents)) * state
    return 6 * (2 * pairs * llm.q_heads * llm.head_dim + 2 * attended * encoder.dim + scanned)


def run_step(
    name: str, config: Config, groups: Sequence[Sequence[Document]], peak: float, repeats: int
) -> dict[str, Any]:
    """Compiles and times a training step with the admitted back-ends; returns a row of a table."""
    documents = [d for group in groups for d in group]
    batch, data = rows_of(groups, config.model)
    config = with_admitted(replace(config, data=data), lambda line: print(f"{name}: {line}", flush=True))
    mesh = make_mesh(config.mesh)
    state, on_mesh = init_state(Blueprint(config), mesh), put_batch(batch, mesh)
    start = time.perf_counter()
    program: Any = make_train_step(Blueprint(config), mesh)
    step = program.lower(state, on_mesh).compile()
    compiling = time.perf_counter() - start
    sizes: Any = step.memory_analysis()
    losses = []

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, on_mesh)
        losses.append(metrics.loss)
        return metrics

    took = seconds(call, repeats)
    tokens, slots = sum(map(len, documents)), data.rows * data.capacity
    flops = model_flops(config, documents)
    found = {
        "name": name,
        "attention": config.compute.attention_backend,
        "scan": config.compute.scan_backend,
        "documents": len(documents),
        "slots": slots,
        "tokens": tokens,
        "ms": round(1e3 * took, 2),
        "tokens_per_s": round(tokens / took),
        "audio_s_per_s": round(sum(d.mel_frames for d in documents) / 100 / took),
        "share_of_peak": round(flops / took / peak, 4),
        "arguments_GiB": round(sizes.argument_size_in_bytes / 2**30, 2),
        "temporary_GiB": round(sizes.temp_size_in_bytes / 2**30, 2),
        "compile_s": round(compiling, 1),
        "fp8_products": fp8_products(step.as_text()),
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
    device, rate = jax.devices()[0], bench_attention.matrix_rate(256 if tiny else 8192)
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
    become("-m", "jaxthd.doctor")


def exact(tiny: bool) -> None:
    """Compares the GPU, in float32 with exact products and then in bfloat16, with float64 on the CPU."""
    jax.config.update("jax_enable_x64", True)
    model = replace(TINY, encoder=replace(TINY.audio_encoder, chunk_seconds=2.0))
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
            batch = batch._replace(mels=batch.mels.astype(wide)) if dtype == "float64" else batch
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


def base_config(tiny: bool, *, kernels: bool) -> Config:
    model = TINY if tiny else ONE_BILLION
    compute = ComputeConfig(dtype="bfloat16", block_sizes=SMALL_BLOCKS if tiny else None)
    config = Config(model=model, compute=compute, train=TrainConfig(warmup_steps=2, learning_rate=1e-4))
    return using(config, attention_backend="auto", scan_backend="auto") if kernels else config


def step(tiny: bool) -> None:
    peak, found = machine(tiny), []
    for tokens in (256, 512) if tiny else (8192, 16384, 32768):
        plain, fast = (base_config(tiny, kernels=kernels) for kernels in (False, True))
        unbuffered = using(fast, command_buffers=False)
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
    become(str(ROOT / "scripts" / "bench_scan.py"), *["--interpret"] * tiny)


def attention(tiny: bool) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs some of the memory
    bench_attention.measure(tiny, machine(tiny), lambda row: told("attention", **row))


def options(tiny: bool) -> None:
    peak, config = machine(tiny), base_config(tiny, kernels=True)
    documents = recordings(256 if tiny else 16384, config.model, 4.0 if tiny else 60.0)
    defaults = {"enable_command_buffer": "", "graph_min_graph_size": "5", "dot_merger_threshold_mb": "32"}
    changes = {"all options": config}
    for option in OPTIONS if jax.default_backend() == "gpu" else ():
        # Combining collectives needs several devices.
        if "gather" not in option.name and "scatter" not in option.name:
            name = option.name.removeprefix("xla_gpu_")
            text = f"{option.name}={defaults.get(name, 'false')}"
            changes[f"without {name}"] = using(config, xla_options=(text,))
    fp8 = ("decoder.layers.*", "encoder.blocks.*")
    unrolled = ("xla_gpu_command_buffer_unroll_loops=true",)
    changes["loops unrolled into the graph"] = using(config, xla_options=unrolled)
    changes["attention blocks of 512"] = using(
        config, block_sizes=replace(config.compute.blocks, attention=512)
    )
    changes["fp8"] = using(config, fp8=fp8)
    show_steps("XLA's options; FP8", variations(config, changes, [documents], peak, 3 if tiny else 8))


def conditionals(tiny: bool) -> None:
    """Times a loop of many iterations, each with a branch that is not taken, against the loop without it."""
    turns, x = 100 if tiny else 2000, jnp.ones((256, 256), jnp.bfloat16)

    def loop(branches: int, taken: Array, x: Array) -> Array:
        def turn(x: Array, _: None) -> tuple[Array, None]:
            x = x + 1
            for _branch in range(branches):
                x = jax.lax.cond(taken, lambda x: x @ x, lambda x: x, x)
            return x, None

        return jax.lax.scan(turn, x, length=turns)[0]

    commands = next(o.value for o in OPTIONS if o.name == "xla_gpu_enable_command_buffer")
    for name, value in (("without command buffers", ""), ("with", commands)):
        took = []
        for branches in (0, 1):
            given = {"xla_gpu_enable_command_buffer": value}
            program = jax.jit(partial(loop, branches), compiler_options=given)
            took.append(seconds(partial(program, jnp.asarray(False), x)) / turns * 1e6)
        told(
            "conditionals",
            command_buffers=name,
            turn_us=round(took[0], 2),
            more_us=round(took[1] - took[0], 2),
        )
        print(f"{name}: a turn takes {took[0]:.2f} us, a skipped branch {took[1] - took[0]:.2f} us more")


SECTIONS: dict[str, Callable[[bool], Any]] = {
    "machine": machine,
    "kernels": kernels,
    "exact": exact,
    "step": step,
    "packing": packing,
    "scan": scan,
    "attention": attention,
    "options": options,
    "conditionals": conditionals,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        SECTIONS[given.section](given.tiny)
        return
    # Sections share compiled programs and XLA's kernel choices.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="check-gpu-"))
    end, results, failed = time.monotonic() + 60 * given.minutes, [], []
    for name in given.only:
        left = end - time.monotonic()
        print(f"\n=== {name} ({left:.0f} s left)", flush=True)
        command = [sys.executable, __file__, "--section", name, *["--tiny"] * given.tiny]
        text, outcome = run_section(command, left)
        print("".join(line for line in text.splitlines(True) if not line.startswith(RESULT)), end="")
        results += [json.loads(x.removeprefix(RESULT)) for x in text.splitlines() if x.startswith(RESULT)]
        if outcome:
            failed.append(name)
            print(f"{name}: {outcome}")
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"{name}.txt").write_text(text)
            (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{len(given.only) - len(failed)} of {len(given.only)} sections ran; failed: {failed or 'none'}")
    if given.check and failed:
        sys.exit(1)


def run_section(command: Sequence[str], left: float) -> tuple[str, str]:
    """Runs a section; returns (its output, the reason it failed or "")."""
    if left < 5:
        return "", "not run, no time left"
    # Output is shown at once, so a section that is stopped loses none.
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left,
            cwd=ROOT,
            env=env,
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return printed.decode() if isinstance(printed, bytes) else printed, "stopped, no time left"
    return done.stdout, f"failed with exit code {done.returncode}" * (done.returncode != 0)


if __name__ == "__main__":
    main()
