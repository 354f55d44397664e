"""Weights of published checkpoints and of runs, read straight into the mesh's arrays.

A source is a Hugging Face folder, a .nemo archive, or the workdir of a run: its newest checkpoint, or, with
@best or @STEP after it, another one. Each gives the part of the model that it holds; a later one replaces
what an earlier one gave.
Of a published checkpoint one tensor at a time is in the host's memory, besides what the devices hold.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Shaped

from jaxthd.checkpoints.checkpoint import find_checkpoint, restore_arrays
from jaxthd.checkpoints.checksum import named_arrays
from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.parallel.processes import is_first
from jaxthd.parallel.stages import to_stages
from jaxthd.run.workdir import compare_models, is_run, read_config
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.state import TrainState, canonical_shardings, init_state, new_state, state_shardings


class Weights(NamedTuple):
    """A model's arrays. params: trained. buffers: state that no gradient trains."""

    params: Tree
    buffers: Tree


def start_state(config: Config, mesh: Mesh) -> TrainState:
    """A new run's state, on the mesh: drawn from the seed, but for what train.init_from gives.

    Raises UserError where a source does not fit the model.
    """
    if not config.train.init_from:
        return init_state(Blueprint(config), mesh)
    return new_state(load_weights(config.train.init_from, config, mesh), Blueprint(config), mesh)


def load_weights(
    sources: Sequence[str | Path], config: Config, mesh: Mesh, *, partly: bool = True
) -> Weights:
    """The model's arrays in the canonical form (state.py), on their final devices.

    partly: what no source gives is drawn from config.train.seed, and said; else it is a UserError.
    Raises UserError where a source is damaged, holds another model or nothing of this one.
    """
    on = canonical_shardings(Blueprint(config), mesh)
    specs = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: Weights(*Blueprint(config).initial_weights())),
        Weights(on.params, on.buffers),
    )
    named = named_weights(specs)
    # All is compared before anything is read.
    readers = [
        _Run(path, which, config, specs) if is_run(path) else _Published(path, config, named)
        for path, which in map(source_of, sources)
    ]
    drawn = [name for name in named if not any(name in reader.gives for reader in readers)]
    arrays: dict[str, Array] = {}
    if drawn and not partly:
        raise UserError(
            f"{', '.join(map(str, sources))}: no weights for {_groups(drawn)}; expected those of the whole "
            "model: name the checkpoints of its other parts too"
        )
    if drawn:
        _say(f"drawn at random, being in no checkpoint: {_groups(drawn)}")
        arrays = _made(lambda: named_weights(Weights(*Blueprint(config).initial_weights())), named, drawn)
    for reader in readers:
        arrays |= reader.read()
    return jax.tree.unflatten(jax.tree.structure(specs), [arrays[name] for name in named])


def _made(
    make: Callable[[], dict[str, Array]], specs: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Array]:
    """Some of the arrays that `make` returns, on their devices."""
    shardings = {name: specs[name].sharding for name in names}

    def some() -> dict[str, Array]:
        made = make()
        return {name: made[name] for name in names}

    return jax.jit(some, out_shardings=shardings)()


def load_model(sources: Sequence[str | Path], config: Config, mesh: Mesh) -> Weights:
    """A whole model, as the mesh's ranks compute with it: for evaluation and generation.

    Raises UserError as load_weights, and where the sources leave something out.
    """
    return training_weights(load_weights(sources, config, mesh, partly=False), config, mesh)


def training_weights(weights: Weights, config: Config, mesh: Mesh) -> Weights:
    """As a run's state has them while it trains. weights: in the canonical form, on the mesh or on the host;
    left as they are.
    """
    on, stages = state_shardings(Blueprint(config), mesh), Blueprint(config).stages
    shardings = Weights(on.params, on.buffers)
    if config.mesh.pipeline == 1:
        return jax.device_put(weights, shardings)
    return jax.jit(lambda weights: to_stages(weights, stages), out_shardings=shardings)(weights)


def source_of(source: str | Path) -> tuple[Path, str]:
    """(its path, which of a run's checkpoints: "newest", "best" or a step)."""
    path, mark, which = str(source).rpartition("@")
    if mark and (which in ("newest", "best") or which.isdecimal()):
        return Path(path), which
    return Path(source), "newest"


def named_weights(weights: Weights) -> dict[str, Any]:
    """By dotted names that are the same in parameters and buffers: without the field's."""
    return {name.partition(".")[2]: x for name, x in named_arrays(weights).items()}


