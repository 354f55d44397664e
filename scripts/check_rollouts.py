"""How far log-probabilities recorded while answers are drawn lie from those that training computes.

    python scripts/check_rollouts.py [--config configs/single.py] [--dtypes float64 float32 bfloat16]

On five meshes, at temperature 0.8 and top-p 0.9, with refilled places; weights are random. Answers are
scored on the mesh that drew them, packed as training packs documents; then once more with the documents in
the reverse order, which shows what rounding alone does. The figures are the largest differences over all
tokens drawn.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxthd.config import Config, MeshConfig, RolloutConfig
from jaxthd.data.audio.features import SAMPLE_RATE
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.data.packer import pack_documents
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.config_file import load_config
from jaxthd.ops.sampling import make_sampling
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.rl.rollouts import Rollout, Rollouts
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import init_state
from jaxthd.terminal.tables import Claim, conclude, show

ROOT = Path(__file__).parents[1]
MESHES = {
    "one device": MeshConfig(),
    "data 2": MeshConfig(data=2),
    "context 2": MeshConfig(context=2),
    "pipeline 2": MeshConfig(pipeline=2),
    "tensor 2": MeshConfig(tensor=2),
}
BOUNDS = {"float64": 1e-10, "float32": 3e-5}
PROMPTS, GROUP, ROWS = 8, 4, 8
ENDS = 16
"""One of so many tokens of the vocabulary ends an answer."""


class Differences(NamedTuple):
    """log_probs: under the temperature. drawn: under what drew the token, where scoring keeps it. dropped:
    tokens that it does not keep. order: of scoring against scoring in another order. tokens, refills: what
    was drawn.
    """

    log_probs: float
    drawn: float
    dropped: int
    order: float
    tokens: int
    refills: int


def run_config(config: Config, mesh: MeshConfig, dtype: Any) -> Config:
    chunk = config.model.audio_encoder.chunk_frames
    data = replace(
        config.data,
        capacity=640,
        max_documents=8,
        rows=ROWS,
        audio_capacity=max(chunk, 800) * mesh.audio_ranks,
    )
    rollout = RolloutConfig(
        group_size=GROUP,
        answers_at_once=4 * GROUP,
        tokens_at_once=4,
        max_new_tokens=32,
        temperature=0.8,
        top_p=0.9,
    )
    compute = replace(config.compute, dtype=dtype)
    train = replace(config.train, microbatches=1)
    return replace(config, mesh=mesh, data=data, rollout=rollout, compute=compute, train=train)


def questions(config: Config) -> list[Document]:
    """Every other one has a recording."""
    rng = np.random.default_rng(0)
    documents = SpeechDocuments(config, load_tokenizer(config.data.tokenizer), train=False)

    def asked(number: int) -> tuple[Samples | str, ...]:
        text = "word " * int(rng.integers(1, 12))
        samples = rng.normal(0, 0.1, int(rng.uniform(0.3, 1.8) * SAMPLE_RATE)).astype(np.float32)
        return (Samples(samples, SAMPLE_RATE), text) if number % 2 else (text,)

    return [documents.prompt(Example(str(n), (Turn("user", asked(n)),))) for n in range(PROMPTS)]


def answered(key: str, prompt: Document, answer: Rollout) -> Document:
    n, before = len(answer.tokens), np.zeros(len(prompt), bool)
    return Document(
        key,
        np.append(prompt.tokens, answer.tokens),
        np.append(prompt.is_audio, np.zeros(n, bool)),
        np.append(before, np.ones(n, bool)),
        prompt.chunks,
    )


class Check:
    """Draws and scores on one mesh in one dtype."""

    def __init__(self, config: Config) -> None:
        self.config, self.mesh = config, make_mesh(config.mesh)
        blueprint = Blueprint(config)
        state = init_state(blueprint, self.mesh)
        self.weights = state.params, state.buffers
        rollout, ends = config.rollout, tuple(range(0, config.model.llm.vocab_size, ENDS))
        self.rollouts = Rollouts(config, self.mesh, stop_ids=ends)
        sampling = make_sampling(rollout.temperature, rollout.top_k, rollout.top_p, config.compute.dtype)
        self.step = make_scoring_step(
            blueprint, self.mesh, temperature=rollout.temperature, drawn_by=sampling
        )

    def scored(self, documents: Sequence[Document]) -> dict[str, np.ndarray]:
        """By key, [2, n]: log-probabilities of the answer's tokens, and the drawn ones."""
        pack = pack_documents(self.config)
        rows = [pack.row(documents[row::ROWS]) for row in range(ROWS)]
        batch, found = concatenate_rows([row.batch for row in rows]), {}
        scores = self.step(*self.weights, put_batch(batch, self.mesh))
        both = np.stack([np.asarray(scores.log_probs), np.asarray(scores.drawn_log_probs)])
        for number, row in enumerate(rows):
            each = ContextLayout.of(self.config).document_slots(batch.segment_ids[number])
            for key, slots in zip(row.report.keys, each, strict=True):
                found[key] = both[:, number, slots[batch.weights[number, slots] > 0]]
        return found

    def differences(self) -> Differences:
        prompts = questions(self.config)
        groups = self.rollouts.draw(*self.weights, prompts)
        answers = {
            f"{n}/{sample}": (prompts[n], answer)
            for n, group in enumerate(groups)
            for sample, answer in enumerate(group)
        }
        documents = [answered(key, *pair) for key, pair in answers.items()]
        scores, backwards = self.scored(documents), self.scored(documents[::-1])
        recorded = np.concatenate(
            [np.stack([answer.log_probs, answer.drawn_log_probs]) for _, answer in answers.values()], axis=1
        )
        given, again = (np.concatenate([x[key] for key in answers], axis=1) for x in (scores, backwards))
        off, is_kept = np.abs(given - recorded), np.isfinite(given[1])
        return Differences(
            off[0].max(),
            off[1, is_kept].max(),
            int((~is_kept).sum()),
            np.abs(given[0] - again[0]).max(),
            recorded.shape[1],
            self.rollouts.counts.refills,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "single.py")
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32", "bfloat16"])
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    options = parser.parse_args(argv)
    config = load_config(options.config)
    simulate_devices(2)

    rows, claims = [], []
    for dtype in options.dtypes:
        largest = 0.0
        for name in options.meshes:
            with jax.enable_x64(dtype == "float64"):
                found = Check(run_config(config, MESHES[name], dtype)).differences()
            figures = f"{found.log_probs:.1e}", f"{found.drawn:.1e}", found.dropped, f"{found.order:.1e}"
            rows.append((dtype, name, *figures, found.tokens, found.refills))
            largest = max(largest, found.log_probs, found.drawn)
        bound = BOUNDS.get(dtype)
        if bound:
            claims.append(Claim(f"{dtype}: recorded as scored, to {largest:.1e}", largest <= bound))
    columns = "dtype|mesh|temperature|top-p too|not kept|scoring, another order|tokens|refills"
    show(f"{options.config.name}: largest differences of log-probabilities", columns, rows)
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
