"""The choice by patterns of names in a model: the parameters that train, the projections that get low-rank
matrices (LoRA), the projections that are computed in FP8.

A projection is a Linear module. The name of a parameter or of a projection is its path in the module tree,
joined by dots: "decoder.layers.attention.mixer.q.w" is the matrix of the projection
"decoder.layers.attention.mixer.q". Trees of arrays are nested dicts by these names. A tree that holds only
some of the parameters has None for the others.
"""

import difflib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from jaxthd.config import AdaptConfig, Config
from jaxthd.models.layers import Linear, column_squares, norm_ratio

Tree = Any
Path = tuple[Any, ...]
PARTS = ("encoder", "adapter")
"""Modules that are a part of the model by themselves. All other modules are the part "LLM"."""


def dotted(path: Path) -> str:
    """The path of a parameter as one text, its parts joined by dots."""
    return ".".join(map(str, path))


def part_of(path: Path) -> str:
    """The part of the model that has the parameter: one of PARTS, or "LLM"."""
    return path[0] if path[0] in PARTS else "LLM"


def is_lora(path: Path) -> bool:
    """Whether the path is that of a low-rank matrix."""
    return "lora" in path


def parameter_names(model: nnx.Module) -> list[str]:
    """Names of all parameters that can be frozen. LoRA's matrices cannot. A matrix that is used as two
    (`also_named` of the model: a tied embedding is the head) has both names."""
    return [name for path in _parameter_paths(model) if not is_lora(path) for name in names_of(model, path)]


def names_of(model: nnx.Module, path: Path) -> list[str]:
    """All names of a parameter."""
    return [
        dotted(path),
        *(other for name, other in getattr(model, "also_named", ()) if name == dotted(path)),
    ]


def projections(model: nnx.Module) -> dict[str, Linear]:
    """The projections that LoRA can adapt, by name."""
    others, fixed = set(no_projections(model)), without_gradient(model)
    found = {dotted(path): module for path, module in nnx.iter_modules(model) if isinstance(module, Linear)}
    return {name: found[name] for name in sorted(set(found) - others) if not name.startswith(fixed)}


def without_gradient(model: nnx.Module) -> tuple[str, ...]:
    """The beginnings of the names of parameters that no gradient reaches (`without_gradient` of a front
    end's module): they do not train, whatever the settings say."""
    return tuple(f"{name}." for name in _named(model, "without_gradient"))


def no_projections(model: nnx.Module) -> list[str]:
    """Names of modules that get neither LoRA nor FP8 (`no_lora` of mixers): routers, which decide in float32,
    and the matrices of routed experts.
    """
    return _named(model, "no_lora")


def absorbed(model: nnx.Module) -> list[str]:
    """Names of projections whose LoRA is on for all tokens or none (`absorbed` of mixers)."""
    return _named(model, "absorbed")


def _named(model: nnx.Module, attribute: str) -> list[str]:
    """Names of the modules that an attribute of the modules above them tells."""
    modules = nnx.iter_modules(model)
    return [dotted((*path, name)) for path, module in modules for name in getattr(module, attribute, ())]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the shell patterns matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(pattern, suggestions) for each pattern that matches no name.

    The suggestions are the names most like it; for a pattern "X.*" they are patterns of the same depth. One
    that begins with "*.", or has no dot, is compared with the ends of names.
    """
    for pattern in patterns:
        if any(matches(name, [pattern]) for name in names):
            continue
        end = pattern.removeprefix("*.")
        depth, paths = end.count("."), [tuple(name.split(".")) for name in names]
        above = {dotted((*path[:depth], "*")) for path in paths if len(path) > depth}
        if pattern.endswith(".*") and above:
            like = {name: name for name in sorted(above)}
        elif end != pattern or not depth:
            like = {dotted(path[-depth - 1 :]): dotted(path) for path in paths[::-1]}
        else:
            like = {name: name for name in names}
        near = difflib.get_close_matches(end, like, n=3, cutoff=0.0)
        yield pattern, [like[name] for name in near]


def _parameter_paths(model: nnx.Module) -> list[Path]:
    return [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]


def add_lora(model: nnx.Module, adapt: AdaptConfig, key: Array) -> None:
    """Gives the projections that adapt.lora_targets matches their low-rank matrices.

    Each projection's random key depends on its name, so its matrices do not depend on which others there are.
    """
    if adapt.lora_rank:
        for name, linear in projections(model).items():
            if matches(name, adapt.lora_targets):
                number = zlib.crc32(name.encode())
                linear.add_lora(
                    adapt.lora_rank,
                    adapt.lora_alpha / adapt.lora_rank,
                    jax.random.fold_in(key, number),
                    dora=adapt.dora,
                    dropout=adapt.lora_dropout,
                    number=number,
                )


def fp8_projections(model: nnx.Module) -> dict[str, Linear]:
    """The projections that FP8 can compute, by name: not those that mixers name in `no_fp8`."""
    wide = set(_named(model, "no_fp8"))
    return {name: linear for name, linear in projections(model).items() if name not in wide}


def use_fp8(model: nnx.Module, patterns: Sequence[str]) -> None:
    """Switches the projections that match to FP8."""
    if patterns:
        for name, linear in fp8_projections(model).items():
            linear.fp8 = matches(name, patterns)


def trained(model: nnx.Module, adapt: AdaptConfig) -> Tree:
    """A bool for every parameter, in the place of its array: whether it trains."""
    frozen, fixed = freezing(model, adapt), without_gradient(model)
    paths = {path: dotted(path) for path in _parameter_paths(model)}
    return nnx.traversals.unflatten_mapping(
        {path: name not in frozen and not name.startswith(fixed) for path, name in paths.items()}
    )


class Frozen(NamedTuple):
    """Why a parameter does not train. setting: a field of AdaptConfig. pattern: of that. linear: a projection
    that has LoRA in the parameter's part; "" where a pattern of `freeze` matches the parameter."""

    setting: str
    pattern: str
    linear: str = ""

    @property
    def text(self) -> str:
        """The pattern and what it matches, for messages."""
        return f"{self.pattern!r}" + f", which matches {self.linear}" * bool(self.linear)


