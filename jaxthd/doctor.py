"""What this machine can run: its devices and versions, and each attention and scan back-end with what was
measured.

    python -m jaxthd.doctor [--config configs/nemotron3_nano.py] [--json]

Back-ends that fit the machine and the problem are measured (or were, before) against XLA's own in float32:
the largest error of each output and gradient, over the largest value. --config FILE: for the sizes that a
rank of that model has, and its dtype; by default for bfloat16, 32 query heads over 8, and
Nemotron-3-Nano's scan. Needs neither data nor weights, nor grain, tyro or Transformer Engine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from jaxthd.config import load_config
from jaxthd.errors import readable_errors
from jaxthd.kernels import scan_probe as scan
from jaxthd.kernels.admission import Kernel, Verdict, admit
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.choose import CHOICES
from jaxthd.kernels.machine import Machine, cudnn_text, installed
from jaxthd.ops.attention import backends as attention
from jaxthd.ops.attention.contract import Problem
from jaxthd.terminal.tables import table

COMMON: list[Sequence[Kernel]] = [
    attention_kernels(Problem("bfloat16", 32, 8, 128)),
    scan.scan_kernels(scan.ScanProblem("bfloat16", 64, 8, 64, 128, 128)),
]
OTHERS = ("flax", "grain", "tyro", "orbax-checkpoint")
"""Packages whose versions are shown too."""
VERIFIED = {"attention": attention.VERIFIED, "scan": scan.VERIFIED}


class Found(NamedTuple):
    """Of one kind of kernel: all back-ends, and what was measured of each."""

    kernels: Sequence[Kernel]
    verdicts: list[Verdict]

    @property
    def kind(self) -> str:
        return self.kernels[0].kind


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxthd.doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--config", type=Path, help="a config file: its model's attention and scan are measured"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(argv)
    machine, config = Machine.of_this(), load_config(options.config) if options.config else None
    kinds = [choice.kernels(config) for choice in CHOICES] if config else COMMON
    found = [Found(kernels, [admit(kernel, machine) for kernel in kernels]) for kernels in kinds]
    print(as_json(machine, found) if options.json else as_tables(machine, found))


def as_json(machine: Machine, found: Sequence[Found]) -> str:
    report = {"machine": asdict(machine), "packages": {name: installed(name) for name in OTHERS}}
    for kind, kernels, verdicts in ((x.kind, *x) for x in found):
        report[kind] = {
            "problem": asdict(kernels[0].problem),
            "backends": [x._asdict() | {"verified": VERIFIED[kind][x.backend]} for x in verdicts],
        }
    return json.dumps(report, indent=2)


def as_tables(machine: Machine, found: Sequence[Found]) -> str:
    capability = machine.compute_capability and f"compute capability {machine.compute_capability}"
    versions = {
        "devices": ", ".join(
            filter(None, (f"{machine.devices} x {machine.kind}", machine.platform, capability))
        ),
        "python": machine.python,
        "jax": machine.jax,
        "jaxlib": machine.jaxlib,
        "cuda": machine.cuda and f"{machine.cuda // 1000}.{machine.cuda // 10 % 100}",
        "cudnn": machine.cudnn and cudnn_text(machine.cudnn),
        "nvidia driver": machine.driver,
        "transformer-engine": machine.transformer_engine,
        **{name: installed(name) for name in OTHERS},
    }
    facts = table(
        "This machine", "what|found", [[name, text or "none"] for name, text in versions.items()], (0, 1)
    )
    return "\n\n".join([facts, *map(_as_table, found)])


def _as_table(found: Found) -> str:
    quantities, bound = found.kernels[0].quantities, found.kernels[0].bound
    rows = [
        [
            verdict.backend,
            "yes" if verdict.refusal is None else "no",
            *(f"{verdict.errors[name]:.1e}" if verdict.errors else "-" for name in quantities),
            VERIFIED[found.kind][verdict.backend],
        ]
        for verdict in found.verdicts
    ]
    columns = f"back-end|admitted|{'|'.join(quantities)}|verified on"
    problem = f"{found.kind.capitalize()}: {found.kernels[0].problem}"
    title = f"{problem}; errors against xla in float32, {bound:.1e} allowed"
    refused = [x for x in found.verdicts if x.refusal is not None]
    why = [f"  {verdict.backend}: {verdict.refusal}" for verdict in refused]
    return "\n".join([table(title, columns, rows, (0, 1, len(quantities) + 2)), *why])


if __name__ == "__main__":
    with readable_errors():
        main()
