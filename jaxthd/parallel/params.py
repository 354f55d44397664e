"""One description of a parameter: its variable in the module tree carries shape, dtype and sharding.

Modules are Flax NNX, built through `Init` with the shapes of the whole model. Initialization, sharding, the
parameter table and weight import all read the variables that it makes. On the mesh a rank holds a shard:

- A sharded dim is divided into whole units (heads, experts, vocabulary entries). Each rank computes with its
  own units.
- An FSDP-sharded weight matrix is divided over ranks that all use the whole matrix. It is gathered just
  before its use (`gathered`) and freed after it. Its gradient is scattered again.

Repeated blocks are stacked (`stack`) and scanned (`scan_stack`), so that compile time and program size do not
grow with the number of repeats.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxthd.config import ComputeConfig, MeshConfig
from jaxthd.parallel.mesh import AXES, CONTEXT, DATA, PIPELINE, TENSOR, ranks_of
from jaxthd.parallel.remat import Remat, all_but_gathered, rematerialized

M = TypeVar("M", bound=nnx.Module)
V = TypeVar("V", bound=nnx.Variable)
Carry = TypeVar("Carry")

DECODER_FSDP = (DATA, CONTEXT)
"""The decoder's FSDP axes: their ranks all use whole layers. The other two axes divide the layers."""
ENCODER_FSDP = AXES
"""The encoder's FSDP axes: all of them, because every rank encodes audio of its own."""


class ShardedDim(NamedTuple):
    """A dim of `units`, divided over mesh axes. A unit is never divided.

    If the number of units is not a multiple of the ranks, every rank holds all units and uses one (own_part).
    """

    axes: tuple[str, ...]
    units: int

    def is_sharded(self, mesh: MeshConfig) -> bool:
        """Whether several ranks divide the units evenly."""
        return ranks_of(mesh, self.axes) > 1 and self.units % ranks_of(mesh, self.axes) == 0


def over_tensor(units: int) -> ShardedDim:
    """A dim whose units are divided over the tensor ranks."""
    return ShardedDim((TENSOR,), units)


def over_vocabulary(entries: int) -> ShardedDim:
    """The vocabulary is sharded over the pipeline ranks too, so that they share its work."""
    return ShardedDim((PIPELINE, TENSOR), entries)


Dims = tuple[ShardedDim | None, ...]
"""The sharding of every dim of a parameter, or None. (): no dim is sharded."""


class Buffer(nnx.Variable):
    """State without a gradient: BatchNorm's running statistics, the router's correction bias."""


def parameter_dtype(compute: ComputeConfig) -> Any:
    """float32, or float64 where the run computes in float64."""
    return jnp.float64 if compute.dtype == "float64" else jnp.float32


@partial(jax.jit, static_argnums=1)
def _split(key: jax.Array, number: int) -> tuple[jax.Array, ...]:
    return tuple(jax.random.split(key, number))


def split_key(key: jax.Array, number: int = 2) -> tuple[jax.Array, ...]:
    """The keys of jax.random.split. Where the key's value is known they are computed now, also while a
    program is traced: inside it each split is a loop, and these were half of the program of a new model.
    """
    if isinstance(key, jax.core.Tracer):
        return _split(key, number)
    with jax.ensure_compile_time_eval():
        return _split(key, number)


def _key_streams(keys: tuple[jax.Array, ...], length: int) -> list[jax.Array]:
    """For each of the first `length` keys that an Init draws: those of the Inits with these keys, stacked."""
    if not length:
        return []
    implementation = jax.random.key_impl(keys[0])
    with jax.ensure_compile_time_eval():
        drawn = []
        for key in keys:
            init = Init(key)
            drawn.append([np.asarray(jax.random.key_data(init.next_key())) for _ in range(length)])
        return [
            jax.random.wrap_key_data(jnp.asarray(np.stack(at)), impl=implementation)
            for at in zip(*drawn, strict=True)
        ]


