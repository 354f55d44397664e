"""configs/cp2.py on one device: the same model, data and optimization.

    jaxthd train configs/single.py

Expect the losses of configs/cp2.py, to 1e-6 for the first 50 steps. Later losses drift apart as rounding
grows.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, MeshConfig


def config() -> Config:
    return replace(load_config(Path(__file__).with_name("cp2.py")), mesh=MeshConfig())
