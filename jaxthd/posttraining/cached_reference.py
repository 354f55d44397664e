"""A reference policy that a run does not hold: its log-probabilities, computed once and kept.

WORKDIR/reference.json              the digest of the reference's weights
WORKDIR/reference/DIGEST/*.npz      its log-probabilities, by the content of each document

The reference is the policy that the run begins with. Before the first step it scores every training document.
From then on a batch takes its numbers from the files, on any mesh and in every epoch. A document that has
changed has another digest: it is scored by the first weights, which are read again for that.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from jaxthd.checkpoints.checksum import checksums
from jaxthd.checkpoints.weights import Weights, start_weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.stacks import from_stages
from jaxthd.objectives.objective import REFERENCE
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import local_rows, put_batch
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.posttraining.score_files import DIGEST_BYTES, ScoreFiles
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import policy_temperature
from jaxthd.steps.reference import is_cached
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import TrainState, canonical_shardings

FLUSHED = 4096
"""Documents after which the first pass writes a file: a killed pass goes on from there."""

WithReference = Callable[[Batch], Batch]
"""(host batch) -> the same with the reference's log-probabilities in its extras."""


def cached_reference(
    blueprint: Blueprint, mesh: Mesh, data: SpeechData, workdir: Path, state: TrainState
) -> WithReference:
    """What adds the reference's log-probabilities to batches, where posttraining.reference is "cached"; else
    what returns them as they are. state: the run's newest; before the first step its policy is the reference.

    Scores all training documents, if that is not done. All processes call it.
    Raises UserError for a run whose reference is not known any more.
    """
    if not is_cached(blueprint.config):
        return lambda batch: batch
    return CachedReference(blueprint, mesh, data, workdir, state)


class Scored(NamedTuple):
    """A document of a batch. slots: its supervised ones in its row, in the order of its tokens."""

    row: int
    digest: bytes
    slots: Int[np.ndarray, " s"]


def make_log_probs(blueprint: Blueprint, mesh: Mesh) -> Any:
    """(params, buffers, batch) -> the log-probability of every supervised position's target, [R, T], on every
    device. One compiled program."""
    scores = make_scoring_step(blueprint, mesh, temperature=policy_temperature(blueprint.config))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jit_for(blueprint.config, mesh, lambda *given: scores(*given).log_probs, out_shardings=everywhere)


