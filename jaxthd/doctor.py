"""What this machine can run: its devices and versions, and each attention back-end with what was measured.

    python -m jaxthd.doctor [--config configs/nemotron3_nano.py] [--json]

Back-ends that fit the machine and the problem are measured (or were, before) against the blockwise one in
float32: the largest error of output, log-sum-exp and each gradient, over the largest value. --config FILE:
for that model's heads and dtype; by default for bfloat16 and 32 query heads over 8. Needs neither data nor
weights, nor grain, tyro or Transformer Engine.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from jaxthd.config import load_config
from jaxthd.errors import readable_errors
from jaxthd.kernels import attention_problem
from jaxthd.ops.attention.admission import QUANTITIES, Verdict, verdicts
from jaxthd.ops.attention.backends import VERIFIED
from jaxthd.ops.attention.contract import Problem
from jaxthd.ops.attention.machine import Machine, cudnn_text, installed
from jaxthd.tables import table

COMMON = Problem("bfloat16", 32, 8, 128)
OTHERS = ("flax", "grain", "tyro", "orbax-checkpoint")
"""Packages whose versions are shown too."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxthd.doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--config", type=Path, help="a config file: its model's attention is what is measured"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(argv)
    problem = attention_problem(load_config(options.config)) if options.config else COMMON
    machine = Machine.of_this()
    found = list(verdicts(problem, machine))
    print(as_json(machine, problem, found) if options.json else as_tables(machine, problem, found))


def as_json(machine: Machine, problem: Problem, found: Iterable[Verdict]) -> str:
    backends = [verdict._asdict() | {"verified": VERIFIED[verdict.backend]} for verdict in found]
    report = {"machine": asdict(machine), "packages": {name: installed(name) for name in OTHERS}}
    return json.dumps(report | {"problem": asdict(problem), "attention": backends}, indent=2)


def as_tables(machine: Machine, problem: Problem, found: Iterable[Verdict]) -> str:
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
    found = list(found)
    rows = [
        [
            verdict.backend,
            "yes" if verdict.refusal is None else "no",
            *(f"{verdict.errors[name]:.1e}" if verdict.errors else "-" for name in QUANTITIES),
            VERIFIED[verdict.backend],
        ]
        for verdict in found
    ]
    columns = f"back-end|admitted|{'|'.join(QUANTITIES)}|verified on"
    title = f"Attention: {problem}; errors against xla in float32, {found[0].bound:.1e} allowed"
    why = [f"  {verdict.backend}: {verdict.refusal}" for verdict in found if verdict.refusal is not None]
    return "\n".join([facts, "", table(title, columns, rows, (0, 1, 7)), *why])


if __name__ == "__main__":
    with readable_errors():
        main()