class Init:
    """Makes a module's parameters: one key stream, one dtype and one mesh for all of them.

    dtype: the dtype of every parameter.
    mesh: the ranks that the modules will run on.
    fsdp: axes over which weight matrices are FSDP-sharded.
    keys: the keys to draw, in place of those that follow from `key`.
    draws: False where only shapes, dtypes and sharding are of use: weight matrices are then zeros.
    """

    def __init__(
        self,
        key: jax.Array,
        dtype: Any = jnp.float32,
        mesh: MeshConfig | None = None,
        fsdp: tuple[str, ...] = (),
        keys: Sequence[jax.Array] | None = None,
        draws: bool = True,
    ) -> None:
        self._key = key
        self._keys = keys
        self.draws = draws
        self.drawn = 0
        self.dtype = dtype
        self.mesh = mesh or MeshConfig()
        self.fsdp = fsdp

    @classmethod
    def of(cls, init: "Init | nnx.Rngs", compute: ComputeConfig) -> "Init":
        """Returns init itself. For nnx.Rngs: an Init for one device, with a key of the stream "params"."""
        return init if isinstance(init, Init) else cls(init.params(), parameter_dtype(compute))

    def next_key(self) -> jax.Array:
        """The next key of the stream; the same one each time where nothing is drawn."""
        self.drawn += 1
        if self._keys is not None:
            return self._keys[self.drawn - 1]
        if not self.draws:
            return self._key
        self._key, key = split_key(self._key)
        return key

    def with_fsdp(self, axes: tuple[str, ...]) -> "Init":
        """An Init for a part of the model, with a key of its own."""
        return Init(self.next_key(), self.dtype, self.mesh, axes, draws=self.draws)

    def normal(
        self, shape: tuple[int, ...], dims: Dims = (), std: float | None = None, *, projects: bool = False
    ) -> nnx.Param:
        """A weight matrix, initially normal. Its fan-in is the second to last dim.

        std: 1 / sqrt(fan-in) by default. projects: as in `matrix`.
        """
        std = 1 / math.sqrt(shape[-2]) if std is None else std
        key = self.next_key()
        value = std * jax.random.normal(key, shape, self.dtype) if self.draws else jnp.zeros(shape)
        return self.matrix(value, dims, projects=projects)

    def matrix(self, value: jax.Array, dims: Dims = (), *, projects: bool = False) -> nnx.Param:
        """A weight matrix. projects: the model multiplies activations by it, [.., inputs, outputs], with one
        matrix for each index of the leading dims. Tables and the taps of convolutions do not.

        A matrix that projects is cast to the compute dtype before it is gathered, and its gradient may come
        in that dtype. If it is used in another dtype, or more than once, call set_metadata(cast=False) on it.
        """
        return self._make(nnx.Param, value, dims, True, projects)

    def zeros(self, shape: tuple[int, ...], dims: Dims = ()) -> nnx.Param:
        """A parameter without weight decay, initially 0."""
        return self.param(jnp.zeros(shape), dims)

    def ones(self, shape: tuple[int, ...], dims: Dims = ()) -> nnx.Param:
        """A parameter without weight decay, initially 1."""
        return self.param(jnp.ones(shape), dims)

    def param(self, value: jax.Array, dims: Dims = ()) -> nnx.Param:
        """A parameter without weight decay, such as a bias or a norm's weight."""
        return self._make(nnx.Param, value, dims, False)

    def buffer(self, value: jax.Array, dims: Dims = ()) -> Buffer:
        """State without a gradient, with this initial value."""
        return self._make(Buffer, value, dims, False)

    def _make(self, kind: type[V], value: jax.Array, dims: Dims, matrix: bool, projects: bool = False) -> V:
        by_dim = [d.axes if d and d.is_sharded(self.mesh) else () for d in dims or (None,) * value.ndim]
        fsdp_dim, fsdp_axes = self._fsdp_dim(value.shape, by_dim) if matrix else (0, ())
        return kind(
            value.astype(self.dtype),
            mesh_axes=tuple(axes + fsdp_axes if i == fsdp_dim else axes for i, axes in enumerate(by_dim)),
            fsdp=(fsdp_dim - value.ndim, fsdp_axes),
            decayed=matrix,
            projects=projects,
            cast=projects,
            stacked=value.ndim - 2 if projects else 0,
        )

    def _fsdp_dim(
        self, shape: tuple[int, ...], sharded: list[tuple[str, ...]]
    ) -> tuple[int, tuple[str, ...]]:
        """The dim to FSDP-shard, and the axes to shard it over.

        It is the dim that the most ranks can divide; among equals, the largest one.
        """
        fsdp = self.fsdp if self.mesh.fsdp else ()
        free = [a for a in fsdp if a not in sum(sharded, ()) and ranks_of(self.mesh, (a,)) > 1]
        best: tuple[int, int, int, tuple[str, ...]] = (1, 0, 0, ())
        for dim, size in enumerate(shape):
            local = size // ranks_of(self.mesh, sharded[dim])
            axes: tuple[str, ...] = ()
            for axis in free:
                if local % ranks_of(self.mesh, (*axes, axis)) == 0:
                    axes = (*axes, axis)
            best = max(best, (ranks_of(self.mesh, axes), local, dim, axes), key=lambda b: b[:2])
        return best[2:]


