"""Weights of published checkpoints and of runs, read straight into the mesh's arrays.

A source is a Hugging Face folder, a .nemo archive, or the workdir of a run; there the newest checkpoint is
read, or the one that @best or @STEP names (its averaged parameters: @ema, @best+ema, @STEP+ema). Each source
gives the parts of the model that it holds; a later one replaces what an earlier one gave. The host never
holds more than one tensor of a published checkpoint.
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

from jaxthd.checkpoints.agreement import (
    groups_of,
    lora_factor,
    require_frozen_from_sources,
    require_same_vocabulary,
    say_other_documents,
    say_other_settings,
    say_other_template,
)
from jaxthd.checkpoints.checksum import named_arrays
from jaxthd.checkpoints.stored import find_checkpoint, reason, restore_arrays
from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.run_folder import EMA, is_run, read_config, source_of
from jaxthd.files.tokenizer_files import BUILT_IN, has_tokenizer
from jaxthd.files.weight_fields import compare_models
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.processes import is_first
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.reference import has_reference, is_base
from jaxthd.steps.state import TrainState, canonical_shardings, init_state, new_state, state_shardings


class Weights(NamedTuple):
    """A model's arrays. params: its parameters. buffers: its other state, which no gradient changes."""

    params: Tree
    buffers: Tree


def start_state(blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """A new run's state on the mesh: the weights of train.init_from, the rest initialised from train.seed.

    Raises UserError where a source does not fit the model, and for parameters that would stay as they are
    initialised: frozen, and held by no source.
    """
    config = blueprint.config
    if not config.train.init_from:
        require_frozen_from_sources(blueprint, named_weights(Weights(*blueprint.abstract_weights)))
        return init_state(blueprint, mesh)
    if has_reference(config) and is_base(config):
        _require_base_alone(config.train.init_from)
    setting = "--train.init-from"
    weights = load_weights(config.train.init_from, blueprint, mesh, setting=setting, starts=True)
    return new_state(weights, blueprint, mesh)


def start_weights(blueprint: Blueprint, mesh: Mesh) -> Weights:
    """The weights of start_state, without the rest of it. Raises UserError as that does."""
    if not blueprint.config.train.init_from:
        on, stages = state_shardings(blueprint, mesh), blueprint.stages
        made = jax.jit(
            lambda: to_stages(Weights(*blueprint.initial_weights()), stages),
            out_shardings=Weights(on.params, on.buffers),
        )
        return made()
    weights = load_weights(blueprint.config.train.init_from, blueprint, mesh, setting="--train.init-from")
    return training_weights(weights, blueprint, mesh)


def _require_base_alone(sources: Sequence[str]) -> None:
    """Raises UserError where weights with LoRA start a run whose reference is the model without LoRA."""
    for path, _ in map(source_of, sources):
        has_lora = read_config(path).adapt.lora_rank if is_run(path) else open_checkpoint(path).lora
        if has_lora:
            raise UserError(
                f"{path} has LoRA matrices, and the reference policy would be the model without them "
                "(posttraining.reference auto); expected the model that this run starts from: set "
                "--posttraining.reference copy, or merge them (jaxthd convert export)"
            )


def load_weights(
    sources: Sequence[str | Path],
    blueprint: Blueprint,
    mesh: Mesh,
    *,
    partly: bool = True,
    setting: str = "the sources",
    starts: bool = False,
) -> Weights:
    """The model's arrays in the checkpoint layout (steps/state.py), on their final devices.

    partly: arrays that no source holds are initialised from config.train.seed, and reported. False: they are
    a UserError. setting: what the sources were given as, for messages. starts: a run begins with them: those
    that are initialised and frozen are a UserError.
    Raises UserError where a source is damaged, holds another model or nothing of this one.
    """
    on = canonical_shardings(blueprint, mesh)
    specs = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        Weights(*blueprint.abstract_weights),
        Weights(on.params, on.buffers),
    )
    named = named_weights(specs)
    # All is compared before anything is read.
    readers = [
        _Run(path, which, blueprint.config, specs, setting)
        if is_run(path)
        else _Published(path, blueprint.config, named)
        for path, which in map(source_of, sources)
    ]
    with_embedding = [reader for reader in readers if "embedding" in reader.gives]
    if with_embedding:  # the last one's is used
        require_same_vocabulary(*with_embedding[-1].tokenizer, blueprint.config.data.tokenizer, setting)
    missing = [name for name in named if not any(name in reader.gives for reader in readers)]
    arrays: dict[str, Array] = {}
    if missing and not partly:
        raise UserError(
            f"{', '.join(map(str, sources))}: no weights for {groups_of(missing)}; expected those of the "
            f"whole model: add the checkpoints of its other parts to {setting}"
        )
    if starts:
        require_frozen_from_sources(blueprint, missing)
    if missing:
        others = [name for name in missing if "lora" not in name.split(".")]
        if len(missing) > len(others):
            _report(f"new: LoRA matrices ({len(missing) - len(others)} arrays)")
        if others:
            _report(f"initialised at random, because no source holds them: {groups_of(others)}")
        arrays = _made(lambda: named_weights(Weights(*blueprint.initial_weights())), named, missing)
    for reader in readers:
        arrays |= reader.read()
    return jax.tree.unflatten(jax.tree.structure(specs), [arrays[name] for name in named])


