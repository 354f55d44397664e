"""Runs every command of jaxthd on a tiny speech LLM of each family of decoders.

    python scripts/check_families.py [--families qwen3 gpt_oss ...]

The models are those of configs/tiny_families.py, the checks those of tests/test_families.py: describe,
estimate and plan print their tables; a run's loss falls; with LoRA on the decoder only LoRA changes;
evaluate, score and generate work on the run, and so do two steps of DPO and of GRPO; exported and imported
again, the arrays are the same bit by bit. Exits 1 unless all of them do. Takes two minutes a family on two
idle cores; what held is not run again until the code changes.
"""

import argparse
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests" / "test_families.py"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", help="these alone")
    options = parser.parse_args()
    chosen = " or ".join(f"{family}-" for family in options.families or ())
    sys.exit(pytest.main([str(TESTS), "-m", "nightly or exhaustive", "-k", chosen, "-v"]))


if __name__ == "__main__":
    main()
