"""Random weights whose values hide no error."""

import math
from typing import Any

import numpy as np
from flax import nnx

from jaxthd.parallel.params import Buffer


def random_state(module: nnx.Module, seed: int = 0) -> tuple[nnx.GraphDef, Any, Any]:
    """(structure, parameters, buffers) of a module made with Init: float64 NumPy arrays in nested dicts.

    module: may be abstract (nnx.eval_shape); then nothing is computed or compiled.
    No value would hide an error, as a bias of 0 or a norm's weight of 1 would. Mamba's decay rates |A| range
    from 0.05 to 1000, its time steps from 0.007 to 0.3.
    """
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], variable: nnx.Variable) -> np.ndarray:
        name, shape = path[-1], variable.shape
        if name == "a_log":
            rates = np.exp(np.linspace(np.log(0.05), np.log(1000.0), math.prod(shape)))
            return np.log(rng.permutation(rates).reshape(shape))
        if name == "dt_bias":
            return rng.uniform(-5.0, -1.0, shape)
        if name == "embedding":
            return rng.normal(size=shape)
        if variable.get_metadata("decayed"):
            return rng.normal(size=shape) / math.sqrt(shape[-2])
        around = 1.0 if name in ("weight", "variance", "d") else 0.0
        return around + rng.uniform(-0.3, 0.3, shape)

    graph, *states = nnx.split(module, nnx.Param, Buffer)
    filled: list[Any] = []
    for state in states:
        flat = {path: value(path, variable) for path, variable in nnx.to_flat_state(state)}
        filled.append(nnx.traversals.unflatten_mapping(flat))
    params, buffers = filled
    return graph, params, buffers
