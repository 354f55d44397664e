"""Checkpoints: the training state and the data position, saved and restored together with orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from jaxthd.step import TrainState


class Checkpoints:
    """The checkpoints of a run, in `folder`, by step; the newest `keep` of them stay.

    Saving is asynchronous; close() waits for it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """position: JSON-serialisable state of the data loader at this step."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()), position=ocp.args.JsonSave(position)
            ),
        )

    def restore_latest(
        self, abstract: TrainState, sharding: Sharding
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint's state, laid out as `sharding`, and its data position; None without one.

        abstract: shapes and dtypes to expect; orbax raises ValueError where the checkpoint has others.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract._asdict()
        )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(target), position=ocp.args.JsonRestore()),
        )
        return TrainState(**restored.state), restored.position

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
