"""Padding that the encoder computes: with one size of buffers, with a ladder, and if a step skipped it.

    python scripts/bench_audio_padding.py [--manifest MANIFEST] [--check]

Packs the lengths of two streams as a run does: the recordings of a manifest (without one, the synthetic
speech), and as many tokens again of text among them (bench_packing.py). For batches of 1, 8 and 64 rows it
prints the mel frames that are computed for each one that holds audio:

- one size: each row's whole audio array (data.audio_capacity).
- ladder: the first size that holds all rows of the step (data.rungs), as jaxthd plan proposes it.
- inside: one program that would compute, for each microbatch of 8 data ranks (of 1, for 1 row), only as many
  eighths of the array as its fullest row needs. All ranks must take the same, since BatchNorm's sums, and the
  gathered weights, are of all ranks. It does not exist; this is what it could save.
- each row: as many eighths as it needs, whatever the others need. No step can do that.

And the work of a step on padding over its work on documents (planning/search.py, slot_work), for the model of
bench_packing.py. No model is run. With --check it exits 1 where a ladder computes more of the recordings than
the program that skips inside would.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from jaxtyping import Float, Int

from jaxthd.config import Config
from jaxthd.data.sources.manifest import read_manifest
from jaxthd.planning.ladder import batch_needs, compare_ladders, proposed
from jaxthd.planning.lengths import Lengths, measure
from jaxthd.planning.search import slot_work
from jaxthd.planning.simulate import Outcome, simulate
from jaxthd.terminal.tables import Claim, conclude, show
from scripts.bench_packing import MODEL, text_documents
from scripts.measurements.recordings import MANIFEST

ROWS, RANKS, EIGHTHS = (1, 8, 64), 8, 8
"""Rows of a step; the data ranks that share them; lengths that a program could choose from."""
TIMES = 4
"""Epochs that are packed one after the other."""


class Way(NamedTuple):
    """mels: computed for each that holds audio. overhead: work on padding over work on documents."""

    mels: float
    overhead: float

    @property
    def text(self) -> str:
        return f"{self.mels:.2f} ({self.overhead:.0%})"


def stream_of(documents: Lengths) -> Lengths:
    """Some epochs of the documents, each in an order of its own."""
    rng, count = np.random.default_rng(0), len(documents.tokens)
    order = np.concatenate([rng.permutation(count) for _ in range(TIMES)])
    tokens, frames, seconds = (x[order] for x in documents[:3])
    return Lengths(tokens, frames, seconds, [documents.chunks[i] for i in order])


def with_text(speech: Lengths) -> Lengths:
    """The documents, and as many tokens of text."""
    text, tokens = list[int](), int(speech.tokens.sum())
    for document in text_documents(4000, 2048):
        if sum(text) < tokens:
            text.append(len(document))
    none = np.zeros(len(text))
    return Lengths(
        np.append(speech.tokens, text),
        np.append(speech.frames, none.astype(int)),
        np.append(speech.seconds, none),
        [*speech.chunks, *([] for _ in text)],
    )


def skipped_inside(needed_BR: Int[np.ndarray, "B R"], capacity: int, ranks: int) -> Float[np.ndarray, ""]:
    """Mel frames of all rows, where microbatches of `ranks` rows compute what the fullest of them needs."""
    eighths = np.ceil(needed_BR / capacity * EIGHTHS).reshape(len(needed_BR), -1, ranks)
    return eighths.max(-1).sum() * ranks * capacity / EIGHTHS


def compare(stream: Lengths, outcome: Outcome, work: tuple[float, float]) -> dict[str, Way]:
    ladders = compare_ladders(stream, outcome, work)
    needs, data, ladder = batch_needs(stream, outcome), outcome.data, proposed(ladders)
    needed = np.array([sum(sum(fit.chunk_frames) for fit in fits) for fits in needs.fits])[needs.rows]
    tokens, mels = needs.real
    slots, batches = outcome.data.capacity * data.rows, len(needs.rows)

    def way(frames: float) -> Way:
        """frames: of a step; its slots are those of one size."""
        useful = work[0] * tokens + work[1] * mels
        return Way(frames / mels, (work[0] * slots + work[1] * frames) / useful - 1)

    ranks = min(RANKS, data.rows)
    return {
        "one size": way(data.audio_capacity * data.rows),
        "ladder": Way(1 / (1 - ladder.audio_padding), ladder.overhead),
        "inside": way(float(skipped_inside(needed, data.audio_capacity, ranks)) / batches),
        "each row": way(float(skipped_inside(needed, data.audio_capacity, 1)) / batches),
    }


def report(name: str, documents: Lengths, config: Config) -> dict[int, dict[str, Way]]:
    stream, work, found = stream_of(documents), slot_work(config), {}
    for rows in ROWS:
        of_rows = replace(config, data=replace(config.data, rows=rows))
        found[rows] = compare(stream, simulate(stream, of_rows, work), work)
    data = config.data
    show(
        f"{name}: mel frames computed for each with audio (overhead of the step); "
        f"buffers of {data.capacity:,} slots and {data.audio_capacity:,} mel frames",
        "rows|one size|ladder|inside|each row",
        [[rows, *(way.text for way in ways.values())] for rows, ways in found.items()],
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", **MANIFEST)
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args(argv)
    config = Config(model=MODEL)
    speech, _ = measure(read_manifest(options.manifest)[0], config)
    alone = report("recordings", speech, config)
    report("recordings and text", with_text(speech), config)
    worst = max(ways["ladder"].mels / ways["inside"].mels for ways in alone.values())
    text = f"recordings: a ladder computes at most {worst:.2f} times the mel frames of skipping inside"
    conclude([Claim(text, worst <= 1)], check=options.check)


if __name__ == "__main__":
    main()
