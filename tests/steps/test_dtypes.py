"""Every feature of a training step in float32 and in bfloat16, with jax's 64-bit mode off, as users run it.

Most tests of these are in float64, where a Python integer above int32 fits and float32 is never rounded. The
step is traced, not compiled: what does not fit raises then.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import grain
import jax
import numpy as np
import pytest

import jaxthd
from jaxthd.config import (
    AdaptConfig,
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    PostTrainingConfig,
    TrainConfig,
)
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.lora_tokens import Draws, drawing, dropped
from jaxthd.packing.document import Document
from jaxthd.steps.forward import objective_of
from tests.clips import clip_of
from tests.helpers import filled_state

LLM = LLMConfig(
    pattern="M*-",
    vocab_size=300,
    dim=16,
    blocks={
        "*": Attention(heads=2, kv_heads=2, head_dim=8),
        "-": MLP(inner=32),
        "M": Mamba2(heads=2, head_dim=8, state=8),
    },
)
BASE: dict[str, Any] = {
    "data": DataConfig(capacity=128, audio_capacity=256, max_documents=8, packing_bins=2),
    "model": ModelConfig(
        encoder=EncoderConfig(
            layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
        ),
        llm=LLM,
    ),
}
DROPOUT = AdaptConfig(lora_rank=4, lora_dropout=0.1)
EVERYWHERE = AdaptConfig(lora_rank=4, lora_dropout=0.1, lora_targets=("*",))
PIPED = {"mesh": MeshConfig(pipeline=2), "data": replace(BASE["data"], rows=2)}


def llm(**changes: Any) -> dict[str, Any]:
    return {"model": replace(BASE["model"], llm=replace(LLM, **changes))}


FEATURES: dict[str, dict[str, Any]] = {
    "dropout in text": {
        "adapt": DROPOUT,
        "model": ModelConfig(encoder=None, llm=replace(LLM, pattern="-")),
    },
    "dropout": {"adapt": DROPOUT},
    "dropout over context": {"adapt": DROPOUT, "mesh": MeshConfig(context=2)},
    "dropout over data and tensor": {
        "adapt": EVERYWHERE,
        "mesh": MeshConfig(data=2, tensor=2),
        "data": PIPED["data"],
    },
    "dropout in a pipeline": {
        "adapt": DROPOUT,
        "train": TrainConfig(microbatches=2),
        **llm(pattern="*-*-"),
        **PIPED,
    },
    "dropout with the largest seed": {"adapt": DROPOUT, "train": TrainConfig(seed=2**32 - 1)},
    "dropout in experts' layers": {"adapt": EVERYWHERE, **llm(pattern="ME*E")},
    "dropout in multi-token prediction": {"adapt": EVERYWHERE, **llm(mtp_pattern="*-", mtp_depths=2)},
    "dora": {"adapt": replace(DROPOUT, dora=True)},
    "ctc": {"train": TrainConfig(ctc_loss=0.3, ctc_max_labels=16)},
    "multi-token prediction": llm(mtp_pattern="*-", mtp_depths=2),
    "averages": {"train": TrainConfig(ema_decay=0.9)},
    "experts": {"train": TrainConfig(aux_loss=0.01), **llm(pattern="ME*E")},
    "the delta rule": llm(pattern="D*-"),
    "windows": llm(pattern="W-"),
    "latent attention": llm(pattern="L-"),
    "whole documents": {
        "mesh": MeshConfig(context=2),
        "compute": ComputeConfig(context_layout="whole"),
    },
    **{name: {"train": TrainConfig(optimizer=name)} for name in ("adamw", "adafactor", "lion", "muon")},  # type: ignore[arg-type]
    **{name: {"train": TrainConfig(objective=name)} for name in ("dpo", "kto", "grpo")},
    "answers with dropout": {"train": TrainConfig(objective="dpo"), "adapt": DROPOUT},
    "prompts that are not shared": {
        "train": TrainConfig(objective="dpo"),
        "posttraining": PostTrainingConfig(share_prompts=False),
    },
}
QUICK = "dropout in text"


def batch_of(config: Config) -> jaxthd.Batch:
    """Documents with a recording each; for objectives of answers, prompts with two answers each."""
    rng, objective = np.random.default_rng(0), objective_of(config)
    extras = (*objective.extras, *objective.scored)
    has_answers = config.train.objective != "sft"
    documents = []
    for key in map(str, range(8)):
        text = rng.integers(4, 250, 9).tolist()
        if has_answers:
            numbers = {name: [[1.0] * 3, [-1.0] * 2] for name in extras}
            document = Document.splice(key, text, [False] * 9, [], 3)
            documents.append(document.with_answers([[5, 6, 7], [8, 9]], numbers))
        else:
            clips = [[rng.normal(size=(64, 16)).astype(np.float32)]] * (config.model.encoder is not None)
            marks = [False] * len(clips) + [True] * 9
            documents.append(
                Document.splice(key, [3] * len(clips) + text, marks, [clip_of(clip) for clip in clips], 3)
            )
    pack = jaxthd.pack_documents(config, answers=has_answers, extras=extras, depths=config.depths_trained)
    rows = iter(grain.MapDataset.source(documents).repeat().pipe(pack))
    return jaxthd.concatenate_rows([next(rows).batch for _ in range(config.data.rows)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [each if each == QUICK else pytest.param(each, marks=pytest.mark.exhaustive) for each in FEATURES],
)
def test_a_feature_trains_in_the_dtypes_that_users_have(name: str, dtype: Any) -> None:
    config = Config(**BASE | FEATURES[name])
    config = replace(
        config, compute=replace(config.compute, dtype=dtype, block_sizes=BlockSizes(attention=32))
    )
    blueprint, mesh = jaxthd.Blueprint(config), jaxthd.make_mesh(config.mesh)
    step, state = jaxthd.make_train_step(blueprint, mesh), filled_state(blueprint, mesh)
    after, metrics = jax.eval_shape(step, state, jaxthd.put_batch(batch_of(config), mesh))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state.params
    )
    assert metrics.loss.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_numbered_by_all_32_bits_drop_their_own_features(dtype: str) -> None:
    """A projection's number is the CRC-32 of its name: half of them do not fit into int32."""
    x, keys = jax.numpy.ones((500, 32), dtype), jax.numpy.arange(500, dtype=np.uint32)
    with drawing(Draws(keys)):
        found = [np.asarray(dropped(x, 0.25, n, sharded=False) == 0) for n in (7, 2**31 + 7, 2**32 - 1)]
    assert all(abs(zero.mean() - 0.25) < 0.02 for zero in found)
    assert all((a != b).any() for a, b in pairwise(found))
