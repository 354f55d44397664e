"""Answers packed into rows by hand, and objectives run on them as the training step does.

The arrays are written slot by slot here, not by jaxthd's packer, and tokens may lie on any context rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxthd.objectives import LOSS, Objective, Tokens

MAX_DOCUMENTS = 12


class Answer(NamedTuple):
    """numbers: of each of its tokens, by name; "policy" are the log-probabilities."""

    numbers: Mapping[str, Sequence[float]]

    def __len__(self) -> int:
        return len(self.numbers["policy"])


class Prompted(NamedTuple):
    """A document: the length of its prompt, and the answers to it."""

    prompt: int
    answers: Sequence[Answer]


class Packed(NamedTuple):
    """Arrays [R, T] as Tokens has them. slots: (row, slots) of each answer's targets, in order."""

    log_probs: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    document_ids: np.ndarray
    positions: np.ndarray
    extras: dict[str, np.ndarray]
    slots: list[tuple[int, np.ndarray]]

    def of_answers(self, x_RT: np.ndarray) -> list[np.ndarray]:
        return [x_RT[row, slots] for row, slots in self.slots]


def packed(rows: Sequence[Sequence[Prompted]], capacity: int, *, shared: bool, seed: int | None) -> Packed:
    """shared: whether answers share their prompt's slots. seed: of a random order of each row's slots; None
    keeps them in order. Unsupervised slots hold numbers that no objective may read, NaN included.
    """
    names = {name for row in rows for document in row for a in document.answers for name in a.numbers}
    ids = np.zeros((3, len(rows), capacity), np.int32)
    numbers = {name: np.full((len(rows), capacity), np.nan) for name in names}
    numbers["policy"][:] = 0
    weights, slots = np.zeros((len(rows), capacity)), []
    for r, row in enumerate(rows):
        order = np.arange(capacity) if seed is None else np.random.default_rng(seed + r).permutation(capacity)
        start = segment = 0
        for d, document in enumerate(row, 1):
            before = 1 if shared else document.prompt
            lengths = [document.prompt - 1] * (shared and document.prompt > 1)
            for n in [*lengths, *(before + len(answer) for answer in document.answers)]:
                segment += 1
                ids[:2, r, order[start : start + n]] = [[segment], [d]]
                ids[2, r, order[start : start + n]] = np.arange(n)
                start += n
            ends = start - np.cumsum([0, *(before + len(a) for a in document.answers[::-1])])[:-1]
            for answer, end in zip(document.answers, ends[::-1], strict=True):
                where = order[end - len(answer) - 1 : end - 1]
                weights[r, where] = 1
                for name, x in answer.numbers.items():
                    numbers[name][r, where] = x
                slots.append((r, where))
        assert start <= capacity
        assert segment <= MAX_DOCUMENTS
        for name, x in numbers.items():
            if name != "policy":
                x[r, ids[0, r] == 0] = 0
    return Packed(numbers.pop("policy"), weights, *ids, numbers, slots)


class Found(NamedTuple):
    """quotients: by name, the extremes included. gradient: of the loss with respect to the
    log-probabilities."""

    quotients: dict[str, Any]
    gradient: Any


def run(
    objectives: Sequence[Objective], batch: Packed, *, context: int | None = None, microbatches: int = 1
) -> list[Found]:
    """Each objective on the batch, in float64, in one program.

    context: ranks of the context axis, or None for no mesh. Every rank differentiates its own share.
    """
    axis = None if context is None else "context"

    def over_ranks(x: Any) -> Any:
        return x if axis is None else jax.lax.psum(x, axis)

    def on_rank(batch: Packed) -> list[Found]:
        def tokens(rows: slice, totals: dict[str, Any]) -> Tokens:
            extras = {name: x[rows] for name, x in batch.extras.items()}
            arrays = (x[rows] for x in batch[1:5])
            return Tokens(*arrays, extras, MAX_DOCUMENTS, axis, totals)

        every, size = slice(None), len(batch.weights) // microbatches
        parts = [slice(m * size, (m + 1) * size) for m in range(microbatches)]
        found = []
        for objective in objectives:
            counts = over_ranks(objective.counts(tokens(every, {})))
            totals = over_ranks(objective.totals(tokens(every, {})))

            def share(logp_RT: Any, rows: slice, o: Any = objective, c: Any = counts, t: Any = totals) -> Any:
                sums = o.sums(logp_RT, tokens(rows, t))
                each = {name: x / jnp.maximum(c.get(name, c[LOSS]), 1) for name, x in sums.items()}
                return each[LOSS], (each, o.extremes(logp_RT, tokens(rows, t)))

            out = [jax.value_and_grad(share, has_aux=True)(batch.log_probs[rows], rows) for rows in parts]
            (_, (first, extremes)), _ = out[0]
            quotients = {name: over_ranks(sum(x[0][1][0][name] for x in out)) for name in first}
            for name in extremes:
                largest = jnp.stack([x[0][1][1][name] for x in out]).max()
                quotients[name] = largest if axis is None else jax.lax.pmax(largest, axis)
            found.append(Found(quotients, jnp.concatenate([gradient for _, gradient in out])))
        return found

    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, batch._replace(slots=[]))
        program: Any = on_rank
        if context is not None:
            mesh = jax.make_mesh((context,), ("context",), axis_types=(AxisType.Auto,))
            by_slot: Any = PartitionSpec(None, "context")
            out = [Found(PartitionSpec(), by_slot)] * len(objectives)  # type: ignore[arg-type]
            program = jax.shard_map(on_rank, mesh=mesh, in_specs=(by_slot,), out_specs=out, check_vma=False)
        return jax.device_get(jax.jit(program)(arrays))
