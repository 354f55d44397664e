"""The optimizers that train.optimizer names. Their settings are train.optimizer_options.

Each turns clipped gradients into updates that are proportional to the learning rate. Weight decay, which all
apply in the same way, is decoupled: the learning rate times train.weight_decay times the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxthd.config import TrainConfig
from jaxthd.errors import UserError
from jaxthd.files.options import from_options
from jaxthd.objectives.settings import check_number
from jaxthd.steps.adafactor import scale_by_adafactor
from jaxthd.steps.muon import scale_by_muon

Tree = Any
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
        return state._replace(mu=jax.tree.map(lambda m: m.astype(dtype), state.mu))

    def update(gradients: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
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
