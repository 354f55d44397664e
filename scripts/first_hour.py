"""The first hour on a machine with a GPU: from a checkout to a report, one command, resumable.

    python scripts/first_hour.py --out FOLDER [--only SECTION ...] [--minutes 9.5]
    python scripts/first_hour.py --out FOLDER --tiny      # a small version, to try the script on a CPU

Sections, the most important first, each in its own process and with at most --minutes:
    machine, kernels, exact, step, packing, attention, options, scan, conditionals    of scripts/check_gpu.py
    models      the steps of scripts/gpu_models.py at 8,192 tokens: tokens/s, memory, share of the bf16 peak
    dense       packed recordings against one document of as many tokens: the rate should be 95% or more of it
A section that ended well is not run again: after a fault, give the same command. Each leaves its output and
its results in FOLDER; report.md has a table of each. Nothing is downloaded. Exits 1 while one is missing.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from jaxthd.files.atomic import write_atomically
from jaxthd.packing.document import Document
from jaxthd.planning.model_flops import model_flops
from scripts import check_gpu
from scripts.gpu_models import MODELS, report_of


def models(tiny: bool) -> None:
    """A step of each model, by the admitted kernels."""
    peak = check_gpu.machine(tiny)
    for name in ("tiny",) if tiny else ("dense-1b", "moe", "hybrid-4b"):
        config = replace(check_gpu.base_config(tiny, kernels=True), model=MODELS[name])
        documents = check_gpu.recordings(256 if tiny else 8192, config.model, 4.0 if tiny else 60.0)
        flops = model_flops(config)(report_of(documents, config))
        for found in check_gpu.variations(config, {name: config}, [documents], peak, 3 if tiny else 8):
            share = flops / (found["ms"] / 1e3) / peak
            told("models", name=name, share_of_peak_by_active_weights=round(share, 4))
        jax.clear_caches()


def whole(documents: list[Document]) -> Document:
    """All of their audio and text as one document."""
    chunks = [chunk for document in documents for chunk in document.chunks]
    text = sum(int(document.supervised.sum()) for document in documents)
    tokens = [3, *np.random.default_rng(1).integers(4, 260, text).tolist()]
    return Document.splice("whole", tokens, [False] + [True] * text, [chunks], 3)


def dense(tiny: bool) -> None:
    """The same audio and text as recordings and as one document."""
    peak, config = check_gpu.machine(tiny), check_gpu.base_config(tiny, kernels=True)
    documents = check_gpu.recordings(256 if tiny else 8192, config.model, 4.0 if tiny else 60.0)
    groups = {"packed recordings": documents, "one document": [whole(documents)]}
    found = []
    for name, group in groups.items():
        found += check_gpu.variations(config, {name: config}, [group], peak, 3 if tiny else 8)
    if len(found) == len(groups):
        packed, one = (row["tokens_per_s"] for row in found)
        told("dense", packed_share_of_dense=round(packed / one, 3))


def told(section: str, **found: Any) -> None:
    check_gpu.told(section, **found)


OWN: dict[str, Callable[[bool], Any]] = {"models": models, "dense": dense}
ORDER = (
    "machine",
    "kernels",
    "exact",
    "models",
    "dense",
    "step",
    "packing",
    "attention",
    "options",
    "scan",
    "conditionals",
)


def run(section: str, out: Path, minutes: float, tiny: bool) -> str:
    """Runs a section, and keeps what it says; returns why it failed, "" if it did not."""
    script = Path(__file__) if section in OWN else Path(check_gpu.__file__)
    command = [sys.executable, str(script), "--section", section, *["--tiny"] * tiny]
    text, outcome = check_gpu.run_section(command, 60 * minutes)
    lines = [x for x in text.splitlines() if x.startswith(check_gpu.RESULT)]
    (out / f"{section}.txt").write_text(text)
    results = [json.loads(x.removeprefix(check_gpu.RESULT)) for x in lines]
    kept = {"outcome": outcome or "ran", "tiny": tiny, "results": results}
    write_atomically(out / f"{section}.json", [json.dumps(kept, indent=1) + "\n"])
    return outcome


def kept(section: str, out: Path, tiny: bool) -> dict[str, Any] | None:
    """What a section left; None if it has not run. A trial is not the hour, nor the hour a trial."""
    path = out / f"{section}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found if found and found["tiny"] == tiny else None


def report(out: Path, tiny: bool) -> str:
    """The page: a table of each section's results."""
    told_machine = ((kept("machine", out, tiny) or {}).get("results") or [{}])[0]
    where = ", ".join(f"{k} {v}" for k, v in told_machine.items() if k != "section") or "not known"
    page = ["# The first hour on this machine\n", f"{where}\n"]
    if tiny or told_machine.get("device", "cpu").lower() == "cpu":
        page.append("A trial on a CPU: **nothing here has run on a GPU.**\n")
    for section in ORDER:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--minutes", type=float, default=9.5, help="of a section")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--section", choices=OWN, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        OWN[given.section](given.tiny)
        return
    if given.out is None:
        parser.error("--out is missing; expected a folder for the results and the report")
    given.out.mkdir(parents=True, exist_ok=True)
    # Sections share compiled programs and XLA's kernel choices.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(given.out.resolve() / "compiled"))
    missing = []
    for section in given.only:
        if (kept(section, given.out, given.tiny) or {}).get("outcome") == "ran":
            print(f"{section}: ran before", flush=True)
            continue
        outcome = run(section, given.out, given.minutes, given.tiny)
        print(f"{section}: {outcome or 'ran'}", flush=True)
        missing += [section] * bool(outcome)
        write_atomically(given.out / "report.md", [report(given.out, given.tiny)])
    print(f"{given.out / 'report.md'}; to run again: {', '.join(missing) or 'nothing'}")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
