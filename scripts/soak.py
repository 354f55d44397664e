"""Injects faults into tiny runs at random moments, and compares what they leave with runs without faults.

    python scripts/soak.py --faults 100 --folder runs/soak          goes on there until 100 are counted
    python scripts/soak.py --fault "full disk" "killed worker"      only such
    python scripts/soak.py --broken resume --faults 20              a copy of jaxthd that is broken on purpose
    python scripts/soak.py --goodput                                six preemptions, and what a day would be

Each case is a run of `jaxthd train` or `jaxthd grpo`, in one process or two, that is struck up to eight times
and started again by the same command. Every fault comes from outside of it: signals, a small file system
(tmpfs), libraries that are preloaded (tests/survival/disk.c and clock.c), limits of memory, a proxy before
the store of its data, bytes of files. A fault counts only if evidence shows what the run was doing: its
stack, read by py-spy while it was stopped, or a file. Each ends in a run that goes on, or in a stop that says
why; at the end every line of metrics, every answer and the checksums of all arrays must be those of a run
without faults, to the bit. Prints a line for each fault with its seed, and a summary; exits with status 1 if
one does not hold. Needs Linux, root, gcc and `pip install py-spy`. About 15 s a fault on 2 idle cores.
"""

import argparse
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.survival.broken import BROKEN, broken_copy
from tests.survival.faults import FAULTS
from tests.survival.goodput import goodput
from tests.survival.runs import ROOT
from tests.survival.soak import KINDS, Soak, holds, summary


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="how many to count, with those of before")
    parser.add_argument("--folder", type=Path, help="where it goes on; else it begins in a new one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", nargs="+", default=[], choices=list(FAULTS), help="only these")
    runs = list(dict.fromkeys(kind.name for kind in KINDS))
    parser.add_argument("--run", nargs="+", default=runs, choices=runs, help="only such runs")
    parser.add_argument("--broken", choices=list(BROKEN), help="break a copy so, and inject what shows it")
    parser.add_argument("--goodput", action="store_true", help="preempt a run, and compute a day's goodput")
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps between preemptions")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what a fault has changed is put right
    with TemporaryDirectory(prefix="jaxthd-soak-", ignore_cleanup_errors=True) as temporary:
        folder = options.folder or Path(temporary)
        if options.goodput:
            sys.exit(not goodput(folder.absolute(), options.seconds, say))
        package = broken_copy(options.broken, folder / "package") if options.broken else ROOT
        names = options.fault or ([BROKEN[options.broken][-1]] if options.broken else [])
        soak = Soak(folder, options.seed, package, say)
        try:
            soak.go_on(options.faults, names, [kind for kind in KINDS if kind.name in options.run])
        finally:
            soak.close()
        lines = soak.lines
    say("\n".join(summary(lines)))
    sys.exit(not all(map(holds, lines)))


if __name__ == "__main__":
    main()
