"""What the packers leave empty: padding of every packer on the same documents, side by side.

    python scripts/bench_packers.py [--manifest MANIFEST] [--check]

Packs two streams with PackDocuments, as a run does: the recordings of a manifest (without one, the synthetic
speech), and a text-like mix of 4,000 documents of up to 4,096 tokens, median 200 (bench_packing.py). For
every packer and number of buffers that it holds open it prints the share of token slots that are padding, the
buffers that it needs, and the time of a document. Buffers that the end of the stream leaves unfilled count.
With --check it exits 1 where best-fit decreasing pads more than the default, first fit with 8 buffers, in
every stream.
"""

import argparse
import time
from collections.abc import Sequence

import grain
import numpy as np

from jaxthd.config import Config, Packing
from jaxthd.data.packer import PackDocuments
from jaxthd.data.sources.manifest import read_manifest
from jaxthd.packing.document import SUBSAMPLING, Document
from jaxthd.planning.lengths import Lengths, measure
from jaxthd.terminal.tables import Claim, conclude, table
from scripts.bench_packing import text_documents
from scripts.measurements.recordings import MANIFEST

PACKERS: tuple[tuple[Packing, int], ...] = (
    ("first_fit", 8),
    ("best_fit", 8),
    ("best_fit_decreasing", 8),
    ("first_fit", 32),
    ("best_fit", 32),
    ("best_fit_decreasing", 32),
)
DEFAULT = PACKERS[0]
MOST = 6000
"""Recordings of a manifest that are packed."""


def of_lengths(lengths: Lengths) -> list[Document]:
    """Documents of these lengths, in a seeded random order, without sound: one mel band of zeros."""
    found = []
    for number in np.random.default_rng(0).permutation(len(lengths.tokens))[:MOST]:
        frames = [np.zeros((f, 1), np.float32) for f in lengths.chunks[number]]
        slots = sum(len(chunk) // SUBSAMPLING for chunk in frames)
        text = int(lengths.tokens[number]) - slots
        tokens = [0] * bool(frames) + [1] * text
        found.append(
            Document.splice(str(number), tokens, [t == 1 for t in tokens], [frames] if frames else [], 0)
        )
    return found


def packed(
    documents: Sequence[Document], packing: Packing, bins: int, capacity: int, audio_capacity: int
) -> tuple[float, int, float]:
    """(share of the slots that is padding, buffers, microseconds a document)"""
    pack = PackDocuments(
        capacity=capacity,
        audio_capacity=audio_capacity,
        max_documents=capacity,
        num_mels=1,
        packing=packing,
        packing_bins=bins,
    )
    start = time.perf_counter()
    real = [row.report.real_tokens for row in grain.MapDataset.source(documents).pipe(pack)]
    seconds = time.perf_counter() - start
    return 1 - sum(real) / (len(real) * capacity), len(real), 1e6 * seconds / len(documents)


def report(title: str, documents: Sequence[Document], capacity: int, audio_capacity: int) -> list[Claim]:
    found = {each: packed(documents, *each, capacity, audio_capacity) for each in PACKERS}
    usual = found[DEFAULT][0]
    rows = [
        [packing, bins, f"{padding:.2%}", f"{usual - padding:+.2%}", buffers, f"{micros:.0f}"]
        for (packing, bins), (padding, buffers, micros) in found.items()
    ]
    total = sum(map(len, documents))
    about = f"{title}: {len(documents):,} documents, {total:,} tokens, buffers of {capacity:,}"
    print(f"\n{table(about, 'packing|open buffers|padding|saved|buffers|us a document', rows)}", flush=True)
    best = found["best_fit_decreasing", 8][0]
    text = f"{title}: best-fit decreasing pads {best:.2%}, first fit {usual:.2%}"
    return [Claim(text, best <= usual)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", **MANIFEST)
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args(argv)
    config = Config()
    lengths, _ = measure(read_manifest(options.manifest)[0], config)
    speech = of_lengths(lengths)
    claims = report("recordings", speech, config.data.capacity, config.data.audio_capacity)
    claims += report("recordings, small buffers", speech, 256, 2400)
    claims += report("text", text_documents(4000), 8192, 0)
    claims += report("text, small buffers", text_documents(4000), 4096, 0)
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
