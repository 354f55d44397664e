"""Log-probabilities of given documents' tokens, and what else was likely in their places.

    python -m jaxthd.score --config configs/cp2.py --weights runs/cp2 --manifest dev.jsonl \\
        --out scores.jsonl [--top-k 5] [--every-token]

Documents are packed and scored on the config's mesh, whatever that is; a document gets what it would get
alone. Scored are the tokens that training would supervise (the assistant's turns), or every text token but
the first. Weights: as jaxthd.evaluate. A line of --out is a document, in the manifest's order:
    key             its line number and name
    log_prob        natural log, summed over the tokens scored
    tokens          ids of all its tokens; a recording is as many placeholders as the encoder makes frames
    positions       which of them are scored
    log_probs       of these, given all tokens before
    top_ids, top_log_probs    the --top-k likeliest tokens in each place, of equals the lowest id first
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Int32

from jaxthd.checkpoints.weights import Weights, load_model, training_weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData, SynchronizedLoader
from jaxthd.data.loader import make_loader
from jaxthd.data.skipped import SkipLog
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.jsonl import write_lines
from jaxthd.kernels.xla_options import jit_for
from jaxthd.ops.cross_entropy import TokenScores
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.layout import document_slots
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.parallel.processes import is_first
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.terminal.command_line import PROCESS_OPTIONS, parse_command_line, ready

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"nargs": "+", "help": "the workdir of a run, or published checkpoints (as train.init_from)"},
    "manifest": {"help": "what is scored, as data.manifest names it"},
    "out": {"type": Path, "help": "JSONL file for the scores"},
    "top-k": {"type": int, "default": 0, "help": "likeliest tokens told for each place, 0 by default"},
    "every-token": {"action": "store_true", "help": "score every text token, not the supervised ones"},
    **PROCESS_OPTIONS,
}


class DocumentScores(NamedTuple):
    """tokens: the document's, with placeholders for its audio. positions: of the s tokens scored, rising.

    log_probs: of these tokens, given all before. top_ids, top_log_probs: the k likeliest in their places, the
    likeliest first, of equals the lowest id.
    """

    key: str
    tokens: Int32[np.ndarray, " n"]
    positions: Int[np.ndarray, " s"]
    log_probs: Float[np.ndarray, " s"]
    top_ids: Int32[np.ndarray, "s k"]
    top_log_probs: Float[np.ndarray, "s k"]


class Scorer:
    """Scores the documents of packed batches; compiled once.

    top_k: at most model.llm.vocab_size (ValueError). every_token: all text tokens but each document's first,
    in place of the supervised ones.
    """

    def __init__(self, config: Config, mesh: Mesh, *, top_k: int = 0, every_token: bool = False) -> None:
        self._config, self._mesh, self._every_token = config, mesh, every_token
        scores = make_scoring_step(Blueprint(config), mesh, top_k)

        def run(params: Tree, buffers: Tree, batch: Batch) -> tuple[TokenScores, tuple[Any, ...]]:
            return scores(params, buffers, batch), (batch.tokens, batch.weights, batch.segment_ids)

        # To every process, with the tokens of rows that it does not read.
        self._step = jit_for(config, mesh, run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, weights: Weights, batches: SynchronizedLoader) -> Iterator[DocumentScores]:
        """weights: in their training form. Of several processes all call it, and get the same."""
        for batch, report in batches:
            batch = supervising_every_token(batch, self._config) if self._every_token else batch
            on_mesh = put_batch(batch, self._mesh)
            found = jax.tree.map(np.asarray, self._step(weights.params, weights.buffers, on_mesh))
            scores, (tokens_RT, weights_RT, ids_RT) = found
            for row, keys in enumerate(batches.keys(report)):
                places = _slots(ids_RT[row], self._config)
                for key, slots in zip(keys, places, strict=True):
                    at = np.flatnonzero(weights_RT[row][slots])
                    of_document = (x[row][slots[at]] for x in scores)
                    yield DocumentScores(key, tokens_RT[row][slots], at + 1, *of_document)


def _slots(segment_ids: Int32[np.ndarray, " T"], config: Config) -> list[Int[np.ndarray, "..."]]:
    context, layout = config.mesh.context, config.compute.context_layout
    return document_slots(segment_ids, context, layout, config.data.round_to)


def supervising_every_token(batch: Batch, config: Config) -> Batch:
    """A host batch in which every position supervises whose next token is text of the same document."""
    targets, weights = np.zeros_like(batch.targets), np.zeros_like(batch.weights)
    for row, ids in enumerate(batch.segment_ids):
        for slots in _slots(ids, config):
            at, after = slots[:-1], slots[1:]
            is_text = ~batch.is_audio[row, after]
            weights[row, at] = is_text
            targets[row, at] = np.where(is_text, batch.tokens[row, after], 0)
    return batch._replace(targets=targets, weights=weights)


def score(
    config: Config,
    weights: Weights | Sequence[str | Path],
    documents: Sequence[Document],
    *,
    top_k: int = 0,
    every_token: bool = False,
) -> list[DocumentScores]:
    """Of each document, in their order. Of several processes all call it with the same, and get the same.

    weights: in the canonical form, or sources as jaxthd.checkpoints.weights.load_weights takes them. config: validated.
    top_k, every_token: see Scorer.
    Raises UserError where two documents have one key, and where one does not fit the config's buffers.
    """
    number = {document.key: n for n, document in enumerate(documents)}
    if len(number) < len(documents):
        raise UserError(
            f"{len(documents)} documents have {len(number)} keys; expected a key of its own for each, by "
            "which its scores are known: rename some"
        )

    def refuse(key: str, reason: str) -> None:
        raise UserError(f"document {key!r} cannot be scored: {reason}; change the config, or leave it out")

    mesh = make_mesh(config.mesh)
    loader = make_loader(
        [documents],
        _as_it_is,
        config,
        rows=local_rows(mesh, config.data.rows),
        repeat=False,
        shuffle=False,
        on_skip=refuse,
    )
    with SynchronizedLoader(loader, SkipLog(Path(), writes=False)) as batches:
        found = Scorer(config, mesh, top_k=top_k, every_token=every_token)(
            _on_mesh(weights, config, mesh), batches
        )
        return sorted(found, key=lambda scores: number[scores.key])


def _as_it_is(document: Document, epoch: int) -> Document:
    return document


def _on_mesh(weights: Weights | Sequence[str | Path], config: Config, mesh: Mesh) -> Weights:
    if isinstance(weights, Weights):
        return training_weights(weights, config, mesh)
    return load_model(weights, config, mesh)


def score_manifest(
    config: Config,
    weights: Weights | Sequence[str | Path],
    manifest: str,
    folder: Path,
    *,
    top_k: int = 0,
    every_token: bool = False,
) -> Iterator[DocumentScores]:
    """As score, of a manifest's documents one by one, in its order. Those skipped are listed, with the
    reason, in folder/skipped.jsonl.
    """
    config = replace(config, data=replace(config.data, validation_manifest=f"scored={manifest}"))
    mesh = make_mesh(config.mesh)
    scorer = Scorer(config, mesh, top_k=top_k, every_token=every_token)
    with closing(SpeechData(config, folder, training=False)) as data:
        on_mesh = _on_mesh(weights, config, mesh)
        keys = [example.key for example in data.validation_examples("scored")]
        with closing(data.validation(local_rows(mesh, config.data.rows))) as batches:
            yield from in_order(keys, scorer(on_mesh, batches), data.is_skipped)
        if is_first() and len(data.skipped):
            print(f"{len(data.skipped)} documents skipped are listed in {data.skipped.path}")


def in_order(
    keys: Iterable[str], found: Iterable[DocumentScores], is_skipped: Callable[[str], bool]
) -> Iterator[DocumentScores]:
    """What is found, in the order of the keys. is_skipped: nothing will be found for this key.

    Packing changes the order by a few buffers; as many documents wait here.
    """
    rest = iter(keys)
    wanted, waiting = next(rest, None), {}
    for scores in found:
        waiting[scores.key] = scores
        while wanted is not None and (wanted in waiting or is_skipped(wanted)):
            if wanted in waiting:
                yield waiting.pop(wanted)
            wanted = next(rest, None)
    for key in (wanted, *rest):
        if key in waiting:
            yield waiting.pop(key)


def main(argv: list[str] | None = None) -> None:
    config, _, options = parse_command_line("score", argv, OPTIONS)
    missing = [f"--{name}" for name in ("weights", "manifest", "out") if not getattr(options, name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} missing; expected --weights SOURCE --manifest FILE --out FILE: add them"
        )
    entries, vocabulary = config.model.llm.vocab_size, "model.llm.vocab_size"
    if not 0 <= options.top_k <= entries:
        raise UserError(f"--top-k is {options.top_k}; expected 0 to {entries} ({vocabulary}): correct it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ready(config, options) as config:
        found = score_manifest(
            config.without_mtp,
            options.weights,
            options.manifest,
            options.out.parent,
            top_k=options.top_k,
            every_token=options.every_token,
        )
        totals = np.zeros(3)
        lines = (_line(scores, totals) for scores in found)
        if is_first():
            write_lines(options.out, lines)
        else:
            for _ in lines:
                pass
        documents, tokens, log_prob = totals
        mean = f"{log_prob / tokens:.4f}" if tokens else "-"
        print(f"{documents:,.0f} documents, {tokens:,.0f} tokens scored, mean log-probability {mean}")
        print(options.out)


def _line(scores: DocumentScores, totals: np.ndarray) -> dict[str, Any]:
    """Adds to totals: documents, tokens, log-probability."""
    log_prob = float(scores.log_probs.sum(dtype=np.float64))
    totals += 1, len(scores.positions), log_prob
    line = {
        "key": scores.key,
        "log_prob": round(log_prob, 6),
        "tokens": scores.tokens.tolist(),
        "positions": scores.positions.tolist(),
        "log_probs": _rounded(scores.log_probs),
    }
    if scores.top_ids.shape[1]:
        line |= {"top_ids": scores.top_ids.tolist(), "top_log_probs": _rounded(scores.top_log_probs)}
    return line


def _rounded(x: np.ndarray) -> list[Any]:
    """To what float32 holds of numbers about 1."""
    return np.round(x.astype(np.float64), 7).tolist()


if __name__ == "__main__":
    with readable_errors():
        main()
