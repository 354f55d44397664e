"""The options of XLA that matter to a training step on GPUs, in one place.

Each goes to the compiler with the program (jax.jit's compiler_options). So nothing needs to be in XLA_FLAGS
before jax starts, and an option that this XLA does not know is an error that names it. On CPUs none is given.
scripts/check_gpu.py times the step without each of them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.user_cache import user_cache
from jaxthd.kernels.programs import Program

Value = bool | int | str


_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
"""Not COLLECTIVES: in a loop or a conditional they would be nodes that CUDA's conditional graphs are reported
to refuse (pytorch/pytorch #180960)."""

OPTIONS: dict[str, Value] = {
    # CUDA graphs: XLA's default records kernels between loops; layers are a loop here and ring steps are
    # conditionals, so both are recorded too, where XLA can.
    "xla_gpu_enable_command_buffer": f"{_COMMANDS},CONDITIONAL,WHILE",
    # A graph for two kernels already (XLA's default: five).
    "xla_gpu_graph_min_graph_size": 2,
    # Collectives start early and end late: ring sends and FSDP gathers beside the matrix products.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A layer's matrices are gathered in one collective, not one each; and so are its gradients.
    "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
    # Products of the same tokens stay products of their own, but for the smallest: merged ones (XLA's
    # default: up to 32 MB) are cut apart by copies, which take longer than reading the tokens twice.
    "xla_gpu_dot_merger_threshold_mb": 1,
}
"""They are given to every program of the model that runs on GPUs. A step ran with them on an H200, where the
GPU computed for 96% of the time; none was left out to measure its effect."""


def compiler_options(config: Config, platform: str) -> dict[str, Value]:
    """jax.jit's compiler_options: on GPUs OPTIONS, everywhere compute.xla_options. Raises UserError as
    given_options.

    platform: jax's name for the mesh's devices.
    """
    return (OPTIONS if platform == "gpu" else {}) | given_options(config)


def given_options(config: Config) -> dict[str, Value]:
    """compute.xla_options as names and values. Raises UserError for one that is not NAME=VALUE."""
    options: dict[str, Value] = {}
    for text in config.compute.xla_options:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise UserError(
                f"compute.xla_options has {text!r}; expected NAME=VALUE, such as "
                "xla_gpu_enable_latency_hiding_scheduler=false"
            )
        truth: Mapping[str, Value] = {"true": True, "false": False}
        options[name.removeprefix("--")] = truth.get(value.lower(), value)
    return options


def check_options(options: Mapping[str, Value]) -> None:
    """Raises UserError for an option that this XLA does not have, or does not take with this value.

    It compiles a program of one operation with each. XLA for CPUs knows the options of GPUs too.
    """
    if not options:
        return
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32"))
    for name, value in options.items():
        try:
            program.compile(compiler_options={name: str(value)})
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"XLA of jax {jax.__version__} does not take the option {name}={value} ({reason}); expected "
                "one of its debug options: correct compute.xla_options"
            ) from error


def prepare_compiler(config: Config) -> None:
    """Call this before the first program. Compiled programs are kept on disk for the next start.

    The folder is JAX_COMPILATION_CACHE_DIR, else $XDG_CACHE_HOME/jaxthd/compiled (~/.cache without it). In it
    each kind of CPU has a folder of its own: a program compiled for one does not always run on another that
    shares the home directory. With several processes only JAX_COMPILATION_CACHE_DIR is used, and all must
    share it: process 0 writes it, and processes that did not find what it finds would wait for its part in
    choosing kernels.
    Raises UserError as given_options and check_options.
    """
    check_options(given_options(config))
    kind = _cpu_kind() if jax.default_backend() == "cpu" else "."
    has_folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if kind and jax.process_count() == 1 and not has_folder:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "compiled" / kind))


def _cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This kind of CPU: a digest of its model and its instructions; "" where they are not known."""
    try:
        first, *_ = cpuinfo.read_text().split("\n\n")
    except OSError:
        return ""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    facts = [line for line in first.splitlines() if line.partition(":")[0].strip() in names]
    digest = hashlib.blake2b("".join(facts).encode(), digest_size=8).hexdigest()
    return f"cpu-{digest}" if facts else ""


def jit_for(config: Config, mesh: Mesh, function: Any, **options: Any) -> Program:
    """jax.jit with compiler_options, which counts its programs."""
    platform = mesh.devices.flat[0].platform
    return Program(jax.jit(function, compiler_options=compiler_options(config, platform), **options))
