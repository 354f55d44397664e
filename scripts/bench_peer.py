"""The training step of a speech model, features included: jaxthd packed against NeMo's SALM padded, or
against transformers' speech LLMs.

    python scripts/bench_peer.py --manifest MANIFEST --python-reference PYTHON [--check] [--models NAME ...]

PYTHON has nemo-toolkit[asr] 3.0.0, torch and transformers; torch and transformers 5.24 alone for --models of
FAMILIES (granite_speech needs torchaudio too). MANIFEST may be several; `synthetic` is the speech of the
first run. --shapes: the data as it is (`short`), with recordings joined to 24 s (`long`), with texts of six
times the length (`talkative`). Takes about 15 minutes for each model and shape on two idle cores.

Both sides train the same model from the same weights on the same documents, in float32: log-mel features,
encoder, decoder, loss, clipping, AdamW. The models (MODELS) are FastConformer before Qwen3, which is NeMo's
SALM; and FastConformer before Nemotron-H, which SALM does not take on a CPU, so that NeMo's perception module
and transformers' NemotronH make one step. Those of FAMILIES are small models of transformers' classes, whose
forward pass has the loss; recordings are cut to whole frames, of which a padded batch would count one more.
Text is bytes. Padding does not count as tokens.

- peer: batches of so many seconds of padded audio, sorted by length; and in random order. SDPA, fused AdamW,
  samples in memory. Batches of the --compile seconds also run with torch.compile (dynamic shapes).
- jaxthd: what `jaxthd train` does where the config gives the model and the data alone (`defaults`), and with
  the settings of --tuned. Samples are read from WAV files.

Each way is its own process, whose C library keeps freed memory, and runs a stretch of batches before the
clock starts. The peer's ways are measured one by one. Then jaxthd's and the fastest of them alternate, a
stretch each, --rounds times; a rate is the median over the stretches. No other process is there: with six of
the peer's asleep beside it, jaxthd was a seventh slower on a machine of 24 GiB, and the peer was not. The
processes that load jaxthd's batches are stopped while the peer is measured: each side pays for its own.
`peak` is the highest resident memory of a process that compiles the step and trains, over what it had before
its model was made, with the processes that load jaxthd's batches. The matrix rate is measured before each
stretch. `MFLOP a token` are what the model must compute, without padding and recomputation; `done` is what
torch counts of the peer, padding included.

Beside NeMo three tables follow: where the time of a step goes, by part of the model, each side by its own
profiler, which slows it down; the loaders alone, from the manifest to features, in items for a second of CPU
time (the peer's is Lhotse's, with its own features); and greedy answers to the prompts of documents, 16 at a
time.

--check exits 1 unless losses and gradient norms of CHECKED documents agree to 1e-4, the answers of the two
sides are the same, and jaxthd's defaults are as many times as fast as the peer's fastest way as MODELS says
(FAMILIES: 1), with at most 1.5 times its memory. Of FAMILIES there are no answers.
"""

import argparse
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.peer_process import Process, matrix_rate, peak_and_workers, require_modules, serve
from scripts.peer_work import (
    ANSWERED,
    CHECKED,
    FAMILIES,
    MODELS,
    NEW_TOKENS,
    SHAPES,
    STRETCHES,
    Recordings,
    Side,
)

CHUNK = 128
"""The scan's chunk of the library's default, which is measured beside the one in MODELS, the fastest here."""
PADDED = (20.0, 40.0, 80.0, 160.0)
"""Seconds of padded audio of the peer's batches."""


def served(side: str, folder: Path, way: str) -> dict[str, Any]:
    """The calls of a way's process, and `peak`: bytes."""
    Made: Any
    if side != "peer":
        from scripts.peer_jaxthd import Jaxthd as Made
    elif (folder / "family").exists():
        from scripts.peer_transformers import Peer as Made
    else:
        from scripts.peer_nemo import Peer as Made
    before, _ = peak_and_workers()
    calls: Side = Made(folder, way).calls()

    def peak() -> int:
        most, workers = peak_and_workers()
        return most - before + workers

    return calls._asdict() | {"peak": peak}


