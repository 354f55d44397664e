"""When a new model begins to use the audio, and what its loss consists of until then.

    python scripts/bench_listening.py

Trains the model of configs/first_run.py three times on the same recordings: on bytes, on words, and on words
with CTC. Every --every steps it scores each validation text twice: with its own recording, and with that of
the next text. A model that does not listen scores both alike. The loss is in nats a word, so that bytes and
words compare. It is divided into the tokens that choose (the first of each word, and the end of the text) and
those that spell (the others).
"""

import argparse
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthd.checkpoints.weights import Weights, start_state
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData, SynchronizedLoader
from jaxthd.data.example import Example
from jaxthd.data.loader import make_loader
from jaxthd.data.skipped import Skipped
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.config_file import load_config
from jaxthd.inference.scorer import DocumentScores, Scorer
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.run.startup import prepared, simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import make_train_step

BYTES_CAPACITY = 768
"""Slots of a buffer for bytes, so that it holds as many documents as one of 512 does for words."""


class Loss(NamedTuple):
    """Nats a word. own: with the text's own recording. other: with another's. choosing: its part in `own`."""

    own: float
    other: float
    choosing: float


def variants(steps: int) -> dict[str, Config]:
    """The three trainings, by name."""
    first = load_config(Path(__file__).parents[1] / "configs" / "first_run.py")
    words = replace(first, train=replace(first.train, steps=steps, ctc_loss=0.0))
    return {
        "bytes": replace(words, data=replace(words.data, tokenizer="bytes", capacity=BYTES_CAPACITY)),
        "words": words,
        "words and CTC": replace(words, train=replace(words.train, ctc_loss=first.train.ctc_loss)),
    }


def with_next_recording(examples: list[Example]) -> list[Example]:
    """Each text with the recording of the next; the last with that of the first."""
    shifted = [*examples[1:], examples[0]]
    return [
        replace(example, turns=(*after.turns[:-1], example.turns[-1]))
        for example, after in zip(examples, shifted, strict=True)
    ]


def chooses(scores: DocumentScores, space: int | None) -> np.ndarray:
    """Whether each scored token begins a word or ends the text. space: None where each word is one token."""
    positions = scores.positions
    if space is None:
        return np.ones(len(positions), bool)
    begins = scores.tokens[positions - 1] == space
    begins[0] = begins[-1] = True  # the first letter; the end
    return begins


def losses(config: Config, steps: int, every: int) -> dict[int, Loss]:
    """Trains, and returns the losses by step."""
    config = prepared(config)
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    space = load_tokenizer("bytes").encode(" ")[0] if config.data.tokenizer == "bytes" else None
    train_step, scorer = make_train_step(blueprint, mesh), Scorer(blueprint, mesh)
    state = start_state(blueprint, mesh)
    found: dict[int, Loss] = {}
    with tempfile.TemporaryDirectory() as folder, closing(SpeechData(config, Path(folder))) as data:
        own = list(data.validation_examples(config.data.validation_sets[0].name))
        sets = [
            [data.validation_document(e) for e in examples] for examples in (own, with_next_recording(own))
        ]
        words = sum(len(str(part).split()) for e in own for part in e.turns[-1].parts)

        def nats_a_word(documents: list[Document | Skipped]) -> tuple[float, float]:
            """(of all tokens, of those that choose)."""
            rows = make_loader([documents], lambda document, epoch: document, config, repeat=False)
            total = choosing = 0.0
            with SynchronizedLoader(rows, data.skipped) as loader:
                for scores in scorer(Weights(state.params, state.buffers), loader):
                    total -= scores.log_probs.sum()
                    choosing -= scores.log_probs[chooses(scores, space)].sum()
            return total / words, choosing / words

        with closing(data.training()) as batches:
            for step in range(1, steps + 1):
                state, _ = train_step(state, put_batch(next(batches)[0], mesh))
                if step % every == 0:
                    (all_own, choosing), (all_other, _) = map(nats_a_word, sets)
                    found[step] = Loss(all_own, all_other, choosing)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    simulate_devices(1)
    for name, config in variants(options.steps).items():
        found = losses(config, options.steps, options.every)
        print(f"\n{name}: nats a word", flush=True)
        print("step | own recording | another's | what listening gains | of own: choosing | spelling")
        for step, (own, other, choosing) in found.items():
            gain, spelling = other - own, own - choosing
            print(f"{step} | {own:.2f} | {other:.2f} | {gain:.2f} | {choosing:.2f} | {spelling:.2f}")
        first = next((step for step, loss in found.items() if loss.other - loss.own >= 1), "later")
        print(f"{name}: first step at which listening gains 1 nat a word: {first}", flush=True)


if __name__ == "__main__":
    main()
