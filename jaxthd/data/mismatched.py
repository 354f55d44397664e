"""Mismatched answers: to each prompt an answer of another item, from which KTO estimates a divergence."""

from collections.abc import Sequence
from dataclasses import replace

from jaxthd.data.example import Alternative, Example, document_rng
from jaxthd.errors import UserError

UNLABELLED = 0.0
"""The preference of a mismatched answer."""


class WithMismatched:
    """Items with answers, each with as many answers of another item, labelled UNLABELLED.

    Item i takes them from item (i + d) mod n, where d from 1 to n - 1 is drawn for each epoch: no item keeps
    its own, and each item's are used once an epoch. They depend on (data.seed, epoch, i) alone, so on no
    mesh, process or position. Ethayarajh et al. (2024) and TRL exchange the answers inside a batch instead.
    Raises UserError for fewer than two items.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        if len(examples) < 2:
            raise UserError(
                f"{len(examples)} items with preferences; expected two or more, to exchange answers "
                "(kl=mismatched): add items, or leave kl=mismatched out of train.objective_options"
            )
        self._examples, self._seed = examples, seed

    def __len__(self) -> int:
        return len(self._examples)

    def of_epoch(self, index: int, epoch: int) -> Example:
        """Item number `index` as it is in this epoch."""
        example, rng = self._examples[index], document_rng(self._seed, epoch, "mismatched")
        other = self._examples[(index + int(rng.integers(1, len(self)))) % len(self)]
        mismatched = [
            Alternative(other.alternatives[number % len(other.alternatives)].text, UNLABELLED)
            for number in range(len(example.alternatives))
        ]
        return replace(example, alternatives=(*example.alternatives, *mismatched))