class Way(NamedTuple):
    """A way's measurements. seconds, audio_seconds, tokens: of each stretch. matrix: FLOP/s."""

    tokens: np.ndarray
    audio_seconds: np.ndarray
    seconds: np.ndarray
    matrix: np.ndarray
    peak: int
    gflop: float

    @property
    def rate(self) -> float:
        """Median of the tokens a second."""
        return float(np.median(self.tokens / self.seconds))

    def row(self, name: str, useful: float) -> list[str]:
        """Its cells. useful: GFLOP that a token needs."""
        shares = 1e9 * useful * self.tokens / self.seconds / self.matrix
        return [
            name,
            f"{self.rate:,.0f}",
            f"{float(np.median(self.audio_seconds / self.seconds)):.1f}",
            f"{self.peak / 2**20:,.0f}",
            f"{1e3 * useful:.1f}" if useful else "",
            f"{1e3 * self.gflop:.1f}" if self.gflop else "",
            f"{float(np.median(shares)):.0%}" if useful else "",
        ]


def begin(folder: Path, python: str, side: str, way: str) -> Process:
    options = ["--side", side, "--folder", str(folder), "--way", way]
    return Process(python, __file__, options, folder / f"{side} {way.replace('/', '_')}.log")


def measured(ways: dict[str, Process], rounds: int) -> dict[str, Way]:
    """Runs the ways by turns, after a warm-up."""
    for name, process in ways.items():  # warm: programs are compiled, memory is there
        for number in range(STRETCHES if "compiled" in name else 2):
            process.ask("stretch", number)
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds * STRETCHES):
        for name, process in ways.items():
            matrix, timed = matrix_rate(process), process.timed("stretch", number)
            found[name].append([*timed.result, timed.seconds, matrix])

    def way(name: str) -> Way:
        tokens, audio_seconds, seconds, matrix = map(np.array, zip(*found[name], strict=True))
        peak, gflop = ways[name].ask("peak"), ways[name].ask("gflop")
        return Way(tokens, audio_seconds, seconds, matrix, peak, gflop)

    return {name: way(name) for name in ways}


def agreement(folder: Path, python: str, best: str, *, answers: bool) -> tuple[list[float], float]:
    """([share of equal tokens of greedy answers], largest relative difference of losses and gradient norms).

    best: the peer's way. Both sides run in processes of their own, which do not train: training changes the
    peer's weights and its BatchNorm's statistics, and what is kept of these programs' memory is no step's.
    """
    pair = [
        begin(folder, sys.executable, "jaxthd", ""),
        begin(folder, python, "peer", best.removeprefix("peer ")),
    ]
    same = []
    if answers:
        ours, theirs = (np.array(process.ask("answers")) for process in pair)
        same.append(float(np.mean(ours == theirs)))
    ours, theirs = (np.array(process.ask("checked")) for process in pair)
    for process in pair:
        process.end()
    return same, float(np.abs(ours / theirs - 1).max())


def show_parts(title: str, ways: dict[str, Process]) -> None:
    """Prints where the time of both sides goes."""
    from scripts.benchmark import show

    parts = {name: Counter(process.ask("profile")) for name, process in ways.items()}
    names = sorted(set().union(*parts.values()), key=lambda part: -max(p[part] for p in parts.values()))
    rows = [[part, *(f"{p[part]:.1f}" if p[part] else "" for p in parts.values())] for part in names]
    rows.append(["all", *(f"{p.total():.1f}" for p in parts.values())])
    show(f"{title}: ms for 1,000 tokens, by part", "|".join(["part", *ways]), rows)


def compare_around(title: str, ways: dict[str, Process]) -> None:
    """Prints the loaders' speed and that of answers."""
    from scripts.benchmark import show

    loads: list[list[str]] = []
    times: dict[str, list[float]] = {}
    for name, process in ways.items():
        process.ask("load")
        loaded = process.timed("load")
        loads.append([name, f"{loaded.result / loaded.cpu_seconds:,.0f}"])
        process.ask("answers")
    for _ in range(3):
        for name, process in ways.items():
            times.setdefault(name, []).append(process.timed("answers").seconds)
    show(f"{title}: the loader alone, from the manifest to features", "way|items/s of CPU", loads)
    rows = [[name, f"{ANSWERED * NEW_TOKENS / float(np.median(x)):,.0f}"] for name, x in times.items()]
    show(f"{title}: greedy answers", "way|tokens/s", rows)


