"""Supplies a run's steps with packed documents; the next batch is loaded while the devices compute a step."""

import time
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax

from jaxthd.config import Config
from jaxthd.data.loader import BatchReport, whole_position
from jaxthd.kernels.machine import peak_flops
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import local_rows, put_batch
from jaxthd.planning.fitting import fitting_step
from jaxthd.planning.model_flops import model_flops
from jaxthd.run.display import Display, display_of
from jaxthd.run.metrics import StepFacts, metrics_line
from jaxthd.run.padding import PaddingWatch
from jaxthd.run.supplier import Run, Say, Stepped, Supplier
from jaxthd.steps.forward import objective_of
from jaxthd.steps.reference import has_reference, is_cached
from jaxthd.steps.reference_scores import make_with_scores
from jaxthd.steps.state import TrainState
from jaxthd.training.cached_reference import CachedReference


class _Loaded(NamedTuple):
    """A batch that was loaded. position: where the data goes on after it."""

    report: BatchReport
    position: dict[str, Any]


class DocumentSupplier(Supplier):
    """Trains on the training data's documents, a batch of data.rows packed buffers in each step."""

    def __init__(self, run: Run) -> None:
        self._run, config = run, run.config
        reads_scores = objective_of(run.config).scored or has_reference(run.config)
        self._with_scores = make_with_scores(run.blueprint, run.mesh) if reads_scores else None
        is_known = config.compute.dtype == "bfloat16"
        self._peak = peak_flops(jax.devices()[0].device_kind) if is_known else None
        self._flops_of = model_flops(config) if self._peak else None
        self._reference: CachedReference | None = None
        self._train_step: Any = None
        self._loader = run.data.training(local_rows(run.mesh, config.data.rows))

    @staticmethod
    def display(config: Config) -> Display:
        """The display of a run on documents."""
        return display_of(objective_of(config))

    def get_state(self) -> dict[str, Any]:
        """The position after the latest batch that was trained on, for all rows of all processes."""
        return whole_position(self._current.position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at that position in the documents."""
        self._loader.set_state(state)

    def begin(self, state: TrainState, first: int, say: Say) -> None:
        """Scores the documents by a cached reference, and loads the first batch."""
        run, self._say = self._run, say
        self._watch_padding = PaddingWatch(run.config, say)
        if is_cached(run.config):
            self._reference = CachedReference(run.blueprint, run.mesh, run.data, run.outputs.path, state)
        with run.account.during("data_wait"):
            self._on_mesh, self._upcoming = self._load()

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the cached reference's log-probabilities, where the run has them."""
        return self._reference(batch) if self._reference else batch

    def _load(self) -> tuple[Batch, _Loaded]:
        """(the next batch on the mesh, its report and position)."""
        batch, report = next(self._loader)
        batch = self.with_reference(batch)
        return put_batch(batch, self._run.mesh), _Loaded(report, self._loader.get_state())

    def step(self, state: TrainState, step: int) -> tuple[TrainState, Stepped]:
        """Trains on the batch that is loaded, and loads the next one meanwhile."""
        run, began, self._current = self._run, time.perf_counter(), self._upcoming
        report = self._current.report
        on_mesh = self._with_scores(state, self._on_mesh) if self._with_scores else self._on_mesh
        if self._train_step is None:
            self._train_step = fitting_step(run.blueprint, run.mesh, state, on_mesh, self._say)
        state, on_device = self._train_step(state, on_mesh)
        if step < run.config.train.steps:
            with run.account.loading(on_device):
                self._on_mesh, self._upcoming = self._load()
        results = jax.tree.map(lambda x: x.item(), on_device)
        facts = StepFacts(
            step,
            results,
            report,
            time.perf_counter() - began,
            self._train_step.count,
            run.data.skipped.total,
            run.mesh.size,
            self._flops_of and self._flops_of(report),
            self._peak,
        )
        self._watch_padding(step, report)
        return state, Stepped(metrics_line(facts), partial(self._keys, report), results.skipped_in_a_row)

    def _keys(self, report: BatchReport) -> list[str]:
        return list(chain(*self._loader.keys(report)))

    def close(self) -> None:
        """Ends the loader."""
        self._loader.close()
