"""Forward and backward on real lengths: jaxthd packed against transformers' NemotronH padded.

    python scripts/bench_reference.py --manifest MANIFEST [--check] [--python-reference PYTHON]

Needs torch and transformers: in this environment, or in another one, whose interpreter --python-reference
names. Takes about five minutes on two idle cores.

The same model (SETTINGS) with the same weights on both sides, float32, 2 threads each. A document is 12.5
audio frames a second of its recording, 8 tokens of prompt and a token for every 4 bytes of its text; token
ids are random, and every token but the first is predicted. Neither side computes audio: embeddings are looked
up.

- jaxthd: buffers of --capacity tokens, by the product's packer and its loss and gradient; with the layers'
  activations kept (as the reference keeps them) and recomputing them; layers written out
  (compute.unroll_layers).
- transformers: batches of 16, each padded on the right to its longest, labels masked on padding, in random
  order and sorted by length; the scan in chunks of 128 tokens (the library's default) and of 32 (the fastest
  here). No attention mask is given: with padding on the right the model needs none, and is faster.

Each side is its own process, whose C library keeps all freed memory, so that finding memory anew costs
neither side time. Programs are compiled and run once before the clock starts. Then all ways
alternate, batch by batch, so that other load on the machine affects them alike. The time of a way is the sum
over its batches of each batch's median over the rounds. CPU s is the same sum for the process's CPU time:
with two threads it is at most twice the wall time, and other load disturbs it less. --check exits 1 unless
both sides have the same loss and gradient norm, and jaxthd is the fastest.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.peer_process import MATRIX, Process, matrix_rate, require_modules, serve
from scripts.peer_work import NEMOTRON_H

SETTINGS: dict[str, Any] = NEMOTRON_H | {"hybrid_override_pattern": "M-M*M-M*", "vocab_size": 4096}
"""The fields of NemotronHConfig."""
ROWS, CHUNKS = 16, (128, 32)
THREADS = 2
CHECKED = 4
"""The number of documents whose loss and gradient norm are compared."""


class Way(NamedTuple):
    """One way of processing all documents.

    batches: each call runs forward and backward on a batch. slots: token slots of all batches.
    """

    batches: Sequence[Callable[[], Any]]
    slots: int


class Side(NamedTuple):
    """What a side's process can run.

    checked: loss and gradient norm of the first CHECKED documents. weights: elements of all matrices that
    tokens are multiplied with."""

    ways: dict[str, Way]
    matrix: Callable[[], Any]
    checked: tuple[float, float]
    weights: int = 0


def transformers_side(folder: Path, documents: Sequence[np.ndarray], capacity: int) -> Side:
    """The reference side; it writes the weights that the other side reads."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)

    def make(chunk: int) -> Any:
        return transformers.NemotronHForCausalLM(
            transformers.NemotronHConfig(**SETTINGS, chunk_size=chunk)
        ).train()

    models = {chunk: make(chunk) for chunk in CHUNKS}
    weights = models[CHUNKS[0]].state_dict()
    for model in models.values():
        model.load_state_dict(weights)
    models[CHUNKS[0]].save_pretrained(folder / "published")

    def batch(model: Any, group: Sequence[np.ndarray]) -> Callable[[], float]:
        tokens = np.zeros((len(group), max(map(len, group))), np.int64)
        labels = np.full_like(tokens, -100)
        for i, document in enumerate(group):
            tokens[i, : len(document)] = labels[i, : len(document)] = document
        inputs = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

        def run() -> float:
            model.zero_grad(set_to_none=True)
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            return float(loss.detach())

        return run

    shuffled = [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]
    ways = {}
    for order, ordered in (("random order", shuffled), ("sorted by length", sorted(documents, key=len))):
        groups = [ordered[i : i + ROWS] for i in range(0, len(ordered), ROWS)]
        slots = sum(len(group) * max(map(len, group)) for group in groups)
        for chunk, model in models.items():
            name = f"transformers, {order}, chunks of {chunk}"
            ways[name] = Way([batch(model, group) for group in groups], slots)
    loss = batch(model, documents[:CHECKED])()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    square = torch.ones(MATRIX, MATRIX)
    matrices = sum(x.numel() for name, x in weights.items() if x.ndim == 2 and "embed" not in name)
    return Side(ways, lambda: square @ square, (loss, norm), matrices)


