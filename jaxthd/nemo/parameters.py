"""NeMo's names of parameters and modules, and ours, for freeze_params and LoRA's target_modules.

Where the checkpoints lie on the disk, the names are those of their tensors. Elsewhere they are those that
all kinds of blocks have on the disk, which may be more than the model has.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax

from jaxthd.checkpoints.weights import Weights, named_weights
from jaxthd.config import Config, ModelConfig
from jaxthd.config.block import block_kinds
from jaxthd.files.tensor_names import Arrays, Table
from jaxthd.hf.checkpoint import Checkpoint
from jaxthd.hf.nemo_perception import IDENTITY, QFORMER, connector_of, encoder_prefix, perception_tensors
from jaxthd.models.adapt import parameter_names, projections
from jaxthd.steps.blueprint import Blueprint

LLM = ("embedding", "head", "decoder.", "mtp.")
LAYERS = "decoder.layers.*."


class Names(NamedTuple):
    """(NeMo's name, ours) of all parameters, and of the projections that LoRA can adapt.

    Projections have the names of modules, without what SALM has in front of them ("llm.").
    is_exact: whether the names are those of a model; else some of ours are patterns.
    """

    parameters: list[tuple[str, str]]
    projections: list[tuple[str, str]]
    is_exact: bool


def names_of(
    model: ModelConfig, llm: Checkpoint, perception: Mapping[str, Any], *, embedding_outside: bool
) -> Names:
    """The names of a model with the LLM of this checkpoint.

    perception: NeMo's settings of the model's encoder and connector. embedding_outside: as SALM has it:
    embed_tokens, and not llm.model.embed_tokens.
    """
    config = Config(model=model)
    weights = jax.eval_shape(lambda: Weights(*Blueprint(config).initial_weights()))
    shapes = {name: x.shape for name, x in named_weights(weights).items()}
    module = Blueprint(config).model
    own, can_adapt = set(parameter_names(module)), set(projections(module))
    pairs: list[tuple[str, str]] = []
    for tensor in llm.tensors(model, shapes):
        for part in tensor.slices:
            outside = embedding_outside and part.name == "embedding"
            pairs.append(("embed_tokens.weight" if outside else f"llm.{tensor.name}", part.name))
    for tensor in perception_tensors(model, perception, shapes):
        pairs += [(tensor.name, part.name) for part in tensor.slices]
    adapted = [
        (theirs.removeprefix("llm.").removesuffix(".weight"), ours.removesuffix(".w"))
        for theirs, ours in pairs
        if theirs.startswith("llm.") and ours.removesuffix(".w") in can_adapt
    ]
    return Names([(theirs, ours) for theirs, ours in pairs if ours in own], adapted, True)


def usual_names(perception: Mapping[str, Any], *, embedding_outside: bool) -> Names:
    """The names that any model may have: those of all kinds of blocks. perception: as in names_of."""
    blocks = [pair for kind in block_kinds().values() for pair in _of_table(kind().tensors())]
    layers = [(f"model.layers.0.mixer.{theirs}", f"{LAYERS}mixer.{ours}") for theirs, ours in blocks]
    embedding = "embed_tokens.weight" if embedding_outside else "llm.model.embed_tokens.weight"
    kind = connector_of(perception)
    encoder = encoder_prefix(kind)
    parameters = [
        (embedding, "embedding"),
        ("llm.lm_head.weight", "head"),
        ("llm.model.norm.weight", "decoder.norm.weight"),
        *((f"llm.{theirs}.weight", ours) for theirs, ours in layers),
        (f"{encoder}pre_encode.out.weight", "encoder.subsampling.*"),
        (f"{encoder}layers.0.norm_out.weight", "encoder.blocks.*"),
    ]
    if kind == QFORMER:
        parameters += [("perception.modality_adapter.layer_weights", "encoder.qformer.*")]
    projection = "proj" if kind == IDENTITY else "modality_adapter.proj"
    parameters += [(f"perception.{projection}.weight", "adapter")]
    return Names(parameters, layers, False)


def _of_table(table: Table) -> Iterator[tuple[str, str]]:
    """(name on the disk, ours) of the matrices at the top of a block's table, without .weight and .w."""
    for theirs, entry in table.items():
        for ours in entry.names if isinstance(entry, Arrays) else [entry]:
            if isinstance(ours, str) and (isinstance(entry, str) or ours.endswith(".w")):
                yield theirs.removesuffix(".weight"), ours.removesuffix(".w")


class Frozen(NamedTuple):
    """Patterns for adapt.freeze. partly: our names of which NeMo freezes some layers, and jaxthd none.
    unmatched: regular expressions that match no name."""

    patterns: tuple[str, ...]
    partly: tuple[str, ...]
    unmatched: tuple[str, ...]


def frozen(names: Names, freeze: Sequence[str], keep: Sequence[str]) -> Frozen:
    """Our patterns for the regular expressions of freeze_params and prevent_freeze_params."""
    is_frozen: dict[str, list[bool]] = {}
    for theirs, ours in names.parameters:
        matched = _matches(theirs, freeze) and not _matches(theirs, keep)
        is_frozen.setdefault(ours, []).append(matched)
    chosen = {ours for ours, each in is_frozen.items() if all(each)}
    partly = tuple(ours for ours, each in is_frozen.items() if any(each) and not all(each))
    # NeMo's features have buffers alone, so a pattern for them is of no use there either.
    unmatched = tuple(
        x
        for x in freeze
        if "preprocessor" not in x and not any(re.match(x, name) for name, _ in names.parameters)
    )
    return Frozen(tuple(_patterns(is_frozen, chosen)), partly, unmatched)


def _matches(name: str, expressions: Iterable[str]) -> bool:
    return any(re.match(x, name) for x in expressions)


def _patterns(names: Iterable[str], chosen: set[str], above: str = "") -> Iterator[str]:
    """The fewest patterns that match the chosen names and no others of the names."""
    below: dict[str, list[str]] = {}
    for name in names:
        first = name.removeprefix(above).partition(".")[0]
        below.setdefault(first, []).append(name)
    for first, group in below.items():
        is_alone = group == [f"{above}{first}"]
        if {*group} <= chosen:
            is_part = not above and first in ("encoder", "adapter", "decoder", "mtp")
            yield f"{above}{first}" if is_alone and not is_part else f"{above}{first}.*"
        elif not is_alone:
            yield from _patterns(group, chosen, f"{above}{first}.")


def lora_targets(names: Names, lora: Mapping[str, Any], *, is_automodel: bool) -> tuple[str, ...]:
    """Our names, or patterns, of the projections that a NeMo model adapts; () where it adapts none.

    lora: the experiment's settings. is_automodel: whether names are those of Automodel, patterns with *; else
    those of peft: the ends of names, a regular expression, or "all-linear".
    """
    wanted, left_out = lora.get("target_modules"), lora.get("exclude_modules") or []
    if lora.get("match_all_linear") or wanted == "all-linear":
        wanted = [""]
    elif wanted is None and not is_automodel:
        wanted = ["q_proj", "v_proj"]  # peft's default for most LLMs
    chosen = {
        ours
        for theirs, ours in names.projections
        if _is_target(theirs, wanted or []) and not (left_out and _is_target(theirs, left_out))
    }
    ours_of_all = [ours for _, ours in names.projections]
    return tuple(sorted(_patterns(dict.fromkeys(ours_of_all), chosen)))


def _is_target(name: str, wanted: str | Sequence[str]) -> bool:
    """Whether a module's name is meant by peft's or Automodel's names."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(not x or name == x or name.endswith(f".{x}") or fnmatchcase(name, x) for x in wanted)
