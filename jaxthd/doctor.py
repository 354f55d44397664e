"""Shows what this machine has, and what of jaxthd is installed on it.

    jaxthd doctor
    jaxthd doctor --kernels configs/nemotron3_nano.py

--kernels compares every attention and scan back-end that can run here with XLA's own in float32, unless an
earlier comparison is kept; on a GPU that takes minutes. Shown is the largest error of each output and
gradient, over the largest value. With a config file or a workdir they are compared for the shapes and dtype
that a rank of that model has. The default is bfloat16, attention of 32 query heads over 8 key/value heads,
and Nemotron-3-Nano's scan. Needs neither data nor weights, nor grain, tyro or Transformer Engine.
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import UserError, readable_errors
from jaxthd.kernels.admission import Kernel, Verdict, admit
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.choose import CHOICES, kernels_of_run
from jaxthd.kernels.encoder_probe import encoder_kernels
from jaxthd.kernels.machine import GPU, host_memory, installed, nvidia_gpus, this_machine
from jaxthd.kernels.scan_probe import scan_kernels
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.relative import RelativeShape
from jaxthd.ops.attention.thd import cudnn_text
from jaxthd.ops.backend import Machine, version_numbers
from jaxthd.ops.scan.contract import ScanShape
from jaxthd.run.installation import PACKAGE, PURPOSES, unmet
from jaxthd.terminal.flags import add_opposite, as_flags
from jaxthd.terminal.tables import aligned, size_text, table

COMMON: list[Sequence[Kernel]] = [
    attention_kernels(AttentionShape("bfloat16", q_heads=32, kv_heads=8, head_dim=128)),
    scan_kernels(ScanShape("bfloat16", heads=64, groups=8, head_dim=64, state=128, chunk=128)),
    encoder_kernels(RelativeShape("bfloat16", heads=8, head_dim=128, longest=375)),
]
CUDA_13_DRIVER = 580
"""The first major version of NVIDIA's driver that runs CUDA 13."""


class Host(NamedTuple):
    """The machine as its system and NVIDIA's driver tell it.

    Memory and disk in bytes, the disk being that of the working folder; free_memory None where that is not
    known. gpus: whether jax can use them or not.
    """

    system: str
    cpu: str
    cores: int
    memory: int
    free_memory: int | None
    disk: int
    free_disk: int
    gpus: list[GPU]


