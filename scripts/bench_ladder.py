"""What a ladder of buffer sizes saves: the same batches with one size and with several, in one run.

    python scripts/bench_ladder.py [--manifest MANIFEST] [--capacity 1024] [--batches 16] [--check]

There are two streams of documents: the recordings of a manifest (without one, the synthetic speech), and
these by turns with documents of text, about two buffers of each. The one size has the mel frames a slot of
DataConfig's defaults; "as tight as possible" is what one size could do for this data at best. The ladder is
the one that jaxthd plan proposes for the lengths (planning/ladder.py). One model is trained by the real step;
the two ways alternate, batch by batch, after every program has run once. A step's time is the median over the
rounds. Compiled in: what the program of each size took to trace, compile and run once.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np

from jaxthd.config import Config, DataConfig
from jaxthd.data.loader import BatchReport, make_loader
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.ladder import compare_ladders, proposed
from jaxthd.planning.lengths import Lengths
from jaxthd.planning.search import slot_work
from jaxthd.planning.simulate import simulate
from jaxthd.run.host_memory import keep_freed_memory
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.ladder import LadderStep
from jaxthd.steps.state import init_state
from jaxthd.terminal.tables import Claim, conclude, show
from scripts.bench_packing import MODEL, multiple, speech_documents, text_documents
from scripts.measurements.recordings import MANIFEST


class Side(NamedTuple):
    """The batches of a way. seconds: of each step."""

    batches: list[Any]
    reports: list[BatchReport]
    seconds: np.ndarray

    @property
    def padding(self) -> float:
        return 1 - sum(r.real_tokens for r in self.reports) / sum(r.capacity_tokens for r in self.reports)

    @property
    def audio_padding(self) -> float:
        room = sum(r.audio_slots_seconds for r in self.reports)
        return 1 - sum(r.audio_seconds for r in self.reports) / room


def by_turns(speech: Sequence[Document], text: Sequence[Document], slots: int) -> list[Document]:
    """Stretches of about so many slots of each, until one of them ends."""
    sources, found = [iter(speech), iter(text)], list[Document]()
    while True:
        for source in sources:
            taken = 0
            while taken < slots:
                document = next(source, None)
                if document is None:
                    return found
                found.append(document)
                taken += len(document)


def lengths_of(documents: Sequence[Document]) -> Lengths:
    frames = [list(document.chunk_frames) for document in documents]
    seconds = [sum(map(len, document.chunks)) / 100 for document in documents]
    tokens, mels = [len(document) for document in documents], [sum(of) for of in frames]
    return Lengths(np.array(tokens), np.array(mels), np.array(seconds), frames)


def with_ladder(documents: Sequence[Document], capacity: int) -> Config:
    """The model's config with one size that holds every buffer, and the proposed smaller ones."""
    stream, config = lengths_of(documents), Config(model=MODEL)
    plain = DataConfig()
    audio = multiple(plain.audio_capacity / plain.capacity * capacity, 8)
    data = replace(plain, capacity=capacity, audio_capacity=audio, max_documents=256, packing_bins=2)
    top, work = replace(config, data=data), slot_work(config)
    return proposed(compare_ladders(stream, simulate(stream, top, work), work)).config


def sides_of(documents: Sequence[Document], config: Config, count: int) -> dict[str, Side]:
    """The first batches with one size, and with the ladder."""
    found = {}
    for name, ladder in (("one size", False), ("ladder", True)):
        loader = make_loader(
            [range(len(documents))],
            lambda item, epoch: documents[item],
            config,
            repeat=False,
            shuffle=False,
            ladder=ladder,
        )
        made = list(islice(loader, count))
        loader.close()
        reports = [report if ladder else report._replace(rung=len(config.data.rungs)) for _, report in made]
        found[name] = Side([batch for batch, _ in made], reports, np.zeros(0))
    return found


