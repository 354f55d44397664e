"""Launches a Pallas kernel of attention or of the scan: lowered by Triton, interpreted on a CPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Inputs = Sequence[tuple[Array, pl.BlockSpec]]
Outputs = Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Inputs,
    outputs: Outputs,
    *,
    warps: int,
    stages: int,
) -> tuple[Array, ...]:
    """Runs one program of the kernel for each place of the grid; returns the outputs.

    inputs: each array, and the block of it that a program reads. outputs: the same of the results.
    warps: of a program. stages: of its pipelined loads.
    """

    def call(*arrays: Array, interpret: bool) -> Any:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
        )(*arrays)

    arrays = [array for array, _ in inputs]
    run = {"cpu": partial(call, interpret=True), "default": partial(call, interpret=False)}
    return tuple(jax.lax.platform_dependent(*arrays, **run))
