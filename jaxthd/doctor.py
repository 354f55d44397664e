"""Shows what this machine can run: devices, versions, and each attention and scan back-end.

    jaxthd doctor
    jaxthd doctor configs/nemotron3_nano.py --json

Every back-end that can run here is compared with XLA's own in float32, unless an earlier comparison is kept;
shown is the largest error of each output and gradient, over the largest value. With a config file or a
workdir they are compared for the shapes and dtype that a rank of that model has. The default is bfloat16,
attention of 32 query heads over 8 key/value heads, and Nemotron-3-Nano's scan. Needs neither data nor
weights, nor grain, tyro or Transformer Engine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from jaxthd.checkpoints.sources import open_settings
from jaxthd.errors import readable_errors
from jaxthd.kernels.admission import Kernel, Verdict, admit
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.choose import CHOICES, kernels_of_run
from jaxthd.kernels.encoder_probe import encoder_kernels
from jaxthd.kernels.machine import installed, this_machine
from jaxthd.kernels.scan_probe import scan_kernels
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.relative import RelativeShape
from jaxthd.ops.attention.thd import cudnn_text
from jaxthd.ops.backend import Machine
from jaxthd.ops.scan.contract import ScanShape
from jaxthd.terminal.tables import table

COMMON: list[Sequence[Kernel]] = [
    attention_kernels(AttentionShape("bfloat16", q_heads=32, kv_heads=8, head_dim=128)),
    scan_kernels(ScanShape("bfloat16", heads=64, groups=8, head_dim=64, state=128, chunk=128)),
    encoder_kernels(RelativeShape("bfloat16", heads=8, head_dim=128, longest=375)),
]
OTHERS = ("flax", "grain", "tyro", "orbax-checkpoint")
"""Packages whose versions are shown too."""


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
        "source", nargs="?", metavar="SOURCE", help="a config file or a workdir: compare for its model"
    )
    parser.add_argument("--config", metavar="SOURCE", help="the same as SOURCE in the first place")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(argv)
    source = options.source or options.config
    machine, config = this_machine(), open_settings(source).config if source else None
    kinds = COMMON
    if config:
        of_shapes = (kernels for choice in CHOICES for kernels in kernels_of_run(config, choice))
        kinds = [list(kernels.values()) for kernels in of_shapes]
    found = [Found(kernels, [admit(kernel, machine) for kernel in kernels]) for kernels in kinds]
    print(as_json(machine, found) if options.json else as_tables(machine, found))


def as_json(machine: Machine, found: Sequence[Found]) -> str:
    """The machine, the packages and the verdicts by kind of kernel, as a JSON object."""
    report: dict[str, Any] = {
        "machine": asdict(machine),
        "packages": {name: installed(name) for name in OTHERS},
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


def as_tables(machine: Machine, found: Sequence[Found]) -> str:
    """The machine and the verdicts as text, a table for each kind and shape."""
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
            kernel.verified,
        ]
        for kernel, verdict in zip(*found, strict=True)
    ]
    columns = f"back-end|admitted|{'|'.join(quantities)}|verified on"
    shape = f"{found.kind.capitalize()}: {found.kernels[0].shape}"
    title = f"{shape}; errors against xla in float32, {bound:.1e} allowed"
    refused = [x for x in found.verdicts if x.refusal is not None]
    why = [f"  {verdict.backend}: {verdict.refusal}" for verdict in refused]
    return "\n".join([table(title, columns, rows, (0, 1, len(quantities) + 2)), *why])


if __name__ == "__main__":
    with readable_errors():
        main()
