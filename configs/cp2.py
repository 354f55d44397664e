"""The default job: a small speech LLM on synthetic speech, each buffer's tokens shared by two devices.

    python -m jaxthd.train --config configs/cp2.py

Needs no download and no accelerator: the speech is made on first use, and a machine without GPUs simulates
the two devices. Expect the loss to fall from 6.07 to 0.37 in 200 steps, 0.52 in validation, at 0.34 s a step
on two CPU cores; and the losses of configs/single.py, to 1e-6 for the first 50 steps: the mesh never changes
the model, and no buffer of this data set has to be cut for its audio to fit the ranks.
"""

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig


def config() -> Config:
    return Config(
        mesh=MeshConfig(context=2),
        # A synthetic document takes 45 tokens and 180 mel frames on average: 44 fill a buffer (57 at most),
        # with 0.4% of padding and up to 8,185 mel frames. Tokens run out first, whatever the mesh.
        data=DataConfig(capacity=2048, max_documents=64, audio_capacity=9216),
        model=ModelConfig(
            # The longest recording has 8.3 s, so none is cut. A rank's share of audio must hold one chunk.
            encoder=EncoderConfig(chunk_seconds=10.0),
            llm=LLMConfig(),
        ),
        train=TrainConfig(),
    )
