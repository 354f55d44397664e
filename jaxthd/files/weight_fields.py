"""The meaning of a model's settings for weights that were made under other values of them.

Two models of equal shapes can compute different functions. So weights are read only where every setting of
the model is the same, but for the few that runs do change.
"""

from collections.abc import Collection
from dataclasses import asdict
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat

REFUSED = ("*.rope.fraction",)
"""Settings of read_with_others that are refused all the same; also a rope.theta or a window from or to 0."""


def compare_models(path: Path, there: ModelConfig, here: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that are taken although they differ, with their values there and here: those of
    `read_with_others` of blocks and of the front end, which change what the arrays compute and which runs do
    change (longer pieces of audio, longer contexts by another base or scaling of the rotary embedding or by a
    wider window, more experts a token).

    Raises UserError if the weights in `path`, of the model `there`, are not weights of the model `here`.
    Encoder and adapter, or multi-token prediction, may be missing on one side. Weights that all depths share
    fit any number of depths.
    """
    then, now = (flat(asdict(model), "model.") for model in (there, here))
    free = []
    if there.encoder is None or here.encoder is None:
        free += ["model.encoder*", "model.adapter_*"]
    if not (there.llm.mtp_pattern and here.llm.mtp_pattern):
        free.append("model.llm.mtp_*")
        free += [
            _of_block(x, "*") for llm in (there.llm, here.llm) for x in set(llm.kinds) - set(llm.letters)
        ]
    elif there.llm.mtp_shared and here.llm.mtp_shared:
        free.append("model.llm.mtp_depths")
    differing = {
        name: (then.get(name), now.get(name))
        for name in now | then
        if now.get(name) != then.get(name) and not _is_any(name, free)
    }
    taken = [_of_block(x, y) for x, block in here.llm.blocks.items() for y in block.read_with_others]
    taken += [f"model.encoder.{x}" for x in (here.encoder.read_with_others if here.encoder else ())]
    said = {name: values for name, values in differing.items() if _is_said(name, values, taken)}
    refused = [f"\n  {name}: {a} there, {b} here" for name, (a, b) in differing.items() if name not in said]
    if refused:
        raise UserError(
            f"{path} holds weights of another model:{''.join(refused)}\n"
            "Set these fields as they are there (of published checkpoints jaxthd.hf.checkpoint.model_config "
            "reads them), or choose other weights"
        )
    return said


def _of_block(letter: str, setting: str) -> str:
    """A pattern of a block's settings. A letter may be a mark of patterns."""
    return f"model.llm.blocks.{escape(letter)}.{setting}"


def _is_said(name: str, values: tuple[Any, Any], taken: Collection[str]) -> bool:
    if name.endswith((".rope.theta", ".window")) and not all(values):
        return False  # with and without a rotary embedding: no scaling leads from one to the other
    return _is_any(name, taken) and not _is_any(name, REFUSED)


def _is_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
