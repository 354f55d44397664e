"""Whether damaged data is always trained on, listed or refused: never a traceback, a hang or a silent loss.

    python scripts/fuzz_data.py [--count 1000] [--seed 0]

Makes damaged inputs, each a function of (seed, number of the input): lines of utterances, conversations and
preferences, and cuts of Lhotse Shar, damaged as bytes and as values; lines that name a recording in any
field; recordings, as files and as samples; tar files, as bytes and as headers. Reads them through the code of
a training run: a data set, documents made in worker processes, packing, skipped items in a skip log. Reads
recordings of every format that is read, whole and damaged, whole and in ranges. The generator keeps
what it wrote and damaged. Prints a table; exits 1 and lists the violations where

- anything is raised but UserError for a data set without a usable line, or for a file that is empty, cut or
  of another form;
- reading a line or a recording takes more than 5 s, or ends its process;
- a line is neither trained on nor in the skip log, or is both;
- a line that names a recording is trained on without it;
- a recording or a range of it has other samples than one decode from its beginning, or a part is missing;
- a feature is not finite;
- a worker process takes more than 1 GiB of memory.

Messages of libraries about damaged recordings go to standard error. Takes a minute on 2 cores.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.checks import fuzzer, run
from tests.fuzz.data import fuzz


def main() -> None:
    options = fuzzer(__doc__, 1000).parse_args()
    run(fuzz, options.count, options.seed)


if __name__ == "__main__":
    main()
