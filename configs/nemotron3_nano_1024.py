"""Nemotron-3-Nano-30B-A3B with a 0.6B FastConformer on 1,024 GPUs: long buffers, each over 512 of them.

    jaxthd estimate configs/nemotron3_nano_1024.py
    jaxthd train configs/nemotron3_nano_1024.py

The first command compiles the step, which takes minutes, and says what it needs: 17.1 GiB of a device's
memory; 129 GiB received over NVLink, most of it for the experts, and 42 GiB over the network; a bubble of
11.1%; a checkpoint of 360 GiB.
What fails first is loading, since each of the 64 machines of a data rank makes the features of all its
rows; then the network, then NVLink. The second command reads train.jsonl and validation.jsonl (NeMo
manifests) and the model's tokenizer.json from this file's folder. It has not yet run on a GPU.

The mesh: tensor 8 inside a machine, context 32, pipeline 2, data 2; the 128 experts over the 64 ranks of data
x context; all other weights whole on the ranks, which have room for them. Model and encoder are those of
configs/nemotron3_nano.py.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, MeshConfig


def config() -> Config:
    nano = load_config(Path(__file__).with_name("nemotron3_nano.py"))
    compute = replace(nano.compute, sequence_sharded=True, remat="full")
    data = replace(nano.data, rows=16, capacity=131072, max_documents=1024, audio_capacity=851968, workers=4)
    return replace(
        nano,
        mesh=MeshConfig(data=2, context=32, pipeline=2, tensor=8, fsdp=False),
        data=data,
        compute=compute,
        train=replace(nano.train, microbatches=8),
    )
