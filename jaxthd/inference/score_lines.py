"""Scores as they are written: a line of JSON for each document, and a table for people."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.inference.scorer import DocumentScores
from jaxthd.terminal.tables import clipped, printable, table

ROWS = 10
"""Most documents in the table."""
COLUMNS = "document|tokens|log-prob|a token|text"


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