class CachedReference:
    """See cached_reference."""

    def __init__(
        self, blueprint: Blueprint, mesh: Mesh, data: SpeechData, workdir: Path, state: TrainState
    ) -> None:
        self._blueprint, self._mesh = blueprint, mesh
        config = self._config = blueprint.config
        self._rows = local_rows(mesh, config.data.rows)
        self._file = workdir / "reference.json"
        self._scores = make_log_probs(blueprint, mesh)
        is_new = not int(state.step)
        weights = Weights(state.params, state.buffers) if is_new else None
        self._digest = self._known_digest(weights)
        self.files = ScoreFiles(workdir / "reference" / self._digest)
        self._score_all(data, weights)

    def __call__(self, batch: Batch) -> Batch:
        """The batch of this process's rows, on the host. All processes call it."""
        documents = list(documents_of(batch, self._config))
        if self._are_missing(documents):
            self._add(batch, documents, self._first_weights())
            self.files.flush()
        found = np.zeros(
            batch.weights.shape, np.float64 if self._config.compute.dtype == "float64" else np.float32
        )
        for row, digest, slots in documents:
            found[row, slots] = self.files[digest]
        return batch._replace(extras={**batch.extras, REFERENCE: found})

    def _known_digest(self, weights: Weights | None) -> str:
        """The digest of the reference. weights: these of a new run, whose digest is written; else None."""
        temperature = policy_temperature(self._config)
        if weights is not None:
            digest = weights_digest(weights, self._blueprint, self._mesh)
            if is_first():
                stored = {"weights": digest, "temperature": temperature}
                write_atomically(self._file, json.dumps(stored) + "\n")
            return digest
        try:
            stored = json.loads(self._file.read_text())
            if stored["temperature"] != temperature:
                raise UserError(
                    f"rollout.temperature is {temperature}, and the reference's log-probabilities were "
                    f"computed with {stored['temperature']}; expected the same: set it back, or start a new "
                    "run (--workdir)"
                )
            return str(stored["weights"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{self._file} cannot be read ({error}); expected the digest of the weights that the run "
                "began with: copy it anew, or start a new run from this one (--train.init-from)"
            ) from error

    def _score_all(self, data: SpeechData, weights: Weights | None) -> None:
        done = self.files.folder / f"{data.digest()}.done"
        if all(exchange(done.exists())):
            return
        print("computing the reference's log-probabilities of all training documents")
        with closing(data.training_once(self._rows)) as batches:
            for batch, _ in batches:
                documents = list(documents_of(batch, self._config))
                if self._are_missing(documents):
                    weights = weights or self._first_weights()
                    self._add(batch, documents, weights)
                if self.files.unwritten >= FLUSHED:
                    self.files.flush()
        self.files.flush()
        exchange("the reference's log-probabilities are written")
        self.files.read()
        if is_first() and len(self.files):
            write_atomically(done, "")
        print(f"{len(self.files)} documents in {self.files.folder}")

    def _first_weights(self) -> Weights:
        """The weights that the run began with. Raises UserError where they are no longer the same."""
        weights = start_weights(self._blueprint, self._mesh)
        if weights_digest(weights, self._blueprint, self._mesh) != self._digest:
            raise UserError(
                f"train.init_from {list(self._config.train.init_from)} holds other weights than the run "
                "began with, and documents have changed or are new, so the reference policy must score them; "
                "expected the first weights: give them, or start a new run (--workdir)"
            )
        return weights

    def _are_missing(self, documents: Sequence[Scored]) -> bool:
        """Whether any process has a document without numbers."""
        return any(exchange(any(each.digest not in self.files for each in documents)))

    def _add(self, batch: Batch, documents: Sequence[Scored], weights: Weights) -> None:
        on_mesh = put_batch(batch, self._mesh)
        scores_RT = np.asarray(self._scores(weights.params, weights.buffers, on_mesh))[self._rows]
        self.files.add({each.digest: scores_RT[each.row, each.slots] for each in documents})


def documents_of(batch: Batch, config: Config) -> Iterator[Scored]:
    """The documents of a host batch.

    The digest covers all that a document's log-probabilities depend on besides the weights: tokens, segments,
    and the features of its audio. It does not depend on its company, the layout or the mesh.
    """
    layout = ContextLayout.of(config)
    for row, ids in enumerate(batch.segment_ids):
        whose = ids, batch.documents[row], batch.cuts_of(row)
        for slots in layout.document_slots(*whose) if ids.any() else ():
            first, prefixes = ids[slots].min(), None if batch.prefixes is None else batch.prefixes[row, slots]
            parts = [
                getattr(batch, name)[row, slots] for name in ("tokens", "targets", "weights", "positions")
            ]
            parts.append(ids[slots] - first)
            parts.append(np.zeros(0) if prefixes is None else np.where(prefixes > 0, prefixes - first + 1, 0))
            if batch.has_audio:
                parts += _audio_of(batch, row, slots)
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for part in parts:
                digest.update(f"{part.dtype} {part.shape}".encode())
                digest.update(part.tobytes())
            yield Scored(row, digest.digest(), slots[batch.weights[row, slots] > 0])


def _audio_of(batch: Batch, row: int, slots: Int[np.ndarray, " slots"]) -> list[Shaped[np.ndarray, "..."]]:
    """Which tokens of a document are audio frames, and the features of these."""
    frames = batch.audio_slots[row, slots]
    at = frames[frames >= 0]
    features = (x.reshape(-1, SUBSAMPLING, *x.shape[1:])[at] for x in (batch.mels[row], batch.mel_mask[row]))
    return [frames >= 0, batch.chunk_positions[row, at], *features]


def weights_digest(weights: Weights, blueprint: Blueprint, mesh: Mesh) -> str:
    """A digest of the weights in their training form, and of the settings that change what they compute. The
    mesh does not change it. All processes call it.
    """
    config, on = blueprint.config, canonical_shardings(blueprint, mesh)

    def canonical(weights: Weights) -> Weights:
        return from_stages(weights, blueprint.stages)

    if config.mesh.pipeline > 1:
        weights = jax.jit(canonical, out_shardings=Weights(on.params, on.buffers))(weights)
    compute = config.compute
    about = {
        "arrays": checksums(weights._asdict()),
        "model": asdict(config.model),
        "lora": [config.adapt.lora_rank, config.adapt.lora_alpha],
        "compute": [compute.dtype, compute.fp8_projections, *["experts"] * compute.fp8_experts],
        "temperature": policy_temperature(config),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
