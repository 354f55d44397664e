"""Speed of generation that drafts with multi-token prediction, and without.

    python scripts/bench_drafting.py runs/my [--tokens 1 2 3] [--recordings 64] [--batch 8] [--check]

runs/my is a run that was trained with multi-token prediction, such as

    jaxthd train configs/first_run.py --workdir runs/my --model.llm.mtp-pattern "*-" \
        --model.llm.mtp-depths 2 --train.mtp-loss 0.3

All sides answer the first recordings of its validation set, at temperature 0 and at 1. Prompts are made
before. Times are medians, encoding and prefill included; the sides take turns.
"""

import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd import load, load_config
from jaxthd.config import Config
from jaxthd.data.example import Turn
from jaxthd.data.sources.registry import read_source, validation_sources
from jaxthd.inference.generator import Generator
from jaxthd.packing.document import Document
from scripts.benchmark import Claim, benchmark, by_turns, changed, conclude, show

GAIN = 1.3
"""Times as many answers a second as without, that drafting should give with trained heads."""


def prompts(generator: Generator, config: Config, most: int) -> list[Document]:
    """The validation set's recordings, each without its answer."""
    source = next(iter(validation_sources(config.data).values()))
    examples = read_source(source, config.data)[0][:most]
    asked = [replace(x, turns=tuple[Turn, ...](x.turns[:-1])) for x in examples]
    return [generator.prompt(x) for x in asked]


def tokens_of(generator: Generator, documents: list[Document], temperature: float) -> list[tuple[int, ...]]:
    """The answers' tokens."""
    return [x.tokens for x in generator.generate(documents, temperature=temperature)]


def compared(
    generators: dict[str, Generator], documents: list[Document], options: Namespace, temperature: float
) -> list[Claim]:
    """Shows the sides' figures at a temperature."""
    ways: dict[str, Any] = {
        name: partial(tokens_of, generator, documents, temperature) for name, generator in generators.items()
    }
    answers = {name: way() for name, way in ways.items()}
    seconds = by_turns(
        {name: [way] for name, way in ways.items()}, options.rounds, wait=lambda done: None, warm_up=()
    )
    plain, *drafting = generators
    rows = []
    for name, generator in generators.items():
        drafted, number = generator.drafted, sum(map(len, answers[name]))
        share = drafted.accepted / max(drafted.tokens, 1)
        rows.append(
            (
                name,
                f"{number:,}",
                f"{share:.1%}",
                f"{seconds[name]:.2f}",
                f"{number / seconds[name]:,.0f}",
                f"{seconds[plain] / seconds[name]:.2f}",
            )
        )
    columns = "drafted tokens|tokens|accepted|seconds|tokens/s|times as fast"
    show(
        f"{options.run}, temperature {temperature:g}: {len(documents)} recordings, {options.batch} at a time",
        columns,
        rows,
    )
    best = max(seconds[plain] / seconds[name] for name in drafting)
    return [
        Claim(
            f"at temperature {temperature:g} all sides give the same answers",
            all(x == answers[plain] for x in answers.values()),
        ),
        Claim(
            f"at temperature {temperature:g} drafting is {best:.2f} times as fast (at least {GAIN})",
            best >= GAIN,
        ),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, rounds=5)
    parser.add_argument("run", help="workdir of a run with multi-token prediction")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3], help="drafted at a time")
    parser.add_argument("--recordings", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="answered together")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    config = load_config(options.run)
    generators = {}
    for tokens in (0, *options.tokens):
        sizes = {"batch": options.batch, "max_new_tokens": options.new_tokens}
        drafting = changed(config, [f"compute.num_speculative_tokens={tokens}"])
        generators[str(tokens)] = load(options.run, drafting, **sizes).generator
    documents = prompts(generators["0"], config, options.recordings)
    claims = [x for t in (0.0, 1.0) for x in compared(generators, documents, options, t)]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