def measure(sides: dict[str, Side], config: Config, rounds: int) -> tuple[dict[str, Side], list[float]]:
    """(the sides with their times, seconds that each size took to trace and compile)."""
    mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
    step, state = LadderStep(blueprint, mesh), init_state(blueprint, mesh)
    placed = {name: [put_batch(b, mesh) for b in side.batches] for name, side in sides.items()}
    compiled = dict[int, float]()
    for name, side in sides.items():
        for batch, report in zip(placed[name], side.reports, strict=True):
            if report.rung not in compiled:
                start = time.perf_counter()
                state, _ = jax.block_until_ready(step(report.rung, state, batch))
                compiled[report.rung] = time.perf_counter() - start
    times = {name: np.zeros((rounds, len(side.batches))) for name, side in sides.items()}
    for turn in range(rounds):
        for i in range(len(next(iter(placed.values())))):
            for name, side in sides.items():
                start = time.perf_counter()
                state, _ = jax.block_until_ready(step(side.reports[i].rung, state, placed[name][i]))
                times[name][turn, i] = time.perf_counter() - start
    assert step.compilations == len(compiled)
    timed = {name: side._replace(seconds=np.median(times[name], axis=0)) for name, side in sides.items()}
    return timed, [compiled[rung] for rung in sorted(compiled)]


def compare(name: str, documents: Sequence[Document], capacity: int, count: int, rounds: int) -> list[Claim]:
    config = with_ladder(documents, capacity)
    sides, compiled = measure(sides_of(documents, config, count), config, rounds)
    rows = []
    for way, side in sides.items():
        programs = len({report.rung for report in side.reports})
        shares = f"{side.padding:.1%}", f"{side.audio_padding:.1%}"
        rows.append([way, len(side.reports), programs, *shares, f"{1000 * side.seconds.mean():.0f}"])
    one, ladder = sides["one size"], sides["ladder"]
    heard = [report.audio_seconds for report in one.reports]
    tight = 1 - sum(heard) / (len(heard) * max(heard))
    rows.insert(1, ["as tight as possible", len(heard), 1, f"{one.padding:.1%}", f"{tight:.1%}", ""])
    sizes = ", ".join("/".join(f"{size:,}" for size in rung) for rung in config.data.ladder)
    show(
        f"{name}: sizes {sizes} (slots/documents/mel frames); compiled in "
        f"{', '.join(f'{seconds:.0f}' for seconds in compiled)} s",
        "|steps|programs|padding|of mel frames|ms a step",
        rows,
    )
    gain = one.seconds.sum() / ladder.seconds.sum()
    same = [r.keys for r in one.reports] == [r.keys for r in ladder.reports]
    claim = Claim(f"{name}: both ways have the same documents in every step", same)
    if not config.data.rungs:
        print("  No further size is proposed: the buffers are alike.")
        return [claim]
    return [
        claim,
        Claim(
            f"{name}: mel padding {one.audio_padding:.1%} with one size, {ladder.audio_padding:.1%} with the "
            "ladder (at most 0.6 times)",
            ladder.audio_padding <= 0.6 * one.audio_padding,
        ),
        Claim(f"{name}: a step of one size takes {gain:.2f} times as long (at least 1.1)", gain >= 1.1),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", **MANIFEST)
    parser.add_argument("--capacity", type=int, default=1024, help="token slots of the largest buffer")
    parser.add_argument("--batches", type=int, default=16, help="steps of each way")
    parser.add_argument("--rounds", type=int, default=2, help="passes over every way")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args(argv)
    speech = [
        d for d in speech_documents(options.manifest, Config(model=MODEL)) if len(d) <= options.capacity
    ]
    text = [d for d in text_documents(200) if len(d) <= options.capacity]
    claims = []
    for name, documents in (
        ("recordings", speech),
        ("by turns with text", by_turns(speech, text, 2 * options.capacity)),
    ):
        claims += compare(name, documents, options.capacity, options.batches, options.rounds)
    conclude(claims, check=options.check)


if __name__ == "__main__":
    keep_freed_memory()  # as jaxthd train does on CPUs
    main()