def partition_spec(variable: nnx.Variable) -> PartitionSpec:
    """The variable's sharding on the mesh."""
    return PartitionSpec(*(axes or None for axes in variable.get_metadata("mesh_axes")))


def gathered(variable: nnx.Variable, dtype: Any = None) -> Array:
    """This rank's part of a variable, ready for computation: gathered if it is FSDP-sharded.

    dtype: the compute dtype. A matrix that is used in it alone (metadata "cast") is cast before it is
    gathered, and has its own dtype again afterwards, in which its gradient is summed over the ranks: nothing
    is lost, for it is cast again where it is used (ops/product.py), and XLA drops both casts.
    """
    (dim, axes), value = variable.get_metadata("fsdp"), variable[...]
    if not axes:
        return value
    if dtype is not None and variable.get_metadata("cast") and value.dtype != dtype:
        return _gathered_as(_Gather(dtype, value.dtype, axes, value.ndim + dim), value)
    return jax.lax.all_gather(value, axes, axis=value.ndim + dim, tiled=True)


class _Gather(NamedTuple):
    """sent, own: the dtypes in which values are gathered, and of the parameter."""

    sent: Any
    own: Any
    axes: tuple[str, ...]
    dim: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_as(how: _Gather, value: Array) -> Array:
    return _gathered_forward(how, value)[0]


def _gathered_forward(how: _Gather, value: Array) -> tuple[Array, None]:
    """Policies of recomputation (parallel/remat.py) keep the first cast, of a shard, and nothing else."""
    sent = jax.lax.all_gather(value.astype(how.sent), how.axes, axis=how.dim, tiled=True)
    return sent.astype(how.own), None


def _gathered_backward(how: _Gather, _: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(gradient, how.axes, scatter_dimension=how.dim, tiled=True),)


_gathered_as.defvjp(_gathered_forward, _gathered_backward)


def applied(module: Any, *args: Any, keeps_gathered: bool) -> Any:
    """module(*args) with all its variables gathered. Call it inside shard_map. The first argument is an array
    in the compute dtype.

    keeps_gathered: whether FSDP-sharded weights stay gathered for the backward pass. If not, they are
    gathered for it again, and nothing but these is computed again.
    """
    graph, state = nnx.split(module)

    def apply(state: Any, *args: Any) -> Any:
        """module(*args) with these variables, gathered."""
        return nnx.merge(graph, gathered_state(state, args[0].dtype))(*args)

    return (apply if keeps_gathered else jax.checkpoint(apply, policy=all_but_gathered))(state, *args)


def gathered_state(state: Any, dtype: Any = None) -> Any:
    """A tree of variables, each gathered. dtype: as `gathered` takes it."""
    return jax.tree.map(lambda v: v.replace(gathered(v, dtype)), state, is_leaf=_is_variable)