def compare(model: str, manifest: str, shape: str, options: argparse.Namespace) -> list[Any]:
    """Measures a model on a manifest in that shape; prints the tables and returns the claims."""
    from scripts.benchmark import Claim, show
    from scripts.peer_jaxthd import reshaped, write_documents

    _, _, chunk, least = (*FAMILIES[model], 0, 1.0) if model in FAMILIES else MODELS[model]
    title = model if shape == "short" else f"{model}, {shape}"
    print(f"\n## {title}: {manifest}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = begin(folder, options.python_reference, "make", model)
        maker.ask("make")
        maker.end()
        taken = SHAPES[shape]._replace(frame=160) if model in FAMILIES else SHAPES[shape]
        useful = write_documents(folder, reshaped(manifest, folder, taken))
        if (few := len(Recordings.read(folder).batches(max(options.padded), "sorted"))) < STRETCHES:
            raise SystemExit(
                f"--padded {max(options.padded):g} makes {few} batches of {manifest}; expected at least "
                f"{STRETCHES}, which are timed apart: give more recordings, or fewer seconds"
            )
        scan, middle = f" {chunk}" if chunk else "", options.padded[len(options.padded) // 2]
        peers = [f"{seconds:g} sorted{scan}" for seconds in options.padded]
        peers += [f"{middle:g} random{scan}", *([f"{middle:g} sorted {CHUNK}"] if chunk else [])]
        if model in MODELS:
            peers += [f"{seconds:g} sorted{scan} compiled" for seconds in options.compile]
        alone: dict[str, Way] = {}
        for way in peers:
            process = begin(folder, options.python_reference, "peer", way)
            alone |= measured({f"peer {way}": process}, 1)
            process.end()
        best = max(alone, key=lambda name: alone[name].rate)
        same, apart = agreement(folder, options.python_reference, best, answers=model in MODELS)
        ours = {"defaults": "", **({"tuned": options.tuned} if options.tuned else {})}
        ways = {f"jaxthd {n}": begin(folder, sys.executable, "jaxthd", way) for n, way in ours.items()}
        ways[best] = begin(folder, options.python_reference, "peer", best.removeprefix("peer "))
        both = {name: ways[name] for name in ("jaxthd defaults", best)}
        alternating = measured(ways, options.rounds)
        found = {name: way for name, way in alternating.items() if name != best} | alone | alternating
        columns = "way|tokens/s|s of audio/s|peak, MiB|MFLOP a token|done|of matrix rate"
        show(f"{title}: a training step", columns, [way.row(name, useful) for name, way in found.items()])
        print(f"losses and gradient norms of {CHECKED} documents: {apart:.1e} apart")
        print(f"fastest way of the peer: {found[best].rate:,.0f} tokens/s, {best}", flush=True)
        if model in MODELS:
            compare_around(title, both)
            show_parts(title, both)
        for process in ways.values():
            process.end()
    own, peer = found["jaxthd defaults"], found[best]
    gain, memory = own.rate / peer.rate, own.peak / peer.peak
    return [
        Claim(f"{title}: losses and gradient norms agree ({apart:.1e}, at most 1e-4)", apart <= 1e-4),
        *(
            Claim(f"{title}: {x:.1%} of the tokens of greedy answers are the same (all)", x == 1)
            for x in same
        ),
        Claim(f"{title}: {gain:.2f} times as fast as {best} ({least} or more)", gain >= least),
        Claim(f"{title}: {memory:.2f} times the memory of {best} (at most 1.5)", memory <= 1.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", nargs="+", default=["synthetic"], help="recordings with their texts")
    parser.add_argument("--python-reference", default=sys.executable, help="has NeMo")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *FAMILIES], default=["qwen3", "hybrid"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["short"], help="of the data")
    parser.add_argument("--padded", nargs="+", type=float, default=PADDED, help="seconds of a peer's batch")
    parser.add_argument("--compile", nargs="*", type=float, default=[], help="seconds with torch.compile")
    parser.add_argument("--tuned", default="", metavar="NAME=VALUE,...", help="settings of a second way")
    parser.add_argument("--rounds", type=int, default=2, help="passes over the recordings")
    for hidden in ("--side", "--way"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "make":
        make: Any
        if options.way in FAMILIES:
            from scripts.peer_transformers import make_family as make
        else:
            from scripts.peer_nemo import make_peer as make

        serve(lambda: {"make": lambda: make(options.folder, options.way)})
    elif options.side:
        serve(lambda: served(options.side, options.folder, options.way))
    else:
        from scripts.benchmark import conclude

        if {*options.models} & {*MODELS}:
            require_modules(options.python_reference, "nemo.collections.speechlm2")
        require_modules(options.python_reference, "torch, transformers")
        runs = product(options.models, options.manifest, options.shapes)
        claims = [claim for run in runs for claim in compare(*run, options)]
        conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
