"""What of a model is chosen by name: which parameters train, which projections have low-rank matrices (LoRA)
beside them or are computed in FP8.

The name of a parameter or of a projection (a Linear) is its path in the module tree, with dots:
"decoder.layers.attention.mixer.q.w" is the matrix of the projection "decoder.layers.attention.mixer.q".
Trees are nested dicts by these names. One that holds some of the parameters has None in the places of others.
"""

import difflib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxthd.config import AdaptConfig, Config
from jaxthd.models.layers import Linear
from jaxthd.models.mixers import MoE

Tree = Any
Path = tuple[Any, ...]
PARTS = ("encoder", "adapter")
"""Names of modules that are parts of their own; all others are the LLM."""


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def part_of(path: Path) -> str:
    return path[0] if path[0] in PARTS else "LLM"


def is_lora(path: Path) -> bool:
    return "lora" in path


def parameter_names(model: nnx.Module) -> list[str]:
    """All that can be frozen: LoRA's matrices are not among them."""
    return [dotted(path) for path in _parameter_paths(model) if not is_lora(path)]


def projections(model: nnx.Module) -> dict[str, Linear]:
    """Those that LoRA can adapt, by name."""
    others = set(no_projections(model))
    found = {dotted(path): module for path, module in nnx.iter_modules(model) if isinstance(module, Linear)}
    return {name: found[name] for name in sorted(set(found) - others)}


def no_projections(model: nnx.Module) -> list[str]:
    """Names of what has neither LoRA nor FP8: routers, decided in float32, and routed experts' matrices."""
    layers = [path for path, module in nnx.iter_modules(model) if isinstance(module, MoE)]
    return [dotted((*path, name)) for path in layers for name in ("router", "up", "down")]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(each pattern that matches no name, those most like it: names, or for "X.*" patterns of that depth)."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            depth, paths = pattern.count("."), [name.split(".") for name in names]
            above = {dotted((*path[:depth], "*")) for path in paths if len(path) > depth}
            like = sorted(above) if pattern.endswith(".*") and above else names
            yield pattern, difflib.get_close_matches(pattern, like, n=3, cutoff=0.0)


def _parameter_paths(model: nnx.Module) -> list[Path]:
    return [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]


def add_lora(model: nnx.Module, adapt: AdaptConfig, key: Array) -> None:
    """Gives the projections that adapt names their low-rank matrices; each draws by its name, so that what
    others there are does not change it.
    """
    if adapt.lora_rank:
        for name, linear in projections(model).items():
            if matches(name, adapt.lora_targets):
                own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
                linear.add_lora(adapt.lora_rank, adapt.lora_alpha / adapt.lora_rank, own_key)


def fp8_projections(model: nnx.Module) -> dict[str, Linear]:
    """Those that FP8 can compute, by name: not Mamba2's time steps, which are exponents."""
    return {name: linear for name, linear in projections(model).items() if not name.endswith(".mixer.dt")}


def use_fp8(model: nnx.Module, patterns: Sequence[str]) -> None:
    """Has the projections that match computed in FP8."""
    if patterns:
        for name, linear in fp8_projections(model).items():
            linear.fp8 = matches(name, patterns)


def trained(model: nnx.Module, adapt: AdaptConfig) -> Tree:
    """Of every parameter whether it is trained: bools in the places of the arrays."""
    paths = _parameter_paths(model)
    has_lora = {part_of(path) for path in paths if is_lora(path)}

    def is_trained(path: Path) -> bool:
        if is_lora(path) or matches(dotted(path), adapt.unfreeze):
            return True
        return part_of(path) not in has_lora and not matches(dotted(path), adapt.freeze)

    return nnx.traversals.unflatten_mapping({path: is_trained(path) for path in paths})


def keeps_statistics(is_trained: Tree) -> bool:
    """Whether the encoder's BatchNorms are frozen: they normalise by their running statistics, which stay."""
    encoder = is_trained.get("encoder")
    return encoder is None or not any(jax.tree.leaves(encoder["blocks"]["conv"]["norm"]))


def keeps_router_biases(is_trained: Tree, module: str = "decoder") -> bool:
    """Whether the routers of the module, if it has any, are frozen: the experts' correction biases stay."""
    moe = is_trained[module]["layers"].get("moe")
    return moe is None or not moe["mixer"]["router"]["w"]


def split(tree: Tree, is_trained: Tree) -> tuple[Tree, Tree]:
    """(what belongs to trained parameters, what belongs to frozen ones)."""

    def where(wanted: bool) -> Tree:
        return jax.tree.map(lambda mine, x: x if mine is wanted else None, is_trained, tree)

    return where(True), where(False)


def join(some: Tree, rest: Tree) -> Tree:
    """`some`, and from `rest` what it has None for."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, rest, is_leaf=lambda x: x is None)


def merge_lora(params: Tree, config: Config) -> tuple[Tree, Config]:
    """The plain model that computes the same, w + alpha / rank a @ b in the place of w; and its config.

    params: arrays of any sharding, those of a pipeline's ranks too. The sum is computed in their own dtype
    (float32, or float64), at full precision. Arrays that nothing is added to are returned as they are.
    """
    adapt = config.adapt
    if not adapt.lora_rank:
        return params, config
    scale = adapt.lora_alpha / adapt.lora_rank

    def merged(node: Tree) -> Tree:
        if not isinstance(node, dict):
            return node
        plain = {name: merged(child) for name, child in node.items() if name != "lora"}
        if "lora" in node:
            plain["w"] = _sum(plain["w"], node["lora"]["a"], node["lora"]["b"], scale)
        return plain

    return merged(params), replace(config, adapt=replace(adapt, lora_rank=0))


@partial(jax.jit, static_argnums=3)
def _sum(w_DF: Array, a_Dr: Array, b_rF: Array, scale: float) -> Array:
    """For stacks too."""
    return w_DF + scale * jnp.matmul(a_Dr, b_rF, precision=jax.lax.Precision.HIGHEST)
