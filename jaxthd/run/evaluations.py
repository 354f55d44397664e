"""Where the results of an evaluation lie: beside the weights they are of, by checkpoint and set.

RUN/evaluations/STEP/SETS, such as runs/my/evaluations/2400/clean+other. Results under other settings get a
folder of their own (clean+other-2): nothing is overwritten but by the same evaluation done again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from jaxthd.checkpoints.stored import find_checkpoint
from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.run_folder import is_run, source_of
from jaxthd.files.stores import is_url
from jaxthd.files.tokenizer_files import tokenizer_digest

SUMMARY = "summary.json"
MOST_NAME = 100
"""Longest name of a folder; of more sets it has their number."""
_SETTINGS = (
    "template",
    "template_options",
    "system_prompt",
    "prompt",
    "audio_placeholder",
    "capacity",
    "audio_capacity",
    "round_to",
)
"""Fields of data that documents depend on, or which of them fit."""


def evaluated_settings(config: Config, weights: Sequence[str | Path]) -> dict[str, Any]:
    """The settings that results depend on, as JSON: not the mesh, the kernels and the optimization."""
    data, train, sets = config.data, config.train, config.data.validation_sets
    return {
        "weights": [str(source) if is_url(source) else os.path.abspath(source) for source in weights],
        "checkpoint": None,
        "sets": {each.name: data.described(each) for each in sets},
        "tarred_audio": [each.tars for each in sets] if any(each.tars for each in sets) else "",
        "tokenizer": tokenizer_digest(data.tokenizer),
        **{name: getattr(data, name) for name in _SETTINGS},
        "dtype": config.compute.dtype,
        "fp8": [*config.compute.fp8_projections, *["routed experts"] * config.compute.fp8_experts],
        "normaliser": train.normaliser,
        "max_new_tokens": train.max_new_tokens,
    }


def checkpoint_of(weights: Sequence[str | Path]) -> tuple[Path, int] | None:
    """(the workdir, the checkpoint's step) where the weights are those of one run; else None.

    Raises UserError where the run has no such checkpoint.
    """
    if len(weights) != 1:
        return None
    path, which = source_of(weights[0])
    return (path, find_checkpoint(path / "checkpoints", which)[0]) if is_run(path) else None


def evaluation_folder(beside: Path, sets: Sequence[str], evaluated: Mapping[str, Any]) -> Path:
    """The folder for results in the folder `beside`. evaluated: what the results depend on, as JSON.

    It is the first that holds no results, or those of the same evaluation.
    """
    name = "+".join(sets)
    name = name if len(name) <= MOST_NAME else f"{len(sets)}-sets"
    evaluated = json.loads(json.dumps(evaluated))
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(beside / each for each in names if holds(beside / each) in (None, evaluated))


def holds(folder: Path) -> dict[str, Any] | None:
    """The settings that the results in the folder depend on; None where it holds none."""
    try:
        return json.loads((folder / SUMMARY).read_text()).get("evaluated", {})
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def require_free(folder: Path, evaluated: Mapping[str, Any]) -> None:
    """Raises UserError where the folder holds results of another evaluation."""
    found = holds(folder)
    if found is not None and (lines := changed_lines(found, evaluated)):
        raise UserError(
            f"{folder} holds the results of another evaluation:{lines}\n"
            "Nothing is overwritten; expected a new folder: choose another --out, or leave it out"
        )


def changed_lines(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, a line each, with a line break before it. there: as read from JSON."""
    now = json.loads(json.dumps(now))
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    return "".join(f"\n  {name}: {there.get(name)} there, {now.get(name)} now" for name in names)
