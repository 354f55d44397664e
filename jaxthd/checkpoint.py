"""Checkpoints: the training state and the data position, saved and restored together with orbax."""

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from jaxthd.errors import UserError
from jaxthd.step import TrainState


class Checkpoints:
    """The checkpoints of a run, in `folder`, by step; the newest `keep` of them stay.

    Saving is asynchronous. A context manager: leaving it waits until everything is on disk.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """position: JSON-serialisable state of the data loader at this step."""
        about = {"position": position, "parameters": _shapes(state)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()), about=ocp.args.JsonSave(about)
            ),
        )

    def restore_latest(
        self, abstract: TrainState, sharding: Sharding
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint's state, laid out as `sharding`, and its data position; None without one.

        abstract: shapes and dtypes to expect. Raises UserError where the checkpoint's parameters have other
        names or shapes, before any is read (orbax would fail halfway).
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
        saved, wanted = about["parameters"], _shapes(abstract)
        differing = [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]
        if differing:
            name = differing[0]
            raise UserError(
                f"the checkpoint of step {step} in {self._manager.directory} is of another model: "
                f"{len(differing)} parameters differ, {name} is {saved.get(name)} there and "
                f"{wanted.get(name)} here. Restore the settings it was made with (config.txt beside it), or "
                "choose another --workdir"
            )
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract._asdict()
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return TrainState(**self._manager.restore(step, args=args).state), about["position"]


def _shapes(state: TrainState) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(x.shape) for path, x in leaves}