def jaxthd_side(folder: Path, documents: Sequence[np.ndarray], capacity: int) -> Side:
    import grain
    import jax
    import optax

    from jaxthd.checkpoints.weights import load_weights
    from jaxthd.config import BlockSizes, ComputeConfig, Config
    from jaxthd.data.packer import PackDocuments
    from jaxthd.hf.checkpoint import model_config
    from jaxthd.packing.batch import Batch
    from jaxthd.packing.document import Document
    from jaxthd.parallel.mesh import make_mesh, put_batch
    from jaxthd.steps.blueprint import Blueprint
    from jaxthd.steps.training import loss_and_gradient

    jax.config.update("jax_platforms", "cpu")
    model = model_config(folder / "published")
    mesh = make_mesh(Config().mesh)
    pack = PackDocuments(capacity=capacity, audio_capacity=0, max_documents=capacity, packing="best_fit")

    def spliced(number: int, tokens: np.ndarray) -> Document:
        no, yes = np.zeros(len(tokens), bool), np.ones(len(tokens), bool)
        return Document(str(number), tokens.astype(np.int32), is_audio=no, supervised=yes)

    packed = [spliced(i, tokens) for i, tokens in enumerate(documents)]
    batches = [put_batch(row.batch, mesh) for row in grain.MapDataset.source(packed).pipe(pack)]
    params, buffers = load_weights([folder / "published"], Blueprint(Config(model=model)), mesh, partly=False)
    ways, programs = {}, {}
    choices: dict[str, Literal["none", "full"]]
    choices = {"jaxthd, packed": "none", "jaxthd, packed, recomputing": "full"}
    for name, remat in choices.items():
        config = Config(
            model=model,
            compute=ComputeConfig(remat=remat, unroll_layers=True, block_sizes=BlockSizes(attention=64)),
        )
        program = programs[name] = jax.jit(loss_and_gradient(Blueprint(config), mesh))

        def batch(data: Batch, program: Any = program) -> Callable[[], Any]:
            return lambda: jax.block_until_ready(program(params, buffers, data))

        ways[name] = Way([batch(data) for data in batches], capacity * len(batches))
    checked = put_batch(pack.row(packed[:CHECKED]).batch, mesh)
    loss, gradients, *_ = programs["jaxthd, packed"](params, buffers, checked)
    square = jax.numpy.ones((MATRIX, MATRIX))
    product = jax.jit(lambda x: x @ x)
    return Side(
        ways, lambda: product(square).block_until_ready(), (float(loss), float(optax.tree.norm(gradients)))
    )


SIDES = {"transformers": transformers_side, "jaxthd": jaxthd_side}


def served(name: str, folder: Path, capacity: int) -> dict[str, Callable[..., Any]]:
    """A side's calls: what it offers, one of its batches, and the matrix product."""
    documents = np.load(folder / "documents.npz")
    side = SIDES[name](folder, [documents[str(i)] for i in range(len(documents))], capacity)
    for way in side.ways.values():
        way.batches[0]()

    def batch(way: str, number: int) -> None:
        side.ways[way].batches[number]()

    def matrix() -> None:
        side.matrix()

    ways = {name: (len(way.batches), way.slots) for name, way in side.ways.items()}
    offer = {"ways": ways, "checked": side.checked, "weights": side.weights}
    return {"offer": lambda: offer, "batch": batch, "matrix": matrix}


