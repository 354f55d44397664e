"""The base that the other recipes start from: a small speech LLM that writes down English synthetic speech.

    jaxthd train configs/recipes/base/config.py --workdir runs/recipes/base

It is the model of configs/first_run.py, which explains its sizes. configs/recipes/README.md has its record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    first_run = load_config(Path(__file__).parents[2] / "first_run.py")
    data = replace(first_run.data, manifest=("synthetic",), validation_manifest="english=synthetic")
    return replace(first_run, data=data)