def freezing(model: nnx.Module, adapt: AdaptConfig) -> dict[str, Frozen]:
    """Returns why parameters do not train, by their names: a pattern freezes them, or their part has LoRA.
    LoRA's matrices train, and so does what a pattern with "!" matches.
    """
    paths = _parameter_paths(model)
    lora = {part_of(path): dotted(path[: path.index("lora")]) for path in reversed(paths) if is_lora(path)}
    patterns = [pattern for pattern in adapt.freeze if not pattern.startswith("!")]
    kept = [pattern[1:] for pattern in adapt.freeze if pattern.startswith("!")]
    why: dict[str, Frozen] = {}
    for path in paths:
        names = names_of(model, path)
        if is_lora(path) or any(matches(name, kept) for name in names):
            continue
        by = next((p for p in patterns if any(matches(name, [p]) for name in names)), None)
        if by is not None:
            why[dotted(path)] = Frozen("freeze", by)
        elif (linear := lora.get(part_of(path))) is not None:
            target = next((p for p in adapt.lora_targets if matches(linear, [p])), "")
            why[dotted(path)] = Frozen("lora_targets", target, linear)
    return why


def keeps_router_biases(is_trained: Tree, module: str = "decoder") -> bool:
    """Whether the module's routers are frozen, or it has none: experts' correction biases do not change."""
    mixers = (stack["mixer"] for stack in is_trained[module]["layers"].values())
    return not any(any(mixer["router"].values()) for mixer in mixers if "router" in mixer)


def split(tree: Tree, is_trained: Tree) -> tuple[Tree, Tree]:
    """(the part of the tree for trained parameters, the part for frozen ones), with None for the others."""

    def where(wanted: bool) -> Tree:
        """The tree with None where `is_trained` is not `wanted`."""
        return jax.tree.map(lambda mine, x: x if mine is wanted else None, is_trained, tree)

    return where(True), where(False)


def join(some: Tree, rest: Tree) -> Tree:
    """`some`, with the leaves of `rest` where it has None."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, rest, is_leaf=lambda x: x is None)


def merge_lora(params: Tree, config: Config) -> tuple[Tree, Config]:
    """A model without LoRA that computes the same: w becomes w + alpha / rank * a @ b, with DoRA's
    magnitudes. And its config.

    params: arrays of any sharding, in the device layout too. The sum is computed in their own dtype (float32
    or float64), at full precision. Arrays without LoRA are returned as they are.
    """
    adapt = config.adapt
    if not adapt.lora_rank:
        return params, config
    scale = adapt.lora_alpha / adapt.lora_rank

    def merged(w: Any, lora: Tree) -> Array:
        """The weight with its low-rank product added."""
        return _sum(w, lora, scale)

    plain_config = replace(config, adapt=replace(adapt, lora_rank=0, lora_dropout=0.0, dora=False))
    return without_lora(params, merged), plain_config


def without_lora(params: Tree, merged: Callable[[Any, Tree], Any] | None = None) -> Tree:
    """The tree without LoRA's matrices. merged: (w, its matrices by name) -> what becomes of w; None: it
    stays."""
    if not isinstance(params, dict):
        return params
    plain = {name: without_lora(child, merged) for name, child in params.items() if name != "lora"}
    if "lora" in params and merged:
        plain["w"] = merged(plain["w"], params["lora"])
    return plain


@partial(jax.jit, static_argnums=2)
def _sum(w_DF: Array, lora: dict[str, Array], scale: float) -> Array:
    """Works on stacked layers too."""
    with jax.default_matmul_precision("highest"):
        sum_DF = w_DF + scale * (lora["a"] @ lora["b"])
        if "m" not in lora:
            return sum_DF
        ratio_F = norm_ratio(column_squares(w_DF, lora["a"], lora["b"], scale))
    return sum_DF * (lora["m"] * ratio_F)[..., None, :]