class _Run:
    """A checkpoint of a run. Raises UserError where it is of another model.

    gives: names of the arrays that it has.
    """

    def __init__(self, path: Path, which: str, config: Config, specs: Weights) -> None:
        compare_models(path, read_config(path).model, config.model)
        self._folder = path / "checkpoints"
        self._step, self._about = find_checkpoint(self._folder, which)
        found = {
            short: tuple(shape)
            for name, (_, shape, _) in self._about.items()
            for field, _, short in [name.partition(".")]
            if field in Weights._fields
        }
        shapes = {name: spec.shape for name, spec in named_weights(specs).items()}
        # A model may do without multi-token prediction.
        found = {
            name: shape for name, shape in found.items() if name in shapes or not name.startswith("mtp.")
        }
        differing = [name for name, shape in found.items() if shapes.get(name) != shape]
        if differing:
            name = differing[0]
            raise UserError(
                f"the checkpoint of step {self._step} in {path} is of another model: {len(differing)} arrays "
                f"differ, {name} is {list(found[name])} there and {shapes.get(name, 'absent')} here. Choose "
                "other weights, or the model's settings"
            )
        self.gives = set(found)
        self._specs = specs

    def read(self) -> dict[str, Array]:
        """Some arrays at a time: orbax holds each on the host besides."""
        found: dict[str, Array] = {}
        structure, named = jax.tree.structure(self._specs), named_weights(self._specs)
        for names in _by_size(named, self.gives):
            some = [spec if name in names else None for name, spec in named.items()]
            wanted = _pruned(jax.tree.unflatten(structure, some)._asdict())
            restored = restore_arrays(self._folder, self._step, wanted, self._about)
            found |= named_weights(Weights(restored.get("params", {}), restored.get("buffers", {})))
        return found


def _by_size(specs: Mapping[str, Any], names: Collection[str], limit: int = 2**28) -> Iterator[set[str]]:
    """Sets of names whose arrays have `limit` bytes together, or that are one array."""
    some: set[str] = set()
    size = 0
    for name, spec in specs.items():
        if name in names:
            own = math.prod(spec.shape) * spec.dtype.itemsize
            if some and size + own > limit:
                yield some
                some, size = set(), 0
            some.add(name)
            size += own
    yield some


def _pruned(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Without None, and without branches that held nothing else."""
    pruned = {k: _pruned(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in pruned.items() if v is not None and v != {}}


class _Published:
    """A published checkpoint; as _Run."""

    def __init__(self, path: Path, config: Config, specs: Mapping[str, Any]) -> None:
        self._checkpoint, self._specs = open_checkpoint(path), specs
        shapes = {name: spec.shape for name, spec in specs.items()}
        self._table = self._checkpoint.tensors(config.model, shapes)
        self.gives = {part.name for tensor in self._table for part in tensor.parts}

    def read(self) -> dict[str, Array]:
        names = sorted(self.gives)
        zeros = {name: (self._specs[name].shape, self._specs[name].dtype) for name in names}
        arrays = _made(lambda: {name: jnp.zeros(*x) for name, x in zeros.items()}, self._specs, names)
        shards = {name: _Shards(arrays.pop(name)) for name in names}
        for part, piece in self._checkpoint.pieces(self._table):
            shards[part.name].write(part.at, piece)
        left_out = self._checkpoint.left_out([tensor.name for tensor in self._table])
        if left_out:
            _say(f"{self._checkpoint.path}: left out, being no part of the model: {_groups(left_out)}")
        return {name: written.array() for name, written in shards.items()}


class _Shards:
    """What this process's devices hold of an array, written in place."""

    def __init__(self, array: Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        self._shards = [(shard.index, shard.data) for shard in array.addressable_shards]

    def write(self, at: tuple[int, ...], piece: Shaped[np.ndarray, "..."]) -> None:
        """piece: [at] of the array; each device takes what it holds of it."""
        for number, (index, held) in enumerate(self._shards):
            bounds = [cut.indices(size)[:2] for cut, size in zip(index, self._shape, strict=True)]
            if all(start <= place < stop for place, (start, stop) in zip(at, bounds, strict=False)):
                own = np.ascontiguousarray(piece[tuple(slice(*b) for b in bounds[len(at) :])])
                first = tuple(place - start for place, (start, _) in zip(at, bounds, strict=False))
                self._shards[number] = index, _written(held, own, first)

    def array(self) -> Array:
        held = [held for _, held in self._shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, held)


@partial(jax.jit, donate_argnums=0)
def _written(held: Array, piece: Array, first: tuple[Array, ...]) -> Array:
    """held[first] = piece, without a copy of the others."""
    piece = piece.astype(held.dtype).reshape((1,) * len(first) + piece.shape)
    return jax.lax.dynamic_update_slice(held, piece, [*first, *[0] * (held.ndim - len(first))])


def _say(text: str) -> None:
    """Once, of several processes."""
    if is_first():
        print(text)


def _groups(names: Sequence[str]) -> str:
    """Parts of the model, each with its number of arrays."""
    count: dict[str, int] = {}
    for name in names:
        part = name.split(".")[0]
        count[part] = count.get(part, 0) + 1
    return ", ".join(f"{part} ({n} {'array' if n == 1 else 'arrays'})" for part, n in count.items())
