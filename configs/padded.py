"""The baseline without packing: one document a row, padded to the longest, on one device.

    jaxthd train configs/padded.py

Model and optimization are those of configs/single.py, and a step has as many documents (15 on average).
Expect losses that fall in the same way, in more seconds per step: 84% of the token slots and 86% of the mel
frames are padding. On two devices: --mesh.context 2.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config


def config() -> Config:
    base = load_config(Path(__file__).with_name("single.py"))
    # The longest synthetic document takes 212 tokens; 1008 mel frames hold one encoder chunk.
    rows = replace(base.data, packing="padded", rows=15, capacity=216, audio_capacity=1008)
    return replace(base, data=rows)
