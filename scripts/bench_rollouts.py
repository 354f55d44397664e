"""Speed of rollouts: places that are refilled, waiting for the longest answer, and a prompt for each answer.

    python scripts/bench_rollouts.py [--config configs/single.py] [--check]

Weights are random, but end tokens are so many that answers are of all lengths. Every prompt is a recording
of noise with a question. All sides answer the same prompts, as often, at temperature 1, with as many answers
decoded at a time. Times are medians and include the features of recordings; the sides take turns.

    refilled    a group's prompt once; a place takes the next group when its answer has ended
    waiting     the same, but the next groups begin when all answers have ended
    one by one  every answer has a copy of its prompt, and waits for the longest (Generator)
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from jaxthd.config import Config, RolloutConfig
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.config_file import load_config
from jaxthd.inference.generator import Generator
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh
from jaxthd.rl.rollouts import TOKENS_AT_ONCE, Rollouts
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState, init_state
from scripts.benchmark import Claim, benchmark, by_turns, conclude, show

ROOT = Path(__file__).parents[1]
ENDS = 12
"""One of so many tokens of the vocabulary ends an answer."""


class Work(NamedTuple):
    """What a side did. slots: of prompts that it prefilled."""

    tokens: int
    slots: int


def questions(count: int) -> list[Example]:
    """Recordings of a second or two, and a line of text."""
    rng = np.random.default_rng(0)

    def asked() -> tuple[Samples, str]:
        samples = rng.normal(0, 0.1, int(rng.uniform(1, 2) * SAMPLE_RATE))
        return Samples(samples.astype(np.float32), SAMPLE_RATE), "word " * int(rng.integers(4, 17))

    return [Example(str(n), (Turn("user", asked()),)) for n in range(count)]


def sized(config: Config, options: argparse.Namespace) -> Config:
    """A page has room for half of the groups that are decoded at a time."""
    mesh, groups = config.mesh, options.at_once // options.group_size // 2
    unit = SUBSAMPLING * mesh.audio_ranks
    longest = (config.model.audio_encoder.longest or 0) * mesh.audio_ranks
    data = replace(
        config.data, capacity=128 * groups, audio_capacity=unit * -(-max(longest, 208 * groups) // unit)
    )
    rollout = RolloutConfig(
        group_size=options.group_size, answers_at_once=options.at_once, max_new_tokens=options.new_tokens
    )
    return replace(config, data=data, rollout=rollout)


class Sides:
    """The three ways to draw the same answers."""

    def __init__(self, config: Config, options: argparse.Namespace) -> None:
        self.config, self.options = config, options
        self.mesh = make_mesh(config.mesh)
        self.state: TrainState = init_state(Blueprint(config), self.mesh)
        self.examples = questions(options.prompts)
        tokenizer = load_tokenizer(config.data.tokenizer)
        self.documents = SpeechDocuments(config, tokenizer, train=False)
        ends = tuple(range(0, config.model.llm.vocab_size, ENDS))
        self.rollouts = Rollouts(config, self.mesh, stop_ids=ends)
        self.generator = self._generator(ends)

    def _generator(self, ends: tuple[int, ...]) -> Generator:
        config, options = self.config, self.options
        copies = 2 * options.group_size
        data = replace(
            config.data,
            capacity=config.data.capacity * copies,
            audio_capacity=config.data.audio_capacity * copies,
        )
        sizes: dict[str, Any] = {"batch": options.at_once, "max_new_tokens": options.new_tokens}
        config = replace(config, data=data)
        return Generator(config, self.mesh, self.state.params, self.state.buffers, **sizes, stop_ids=ends)

    def prompts(self) -> list[Document]:
        return [self.documents.prompt(example) for example in self.examples]

    def refilled(self) -> Work:
        return self._drawn(self.prompts())

    def waiting(self) -> Work:
        groups, prompts = self.options.at_once // self.options.group_size, self.prompts()
        drawn = [self._drawn(prompts[n : n + groups]) for n in range(0, len(prompts), groups)]
        return Work(*map(sum, zip(*drawn, strict=True)))

    def _drawn(self, prompts: list[Document]) -> Work:
        """Draws answers to these prompts, each of which is prefilled once for its group."""
        drawn = self.rollouts.draw(self.state.params, self.state.buffers, prompts)
        return Work(sum(len(x.tokens) for group in drawn for x in group), sum(map(len, prompts)))

    def one_by_one(self) -> Work:
        size = self.options.group_size
        asked = [replace(e, key=f"{e.key}/{sample}") for e in self.examples for sample in range(size)]
        answers = self.generator.generate(asked, temperature=1.0, every=TOKENS_AT_ONCE)
        # The token that ends an answer was drawn too.
        tokens = sum(len(answer.tokens) + (answer.end == "stop") for answer in answers)
        return Work(tokens, size * sum(map(len, self.prompts())))


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, rounds=5)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "single.py")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=64, help="answers decoded together")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    config = sized(load_config(options.config), options)
    simulate_devices(config.mesh.devices)

    own = Sides(config, options)
    sides = {"refilled": own.refilled, "waiting": own.waiting, "one by one": own.one_by_one}
    works = {name: side() for name, side in sides.items()}
    ways = {name: [side] for name, side in sides.items()}
    seconds = by_turns(ways, options.rounds, wait=lambda done: None, warm_up=())
    rate = {name: work.tokens / seconds[name] for name, work in works.items()}
    rows = [
        (name, f"{work.slots:,}", f"{work.tokens:,}", f"{seconds[name]:.2f}", f"{rate[name]:,.0f}")
        for name, work in works.items()
    ]
    title = f"{options.config.name}: {options.group_size} answers to each of {options.prompts} prompts"
    show(title, "side|prompt slots|tokens drawn|seconds|tokens/s", rows)
    claims = [
        Claim(f"{gain:.2f} times as many tokens a second as {name}", gain > 1)
        for name, gain in ((name, rate["refilled"] / rate[name]) for name in ("waiting", "one by one"))
    ]
    shared = works["refilled"].slots / works["one by one"].slots
    claims.append(Claim(f"prompts take {shared:.3f} of the slots of copies", shared < 0.35))
    compiled = own.rollouts.programs.made
    claims.append(Claim(f"{compiled} programs for all rollouts", compiled == 3))
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
