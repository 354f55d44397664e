"""Runs every command of jaxthd on a tiny speech LLM of each family of decoders; measures the hybrid ones.

    python scripts/check_families.py [--families qwen3 gpt_oss ...]
    python scripts/check_families.py --hybrids --python-reference PYTHON [--families bamba ...]

The models are those of configs/tiny_families.py, the checks those of tests/test_families.py: describe,
estimate and plan print their tables; a run's loss falls; with LoRA on the decoder only LoRA changes;
evaluate, score and generate work on the run, and so do two steps of DPO and of GRPO; exported and imported
again, the arrays are the same bit by bit. Exits 1 unless all of them do. Takes two minutes a family on two
idle cores; what held is not run again until the code changes.

With --hybrids, a table of the hybrid families of tests/meshes/models.py; PYTHON has torch and transformers:

    logits     the largest relative error against transformers in float32, alone and packed, over four models
               of sizes drawn at random (at most 2e-5)
    meshes     data x context x pipeline x tensor: the largest relative difference from one device, in
               float64, of the loss and all gradients of a speech LLM (at most 1e-10)
    a layer    the block that passes states, and the bytes that a rank receives in it on context 8, forward
               and backward, for a buffer of 1,024 and of 65,536 tokens, from the compiled program (the same)
    rollouts   the largest difference of a drawn token's log-probability from that of its document alone (at
               most 1e-10 in float64, 3e-5 in float32)
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests"
HYBRIDS = ("hf/test_hybrids_live.py", "test_meshes.py", "test_context_costs.py", "rl/test_rollouts.py")


class Figures:
    """The largest of each figure that the tests of a family recorded."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the figures of a test, whose parameters begin with its family."""
        row = self.rows[report.nodeid.partition("[")[2].rstrip("]").partition("-")[0]]
        for name, value in report.user_properties:
            row[name] = max(row.get(name, "0"), str(value), key=lambda x: float(x.replace(",", "")))

    def show(self) -> None:
        """Prints the table."""
        sys.path.insert(0, str(TESTS.parent))
        from scripts.benchmark import show  # after tests/conftest.py has set jax's environment

        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        cells = [[family, *(row.get(name, "") for name in names)] for family, row in self.rows.items()]
        show("Hybrid families", "|".join(["family", *names]), cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=[], help="these alone")
    parser.add_argument("--hybrids", action="store_true", help="the table of hybrid families")
    parser.add_argument("--python-reference", default=sys.executable, help="has torch and transformers")
    options = parser.parse_args()
    chosen = " or ".join(f"[{family}{end}" for family in options.families for end in "-]")
    asked = ["-m", "nightly or exhaustive", "-v", "-k", chosen]
    if not options.hybrids:
        sys.exit(pytest.main([str(TESTS / "test_families.py"), *asked]))
    asked[-1] = " and ".join(filter(None, ["hybrids", chosen and f"({chosen})"]))
    asked += ["--python-reference", options.python_reference]
    figures = Figures()
    status = pytest.main([*(str(TESTS / file) for file in HYBRIDS), *asked], plugins=[figures])
    figures.show()
    sys.exit(status)


if __name__ == "__main__":
    main()
