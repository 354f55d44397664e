"""Compares import and export with the transformers library, run live: a table.

    python scripts/check_published.py [--python-reference PYTHON] [--seed N] [--only NAME ...]

Needs torch and transformers: in this environment, or in another one, whose interpreter --python-reference
names. Takes about three minutes on two idle cores. For each family the library makes a tiny random checkpoint
and computes its logits, loss and gradients (tests/references). jaxthd imports the folder, computes the same
with documents alone and packed, and exports; the library reads the export. Exits 1 unless

- every document's logits are within 1e-4 of the library's, relative to their norm, and so are those that the
  library computes from the export;
- every parameter's gradient is within 1e-3 (see tests/errors.py);
- the export's tensors, and those of an export of the imported export, equal the original's bit by bit, and
  the library finds none missing or unexpected.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.convert import export_weights, import_weights
from scripts.benchmark import Claim, benchmark, conclude, table
from tests.errors import relative_errors
from tests.hf.published import Published

ROOT = Path(__file__).parents[1]
REFERENCES = {"text_models": "llm", "encoder": "encoder", "nemotron_omni": "omni"}
"""The modules of tests/references that make them, with the form in which they are exported."""
FAMILIES = {
    "nemotron_h": "llm",
    "nemotron_h_latent": "llm",
    "qwen3": "llm",
    "qwen3_moe": "llm",
    "qwen3_next": "llm",
    "qwen3_5": "llm",
    "qwen3_5_moe": "llm",
    "kimi_linear": "llm",
    "deepseek_v3": "llm",
    "gpt_oss": "llm",
    "moonlight": "llm",
    "fastconformer": "encoder",
    "nemotron_omni": "omni",
}
"""The references, each with the form in which it is exported."""


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def compare(name: str, folder: Path, npz: Path) -> tuple[float, float]:
    """(worst error of a document's logits, of a parameter's gradient), over alone and packed."""
    family = Published.of(dict(np.load(npz)), folder)
    numbers = family.numbers
    want = family.gradients()
    runs = [family.run([n]) for n in numbers]
    summed = {k: sum(gradients[k] for *_, gradients in runs) for k in want}
    _, packed, gradients = family.run([*numbers[1:], 0])
    logits = {n: family.arrays[f"logits.{n}"] for n in numbers}
    errors = [relative_errors(x, logits[n]) for (_, (x,), _), n in zip(runs, numbers, strict=True)]
    errors += [relative_errors(x, logits[n]) for x, n in zip(packed, [*numbers[1:], 0], strict=True)]
    worst = [relative_errors(g, want) for g in (summed, {k: gradients[k] for k in want})]
    return max(max(e.values()) for e in errors), max(max(e.values()) for e in worst)


def main() -> None:
    parser = benchmark(__doc__, check=False)
    parser.add_argument("--python-reference", default=sys.executable, help="has torch and transformers")
    parser.add_argument("--seed", type=int, default=1, help="of the library's random weights")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="some of the checkpoints")
    options = parser.parse_args()
    only = set(options.only or FAMILIES)

    def reference(module: str, *arguments: Any) -> str:
        command = [options.python_reference, "-m", f"tests.references.{module}", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    rows, claims = [], []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        checkpoints = work / "published"
        for module, form in REFERENCES.items():
            # An encoder completes a language model, and the other way round.
            if form != "omni" or form in map(FAMILIES.get, only):
                folders = "--out", work, "--checkpoints", checkpoints
                reference(module, *folders, "--seed", options.seed)
        for name, form in FAMILIES.items():
            if name not in only:
                continue
            folder, npz = checkpoints / name, work / f"{name}.npz"
            others = {"llm": ["fastconformer"], "encoder": ["nemotron_h"], "omni": []}[form]
            sources = [str(folder), *(str(checkpoints / other) for other in others)]
            like = folder if form == "omni" or name in ("qwen3_5_moe", "kimi_linear") else None
            exported = []
            for turn, given in enumerate((sources, [str(work / f"{name}-0"), *sources[1:]])):
                imported, out = work / f"{name}-imported-{turn}", work / f"{name}-{turn}"
                import_weights(given, imported)
                export_weights(imported, out, form=form, like=like)
                exported.append(tensors(out))
            original = tensors(folder)
            same = all(
                x.keys() == original.keys() and all(x[k].tobytes() == original[k].tobytes() for k in original)
                for x in exported
            )
            back = json.loads(reference("read_back", work / f"{name}-0", npz).splitlines()[-1])
            lost = len(back["missing_keys"]) + len(back["unexpected_keys"]) + back["mismatched"]
            shown = ["see tests"] * 2
            if form != "encoder":  # tests/models/test_fastconformer.py compares the encoder's
                logits, gradients = compare(name, folder, npz)
                shown = [f"{logits:.1e}", f"{gradients:.1e}"]
                claims += [
                    Claim(f"{name}: logits within 1e-4", logits <= 1e-4),
                    Claim(f"{name}: gradients within 1e-3", gradients <= 1e-3),
                ]
            rows.append((name, len(original), *shown, f"{back['error']:.1e}", lost, "yes" if same else "NO"))
            claims += [
                Claim(f"{name}: the library's outputs of the export within 1e-4", back["error"] <= 1e-4),
                Claim(f"{name}: exported again bit by bit, nothing missing", same and not lost),
            ]
    columns = "checkpoint|tensors|logits|gradients|export read back|lost|bit-identical"
    print(table("Import and export against transformers", columns, rows))
    conclude(claims, check=True)


if __name__ == "__main__":
    main()
