"""Scores documents with a text-only NemotronH made by the transformers library, token by token: a table.

    python scripts/check_text_only.py [--python-reference PYTHON] [--seed N] [--meshes 1x2x2x2 ...]

Needs torch and transformers: in this environment, or in another one, whose interpreter --python-reference
names. Takes about two minutes on two idle cores. The library makes a tiny random model of odd sizes with a
tokenizer, and computes log-probabilities of documents, each alone (tests/references/text_only.py). A config
of three lines names that folder, and `jaxthd.score --every-token` scores the documents, packed, on each mesh
(data x context x pipeline x tensor) of simulated devices. Exits 1 unless

- every document has the tokens that transformers encodes, and every log-probability is within 2e-5 of the
  library's;
- `jaxthd.convert` imports the folder without initialising a parameter, and exports a folder of the same
  files, whose tensors equal the original's bit by bit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.terminal.tables import Claim, conclude, show

BOUND = 2e-5
AXES = ("data", "context", "pipeline", "tensor")
CONFIG = """
from jaxthd.config import Config, DataConfig
from jaxthd.hf.checkpoint import model_config


def config() -> Config:
    return Config(data=DataConfig(tokenizer={folder!r}, capacity=256), model=model_config({folder!r}))
"""


def run(*command: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def score(folder: Path, work: Path, mesh: str) -> list[dict[str, Any]]:
    """The lines that jaxthd.score writes for the folder's documents, by its own command line."""
    documents = str(folder / "documents.jsonl")
    (work / "text.py").write_text(CONFIG.format(folder=str(folder)))
    sizes = [x for axis, n in zip(AXES, mesh.split("x"), strict=True) for x in (f"--mesh.{axis}", n)]
    sizes += ["--data.rows", mesh.split("x")[0]]
    out = work / f"scores-{mesh}.jsonl"
    command = [sys.executable, "-m", "jaxthd.score", "--config", work / "text.py", "--weights", folder]
    run(*command, "--manifest", documents, "--out", out, "--every-token", *sizes)
    return [json.loads(line) for line in out.read_text().splitlines()]


def differences(scores: list[dict[str, Any]], expected: list[dict[str, Any]]) -> np.ndarray:
    """|log-probability - the library's| of all tokens but each document's first; inf where tokens differ."""
    found = []
    for got, want in zip(scores, expected, strict=True):
        is_same = got["tokens"] == want["tokens"] and got["positions"] == [*range(1, len(want["tokens"]))]
        ours = np.array(got["log_probs"]) if is_same else np.full(len(want["log_probs"]), np.inf)
        found.append(abs(ours - np.array(want["log_probs"])))
    return np.concatenate(found)


def converts(folder: Path, work: Path) -> list[Claim]:
    """Imports the folder, exports the result, and compares the two folders."""
    convert = [sys.executable, "-m", "jaxthd.convert"]
    printed = run(*convert, "import", folder, "--out", work / "imported")
    run(*convert, "export", work / "imported", "--out", work / "exported")
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    original, exported = (load_file(x / "model.safetensors") for x in (folder, work / "exported"))
    is_same = original.keys() == exported.keys() and all(
        exported[name].tobytes() == x.tobytes() for name, x in original.items()
    )
    return [
        Claim("the import initialises no parameter", "initialised" not in printed),
        Claim(
            "the export is a folder of the same files",
            set(names) == {p.name for p in (work / "exported").iterdir()},
        ),
        Claim(f"its {len(original)} tensors are the original's, bit by bit", is_same),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python-reference", default=sys.executable, help="has torch and transformers")
    parser.add_argument("--seed", type=int, default=1, help="of the library's random weights")
    parser.add_argument("--meshes", nargs="+", default=["1x1x1x1", "1x2x2x2", "2x2x1x1"])
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        script = Path(__file__).parent / "references" / "text_only.py"
        run(options.python_reference, script, "--out", work, "--seed", options.seed)
        folder = work / "text_only"
        expected = json.loads((folder / "expected.json").read_text())
        rows, claims = [], []
        for mesh in options.meshes:
            found = differences(score(folder, work, mesh), expected)
            rows.append((mesh, len(expected), len(found), f"{found.max():.1e}", f"{found.mean():.1e}"))
            claims.append(Claim(f"{mesh}: every log-probability within {BOUND:.0e}", found.max() <= BOUND))
        claims += converts(folder, work)
    show("Scores against transformers", "mesh|documents|tokens|largest difference|mean", rows)
    conclude(claims, check=True)


if __name__ == "__main__":
    main()
