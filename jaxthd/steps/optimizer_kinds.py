"""The optimizers that train.optimizer names. Their settings are train.optimizer_options.

Each turns clipped gradients into updates that are proportional to the learning rate. Weight decay, which all
apply in the same way, is decoupled: the learning rate times train.weight_decay times the weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from optax import FactoredState

from jaxthd.config import TrainConfig
from jaxthd.errors import UserError
from jaxthd.files.options import check_number, from_options
from jaxthd.steps.muon import scale_by_muon

Tree = Any


def scale_by_adafactor(
    decay_rate: float, clipping_threshold: float, min_dim: int, stacked: Tree, *, relative: bool
) -> optax.GradientTransformation:
    """Gradients divided by factored root mean squares, clipped to a root mean square of clipping_threshold.

    By optax (Shazeer and Stern, Adafactor, 2018), of each parameter by itself. Layers and experts are stacked
    into one array, and Adafactor's means run over one parameter: its rows, its columns, all of it. So every
    index of a stack is updated alone, and the rows that pad a pipeline's stages enter no mean.

    min_dim: the least size of both dims of a matrix whose second moments are factored. relative: times the
    parameter's own root mean square, 0.001 at least. stacked: the number of leading dims of each parameter
    that stack parameters.
    """
    moments = optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_dim)
    after = [optax.clip_by_block_rms(clipping_threshold)]
    if relative:
        after.append(optax.scale_by_param_block_rms())
    rest = optax.chain(*after)
    axes, one_state = FactoredState(None, 0, 0, 0), FactoredState(0, 0, 0, 0)

    def transposed(by_parameter: Tree, one: Any) -> Any:
        """One result for all parameters, from a tree with a result like `one` for each."""
        return jax.tree.transpose(jax.tree.structure(stacked), jax.tree.structure(one), by_parameter)

    def alone(function: Callable[..., Any], number: int, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        """The function applied to each layer of a stack alone."""
        for _ in range(number):
            function = jax.vmap(function, in_axes, out_axes)
        return function

    def init(params: Tree) -> FactoredState:
        """Factored moments of each layer."""
        found = jax.tree.map(lambda x, number: alone(moments.init, number, 0, axes)(x), params, stacked)
        return transposed(found, one_state)._replace(count=jnp.zeros((), jnp.int32))

    def of_one(gradient: Any, state: FactoredState, param: Any) -> tuple[Any, FactoredState]:
        """The update of one layer's parameter, and its moments."""
        update, state = moments.update(gradient, state, param)
        return rest.update(update, rest.init(param), param)[0], state

    def update(gradients: Tree, state: FactoredState, params: Tree) -> tuple[Tree, FactoredState]:
        """Updates of all parameters, and their moments."""

        def of_leaf(number: int, gradient: Any, row: Any, column: Any, v: Any, param: Any) -> Any:
            """The updates of a stack of layers."""
            run = alone(of_one, number, (0, axes, 0), (0, axes))
            return run(gradient, FactoredState(state.count, row, column, v), param)

        both = jax.tree.map(of_leaf, stacked, gradients, state.v_row, state.v_col, state.v, params)
        updates, found = transposed(both, (0, one_state))
        return updates, found._replace(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


OPTIONS = "train.optimizer_options"
_check = partial(check_number, setting=OPTIONS)


class Trained(NamedTuple):
    """An optimizer's facts about the parameters that train. Trees with None for the others, but for specs.

    rates: the learning rate by updates done. decayed: whether weight decay applies. projections: whether it
    is a matrix that multiplies activations. stacked: the number of leading dims that stack parameters.
    specs: PartitionSpecs of all parameters. mesh: None where only the state's form is asked for.
    """

    train: TrainConfig
    rates: optax.Schedule
    decayed: Tree
    projections: Tree
    stacked: Tree
    specs: Tree
    mesh: Mesh | None


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019).

    beta1, beta2: decays of the first and the second moment. first_moment: the dtype in which it is held,
    "own" for the parameter's. An update is computed from it before it is rounded.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    first_moment: Literal["own", "bfloat16"] = "own"

    def __post_init__(self) -> None:
        _check_decays(self.beta1, self.beta2)

    def transformation(self, trained: Trained) -> optax.GradientTransformation:
        """optax's AdamW, with decay of matrices alone."""
        train = trained.train
        adam = optax.scale_by_adam(self.beta1, self.beta2)
        return optax.chain(  # optax.adamw
            adam if self.first_moment == "own" else _first_moment_held_in(self.first_moment, adam),
            optax.add_decayed_weights(train.weight_decay, trained.decayed),
            optax.scale_by_learning_rate(trained.rates),
        )


def _check_decays(beta1: float, beta2: float) -> None:
    """Raises UserError for a decay of a moment that is no number from 0 to below 1."""
    for name, decay in (("beta1", beta1), ("beta2", beta2)):
        _check(name, decay, least=0.0, below=1.0)


