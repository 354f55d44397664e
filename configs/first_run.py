"""The first run: a small speech LLM learns to listen to synthetic speech, in three minutes on two cores.

    jaxthd train configs/first_run.py

It needs no download and no accelerator. 10,000 utterances of synthetic speech are made on first use (20 s).
The word error rate is measured on 500 utterances whose voices and texts are not in the training set. Expect
less than 10% after the last step. `--mesh.context 2` trains the same model on two devices, which a machine
without accelerators simulates. Its buffers hold other documents, because the audio of a rank's documents must
fit on that rank, so its losses are others too.

configs/cp2.py is the longer run. Its model writes any text, letter by letter; for this one each of the 56
words of the synthetic texts is a token. docs/training.md shows when a new model begins to listen.
"""

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        # A synthetic document takes 23 slots and 137 mel frames on average, so 22 fill a buffer.
        data=DataConfig(tokenizer="synthetic", capacity=512, max_documents=48, audio_capacity=3072),
        model=ModelConfig(
            # Two blocks learn these words in fewer steps than four do, and each step is shorter. The longest
            # recording has 8.7 s, so each is one encoder chunk.
            encoder=EncoderConfig(layers=2, subsampling_channels=32, chunk_seconds=10.0),
            # The tokenizer has 419 entries.
            llm=LLMConfig(pattern="M*M*-", vocab_size=448),
        ),
        # What is cheap is computed again: the step needs 59 MB of temporary memory in place of 120 MB, and
        # takes as long. With --mesh.context 2 the process keeps only arrays of up to 64 MiB from step to step
        # (jaxthd/run/startup.py).
        compute=ComputeConfig(remat="selective"),
        train=TrainConfig(
            steps=900,
            learning_rate=1.5e-3,
            warmup_steps=100,
            # Teaches the encoder from the first step, while the decoder still learns what a text looks like.
            ctc_loss=0.5,
            validate_every=450,
            validation_batches=64,  # more than the 500 documents fill: each is measured
            checkpoint_every=450,
        ),
    )
