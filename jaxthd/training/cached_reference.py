"""A reference policy that a run does not hold: its log-probabilities, computed once and kept.

WORKDIR/reference.jsonl begins with the digest of the reference's weights, and has a line for each document,
by its content.

The reference is the policy that the run begins with. Before the first step it scores every training document.
From then on a batch takes its numbers from the file, on any mesh and in every epoch. A document that has
changed has another digest: it is scored by the first weights, which are read again for that.
"""

import functools
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Shaped

from jaxthd.checkpoints.checksum import checksums
from jaxthd.checkpoints.weights import Weights, start_weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines
from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.stacks import from_stages
from jaxthd.objectives.objective import REFERENCE
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import local_rows, put_batch
from jaxthd.parallel.processes import exchange
from jaxthd.run.outputs import Line, OutputFolder
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import policy_temperature
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import TrainState, canonical_shardings


class Scored(NamedTuple):
    """A document of a batch. slots: its supervised ones in its row, in the order of its tokens."""

    row: int
    digest: str
    slots: Int[np.ndarray, " s"]


def make_log_probs(blueprint: Blueprint, mesh: Mesh) -> Any:
    """(params, buffers, batch) -> the log-probability of every supervised position's target, [R, T], on every
    device. One compiled program."""
    scores = make_scoring_step(blueprint, mesh, temperature=policy_temperature(blueprint.config))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jit_for(blueprint.config, mesh, lambda *given: scores(*given).log_probs, out_shardings=everywhere)


class CachedReference:
    """(host batch) -> the same with the reference's log-probabilities in its extras.

    state: the run's newest; before the first step its policy is the reference. Scores all training documents,
    if that is not done. All processes make and call it, and hold the same numbers.
    scores: the log-probabilities of a document's supervised tokens, in their order, by its digest.
    Raises UserError for a run whose reference is not known any more.
    """

    def __init__(
        self, blueprint: Blueprint, mesh: Mesh, data: SpeechData, workdir: Path, state: TrainState
    ) -> None:
        self._blueprint, self._mesh, self._config = blueprint, mesh, blueprint.config
        self._rows = local_rows(mesh, self._config.data.rows)
        self._log_probs = make_log_probs(blueprint, mesh)
        weights = None if int(state.step) else Weights(state.params, state.buffers)
        self._outputs, self._file = OutputFolder(workdir), workdir / "reference.jsonl"
        self._dtype = np.float64 if self._config.compute.dtype == "float64" else np.float32
        lines = self._known(weights)
        self._digest: str = lines[0]["weights"]
        self.scores: dict[str, np.ndarray] = {}
        self._add([line for line in lines if "document" in line])
        if not all(exchange(data.digest() in [line.get("data") for line in lines])):
            self._score_all(data, weights)

    def __call__(self, batch: Batch) -> Batch:
        """The batch of this process's rows, on the host. All processes call it."""
        found = np.zeros(batch.weights.shape, self._dtype)
        for row, digest, slots in self._scored(batch, self._first_weights):
            found[row, slots] = self.scores[digest]
        return batch._replace(extras={**batch.extras, REFERENCE: found})

    def _known(self, weights: Weights | None) -> list[Line]:
        """The lines of the file. weights: these of a new run, whose file is made where it is of others."""
        file, temperature = self._file, policy_temperature(self._config)
        if not file.exists() and (earlier := of_earlier_form(file.parent)):
            print(f"{file.with_suffix('')} is of an earlier jaxthd: what it holds is now in {file}")
            self._outputs.write_lines(file.name, earlier)
        # A line that a kill cut short would join the next one.
        self._outputs.keep_lines(file.name, lambda line: True)
        exchange("the file is whole")
        lines = read_lines(file)
        if weights is not None:
            digest = weights_digest(weights, self._blueprint, self._mesh)
            first = {"weights": digest, "temperature": temperature}
            if lines[:1] != [first]:
                lines = [first]
                self._outputs.write_lines(file.name, lines)
        if not lines or "weights" not in lines[0]:
            raise UserError(
                f"{file} is missing or damaged; expected the digest of the weights that the run began with: "
                "copy it anew, or start a new run from this one (--train.init-from)"
            )
        if lines[0]["temperature"] != temperature:
            raise UserError(
                f"rollout.temperature is {temperature}, and the reference's log-probabilities were computed "
                f"with {lines[0]['temperature']}; expected the same: set it back, or start a new run "
                "(--workdir)"
            )
        return lines

    def _add(self, lines: Sequence[Line]) -> None:
        self.scores |= {line["document"]: np.array(line["log_probs"], self._dtype) for line in lines}

    def _score_all(self, data: SpeechData, weights: Weights | None) -> None:
        print("computing the reference's log-probabilities of all training documents")
        first = functools.cache(lambda: weights or self._first_weights())
        with closing(data.training_once(self._rows)) as batches:
            for batch, _ in batches:
                self._scored(batch, first)
        self._outputs.append_line(self._file.name, {"data": data.digest()})
        print(f"{len(self.scores)} documents in {self._file}")

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

    def _scored(self, batch: Batch, weights: Callable[[], Weights]) -> list[Scored]:
        """The documents of a host batch; those without numbers, in any process, are scored by the weights."""
        documents = list(documents_of(batch, self._config))
        if any(exchange(any(each.digest not in self.scores for each in documents))):
            params, buffers = weights()
            scores_RT = np.asarray(self._log_probs(params, buffers, put_batch(batch, self._mesh)))[self._rows]
            own = [_line(each.digest, scores_RT[each.row, each.slots]) for each in documents]
            of_all = {line["document"]: line for line in chain(*exchange(own))}
            new = [line for digest, line in of_all.items() if digest not in self.scores]
            self._add(new)
            self._outputs.append_lines(self._file.name, new)
        return documents


