"""Whether damaged data sets are always trained on, listed or refused: never a traceback, a hang or a loss.

    python scripts/fuzz_sources.py [--count 5000] [--seed 0]

As fuzz_data.py, for the data sets that it does not make. Tables: parquet and arrow files of up to 5 rows,
damaged as bytes and as values of their cells, and with recordings in a column of any name. Manifests of
Lhotse cuts with recordings in files, and of noises that training recordings are augmented with, damaged as
bytes and as values of a line. Sets of several containers, one of them missing, empty, cut, changed or of
another form: manifests, tables, Shar directories, tar files. Each input is a function of (seed, its number),
read by itself through the code of a training run: a source, documents made in worker processes, packing, a
skip log. The generator keeps what it wrote and damaged. Prints a table; exits 1 and lists the violations
where

- anything is raised but UserError for a data set without a usable item, for a file that is empty, cut or of
  another form, or for a noise that cannot be used;
- reading a data set takes more than 5 s, or ends its process;
- an item that was written is neither trained on nor in the skip log, or is both, or has another name;
- a run goes on without a container that is missing or damaged, or an item that is sound is not trained on;
- a worker process dies, or takes more than 1 GiB of memory.

Needs pyarrow (the extra parquet).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.checks import fuzzer, run
from tests.fuzz.sources import fuzz


def main() -> None:
    options = fuzzer(__doc__, 5000).parse_args()
    run(fuzz, options.count, options.seed)


if __name__ == "__main__":
    main()
