"""What the Pallas kernels of attention and of the scan share: products, requirements, launches. Kernels are
lowered by Triton, and interpreted on a CPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxthd.ops.backend import Machine, below_capability, not_nvidia
from jaxthd.ops.numerics import accumulation_dtype

Ref = Any
"""A Pallas reference to a block."""
CAPABILITY_LEAST = (8, 0)
"""Ampere's compute capability, the first with bfloat16 matrix units."""
SMALLEST = 16
"""Least size of a dim that the tensor cores multiply over."""
ROWS, COLUMNS = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
STAGES = 2
"""Stages of a program's loops: loads run one matrix product early."""

Inputs = Sequence[tuple[Array, pl.BlockSpec]]
Outputs = Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]


def dot(a: Array, b: Array, dims: Any = ROWS) -> Array:
    """In the accumulation dtype: a @ b (ROWS), a.T @ b (COLUMNS), a @ b.T (ROWS_BY_ROWS)."""
    exact = jax.lax.Precision.DEFAULT if a.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=accumulation_dtype(a))


def below_ampere(machine: Machine) -> str | None:
    """The requirement of all kernels: an NVIDIA GPU of Ampere or later."""
    return not_nvidia(machine.platform) or below_capability(machine, CAPABILITY_LEAST, "Ampere")


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Inputs,
    outputs: Outputs,
    warps: int = 4,
) -> tuple[Array, ...]:
    """Runs one program of the kernel for each place of the grid; returns the outputs.

    inputs: each array, and the block of it that a program reads. outputs: the same of the results.
    warps: of a program.
    """

    def call(*arrays: Array, interpret: bool) -> Any:
        """The launch, interpreted or compiled."""
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=STAGES),
            interpret=interpret,
        )(*arrays)

    arrays = [array for array, _ in inputs]
    run = {"cpu": partial(call, interpret=True), "default": partial(call, interpret=False)}
    return tuple(jax.lax.platform_dependent(*arrays, **run))
