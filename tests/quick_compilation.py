"""XLA's flags for programs on simulated CPU devices that are compiled once and run few times."""

from importlib.metadata import version

QUICK = "--xla_backend_optimization_level=0"
"""Without optimization compiling takes 60% of the time."""
if version("jaxlib").startswith("0.10."):
    # Without the MLIR emitters too it takes 35%, in one part a few percent less again. Later versions have no
    # other emitters, and abort on an unknown flag.
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def quick_on_devices(number: int = 8, *, stuck_seconds: int = 120) -> str:
    """XLA_FLAGS: as many simulated devices; a deadlock aborts after this time, instead of hanging."""
    return (
        f"--xla_force_host_platform_device_count={number} {QUICK} "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60 "
        f"--xla_cpu_collective_call_terminate_timeout_seconds={stuck_seconds}"
    )
