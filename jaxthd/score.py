"""Log-probabilities of given documents' tokens, and of the likeliest tokens at their positions.

    jaxthd score runs/my --manifest dev.jsonl --out scores.jsonl
    jaxthd score runs/my@best --manifest dev.jsonl --out scores.jsonl --top-k 5 --every-token

Documents are packed and scored on the config's mesh; neither changes a document's scores. Scored are the
tokens that training would supervise (the assistant's turns), or with --every-token all text tokens but the
first. --out receives a line for each document, in the manifest's order:
    key             its line number and name
    text            that of the scored tokens
    log_prob        natural log, summed over the scored tokens
    tokens          ids of all its tokens; a recording is as many placeholders as the encoder makes frames
    positions       the scored tokens, as indices of `tokens`
    texts           their texts, each token's by itself
    log_probs       their log-probabilities, given all tokens before
    top_ids         the --top-k likeliest tokens at each position, of equals the lowest id first
    top_texts, top_log_probs    their texts and log-probabilities
    answers         of a preference line: text, log_prob and number of tokens of each of its answers

The terminal gets a table of the documents that are least likely for each token. Documents that were skipped
are listed beside --out, in OUT.skipped.jsonl.

Several processes score together as they train together (jaxthd.train).
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.model import Model, check_scored
from jaxthd.inference.scorer import DocumentScores, in_order
from jaxthd.parallel.mesh import local_rows
from jaxthd.parallel.processes import is_first
from jaxthd.planning.sizes import with_room
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.startup import check, devices_ready
from jaxthd.terminal.arguments import PROCESS_OPTIONS, WEIGHTS, parse_command_line
from jaxthd.terminal.tables import clipped, printable, table

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "manifest": {"metavar": "FILE", "help": "the documents to score, as in data.manifest"},
    "out": {"type": Path, "metavar": "FILE", "help": "JSONL file for the scores"},
    "top-k": {
        "type": int,
        "metavar": "K",
        "default": 0,
        "help": "likeliest tokens given for each position, 0 by default",
    },
    "every-token": {"action": "store_true", "help": "score every text token, not only the supervised ones"},
    **PROCESS_OPTIONS,
}
ROWS = 10
"""Most documents in the table."""
COLUMNS = "document|tokens|log-prob|a token|text"


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("score", argv, OPTIONS, __doc__)
    config, options, weights = line.config, line.options, line.weights()
    line.require("manifest", "out")
    entries = config.model.llm.vocab_size
    if not 0 <= options.top_k <= entries:
        raise UserError(f"--top-k is {options.top_k}; expected 0 to {entries} (model.llm.vocab_size)")
    skipped, folder = options.out.with_suffix(".skipped.jsonl"), options.out.parent
    new = RemovedOnFailure(options.out, skipped)
    with devices_ready(config.mesh, options), new:
        outputs, summary = OutputFolder(folder), Summary()
        tokenizer = load_tokenizer(config.data.tokenizer)
        scores = score_manifest(
            config,
            weights,
            options.manifest,
            skipped,
            top_k=options.top_k,
            every_token=options.every_token,
        )
        lines = (score_line(of_document, tokenizer) for of_document in scores)
        outputs.write_lines(options.out.name, map(summary.noted, lines))
        print(summary.text(shutil.get_terminal_size().columns))
        print(options.out)


def score_manifest(
    config: Config,
    weights: Weights | Sequence[str | Path],
    manifest: str,
    skipped: Path,
    *,
    top_k: int = 0,
    every_token: bool = False,
) -> Iterator[DocumentScores]:
    """The scores of a manifest's documents one by one, in its order; otherwise as Model.score.

    skipped: JSONL file that lists the skipped documents, with the reasons.
    """
    own: dict[str, Any] = {"manifest": (manifest,), "weights": ()}
    config = replace(config, data=replace(config.data, validation_manifest=f"scored={manifest}", **own))
    check(config)
    config = with_room(config)
    model = Model(config, weights)
    scorer = model.scorer(top_k=top_k, every_token=every_token)
    options: dict[str, Any] = {"training": False, "skip_list": skipped.name, "preferences": True}
    with closing(SpeechData(model.config, skipped.parent, **options)) as data:
        has_answers = any(example.alternatives for example in data.validation_examples("scored"))
        check_scored(has_answers, every_token)
        on_mesh = model.weights
        keys = [example.key for example in data.validation_examples("scored")]
        with closing(data.validation(local_rows(model.mesh, config.data.rows))) as batches:
            yield from in_order(keys, scorer(on_mesh, batches), data.is_skipped)
        if is_first() and len(data.skipped):
            print(f"{len(data.skipped)} skipped documents are listed in {data.skipped.path}")


def score_line(scores: DocumentScores, tokenizer: Tokenizer) -> dict[str, Any]:
    """A document's line of JSON; log-probabilities to what float32 holds of numbers about 1.

    A token's own text is as the tokenizer decodes it by itself; a part of a character is U+FFFD.
    """
    scored = scores.tokens[scores.positions].tolist()
    line = {
        "key": scores.key,
        "text": tokenizer.decode(scored),
        "log_prob": round(float(scores.log_probs.sum(dtype=np.float64)), 6),
        "tokens": scores.tokens.tolist(),
        "positions": scores.positions.tolist(),
        "texts": [tokenizer.decode([token]) for token in scored],
        "log_probs": _rounded(scores.log_probs),
    }
    if scores.answers:
        line["answers"] = _of_answers(scores, tokenizer)
    if scores.top_ids.shape[1]:
        top = scores.top_ids.tolist()
        line |= {
            "top_ids": top,
            "top_texts": [[tokenizer.decode([token]) for token in tokens] for tokens in top],
            "top_log_probs": _rounded(scores.top_log_probs),
        }
    return line


def _of_answers(scores: DocumentScores, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Text, log-probability and number of tokens of each answer."""
    ids, ends = scores.tokens[scores.positions], np.cumsum(scores.answers)[:-1]
    return [
        {
            "text": tokenizer.decode(of_answer.tolist()),
            "log_prob": round(float(log_probs.sum(dtype=np.float64)), 6),
            "tokens": len(of_answer),
        }
        for of_answer, log_probs in zip(np.split(ids, ends), np.split(scores.log_probs, ends), strict=True)
    ]


