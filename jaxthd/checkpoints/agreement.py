"""Whether weights mean the same under the settings that they are read with; what differs is said or refused.

The fields of a model: jaxthd/files/weight_fields.py. Here: LoRA's scale, tokenizers, templates.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxthd.config import AdaptConfig, DataConfig
from jaxthd.data.text.published_tokenizer import other_tokens, read_vocabulary
from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import BUILT_IN
from jaxthd.parallel.processes import is_first


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


def _warn(text: str) -> None:
    if is_first():
        print(f"warning: {text}", file=sys.stderr)
