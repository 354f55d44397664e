"""Whether weights mean the same under the settings that they are read with; what differs is said or refused.

The fields of a model: jaxthd/files/weight_fields.py. Here: LoRA's scale, tokenizers, templates, and which
weights a run may freeze.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxthd.config import AdaptConfig, DataConfig
from jaxthd.data.text.published_tokenizer import other_tokens, read_vocabulary
from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import BUILT_IN
from jaxthd.models.adapt import PARTS, Frozen, freezing, part_of
from jaxthd.parallel.processes import is_first
from jaxthd.steps.blueprint import Blueprint


def say_other_settings(path: Path, differing: Mapping[str, tuple[Any, Any]]) -> None:
    """Warns of settings of the model that are taken although the weights were made with others."""
    if differing:
        lines = "".join(f"\n  {name}: {a} there, {b} here" for name, (a, b) in differing.items())
        _warn(
            f"the weights of {path} were made with other settings:{lines}\n"
            "They are taken, and compute something else than there. If that is not meant, set these fields "
            "as they are there"
        )


def say_other_template(path: Path, there: DataConfig, here: DataConfig) -> None:
    """Warns where answers are written otherwise than a run was trained on."""
    lines = "".join(
        f"\n  data.{name}: {getattr(there, name)!r} there, {getattr(here, name)!r} here"
        for name in ("template", "template_options")
        if getattr(there, name) != getattr(here, name)
    )
    if lines:
        _warn(f"the run in {path} was trained on turns that are written otherwise:{lines}")


def say_other_documents(path: Path, there: AdaptConfig | None, here: AdaptConfig) -> None:
    """Warns where LoRA that is on in documents with audio alone is here on in others too, or the reverse."""
    if there and there.lora_documents != (here.lora_documents if here.lora_rank else "all"):
        which = {"all": "all documents", "audio": "documents with audio alone"}
        one, other = which.pop(there.lora_documents), which.popitem()[1]
        _warn(
            f"the LoRA of {path} is on in {one}, and here in {other}: text by itself is answered otherwise "
            "than there"
        )


def lora_factor(path: Path, there: AdaptConfig, here: AdaptConfig) -> float:
    """Returns the factor for the matrices b of a run's LoRA, so that with this alpha and rank they compute
    what they compute there. Says so where it is not 1.

    Raises UserError where no factor does: with DoRA on one side only, and where lora_alpha is 0 here alone.
    """
    if there.dora != here.dora:
        raise UserError(
            f"{path} has LoRA with adapt.dora {there.dora}, and here it is {here.dora}; expected the same, "
            "because other columns would be normalised: set --adapt.dora as it is there, or merge its LoRA "
            f"first (jaxthd convert export {path})"
        )
    scales = [adapt.lora_alpha / adapt.lora_rank for adapt in (there, here)]
    if scales[0] == scales[1]:
        return 1.0
    if not scales[1]:
        raise UserError(
            f"{path} has LoRA with adapt.lora_alpha {there.lora_alpha:g}, and here it is 0; expected another "
            "value: set --adapt.lora-alpha"
        )
    _warn(
        f"{path} has LoRA with adapt.lora_alpha {there.lora_alpha:g}, and here it is {here.lora_alpha:g}; "
        f"its matrices b are multiplied by {scales[0] / scales[1]:g}, so that the model is the same"
    )
    return scales[0] / scales[1]


def require_same_vocabulary(path: Path, theirs: str | None, ours: str, setting: str) -> None:
    """Raises UserError where ids of text stand for other tokens than those that the weights were trained on;
    warns where that is so of special and other added tokens.

    theirs, ours: tokenizers, as data.tokenizer names them. One that cannot be read is not compared; without
    theirs (None), a built-in one is warned of.
    """
    if theirs is None and ours in BUILT_IN:
        _warn(
            f"{path} has no tokenizer, and data.tokenizer is {ours!r}, whose ids stand for other tokens than "
            "those it was trained on, unless it is new: set --data.tokenizer to the folder of its LLM"
        )
    if theirs is None or theirs == ours:
        return
    there, here = read_vocabulary(theirs), read_vocabulary(ours)
    if there is None or here is None:
        return
    text, added = other_tokens(there, here)
    if text:
        raise UserError(
            f"{path} has weights of another vocabulary than data.tokenizer {ours}: of its ids {text}; "
            f"expected its tokenizer: set --data.tokenizer {theirs}, or choose other weights in {setting}"
        )
    if added:
        _warn(
            f"{path} has weights of other added tokens than data.tokenizer {ours}: of its ids {added}. Their "
            f"embeddings are taken as they are; its own tokenizer is {theirs}"
        )


def require_frozen_from_sources(blueprint: Blueprint, missing: Collection[str]) -> None:
    """Raises UserError where parameters would be frozen as they are initialised: what they compute is noise,
    and no step would change it.

    missing: dotted names of the arrays that no source of weights holds.
    """
    adapt, frozen = blueprint.config.adapt, dict[Frozen, list[str]]()
    for name, by in freezing(blueprint.model, adapt).items():
        if name in missing:
            frozen.setdefault(by, []).append(name)
    if not frozen:
        return
    found = [f"{groups_of(names)} by adapt.{by.setting} {by.text}" for by, names in frozen.items()]
    changes = ["name a checkpoint that holds them in --train.init-from"]
    if patterns := [repr(by.pattern) for by in frozen if not by.linear]:
        changes.append(f"leave {' and '.join(patterns)} out of adapt.freeze")
    if linears := [by.linear for by in frozen if by.linear]:
        found[-1] += ", and a part with LoRA trains nothing else"
        if all(part_of(tuple(linear.split("."))) in PARTS for linear in linears):
            targets = " ".join(map(repr, _of_llm(adapt.lora_targets)))
            changes.append(f"give LoRA to the LLM alone (--adapt.lora-targets {targets})")
        names = (name for by, of_it in frozen.items() if by.linear for name in of_it)
        heads = dict.fromkeys((name.partition(".")[0], "." in name) for name in names)
        kept = [f"!{head}{'.*' * is_inside}" for head, is_inside in heads]
        flag = f"--adapt.freeze {' '.join(map(repr, (*adapt.freeze, *kept)))}"
        changes.append(f"train them beside LoRA ({flag})")
    raise UserError(
        "parameters would be frozen with random values, because no source of train.init_from holds them: "
        f"{'; '.join(found)}. Expected all that is frozen in a checkpoint: {'; or '.join(changes)}"
    )


def _of_llm(patterns: Iterable[str]) -> list[str]:
    """The patterns of projections, for the decoder's alone."""
    own = [x for x in patterns if x.partition(".")[0] not in PARTS]
    return [x if x.startswith(("decoder.", "mtp.")) else f"decoder.{x}" for x in own] or ["decoder.layers.*"]


def groups_of(names: Collection[str]) -> str:
    """The parts of the model that the names belong to, each with its number of arrays."""
    count: dict[str, int] = {}
    for name in names:
        names_of = name.split(".")
        part = ".".join(names_of[:3]) if names_of[:2] == ["model", "layers"] else names_of[0]
        count[part] = count.get(part, 0) + 1
    return ", ".join(f"{part} ({n} {'array' if n == 1 else 'arrays'})" for part, n in count.items())


def _warn(text: str) -> None:
    if is_first():
        print(f"warning: {text}", file=sys.stderr)