def _made(
    make: Callable[[], dict[str, Array]], specs: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Array]:
    """The named ones of the arrays that `make` returns, on their devices."""
    shardings = {name: specs[name].sharding for name in names}

    def some() -> dict[str, Array]:
        made = make()
        return {name: made[name] for name in names}

    return jax.jit(some, out_shardings=shardings)()


def load_model(sources: Sequence[str | Path], blueprint: Blueprint, mesh: Mesh) -> Weights:
    """A whole model, as the mesh's ranks compute with it: for evaluation, scoring and generation.

    Raises UserError as load_weights, and where no source holds some of its arrays.
    """
    weights = load_weights(sources, blueprint, mesh, partly=False, setting="--weights")
    return training_weights(weights, blueprint, mesh)


def training_weights(weights: Weights, blueprint: Blueprint, mesh: Mesh) -> Weights:
    """The weights in their device layout (steps/state.py), on the mesh.

    weights: in the checkpoint layout, on the mesh or on the host; they are not donated.
    """
    on, stages = state_shardings(blueprint, mesh), blueprint.stages
    shardings = Weights(on.params, on.buffers)
    if blueprint.config.mesh.pipeline == 1:
        return jax.device_put(weights, shardings)
    return jax.jit(lambda weights: to_stages(weights, stages), out_shardings=shardings)(weights)


def named_weights(weights: Weights) -> dict[str, Any]:
    """All arrays by their dotted names in the model, without "params." and "buffers."."""
    return {name.partition(".")[2]: x for name, x in named_arrays(weights).items()}


class _Run:
    """A checkpoint of a run. Raises UserError where it is of another model.

    gives: names of the arrays that it holds. tokenizer: (its path, its tokenizer; None where that is not
    known).
    """

    def __init__(self, path: Path, which: str, config: Config, specs: Weights, setting: str) -> None:
        there = read_config(path)
        say_other_settings(path, compare_models(path, there.model, config.model))
        say_other_template(path, there.data, config.data)
        self._folder = path / "checkpoints"
        self._step, self._saved = find_checkpoint(self._folder, which)
        self._averages = {name[4:] for name in self._saved if name[:4] == "ema."} if EMA in which else set()
        shapes = {name: spec.shape for name, spec in named_weights(specs).items()}
        optional = ("mtp.",) if config.model.encoder else ("mtp.", "encoder.", "adapter.")
        found = {
            short: array.shape
            for name, array in self._saved.items()
            for field, _, short in [name.partition(".")]
            if field in Weights._fields and (short in shapes or not short.startswith(optional))
        }
        differing = [name for name, shape in found.items() if shapes.get(name) != shape]
        if differing:
            name, ranks = differing[0], (there.adapt.lora_rank, config.adapt.lora_rank)
            lora = f"adapt.lora_rank is {ranks[0]} there and {ranks[1]} here. " * (ranks[0] != ranks[1])
            if ".lora." in name and ranks[0] == ranks[1]:
                lora = (
                    f"adapt.lora_targets is {there.adapt.lora_targets} there and {config.adapt.lora_targets} "
                    f"here, adapt.dora {there.adapt.dora} and {config.adapt.dora}. "
                )
            raise UserError(
                f"the checkpoint of step {self._step} in {path} is of another model: {len(differing)} arrays "
                f"differ, {name} is {list(found[name])} there and {shapes.get(name, 'absent')} here. {lora}"
                f"Take the settings of that run (jaxthd COMMAND {path}), merge its LoRA matrices (jaxthd "
                f"convert export), or choose other weights in {setting}"
            )
        self.gives = set(found)
        self._specs = specs
        has_lora = any(name.endswith(".lora.b") for name in self.gives)
        self._lora_factor = lora_factor(path, there.adapt, config.adapt) if has_lora else 1.0
        say_other_documents(path, there.adapt if has_lora else None, config.adapt)
        # What import wrote (step 0) has "bytes" where no source had a tokenizer.
        is_known = self._step > 0 or there.data.tokenizer not in BUILT_IN
        self.tokenizer = path, there.data.tokenizer if is_known else None

    def read(self) -> dict[str, Array]:
        """The arrays. They are restored a few at a time, because orbax holds each on the host too."""
        found: dict[str, Array] = {}
        structure, named = jax.tree.structure(self._specs), named_weights(self._specs)
        for names in _by_size(named, self.gives):
            own, averages = (
                jax.tree.unflatten(structure, [spec if n in chosen else None for n, spec in named.items()])
                for chosen in (names - self._averages, names & self._averages)
            )
            wanted = _pruned(own._asdict() | {"ema": averages.params})
            try:
                restored = restore_arrays(self._folder, self._step, wanted, self._saved)
            except Exception as error:
                raise UserError(
                    f"the checkpoint of step {self._step} in {self._folder} cannot be read "
                    f"({reason(error)}); expected a whole one: copy it anew"
                ) from error
            found |= named_weights(Weights(restored.get("params", {}), restored.get("buffers", {})))
            found |= named_weights(Weights(restored.get("ema", {}), {}))
        if self._lora_factor != 1.0:
            found |= {name: x * self._lora_factor for name, x in found.items() if name.endswith(".lora.b")}
        return found