def gathered_module(module: M, dtype: Any = None) -> M:
    """The module with all its variables gathered, for code that runs on some ranks alone: nothing in it is
    gathered again. dtype: as `gathered` takes it."""
    graph, state = nnx.split(module)

    def whole(variable: nnx.Variable) -> nnx.Variable:
        """The variable, gathered, as one that is not sharded."""
        found = variable.replace(gathered(variable, dtype))
        found.set_metadata(fsdp=(-1, ()))
        return found

    merged: M = nnx.merge(graph, jax.tree.map(whole, state, is_leaf=_is_variable))
    return merged


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def own_part(x: Array, dim: int, sharded: ShardedDim | None, mesh: MeshConfig) -> Array:
    """The unit that this rank computes with, if there are more ranks than units; otherwise x unchanged.

    Several ranks then share a unit. Its gradient is summed over the ranks that hold x, as for every
    replicated parameter.

    Raises ValueError if there are more units than ranks: some would be used by no rank.
    """
    if sharded is None or ranks_of(mesh, sharded.axes) == 1 or sharded.is_sharded(mesh):
        return x
    ranks = ranks_of(mesh, sharded.axes)
    if sharded.units > ranks:
        raise ValueError(
            f"{sharded.units} units do not divide over the {ranks} ranks of {' x '.join(sharded.axes)}: "
            f"expected a multiple of {ranks}, or at most {ranks}. Change the model's sizes or the mesh."
        )
    size = x.shape[dim] // sharded.units
    unit = jax.lax.axis_index(sharded.axes) * sharded.units // ranks
    return jax.lax.dynamic_slice_in_dim(x, unit * size, size, axis=dim)


def once(x: Array, sharded: ShardedDim | None, mesh: MeshConfig) -> Array:
    """x on the first of the ranks that share a dim, 0 on the others: their sum has it once."""
    if sharded is None or not sharded.is_sharded(mesh):
        return x
    return jnp.where(jax.lax.axis_index(sharded.axes) == 0, x, 0)


def stack(make: Callable[[Init], M], init: Init, repeats: int, *, axes: tuple[str, ...] = ()) -> M:
    """Stacks `repeats` modules into one: every variable gets a leading dim. Each module has a key of its own.

    axes: the mesh axes over which the leading dim is sharded.
    """

    counts: list[int] = []

    def again(key: jax.Array, keys: Sequence[jax.Array] | None = None) -> M:
        """Makes one module of the stack, and counts the keys that it draws."""
        own = Init(key, init.dtype, init.mesh, init.fsdp, keys, init.draws)
        made = make(own)
        counts.append(own.drawn)
        return made

    graph, state = nnx.split(nnx.eval_shape(lambda: again(jax.random.key(0))))
    key = init.next_key()
    if not init.draws:
        stacked = jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), state)
    elif isinstance(key, jax.core.Tracer):
        stacked = jax.vmap(lambda key: nnx.state(again(key)))(jax.random.split(key, repeats))
    else:
        streams = _key_streams(split_key(key, repeats), counts[0])
        stacked = jax.vmap(lambda keys: nnx.state(again(key, keys)), axis_size=repeats)(streams)
    for _, variable in nnx.to_flat_state(stacked):
        variable.set_metadata(
            mesh_axes=(axes, *variable.get_metadata("mesh_axes")),
            stacked=variable.get_metadata("stacked") + 1,
        )
    return nnx.merge(graph, stacked)


def scan_stack(
    module: M, body: Callable[..., tuple[Carry, Any]], carry: Carry, *, remat: Remat, unroll: bool = False
) -> tuple[Carry, Any]:
    """Applies `body(layer, carry)` for every layer of a stack, first to last. The carry's first array has the
    compute dtype.

    remat: recompute a layer's activations in the backward pass. "full" or "layers": only the carry between
        layers is kept; "selective": results of matrix products too. unroll: write the layers out one after
        the other.
    Returns the last carry and the layers' second results, stacked.
    A layer's parameters are gathered for its forward pass, freed, and gathered again for its backward pass.
    """
    graphdef, state = nnx.split(module)
    dtype = jax.tree.leaves(carry)[0].dtype

    def step(carry: Carry, layer: Any) -> tuple[Carry, Any]:
        """Applies `body` with one layer's variables, gathered."""
        return body(nnx.merge(graphdef, gathered_state(layer, dtype)), carry)

    return jax.lax.scan(rematerialized(step, remat, state), carry, state, unroll=unroll)


def metadata(state: Any, name: str) -> Any:
    """A nested dict of what the variables say under `name`.

    decayed: whether it is a weight matrix (Init.normal, Init.matrix), which gets weight decay.
    projects: whether the model multiplies activations by it (Init.matrix).
    cast: whether it is used in the compute dtype alone, and once.
    stacked: the number of leading dims that stack parameters of layers, depths or experts: each index of
        these dims is a parameter by itself.
    """
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata(name), state, is_leaf=_is_variable))
