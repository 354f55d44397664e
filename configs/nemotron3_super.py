"""Nemotron-3-Super-120B-A12B with a 0.6B FastConformer on 1,024 GPUs: long buffers, each over 512 of them.

    jaxthd estimate configs/nemotron3_super.py
    jaxthd train configs/nemotron3_super.py

The first command compiles the step, which takes minutes, and says what it needs: 34.9 GiB of a device's
memory; 310 GiB received over NVLink, most of it for the experts, and 81 GiB over the network; a bubble of
11.1%; a checkpoint of 1,356 GiB.
What fails first is loading, as for configs/nemotron3_nano_1024.py; then the network, then NVLink. The second
command reads train.jsonl and validation.jsonl (NeMo manifests) and the model's tokenizer.json from this
file's folder. It has not yet run on a GPU.

The mesh: tensor 8 inside a machine, context 32, pipeline 2, data 2; the 512 experts over the 64 ranks of data
x context. Encoder, buffers and optimization are those of configs/nemotron3_nano_1024.py. Decoder: NVIDIA,
Nemotron 3 (2025).
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config
from jaxthd.models.blocks import Router


def config() -> Config:
    nano = load_config(Path(__file__).with_name("nemotron3_nano_1024.py"))
    llm = replace(
        nano.model.llm.with_settings("M", heads=128).with_settings(
            "E",
            experts=512,
            experts_per_token=22,
            inner=2688,
            shared_inner=5376,
            latent=1024,
            router=Router(scale=5.0),
        ),
        pattern="MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        dim=4096,
    )
    return replace(nano, model=replace(nano.model, llm=llm))