def _by_size(specs: Mapping[str, Any], names: Collection[str], limit: int = 2**28) -> Iterator[set[str]]:
    """The names in sets whose arrays take at most `limit` bytes; a larger array is alone in its set."""
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
    """The tree without None, and without branches that hold nothing else."""
    pruned = {k: _pruned(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in pruned.items() if v is not None and v != {}}


class _Published:
    """A published checkpoint, with the same attributes as _Run."""

    def __init__(self, path: Path, config: Config, specs: Mapping[str, Any]) -> None:
        shapes = {name: spec.shape for name, spec in specs.items()}
        opened = open_checkpoint(path)
        say_other_settings(path, compare_models(path, opened.configure(config.model), config.model))
        self.tokenizer = path, str(path) if path.is_dir() and has_tokenizer(path) else None
        self._checkpoint, self._specs = opened.for_run(config.adapt, shapes), specs
        say_other_documents(path, opened.lora, config.adapt)
        if self._checkpoint is not opened:
            _report(f"{path}: its LoRA, which is not that of this run, is merged into its projections")
        self._table = self._checkpoint.tensors(config.model, shapes)
        self.gives = {part.name for tensor in self._table for part in tensor.slices}

    def read(self) -> dict[str, Array]:
        """The arrays, each tensor written into the devices' shards as it is read."""
        names = sorted(self.gives)
        zeros = {name: (self._specs[name].shape, self._specs[name].dtype) for name in names}
        arrays = _made(lambda: {name: jnp.zeros(*x) for name, x in zeros.items()}, self._specs, names)
        shards = {name: _Shards(arrays.pop(name)) for name in names}
        for part, elements in self._checkpoint.read(self._table):
            shards[part.name].write(part.at, elements)
        decoded = self._checkpoint.decoded(tensor.name for tensor in self._table)
        if decoded:
            _report(f"{self._checkpoint.path}: decoded as they were read: {decoded}")
        unread = self._checkpoint.unread([tensor.name for tensor in self._table])
        if unread:
            _report(f"{self._checkpoint.path}: not read, being no part of the model: {groups_of(unread)}")
        return {name: written.array() for name, written in shards.items()}


class _Shards:
    """The shards of an array on this process's devices, written in place."""

    def __init__(self, array: Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        self._shards = [(shard.index, shard.data) for shard in array.addressable_shards]

    def write(self, at: tuple[int, ...], elements: Shaped[np.ndarray, "..."]) -> None:
        """array[at] = elements; each device copies what belongs to its shard."""
        for number, (index, shard) in enumerate(self._shards):
            bounds = [dim.indices(size)[:2] for dim, size in zip(index, self._shape, strict=True)]
            if all(start <= i < stop for i, (start, stop) in zip(at, bounds, strict=False)):
                own = np.ascontiguousarray(elements[tuple(slice(*b) for b in bounds[len(at) :])])
                first = tuple(i - start for i, (start, _) in zip(at, bounds, strict=False))
                self._shards[number] = index, _written(shard, own, first)

    def array(self) -> Array:
        """The array of all shards."""
        shards = [shard for _, shard in self._shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


@partial(jax.jit, donate_argnums=0)
def _written(shard: Array, elements: Array, first: tuple[Array, ...]) -> Array:
    """shard[first] = elements, in place."""
    elements = elements.astype(shard.dtype).reshape((1,) * len(first) + elements.shape)
    return jax.lax.dynamic_update_slice(shard, elements, [*first, *[0] * (shard.ndim - len(first))])


def _report(text: str) -> None:
    """Prints it, from process 0 alone."""
    if is_first():
        print(text)
