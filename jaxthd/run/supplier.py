"""The contract between the training loop (jaxthd/training/loop.py) and what supplies its steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.packing.batch import Batch
from jaxthd.run.display import Display
from jaxthd.run.goodput import TimeAccount
from jaxthd.run.outputs import OutputFolder
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState

Say = Callable[[str], None]
"""Prints a line, which leaves the live progress line whole."""


class Run(NamedTuple):
    """The parts of an opened run that its supplier uses. account: receives the time of waiting for data."""

    config: Config
    blueprint: Blueprint
    mesh: Mesh
    data: SpeechData
    outputs: OutputFolder
    account: TimeAccount


class Stepped(NamedTuple):
    """The result of one step.

    line: its metrics, with the names of metrics.jsonl. documents: returns the keys of the documents of its
    updates; all processes call it. skipped_in_a_row: updates skipped up to this step, since loss or gradient
    was not finite; 0 where its own was not.
    """

    line: dict[str, Any]
    documents: Callable[[], list[str]]
    skipped_in_a_row: int


class Supplier(ABC):
    """Supplies a run with its steps: reads or draws what they train on, and holds the programs that train.

    Made before the run's checkpoint is restored. Of several processes all call each method, equally often.
    """

    @staticmethod
    @abstractmethod
    def display(config: Config) -> Display:
        """Its metrics as people see them. Called without a run too, to draw its curves again."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Where the data goes on after the latest step, as JSON: the data position of a checkpoint."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises UserError for a position that was saved for other data."""

    def begin(self, state: TrainState, first: int, say: Say) -> None:  # noqa: B027 - few have something to do
        """Prepares the steps after step number `first`, whose state this is, before anything is validated."""

    @abstractmethod
    def step(self, state: TrainState, step: int) -> tuple[TrainState, Stepped]:
        """Trains on what comes next. The old state's memory is reused."""

    def with_reference(self, batch: Batch) -> Batch:
        """A host batch of validation, with the log-probabilities of a reference that the run lacks."""
        return batch

    def held_out(self, state: TrainState, step: int) -> dict[str, float]:
        """Further validation metrics after a step, in the form of a metrics line."""
        return {}

    def end(self) -> list[str]:
        """Returns parts of the report. Called after the last step, where no error ended the run."""
        return []

    def close(self) -> None:  # noqa: B027 - few have something to do
        """Ends what the supplier has started, such as threads."""