class Found(NamedTuple):
    """All back-ends of one kind, and whether each may be used."""

    kernels: Sequence[Kernel]
    verdicts: list[Verdict]

    @property
    def kind(self) -> str:
        """The kind of kernel that these back-ends compute."""
        return self.kernels[0].kind


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    parser = argparse.ArgumentParser(prog="jaxthd doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kernels",
        nargs="?",
        const="",
        metavar="SOURCE",
        help="also compare attention and scan back-ends, for the model of a config file or a workdir",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_opposite(parser, "json")
    options = parser.parse_args(as_flags(sys.argv[1:] if argv is None else argv, parser, ["json"])[0])
    host, found = this_host(), list[Found]()
    try:
        machine: Machine | UserError = this_machine()
    except UserError as error:  # what is wrong with jax is what a doctor is asked for
        machine = error
    if options.kernels is not None:
        if isinstance(machine, UserError):
            raise machine
        found = [Found(x, [admit(kernel, machine) for kernel in x]) for x in _kernels(options.kernels)]
    print(as_json(host, machine, found) if options.json else as_text(host, machine, found))


def this_host() -> Host:
    """The facts that the operating system and NVIDIA's driver give; jax is not asked."""
    disk = shutil.disk_usage(Path.cwd())
    memory, cpu, names = None, platform.processor(), "/proc/cpuinfo"
    with suppress(OSError):
        cpu = re.findall(r"^model name\s*: (.*)$", Path(names).read_text(), re.M)[0]
        (available,) = re.findall(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        memory = min(int(available) << 10, host_memory())
    return Host(
        f"{platform.system()} {platform.release()}, {platform.machine()}; Python {platform.python_version()}",
        cpu or platform.machine(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_memory(),
        memory,
        disk.total,
        disk.free,
        nvidia_gpus(),
    )


def _kernels(source: str) -> list[Sequence[Kernel]]:
    """The back-ends to compare, kind by kind: for the source's model, or for common shapes without one."""
    if not source:
        return COMMON
    from jaxthd.checkpoints.sources import open_settings  # needs more than a bare doctor may have

    config = open_settings(source).config
    return [list(kernels.values()) for choice in CHOICES for kernels in kernels_of_run(config, choice)]


def as_json(host: Host, machine: Machine | UserError, found: Sequence[Found]) -> str:
    """All that is known, as a JSON object: the machine, requirements, and the verdicts by kind of kernel."""
    report: dict[str, Any] = {
        "host": host._asdict() | {"gpus": [gpu._asdict() for gpu in host.gpus]},
        "machine": {"error": str(machine)} if isinstance(machine, UserError) else asdict(machine),
        "unmet": unmet(),
        "extras": {name: {"unmet": unmet(name)} for name in PURPOSES},
        "advice": advice(host, machine),
    }
    for kind, kernels, verdicts in ((x.kind, *x) for x in found):
        pairs = zip(kernels, verdicts, strict=True)
        of_shape = {
            "shape": asdict(kernels[0].shape),
            "backends": [verdict._asdict() | {"verified": kernel.verified} for kernel, verdict in pairs],
        }
        if kind in report:
            report[kind].setdefault("other_shapes", []).append(of_shape)
        else:
            report[kind] = of_shape
    return json.dumps(report, indent=2)


def as_text(host: Host, machine: Machine | UserError, found: Sequence[Found]) -> str:
    """All that is known, for people: a list each of the machine, of the extras, and of what to do."""
    facts = aligned([["", *fact] for fact in _facts(host, machine)], left=(0, 1, 2))
    rows = [["", name, "no" if unmet(name) else "yes", what] for name, what in PURPOSES.items()]
    extras = aligned([["", "extra", "installed", "for"], *rows], left=(0, 1, 2, 3))
    parts = [f"This machine\n{facts}", f"Extras; pip install -e '.[NAME]' installs one\n{extras}"]
    if lines := advice(host, machine):
        parts.append("\n".join(["To do", *(f"  {line}" for line in lines)]))
    return "\n\n".join([*parts, *map(_as_table, found)])


def _facts(host: Host, machine: Machine | UserError) -> list[tuple[str, str]]:
    """(what, what is here) for each fact about the machine."""
    free = "" if host.free_memory is None else f", {size_text(host.free_memory)} of it free"
    of_kinds = [
        f"{sum(x.name == gpu.name for x in host.gpus)} x {gpu.name}, {size_text(gpu.memory)}, "
        f"{size_text(min(x.free for x in host.gpus if x.name == gpu.name))} free"
        for gpu in {gpu.name: gpu for gpu in host.gpus}.values()
    ]
    facts = [
        ("system", host.system),
        ("CPU", f"{host.cpu}, {host.cores} cores"),
        ("memory", f"{size_text(host.memory)}{free}"),
        ("disk", f"{size_text(host.free_disk)} free of {size_text(host.disk)}, for the working folder"),
        ("GPUs", "; ".join(of_kinds) or "none that NVIDIA's driver lists"),
        ("jaxthd", installed(PACKAGE) or "not installed as a package"),
    ]
    driver = host.gpus[0].driver if host.gpus else None
    if isinstance(machine, UserError):
        return [*facts, ("NVIDIA driver", driver or "none"), ("jax", "cannot start: see below")]
    libraries = [f"CUDA {machine.cuda // 1000}.{machine.cuda // 10 % 100}"] if machine.cuda else []
    libraries += [f"cuDNN {cudnn_text(machine.cudnn)}"] if machine.cudnn else []
    capability = f", compute capability {machine.compute_capability}" if machine.compute_capability else ""
    devices = f"{machine.devices} x {machine.kind} ({machine.platform}{capability})"
    return [
        *facts,
        ("NVIDIA driver", driver or machine.driver or "none"),
        ("jax", f"{machine.jax}, jaxlib {machine.jaxlib}; runs on {devices}"),
        ("its libraries", ", ".join(libraries) or "no CUDA"),
    ]


def advice(host: Host, machine: Machine | UserError) -> list[str]:
    """Lines that say what to install or to change; none where all is well."""
    lines = [f"{what}: pip install -e . brings what jaxthd needs" for what in unmet()]
    if isinstance(machine, UserError):
        return [*lines, str(machine)]
    if host.gpus and machine.platform == "cpu":
        if asked := os.environ.get("JAX_PLATFORMS"):
            lines.append(f"jax does not use the GPU, since JAX_PLATFORMS is {asked}: leave it unset")
        else:
            major = version_numbers(host.gpus[0].driver)[:1]
            extra = "cuda13" if major >= (CUDA_13_DRIVER,) else "cuda12"
            lines.append(f"jax does not use the GPU: pip install -e '.[{extra}]'")
    return lines


def _as_table(found: Found) -> str:
    quantities, bound = found.kernels[0].quantities, found.kernels[0].bound
    rows = [
        [
            verdict.backend,
            "yes" if verdict.refusal is None else "no",
            *(f"{verdict.errors[name]:.1e}" if verdict.errors else "-" for name in quantities),
        ]
        for verdict in found.verdicts
    ]
    columns = f"back-end|admitted|{'|'.join(quantities)}"
    shape = f"{found.kind.capitalize()}: {found.kernels[0].shape}"
    title = f"{shape}; errors against xla in float32, {bound:.1e} allowed"
    refused = [x for x in found.verdicts if x.refusal is not None]
    why = [f"  {verdict.backend}: {verdict.refusal}" for verdict in refused]
    return "\n".join([table(title, columns, rows, (0, 1)), *why])


if __name__ == "__main__":
    with readable_errors():
        main()
