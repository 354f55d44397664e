"""TRL's losses, gradients and metrics, of every variant that it has (tests/references/post_training.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.objectives import make_objective
from tests.objectives.packed import Answer, Packed, Prompted, packed, run

REFERENCES = json.loads((Path(__file__).parents[1] / "references" / "post_training.json").read_text())


def constant(value: float, like: list[float]) -> list[float]:
    return [value] * len(like)


def pairs() -> list[Prompted]:
    policy, reference = (REFERENCES["dpo"]["inputs"][name] for name in ("policy", "reference"))
    count = len(policy) // 2

    def answer(i: int) -> Answer:
        preference = constant(1.0 if i < count else -1.0, policy[i])
        return Answer({"policy": policy[i], "reference": reference[i], "preference": preference})

    return [Prompted(3 + i, [answer(i), answer(count + i)]) for i in range(count)]


def labelled() -> list[Prompted]:
    """Each prompt has its own answer, and one that belongs to another prompt."""
    inputs = REFERENCES["kto"]["inputs"]

    def answer(policy: list[float], reference: list[float], label: float) -> Answer:
        numbers = {"policy": policy, "old": policy, "reference": reference}
        return Answer(numbers | {"preference": constant(label, policy)})

    return [
        Prompted(1 + i, [answer(own, of_own, label), answer(other, of_other, 0.0)])
        for i, (own, of_own, label, other, of_other) in enumerate(
            zip(*(inputs[name] for name in inputs), strict=True)
        )
    ]


def groups() -> list[Prompted]:
    """Two prompts with three answers each."""
    inputs = dict(REFERENCES["grpo"]["inputs"])
    advantages = inputs.pop("advantages")
    names = ("policy", "old", "reference", "drawn")
    answers = [
        Answer(
            dict(zip(names, numbers, strict=True))
            | {"advantage": constant(advantage, numbers[0]), "recorded": numbers[3]}
        )
        for advantage, *numbers in zip(advantages, *(inputs[name] for name in names), strict=True)
    ]
    return [Prompted(2, answers[:3]), Prompted(5, answers[3:])]


def gradients(name: str, batch: Packed, found: Any) -> list[np.ndarray]:
    """In the order of the reference's answers."""
    by_answer = batch.of_answers(found.gradient)
    if name == "dpo":
        return by_answer[::2] + by_answer[1::2]
    return by_answer[::2] if name == "kto" else by_answer


@pytest.mark.parametrize(
    ("name", "documents"), [("dpo", pairs), ("kto", labelled), ("grpo", groups)], ids=["dpo", "kto", "grpo"]
)
def test_losses_gradients_and_metrics_are_those_of_trl(name: str, documents: Any) -> None:
    """Packed with shared prompts into rows, of which one is empty, over 4 context ranks, in 2
    microbatches."""
    cases = REFERENCES[name]["cases"]
    objectives = [make_objective(name, case["options"]) for case in cases]
    first, *rest = documents()
    batch = packed([[first], rest[:2], rest[2:], []], 64, shared=True, seed=5)
    for case, found in zip(cases, run(objectives, batch, context=4, microbatches=2), strict=True):
        about = f"{name}, {case['trl']}, {case['options']}"
        np.testing.assert_allclose(found.quotients["loss"], case["loss"], rtol=1e-10, err_msg=about)
        assert not np.any(found.gradient[batch.weights == 0]), about
        for got, want in zip(gradients(name, batch, found), case["gradient"], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-14, err_msg=about)
        for metric, want in case["metrics"].items():  # TRL has float32 numbers among them
            np.testing.assert_allclose(found.quotients[metric], want, rtol=3e-7, err_msg=f"{about}: {metric}")
