"""Whether runs survive kill -9 and SIGTERM at random moments, and damage to their newest checkpoint.

    python scripts/check_survival.py [--kills 10] [--damages 20] [--seed 0]
    python scripts/check_survival.py --grpo [--kills 10] [--seed 0]

Runs `jaxthd train` on a tiny model and noise, on four simulated devices (tests/survival.py): once
uninterrupted; once killed repeatedly and restarted by the same command; once stopped by SIGTERM and
continued. Every line of metrics that any of them ever wrote must equal the uninterrupted run's, to the bit.
Then checkpoints are damaged: each time, either the damage is reported and the previous checkpoint restored,
or the state is the same to the bit. With --grpo it is `jaxthd grpo` that is killed, while drawing,
rewarding, updating or saving; its answers must be the same, too. Prints a table; exits 1 if a check fails.
Takes about 5 minutes on 2 cores.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.benchmark import benchmark
from tests.survival import grpo_rows, train_rows


def main() -> None:
    parser = benchmark(__doc__, check=False)
    parser.add_argument("--grpo", action="store_true", help="runs of jaxthd grpo")
    for name, default in {"kills": 10, "damages": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxthd-survival-") as name:
        if options.grpo:
            rows = grpo_rows(Path(name), options.kills, options.seed)
        else:
            rows = train_rows(Path(name), options.kills, options.damages, options.seed)
    for row in rows:
        print(f"{'holds' if row.holds else 'FAILS':5}  {row.check}: {row.found}")
    sys.exit(not all(row.holds for row in rows))


if __name__ == "__main__":
    main()
