"""Counts a model's parameters by group, and its training state's bytes on a device, from shapes alone."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxthd.config import Config, MeshConfig
from jaxthd.models.adapt import split
from jaxthd.parallel.mesh import bytes_of, on_device
from jaxthd.parallel.params import Buffer
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer import make_optimizer
from jaxthd.steps.optimizer_kinds import optimizer_kind
from jaxthd.steps.reference import copied as copied_by
from jaxthd.steps.reference import reference_of
from jaxthd.steps.state import moment_specs

PARTS = ("LLM", "encoder", "adapter")

_ORDER = (
    "embedding",
    "blocks",
    "RMSNorms",
    "head",
    "MTP",
)

Path = tuple[Any, ...]
"""Names and numbers, from the root of the module tree to a parameter."""


@dataclass
class Group:
    """Parameters that belong together.

    part: one of PARTS. copies: blocks that have the group. parameters: over all copies, including LoRA.
    trained: how many of these are trained.
    active: parameters used for one token of the LLM: only the experts that it is routed to, and one row of
        an embedding that is not the head too. For encoder and adapter, which process frames, all.
    largest: name and shape of the largest array, in one block.
    """

    part: str
    name: str
    copies: int
    parameters: int = 0
    trained: int = 0
    active: int = 0
    largest: tuple[str, tuple[int, ...]] = ("", ())


def parameter_groups(config: Config) -> list[Group]:
    """The model's parameters, part by part, counted from the shapes of the model that would be trained."""
    groups: dict[tuple[str, str], Group] = {}
    blueprint = Blueprint(replace(config, mesh=MeshConfig()))
    is_trained = nnx.traversals.flatten_mapping(blueprint.trained)
    for path, variable in nnx.to_flat_state(nnx.state(blueprint.model, nnx.Param)):
        part, name, copies, share = _group(path, config)
        group = groups.setdefault((part, name), Group(part, name, copies))
        size, is_stacked = math.prod(variable.shape), bool({"layers", "blocks", "depths"} & set(path))
        group.parameters += size
        group.trained += size * is_trained[path]
        group.active += round(size * share)
        shape = tuple(variable.shape[1:] if is_stacked else variable.shape)
        if math.prod(shape) > math.prod(group.largest[1]) or not group.largest[1]:
            group.largest = (_array_name(path), shape)
    letters = config.model.llm.letters
    return sorted(groups.values(), key=lambda g: (PARTS.index(g.part), *_order(g.name, letters)))


def _group(path: Path, config: Config) -> tuple[str, str, int, float]:
    """(part, name, copies, share of it that a token uses) of the group of the parameter at `path` in the
    module tree."""
    llm, encoder = config.model.llm, config.model.encoder
    letter_of = {stack: letter for letter, stack in llm.stacks}
    match path:
        case ("decoder", "layers", str(stack), "mixer", str(name), *_):
            letter = letter_of[stack]
            label, share = llm.blocks[letter].parameters(name)
            return "LLM", f"{letter} {label}", llm.letters.count(letter), share
        case ("mtp", "layers", str(stack), "mixer", str(name), *_):
            label, share = llm.blocks[letter_of[stack]].parameters(name)
            return "LLM", "MTP" if share == 1 else f"MTP {label}", llm.mtp_modules, share
        case ("mtp", *_):
            return "LLM", "MTP", llm.mtp_modules, 1.0
        case ("embedding", *_):
            return "LLM", "embedding", 1, 1.0 if llm.tied_embedding else 1 / llm.vocab_size
        case ("decoder", *_):
            return "LLM", "RMSNorms", len(llm.letters) + 1, 1.0
        case ("encoder", *below) if encoder is not None:
            return "encoder", *encoder.parameters([str(name) for name in below]), 1.0
        case _:
            return ("adapter" if path[0] == "adapter" else "LLM"), str(path[0]), 1, 1.0


def _array_name(path: Path) -> str:
    """A path without the modules around its group, and without the name of a Linear's matrix."""
    if path[:2] in (("decoder", "layers"), ("mtp", "layers")):
        path = path[3 + (path[3] == "mixer") :]
    names = [str(p) for p in path if p not in ("blocks", "decoder", "encoder", "mtp", "depths")]
    return ".".join(names[:-1] if names[-1] == "w" else names)


def _order(name: str, letters: str) -> tuple[int, int]:
    """Sorts the groups; those of blocks as the letters come in the pattern."""
    first = name.split()[0]
    if first in letters:
        return _ORDER.index("blocks"), letters.index(first)
    first = name if name in _ORDER else first
    return _ORDER.index(first) if first in _ORDER else len(_ORDER), 0


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of the training state and of the gradients on each device of config.mesh; all hold the same.

    Raises ValueError if the block pattern cannot be divided into the pipeline's stages.
    """
    blueprint = Blueprint(config)
    whole, buffers = (nnx.to_pure_dict(nnx.state(blueprint.model, kind)) for kind in (nnx.Param, Buffer))
    specs, buffer_specs = blueprint.specs
    moments = jax.eval_shape(make_optimizer(blueprint).init, split(whole, blueprint.trained)[0])
    moments = on_device(moments, moment_specs(moments, whole, specs), config.mesh)
    params, buffers = on_device(whole, specs, config.mesh), on_device(buffers, buffer_specs, config.mesh)
    own, _ = split(params, blueprint.trained)
    optimizer = optimizer_kind(config.train.optimizer, config.train.optimizer_options)
    average = {"averaged parameters": bytes_of(own)} if config.train.ema_decay else {}
    reference = jax.eval_shape(partial(reference_of, blueprint), whole)
    copied = (
        {}
        if reference is None
        else {
            "reference policy": bytes_of(
                on_device(reference, split(specs, copied_by(blueprint))[0], config.mesh)
            )
        }
    )
    return {
        "parameters": bytes_of(params),
        **average,
        **copied,
        "gradients": bytes_of(own),
        f"{type(optimizer).__name__} moments": bytes_of(moments),
        "batch statistics, router biases": bytes_of(buffers),
    }
