"""Generation speed by batch size, and the number of programs compiled for prompts of all lengths.

    python scripts/bench_generate.py [--config configs/single.py] [--batches 1 4 16] [--check]

Weights are random; half of the prompts are recordings of noise. The time to the first token includes
features, encoder and prefill; a step decodes one token of every answer. Times are the median of three runs,
after one that compiles.
"""

import argparse
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from jaxthd.config import Config
from jaxthd.data.audio.features import SAMPLE_RATE
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.files.config_file import load_config
from jaxthd.inference.generator import Generator
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.terminal.tables import Claim, conclude, show

ROOT = Path(__file__).parents[1]
RUNS = 3


class Speed(NamedTuple):
    """first: seconds to the first token. step: seconds a step after the first, streamed. streamed, whole:
    tokens a second, fetched one by one or all at the end.
    """

    first: float
    step: float
    streamed: float
    whole: float


def made(config: Config, batch: int, new_tokens: int) -> Generator:
    """A generator whose buffers hold `batch` short prompts."""
    mesh, share = config.mesh, -(-batch // config.mesh.data)
    unit = SUBSAMPLING * mesh.audio_ranks
    frames = unit * -(-max(config.model.audio_encoder.chunk_frames * mesh.audio_ranks, 104 * share) // unit)
    data = replace(config.data, capacity=128 * share, audio_capacity=frames)
    config = replace(config, data=data)
    devices = make_mesh(mesh)
    state = init_state(Blueprint(config), devices)
    return Generator(config, devices, state.params, state.buffers, batch=batch, max_new_tokens=new_tokens)


def conversations(count: int) -> list[Example]:
    """Prompts of ragged lengths; every other one is a recording of up to a second."""
    rng = np.random.default_rng(count)

    def said(number: int) -> str | Samples:
        if number % 2:
            return "tell me " * int(rng.integers(1, 9))
        samples = rng.normal(0, 0.1, int(rng.uniform(0.2, 1) * SAMPLE_RATE))
        return Samples(samples.astype(np.float32), SAMPLE_RATE)

    return [Example(str(n), (Turn("user", (said(n),)),)) for n in range(count)]


def measure(generator: Generator, asked: list[Example]) -> Speed:
    """Times all prompts together; tokens are sampled, so that answers seldom end early."""

    def timed(every: int) -> tuple[float, float, int, int]:
        """(seconds to the first token, seconds in all, tokens, steps)."""
        start, first, tokens = time.perf_counter(), 0.0, Counter[int]()
        for delta in generator.stream(asked, temperature=1.0, every=every):
            first = first or time.perf_counter() - start
            tokens[delta.number] += len(delta.tokens)
        return first, time.perf_counter() - start, tokens.total(), max(tokens.values())

    first, seconds, tokens, steps = timed(1)
    _, whole, _, _ = timed(generator.max_new_tokens)
    return Speed(first, (seconds - first) / max(steps - 1, 1), tokens / seconds, tokens / whole)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "single.py")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    options = parser.parse_args(argv)
    config = load_config(options.config)
    simulate_devices(config.mesh.devices)

    speeds = {}
    for batch in options.batches:
        generator, asked = made(config, batch, options.new_tokens), conversations(batch)
        measure(generator, asked)
        runs = [measure(generator, asked) for _ in range(RUNS)]
        speeds[batch] = Speed(*map(median, zip(*runs, strict=True)))
    cells = [
        (batch, f"{1e3 * s.first:.1f}", f"{1e3 * s.step:.2f}", f"{s.streamed:,.0f}", f"{s.whole:,.0f}")
        for batch, s in speeds.items()
    ]
    columns = "batch|first token, ms|a step, ms|tokens/s, streamed|tokens/s"
    show(f"{options.config.name}: {options.new_tokens} new tokens an answer", columns, cells)

    capacity, compiled = generator.config.data.capacity, []
    lengths = [1, capacity // 7, capacity // 2, capacity - 8]
    for length in lengths:
        generator.generate([Example("", (Turn("user", ("a" * length,)),))], max_new_tokens=2)
        compiled.append(generator.compilations)
    rows = list(zip(lengths, compiled, strict=True))
    show(f"Prompts in a buffer of {capacity} tokens", "tokens|programs compiled", rows)

    least, most = options.batches[0], options.batches[-1]
    gain = speeds[most].whole / speeds[least].whole
    claims = [
        Claim(f"prompts of {lengths[0]} to {lengths[-1]} tokens: two programs", set(compiled) == {2}),
        Claim(f"{gain:.1f} times as many tokens a second in a batch of {most} as of {least}", gain > 1),
    ]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
