"""The longer run: a small speech LLM that writes any text, each buffer's tokens sharded over two devices.

    jaxthd train configs/cp2.py

It needs no download and no accelerator: 10,000 utterances of synthetic speech are made on first use (20 s),
and a machine without GPUs simulates the two devices. It takes about 7 minutes on two cores. Expect a word
error rate of 4 to 6%, in voices and texts that are not in the training set. The shorter run is
configs/first_run.py: two encoder blocks in place of four, words in place of bytes. Expect the losses of
configs/single.py, to 1e-5 for the first 50 steps: the mesh never changes the model.
"""

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        mesh=MeshConfig(context=2),
        # A synthetic document takes 34 slots and 141 mel frames on average, so 15 fill a buffer. Small
        # buffers mean more updates for the same work, and a new model needs updates to learn to listen.
        data=DataConfig(capacity=512, max_documents=32, audio_capacity=2560),
        model=ModelConfig(
            # The longest recording has 8.7 s, so each is one encoder chunk. A rank's share of the audio
            # capacity must hold one.
            encoder=EncoderConfig(chunk_seconds=10.0),
            llm=LLMConfig(pattern="M*M*-"),
        ),
        # What is cheap is computed again. So the temporary memory stays under 64 MiB, and the process keeps
        # it from step to step (jaxthd/run/startup.py). To keep all activations would take longer.
        compute=ComputeConfig(remat="selective"),
        train=TrainConfig(
            steps=3200,
            learning_rate=8e-4,
            warmup_steps=100,
            validate_every=400,
            validation_batches=16,
            checkpoint_every=400,
        ),
    )
