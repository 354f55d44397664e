"""How far the losses of two runs are apart.

    python scripts/compare_losses.py runs/single runs/cp2

Prints the largest relative difference of the training loss over the steps that both runs have.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.errors import UserError, readable_errors
from jaxthd.run.metrics import values
from jaxthd.run.metrics_file import read_metrics


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", type=Path, nargs=2)
    options = parser.parse_args(argv)
    one, other = (dict(values(read_metrics(workdir), "loss")) for workdir in options.workdirs)
    steps = sorted(one.keys() & other.keys())
    if not steps:
        raise UserError(f"{' and '.join(map(str, options.workdirs))} have no step in common")
    apart = {step: abs(one[step] / other[step] - 1) for step in steps}
    worst = max(apart, key=apart.__getitem__)
    print(f"{len(steps)} steps, losses at most {apart[worst]:.1e} apart (step {worst})")


if __name__ == "__main__":
    with readable_errors():
        main()
