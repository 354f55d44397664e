"""What sharing a prompt among its answers saves: token slots, flops and time of a gradient step.

    python scripts/bench_shared_prompts.py [--check] [--prompt 145] [--answer 25] [--answers 8] [--rounds 5]

Groups of answers to one prompt are packed with the prompt's slots shared, and with the prompt written out
before every answer (posttraining.share_prompts). Both train on the same targets. Only the decoder is counted:
a recording is encoded once in either case.

Flops are those of loss and gradient, recomputing layers in the backward pass (compute.remat full), as XLA
counts them in the program compiled for a layer of each kind with the widths of Nemotron-3-Nano (nothing is
run). XLA counts a loop's body once. The loops over the loss have one turn here. Two remain, and what is
missing is added in closed form: attention's blocks, from the key intervals of the packed buffers; and the
scan's recurrence over scan chunks.

Times are medians of alternating steps of a small model, on one device. --check exits 1 when a claim fails:
slots and flops are to be at most 0.35 of prompts written out.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxthd.config import BlockSizes, ComputeConfig, Config, DataConfig, LLMConfig, ModelConfig
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.intervals import KeyIntervals, usual_queries
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.parallel.params import Buffer
from jaxthd.planning.program import compiled
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from scripts.benchmark import Claim, benchmark, by_turns, conclude, show
from tests.weights import random_state

WIDE = LLMConfig(
    pattern="M*-",
    vocab_size=4096,
    dim=2688,
    blocks={
        "-": MLP(inner=7424),
        "*": Attention(heads=32, kv_heads=2, head_dim=128),
        "M": Mamba2(heads=64, head_dim=64, state=128, groups=8),
    },
)
"""A layer of each kind. The MLP is as wide as the experts of a token. The vocabulary is small: its products
are equal on both sides, and with few layers they would weigh too much."""
SMALL = replace(
    WIDE,
    vocab_size=512,
    dim=256,
    blocks={
        "-": MLP(inner=1024),
        "*": Attention(heads=4, kv_heads=2, head_dim=64),
        "M": Mamba2(heads=8, head_dim=64, state=128, groups=2),
    },
)
"""For the times, on two cores."""
MOST = 0.35


class Groups(NamedTuple):
    """The size of the groups, and how many lie in a buffer. prompt, answer: tokens. answers: of a group."""

    prompt: int
    answer: int
    answers: int
    groups: int

    def slots(self, share_prompts: bool) -> int:
        of_group = (
            self.prompt - 1 + self.answers * (1 + self.answer)
            if share_prompts
            else self.answers * (self.prompt + self.answer)
        )
        return self.groups * of_group

    def batch(self, share_prompts: bool) -> Batch:
        rng = np.random.default_rng(0)
        length = self.prompt + self.answers * self.answer
        documents = [
            Document(
                str(number),
                rng.integers(4, 260, length).astype(np.int32),
                np.zeros(length, bool),
                np.arange(length) >= self.prompt,
                answers=(self.answer,) * self.answers,
            )
            for number in range(self.groups)
        ]
        sizes: dict[str, Any] = {"audio_capacity": 0, "max_documents": self.most_segments}
        capacity = self.slots(share_prompts)
        return pack_row(documents, capacity=capacity, **sizes, answers=True, share_prompts=share_prompts)[0]

    @property
    def most_segments(self) -> int:
        return self.groups * (1 + self.answers)

    def config(self, llm: LLMConfig) -> Config:
        supervised = self.groups * self.answers * self.answer
        return Config(
            model=ModelConfig(encoder=None, llm=llm, adapter_dim=0),
            compute=ComputeConfig(block_sizes=BlockSizes(loss=supervised, vocabulary=llm.vocab_size)),
            data=DataConfig(max_documents=self.most_segments),
        )


class Flops(NamedTuple):
    """Of loss and gradient. program: as XLA counts them. attention, states: what it leaves out of loops."""

    program: float
    attention: float
    states: float


def flops(config: Config, batch: Batch) -> Flops:
    llm, compute = config.model.llm, config.compute
    _, *states = nnx.split(Blueprint(config).model, nnx.Param, Buffer)
    given = *map(nnx.to_pure_dict, states), batch
    program = compiled(loss_and_gradient(Blueprint(config), make_mesh(config.mesh)), *given)
    attention, scan = llm.blocks["*"].attention(1), llm.blocks["M"].scan(1)
    assert attention
    assert scan
    # Forward, forward again and backward: 2 + 2 + 5 products of a block's queries and keys.
    pairs = compute.blocks.attention * usual_queries(compute.blocks.attention)
    block = 9 * 2 * pairs * attention.heads * attention.key_dim
    more_blocks = sum(max(0, blocks - 1) for blocks in executed_blocks(config, batch))
    # A product and a sum for each number of the state, also 2 + 2 and about twice that backward.
    turns = -(-batch.tokens.shape[1] // compute.blocks.scan) - 1
    state = 8 * scan.heads * scan.head_dim * scan.state
    kinds = llm.letters
    return Flops(
        float(program.cost_analysis()["flops"]),
        float(kinds.count("*") * more_blocks * block),
        float(kinds.count("M") * turns * state),
    )


def executed_blocks(config: Config, batch: Batch) -> list[int]:
    """Pairs of a query block and a key block that each call of attention computes."""
    given = batch.segment_ids, batch.positions, batch.prefixes
    segments = make_segments(
        *jax.tree.map(jnp.asarray, given),
        block=config.compute.blocks.attention,
        axis=None,
        documents=config.data.max_documents,
    )
    calls: list[KeyIntervals] = [segments.keys.local]
    if segments.prefixes is not None:
        calls.append(segments.prefixes.keys.local)
    return [int(call.blocks.sum()) for call in calls]


def milliseconds(config: Config, batches: list[Batch], rounds: int) -> list[float]:
    """The median time of a gradient step on each batch; the batches take turns."""
    mesh = make_mesh(config.mesh)
    step = jax.jit(loss_and_gradient(Blueprint(config), mesh))
    params, buffers = random_state(Blueprint(config).model)[1:]
    ways = {str(i): [partial(step, params, buffers, put_batch(b, mesh))] for i, b in enumerate(batches)}
    return [1e3 * x for x in by_turns(ways, rounds, wait=jax.block_until_ready).values()]


def compare(groups: Groups, rounds: int) -> tuple[float, float]:
    """Prints the table; returns the ratios of slots and of flops, shared to written out."""
    batches = [groups.batch(share_prompts) for share_prompts in (True, False)]
    slots = [batch.tokens.size for batch in batches]
    counted = [flops(groups.config(WIDE), batch) for batch in batches]
    took = milliseconds(groups.config(SMALL), batches, rounds)
    rows: list[list[Any]] = [
        [name, size, *(f"{x / 1e9:.2f}" for x in (*of_step, sum(of_step))), f"{ms:.1f}"]
        for name, size, of_step, ms in zip(("shared", "written out"), slots, counted, took, strict=True)
    ]
    ratios = [a / b for a, b in (slots, map(sum, counted), took)]
    rows.append(["ratio", f"{ratios[0]:.3f}", "", "", "", f"{ratios[1]:.3f}", f"{ratios[2]:.3f}"])
    title = (
        f"{groups.groups} groups of {groups.answers} answers of {groups.answer} tokens to prompts of "
        f"{groups.prompt} (Gflop)"
    )
    show(title, "prompts|slots|program|+ attention|+ states|flops|ms", rows)
    return ratios[0], ratios[1]


def main() -> None:
    parser = benchmark(__doc__, rounds=5)
    parser.add_argument("--prompt", type=int, default=145)
    parser.add_argument("--answer", type=int, default=25)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="groups in a buffer")
    given = parser.parse_args()
    slots, flops_ = compare(Groups(given.prompt, given.answer, given.answers, given.groups), given.rounds)
    claims = [
        Claim(f"token slots are {slots:.3f} of those of prompts written out (at most {MOST})", slots <= MOST),
        Claim(f"flops are {flops_:.3f} of those of prompts written out (at most {MOST})", flops_ <= MOST),
    ]
    conclude(claims, check=given.check)


if __name__ == "__main__":
    main()
