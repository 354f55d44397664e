"""How good a model is: loss, token accuracy and word error rate over a data set."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jiwer
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.config import Config
from jaxthd.data.tokenizer import load_tokenizer
from jaxthd.distributed import exchange
from jaxthd.mesh import DATA, local_rows, put_batch, put_rows
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds, find_prompts
from jaxthd.state import TrainState
from jaxthd.step import make_validation_step


class Hypothesis(NamedTuple):
    """What was decoded for a document, next to what it should be."""

    key: str
    reference: str
    hypothesis: str


class Evaluator:
    """Evaluates states of one model on batches of a fixed shape; compiled once.

    end_id: the token that ends an answer. config.train.max_new_tokens 0 decodes nothing.
    """

    def __init__(self, config: Config, mesh: Mesh, end_id: int) -> None:
        self._config, self._mesh = config, mesh
        self._step = make_validation_step(config, mesh, end_id=end_id, new_tokens=config.train.max_new_tokens)
        self._tokenizer = load_tokenizer(config.data.tokenizer)

    def __call__(
        self, state: TrainState, batches: Iterable[tuple[Batch, Mapping[str, Any]]]
    ) -> tuple[dict[str, float], list[Hypothesis]]:
        """Scores over all supervised tokens of the Loader's batches, and each document's decoded last answer.

        Of several processes all call it, with as many batches (data.loaders.InStep), and get the same.

        Scores: "loss", natural log, a token; "accuracy", 0 to 1, given the true tokens before; "wer", see
        word_error_rate, if anything was decoded; "documents". None where nothing is supervised.
        """
        sums, documents, decoded = np.zeros(3), 0, []
        for at, (batch, report) in enumerate(batches):
            ends, answers = find_prompts(
                batch,
                self._config.mesh.context,
                self._config.data.max_documents,
                layout=self._config.model.context_layout,
                round_to=self._config.data.round_to,
            )
            on_mesh = put_batch(batch, self._mesh)
            ends_on_mesh = put_rows(ends, PromptEnds(*[PartitionSpec(DATA)] * 2), self._mesh)
            scores, tokens = self._step(state.params, state.buffers, on_mesh, ends_on_mesh)
            sums += np.array(scores, float)
            documents += report["documents"]
            places = ends.last.shape[1]
            tokens_RDm = np.asarray(tokens).reshape(-1, places, tokens.shape[1])
            rows = local_rows(self._mesh, len(tokens_RDm))
            for own, keys in enumerate(report["keys"] if tokens.size else ()):
                for number, key in enumerate(keys):
                    if ends.last[own, number] >= 0:
                        texts = answers[own * places + number], tokens_RDm[rows[own], number].tolist()
                        decoded.append((at, rows[own], number, key, *map(self._tokenizer.decode, texts)))
        loss, correct, count = sums
        if not count:
            return {}, []
        # A row that several processes hold was decoded by each.
        told = sorted({tuple(x) for x in chain(*exchange(decoded))})
        hypotheses = [Hypothesis(*texts) for _, _, _, *texts in told]
        found = {"loss": loss / count, "accuracy": correct / count, "documents": float(documents)}
        return found | ({"wer": word_error_rate(hypotheses)} if hypotheses else {}), hypotheses


def word_error_rate(hypotheses: Sequence[Hypothesis]) -> float:
    """Substitutions, deletions and insertions over words of the references, after normalise, over all.

    References without a word are left out; NaN if no other is there.
    """
    pairs = [(normalise(h.reference), normalise(h.hypothesis)) for h in hypotheses]
    pairs = [pair for pair in pairs if pair[0]]
    if not pairs:
        return float("nan")
    references, guesses = map(list, zip(*pairs, strict=True))
    return float(jiwer.wer(references, guesses))


def normalise(text: str) -> str:
    """Lower case, no punctuation but apostrophes inside words, single spaces (Unicode NFKC first)."""
    text = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    kept = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return " ".join(word for word in (w.strip("'") for w in kept.split()) if word)