def _first_moment_held_in(dtype: str, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax's own mu_dtype rounds the decayed moment too, before the gradient is added."""

    def held(state: Any) -> Any:
        """The state with first moments in the dtype in which they are held."""
        return state._replace(mu=jax.tree.map(lambda m: m.astype(dtype), state.mu))

    def update(gradients: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        """AdamW's update, computed in the dtype of the second moment."""
        wide = jax.tree.map(lambda m, v: m.astype(v.dtype), state.mu, state.nu)
        updates, state = adam.update(gradients, state._replace(mu=wide), params)
        return updates, held(state)

    return optax.GradientTransformation(lambda params: held(adam.init(params)), update)


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al., 2023): the sign of a momentum, so one moment. Its learning rate is 3 to 10 times
    lower than AdamW's, its weight decay as much higher.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        _check_decays(self.beta1, self.beta2)

    def transformation(self, trained: Trained) -> optax.GradientTransformation:
        """optax's Lion, with decay of matrices alone."""
        decay = trained.train.weight_decay
        return optax.lion(
            trained.rates, b1=self.beta1, b2=self.beta2, weight_decay=decay, mask=trained.decayed
        )


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern, 2018): of a matrix it holds the squared gradients' means by row and by
    column alone.

    decay_rate: the second moments' decay is 1 - updates^-decay_rate. clipping_threshold: most root mean
    square of a parameter's update. relative: updates are times the parameter's root mean square.
    min_dim_size_to_factor: smaller dims are not averaged over.
    """

    decay_rate: float = 0.8
    clipping_threshold: float = 1.0
    relative: bool = True
    min_dim_size_to_factor: int = 128

    def __post_init__(self) -> None:
        _check("decay_rate", self.decay_rate, above=0.0, most=1.0)
        _check("clipping_threshold", self.clipping_threshold, above=0.0)
        _check("min_dim_size_to_factor", self.min_dim_size_to_factor, least=1)

    def transformation(self, trained: Trained) -> optax.GradientTransformation:
        """Adafactor of each layer alone, with decay of matrices alone."""
        return optax.chain(
            scale_by_adafactor(
                self.decay_rate,
                self.clipping_threshold,
                self.min_dim_size_to_factor,
                trained.stacked,
                relative=self.relative,
            ),
            optax.add_decayed_weights(trained.train.weight_decay, trained.decayed),
            optax.scale_by_learning_rate(trained.rates),
        )


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al., 2024) for the matrices that multiply activations, AdamW for the rest: embeddings,
    the head, convolutions, Mamba2's numbers for each head, routers' and norms' vectors, biases.

    beta: the momentum's decay. beta1, beta2: AdamW's. iterations: of Newton-Schulz. nesterov: the momentum
    looks ahead. rms: the root mean square of an update's elements over the learning rate; 0.2 is about
    AdamW's, so that one learning rate serves both (Liu et al., 2025). 0: Jordan's scale instead,
    sqrt(max(1, outputs / inputs)).
    """

    beta: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    iterations: int = 5
    nesterov: bool = True
    rms: float = 0.2

    def __post_init__(self) -> None:
        _check("beta", self.beta, least=0.0, below=1.0)
        _check_decays(self.beta1, self.beta2)
        _check("iterations", self.iterations, least=1)
        _check("rms", self.rms, least=0.0)

    def transformation(self, trained: Trained) -> optax.GradientTransformation:
        """Muon for the decoder's and the encoder's matrices, AdamW for all else."""
        matrices = optax.chain(
            scale_by_muon(
                self.beta,
                self.iterations,
                self.rms,
                nesterov=self.nesterov,
                specs=trained.specs,
                mesh=trained.mesh,
            ),
            optax.add_decayed_weights(trained.train.weight_decay),
            optax.scale_by_learning_rate(trained.rates),
        )
        labels = jax.tree.map(lambda x: "muon" if x else "adamw", trained.projections)
        rest = AdamW(self.beta1, self.beta2).transformation(trained)
        return optax.partition({"muon": matrices, "adamw": rest}, labels)


Kind = AdamW | Adafactor | Lion | Muon
OPTIMIZERS: dict[str, type[Kind]] = {"adamw": AdamW, "adafactor": Adafactor, "lion": Lion, "muon": Muon}
"""Names that train.optimizer takes -> classes: frozen dataclasses, whose fields are the settings."""


def optimizer_kind(name: str, options: Sequence[str] = ()) -> Kind:
    """The optimizer of that name with its options (NAME=VALUE).

    Raises UserError for an unknown name or option, a value of another type, and one out of bounds.
    """
    if name not in OPTIMIZERS:
        raise UserError(
            f"train.optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS)}: correct train.optimizer"
        )
    return from_options(OPTIMIZERS[name], options, f"optimizer {name!r}", OPTIONS)
