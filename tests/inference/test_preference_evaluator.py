"""Held-out preferences during training, against the scores of jaxthd.score by both policies."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxthd.checkpoints.weights import Weights, start_state
from jaxthd.config import Config, DataConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.models.blocks import Attention
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.metrics_file import read_metrics
from jaxthd.score import score_line, score_manifest
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import checkpoint_layout
from jaxthd.train import train

BETA = 0.5


def write(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.exhaustive)])
def test_held_out_pairs_are_measured_as_their_scores_say(tmp_path: Path, objective: str):
    rng = np.random.default_rng(0)
    pairs = [
        {
            "id": str(n),
            "prompt": "abc"[: 1 + n % 3],
            "chosen": "x" * int(rng.integers(1, 5)) + "y",
            "rejected": "z" * int(rng.integers(1, 9)),
        }
        for n in range(14)
    ]
    spoken = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    held_out = write(tmp_path / "held.jsonl", [*pairs[9:], *spoken])
    config = Config(
        data=DataConfig(
            manifest=(write(tmp_path / "pairs.jsonl", pairs[:9]),),
            validation_manifest=held_out,
            capacity=48,
            audio_capacity=0,
            max_documents=9,
            rows=2,
            workers=0,
            max_skipped_share=1.0,
        ),
        model=ModelConfig(
            encoder=None,
            llm=LLMConfig(pattern="*-", dim=16, blocks={"*": Attention(heads=2, kv_heads=1, head_dim=8)}),
        ),
        train=TrainConfig(
            objective=objective,
            objective_options=(f"beta={BETA}",) + (("kl=mismatched",) if objective == "kto" else ()),
            steps=2,
            learning_rate=3e-2,
            warmup_steps=0,
            validate_every=2,
            max_new_tokens=0,
            best_by="preferences",
        ),
    )
    train(config, tmp_path / "run")
    first, last = (line for line in read_metrics(tmp_path / "run") if "validation_preference_loss" in line)
    assert (first["step"], last["step"]) == (0, 2)
    assert first["validation_loss"] != last["validation_loss"], "the transcript is measured too"
    start = math.log(2) if objective == "dpo" else 0.5
    assert first["validation_preference_loss"] == pytest.approx(start, abs=1e-6)
    assert first["validation_preference_margin"] == pytest.approx(0, abs=1e-6)
    assert last["validation_preference_documents"] == 5

    blueprint = Blueprint(config)
    mesh = make_mesh(config.mesh)
    state = checkpoint_layout(start_state(blueprint, mesh), blueprint, mesh)
    only = write(tmp_path / "only.jsonl", pairs[9:])
    answers = []
    for weights in (Weights(state.params, state.buffers), [str(tmp_path / "run")]):
        scores = score_manifest(config, weights, only, tmp_path / "skipped.jsonl")
        lines = [score_line(x, load_tokenizer("bytes")) for x in scores]
        answers.append(np.array([[a["log_prob"] for a in line["answers"]] for line in lines]))
    rewards = answers[1] - answers[0]
    difference = BETA * (rewards[:, 0] - rewards[:, 1])
    assert np.abs(difference).max() > 0.05
    assert last["validation_preference_margin"] == pytest.approx(difference.mean(), abs=1e-4)
    assert last["validation_preference_accuracy"] == pytest.approx((difference > 0).mean())
    if objective == "dpo":
        loss = np.log1p(np.exp(-difference)).mean()
        assert last["validation_preference_loss"] == pytest.approx(loss, abs=1e-4)
    else:
        assert last["validation_preference_loss"] < 0.5