def _rounded(x: np.ndarray) -> list[Any]:
    return np.round(x.astype(np.float64), 7).tolist()


class _Row(NamedTuple):
    mean: float
    key: str
    tokens: int
    log_prob: float
    text: str


class Summary:
    """Counts documents, and remembers those that are least likely for each token."""

    def __init__(self) -> None:
        self.documents = self.tokens = 0
        self.log_prob = 0.0
        self._least: list[_Row] = []

    def noted(self, line: dict[str, Any]) -> dict[str, Any]:
        """Takes a document's line (score_line) into account, and returns it."""
        tokens, log_prob = len(line["positions"]), line["log_prob"]
        self.documents, self.tokens, self.log_prob = (
            self.documents + 1,
            self.tokens + tokens,
            self.log_prob + log_prob,
        )
        if tokens:
            row = _Row(
                log_prob / tokens, line["key"], tokens, log_prob, printable(" ".join(line["text"].split()))
            )
            self._least = sorted([*self._least, row])[:ROWS]
        return line

    def text(self, columns: int) -> str:
        """The table, at most so many columns wide, and the figures of all documents."""
        mean = f"{self.log_prob / self.tokens:.4f}" if self.tokens else "-"
        whole = (
            f"{self.documents:,} documents, {self.tokens:,} tokens scored, "
            f"log-probability {self.log_prob:,.2f}, {mean} a token"
        )
        if not self._least:
            return whole
        rows: Sequence[Sequence[Any]] = [
            [clipped(row.key, 24), row.tokens, f"{row.log_prob:.2f}", f"{row.mean:.3f}", row.text]
            for row in self._least
        ]
        title = "Least likely for each token"
        lines = table(title, COLUMNS, rows, left=(0, 4)).splitlines()
        return "\n".join([*(clipped(line, columns) for line in lines), whole])


if __name__ == "__main__":
    with readable_errors():
        main()
