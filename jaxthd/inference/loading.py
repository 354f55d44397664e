"""A Generator from a config and the weights that a command names."""

from collections.abc import Sequence
from pathlib import Path

from jaxthd.checkpoints.weights import load_model
from jaxthd.config import Config
from jaxthd.inference.generator import Generator, for_generation
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.startup import check, with_kernels
from jaxthd.steps.blueprint import Blueprint


def load(
    config: Config, weights: Sequence[str | Path], *, batch: int = 8, max_new_tokens: int = 256
) -> Generator:
    """A Generator on config.mesh.

    weights: workdirs of runs, Hugging Face folders (jaxthd.checkpoints.weights.load_weights). batch: most
    conversations answered together. max_new_tokens: most tokens of an answer.
    Raises UserError for a config that cannot work on this machine, and for a tokenizer or weights that cannot
    be used.
    """
    check(for_generation(config, batch), data_sets=False)
    config = with_kernels(config.without_mtp)
    mesh = make_mesh(config.mesh)
    params, buffers = load_model(weights, Blueprint(config), mesh)
    return Generator(config, mesh, params, buffers, batch=batch, max_new_tokens=max_new_tokens)