def _line(digest: str, log_probs: Float[np.ndarray, " s"]) -> Line:
    """A document's line. str gives as many digits as the dtype needs, and float twice as many."""
    return {"document": digest, "log_probs": [float(str(x)) for x in log_probs]}


def of_earlier_form(workdir: Path) -> list[Line]:
    """The lines that reference.json and its folder of npz files stand for, as jaxthd kept them before.

    [] where there are none. Damaged files are left out, so that their documents are scored anew.
    """
    try:
        lines: list[Line] = [json.loads((workdir / "reference.json").read_text())]
        folder = workdir / "reference" / lines[0]["weights"]
    except (OSError, ValueError, KeyError):
        return []
    for path in sorted(folder.glob("*.npz")):
        damage = OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile
        with suppress(*damage), path.open("rb") as opened, np.load(opened) as file:
            of_documents = np.split(file["log_probs"], np.cumsum(file["lengths"])[:-1])
            lines += map(_line, (digest.tobytes().hex() for digest in file["digests"]), of_documents)
    return lines + [{"data": path.stem} for path in folder.glob("*.done")]


def documents_of(batch: Batch, config: Config) -> Iterator[Scored]:
    """The documents of a host batch.

    The digest covers all that a document's log-probabilities depend on besides the weights: tokens, segments,
    and the features of its audio. It does not depend on its company, the layout or the mesh.
    """
    layout = ContextLayout.of(config)
    for row, ids in enumerate(batch.segment_ids):
        whose = ids, batch.documents[row], batch.splits_of(row)
        for slots in layout.document_slots(*whose) if ids.any() else ():
            first, prefixes = ids[slots].min(), None if batch.prefixes is None else batch.prefixes[row, slots]
            parts = [
                getattr(batch, name)[row, slots] for name in ("tokens", "targets", "weights", "positions")
            ]
            parts.append(ids[slots] - first)
            parts.append(np.zeros(0) if prefixes is None else np.where(prefixes > 0, prefixes - first + 1, 0))
            if batch.has_audio:
                parts += _audio_of(batch, row, slots, config.model.audio_encoder.unit)
            digest = hashlib.blake2b(digest_size=16)
            for part in parts:
                digest.update(f"{part.dtype} {part.shape}".encode())
                digest.update(part.tobytes())
            yield Scored(row, digest.hexdigest(), slots[batch.weights[row, slots] > 0])


def _audio_of(
    batch: Batch, row: int, slots: Int[np.ndarray, " slots"], unit: tuple[int, int]
) -> list[Shaped[np.ndarray, "..."]]:
    """Mask of a document's tokens that are audio, and the features of these. unit: the front end's."""
    outputs, (frames, per_unit) = batch.audio_slots[row, slots], unit
    at = outputs[outputs >= 0]
    of_units = dict.fromkeys((at // per_unit).tolist())
    features = (
        x.reshape(-1, frames, *x.shape[1:])[[*of_units]] for x in (batch.features[row], batch.frame_mask[row])
    )
    return [outputs >= 0, batch.piece_positions[row, at], *features]


def weights_digest(weights: Weights, blueprint: Blueprint, mesh: Mesh) -> str:
    """A digest of the weights in their device layout, and of the settings that change what they compute. The
    mesh does not change it. All processes call it.
    """
    config, on = blueprint.config, canonical_shardings(blueprint, mesh)

    def canonical(weights: Weights) -> Weights:
        """The weights with the layers of all stages in one stack."""
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