def begin(python: str, side: str, folder: Path, capacity: int) -> Process:
    options = ["--side", side, "--folder", str(folder), "--capacity", str(capacity)]
    return Process(python, __file__, options, folder / f"{side}.log")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", help="recordings whose lengths are taken")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    parser.add_argument("--python-reference", default=sys.executable, help="has torch and transformers")
    parser.add_argument("--capacity", type=int, default=2048, help="token slots of a packed buffer")
    parser.add_argument("--rounds", type=int, default=3, help="passes over every way")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # As many threads as cores: both libraries follow the cores a process may use.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    if options.side:
        serve(lambda: served(options.side, options.folder, options.capacity))
        return
    if options.manifest is None:
        parser.error("--manifest is missing: give a NeMo manifest with durations")
    python = options.python_reference
    require_modules(python, "torch, transformers")

    from jaxthd.config import DataConfig
    from jaxthd.data.sources.registry import open_source
    from jaxthd.data.sources.source import SourceSetting
    from scripts.benchmark import Claim, conclude

    utterances, _ = open_source(SourceSetting(options.manifest, "--manifest")).read(DataConfig())
    lengths = [
        math.ceil(12.5 * u.duration) + 8 + math.ceil(len(u.text.encode()) / 4)
        for u in utterances
        if u.duration is not None
    ]
    rng = np.random.default_rng(0)
    documents = {str(i): rng.integers(SETTINGS["vocab_size"], size=n) for i, n in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "documents.npz", **documents)  # type: ignore[arg-type]
        reference = begin(python, "transformers", folder, options.capacity)
        theirs = reference.ask("offer")  # its weights are what the other side reads
        ours = begin(sys.executable, "jaxthd", folder, options.capacity)
        own = ours.ask("offer")
        sides = (ours, own), (reference, theirs)
        ways = {way: (p, *offer["ways"][way]) for p, offer in sides for way in offer["ways"]}
        times: dict[tuple[str, int], list[tuple[float, ...]]] = {}
        rates: dict[str, float] = {}
        for _ in range(options.rounds):
            for side, process in (("jaxthd", ours), ("transformers", reference)):
                rates[side] = max(matrix_rate(process), rates.get(side, 0))
            numbers = ([(way, i) for i in range(count)] for way, (_, count, _) in ways.items())
            for turn in zip_longest(*numbers):
                for key in filter(None, turn):
                    times.setdefault(key, []).append(ways[key[0]][0].timed("batch", *key)[1:])
        ours.end()
        reference.end()
    weights = theirs["weights"]

    real = sum(lengths)
    print(f"{len(lengths)} documents of {min(lengths)} to {max(lengths):,} tokens, {real:,} in all")
    columns = ("slots", "padding", "seconds", "CPU s", "real tokens/s", "of matrix rate")
    print("".join([f"\n{'':44}", *(f"{column:>16}" for column in columns)]))
    speed = {}
    for way, (process, count, slots) in ways.items():
        medians = (zip(*times[way, i], strict=True) for i in range(count))
        wall, cpu = np.sum([[statistics.median(x) for x in pair] for pair in medians], axis=0)
        speed[way] = real / wall
        share = 6 * weights * speed[way] / rates["jaxthd" if process is ours else "transformers"]
        cells = f"{slots:,}", f"{1 - real / slots:.1%}", f"{wall:.2f}", f"{cpu:.2f}", f"{speed[way]:,.0f}"
        print("".join([f"{way:44}", *(f"{cell:>16}" for cell in (*cells, f"{share:.0%}"))]))
    shown = ", ".join(f"{side} {rate / 1e9:.0f}" for side, rate in rates.items())
    print(
        f"\nMatrix rate, GFLOP/s: {shown}. Counted are {6 * weights / 1e6:.0f} MFLOP a token: the weights' "
        f"{weights / 1e6:.2f}M multiply-adds, three times."
    )
    losses, norms = zip(own["checked"], theirs["checked"], strict=True)
    print(
        f"First {CHECKED} documents: loss {losses[0]:.6f} and {losses[1]:.6f}, "
        f"{abs(losses[0] / losses[1] - 1):.0e} apart; "
        f"gradient norm {norms[0]:.6f} and {norms[1]:.6f}"
    )
    same = np.allclose([losses[0], norms[0]], [losses[1], norms[1]], rtol=1e-4)
    claims = [Claim("both sides have the same loss and gradient norm, to 1e-4", bool(same))]
    for way in theirs["ways"]:
        gain = speed["jaxthd, packed"] / speed[way]
        claims.append(Claim(f"jaxthd, packed: {gain:.2f} times {way} (more than 1)", gain > 1))
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
