"""Objectives of post-training: numbers computed by hand, the same in every layout, on every number of context
ranks, in microbatches, and from losses written for one unpacked answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.errors import UserError
from jaxthd.objectives import UnpackedObjective, make_objective, register_objective
from tests.objectives.packed import Answer, Packed, Prompted, packed, run

LN2 = math.log(2)


def quotients(name: str, options: Iterable[str], document: Prompted) -> list[dict[str, float]]:
    """For each of the options."""
    batch = packed([[document]], 32, shared=True, seed=None)
    found = run([make_objective(name, each.split()) for each in options], batch)
    return [each.quotients for each in found]


def assert_losses(name: str, wanted: dict[str, float], document: Prompted) -> None:
    """wanted: the loss, by options."""
    for (options, loss), found in zip(wanted.items(), quotients(name, wanted, document), strict=True):
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-12, atol=1e-15, err_msg=options)


# --- numbers computed by hand ---

# The chosen answer's reward is 1, or 0.5 a token; the rejected one's is -1, or -0.5 a token.
PAIR = Prompted(
    3,
    [
        Answer({"policy": [-1, -2], "reference": [-1.5, -2.5], "preference": [1, 1]}),
        Answer({"policy": [-1, -1], "reference": [-0.5, -0.5], "preference": [-1, -1]}),
    ],
)


PAIR_LOSSES = {
    "beta=0.5": 0.3132616875182228,  # -log sigmoid(1)
    "beta=0.5 label_smoothing=0.1": 0.4132616875182228,  # 0.9 of that and 0.1 of that + 1
    "beta=0.5 length_average=true": 0.4740769841801067,  # -log sigmoid(0.5)
    "beta=0.5 sft_weight=2": 3.3132616875182228,  # the chosen tokens' mean is 1.5
    "beta=0.5 reference_free=true": 0.9740769841801067,  # -log sigmoid(-0.5)
    "loss=ipo beta=0.5": 1.0,  # (2 - 1)^2
    "loss=ipo beta=0.5 length_average=true": 0.0,  # (1 - 1)^2
    "loss=hinge beta=0.25": 0.5,  # 1 - 0.25 * 2
    "loss=simpo beta=2 gamma=0.5": 1.7014132779827524,  # -log sigmoid(2 * (-1.5 + 1) - 0.5)
}


def test_a_pair_by_hand() -> None:
    assert_losses("dpo", PAIR_LOSSES, PAIR)


def test_the_metrics_of_a_pair_by_hand() -> None:
    (found,) = quotients("dpo", ["beta=0.5 sft_weight=2"], PAIR)
    want = {"preference_loss": 0.3132616875182228, "sft_loss": 1.5, "accuracy": 1.0, "margin": 1.0}
    want |= {"rewards_chosen": 0.5, "rewards_rejected": -0.5}
    want |= {"log_probs_chosen": -3.0, "log_probs_rejected": -2.0}
    assert {name: pytest.approx(x, rel=1e-12) for name, x in want.items()} == {
        name: float(x) for name, x in found.items() if name != "loss"
    }


def test_the_first_loss_of_dpo_is_ln_2() -> None:
    answers = [Answer({**a.numbers, "reference": a.numbers["policy"]}) for a in PAIR.answers]
    (found,) = quotients("dpo", [""], Prompted(3, answers))
    np.testing.assert_allclose(found["loss"], LN2, rtol=1e-15)
    assert found["accuracy"] == 0


def test_a_document_without_both_answers_is_no_pair() -> None:
    alone = Prompted(3, PAIR.answers[:1])
    batch = packed([[alone, PAIR, alone]], 32, shared=True, seed=None)
    (found,) = run([make_objective("dpo", ["beta=0.5", "sft_weight=2"])], batch)
    np.testing.assert_allclose(found.quotients["loss"], 3.3132616875182228, rtol=1e-12)
    (nothing,) = quotients("dpo", ["sft_weight=1"], alone)
    assert set(map(float, nothing.values())) == {0.0}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_labelled_answers_by_hand() -> None:
    """r is 1 for the desired answer, -0.5 for the undesired one; those before the updates add up to 0.5."""

    def answer(label: float, r: float, old: float) -> Answer:
        numbers = {"policy": [-1.0 + r, -2.0], "reference": [-1.0, -2.0], "old": [-1.0 + old, -2.0]}
        return Answer({**numbers, "preference": [label, label]})

    document = Prompted(2, [answer(1, 1, 0.75), answer(-1, -0.5, -0.25), answer(0, 5, 0.75)])
    divergences = {"none": 0.0, "answers": 0.25, "mismatched": 0.75}
    options = [f"kl={kl} beta=0.5 desired_weight=3" for kl in divergences]
    for z, found in zip(divergences.values(), quotients("kto", options, document), strict=True):
        want = (3 * (1 - sigmoid(0.5 * (1 - z))) + 1 - sigmoid(0.5 * (z + 0.5))) / 2
        np.testing.assert_allclose((found["loss"], found["kl"]), (want, z), rtol=1e-12)
        np.testing.assert_allclose((found["rewards_desired"], found["rewards_undesired"]), (0.5, -0.25))


def test_the_divergence_of_kto_is_never_negative() -> None:
    numbers = {"policy": [-1.0], "reference": [-0.5], "old": [-1.0], "preference": [1.0]}
    (found,) = quotients("kto", ["beta=1.0"], Prompted(2, [Answer(numbers)]))
    assert found["kl"] == 0
    np.testing.assert_allclose(found["loss"], 1 - sigmoid(-0.5), rtol=1e-12)


def drawn(ratios: list[float], advantage: float, **more: list[float]) -> Answer:
    policy = [-1.0 - i for i in range(len(ratios))]
    old = [p - math.log(ratio) for p, ratio in zip(policy, ratios, strict=True)]
    numbers = {"policy": policy, "old": old, "reference": [p + LN2 for p in policy], "recorded": old}
    return Answer({**numbers, "advantage": [advantage] * len(ratios), **more})


# Ratios 1.5 and 1 of a better answer, 0.5, 4, 1 and 1 of a worse one, with advantages of 1 and -2.
GROUP = Prompted(3, [drawn([1.5, 1], 1), drawn([0.5, 4, 1, 1], -2)])


GROUP_LOSSES = {
    # -1.2, -1 and 2 * (0.8, 4, 1, 1)
    "beta_kl=0": (-2.2 + 13.6) / 6,
    "beta_kl=0 clip_low=0.4 clip_high=0.3": (-2.3 + 2 * (0.6 + 4 + 2)) / 6,
    "beta_kl=0 dual_clip=3": (-2.2 + 2 * (0.8 + 3 + 2)) / 6,
    "beta_kl=0 mean=answers": (-1.1 + 3.4) / 2,
    "beta_kl=0 mean=max_length max_length=10": (-2.2 + 13.6) / 20,
    # Geometric means 1.5^(1/2), which is clipped to 1.2, and 2^(1/4), which is not, as it is too large.
    "beta_kl=0 ratio=answer mean=answers": (-1.2 + 2 * 2**0.25) / 2,
    # -A clip(rho) log p: -(1.2 * -1 + 1 * -2) and 2 * (0.8 * -1 + 1.2 * -2 - 3 - 4)
    "beta_kl=0 loss=cispo": (3.2 + 2 * (-0.8 - 2.4 - 7)) / 6,
    "beta_kl=0.5 kl=k1": (11.4 - 6 * 0.5 * LN2) / 6,
    "beta_kl=0.5 kl=k2": (11.4 + 6 * 0.5 * LN2**2 / 2) / 6,
    "beta_kl=0.5 kl=k3": (11.4 + 6 * 0.5 * (1 - LN2)) / 6,
}


def test_a_group_by_hand() -> None:
    assert_losses("grpo", GROUP_LOSSES, GROUP)


def test_the_metrics_of_a_group_by_hand() -> None:
    recorded = [[-1 + 0.5, -2.0], [-1.0, -2.0 - 0.75, -3.0, -4.0]]
    answers = [Answer({**a.numbers, "recorded": r}) for a, r in zip(GROUP.answers, recorded, strict=True)]
    (found,) = quotients("grpo", ["old=current"], Prompted(3, answers))
    want = {"ratio": 1.0, "ratio_max": 1.0, "clipped_high": 0.0, "logprob_difference": 0.75}
    want |= {"logprob_difference_mean": 1.25 / 6, "entropy": 13 / 6, "kl": 1 - LN2}
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-12, err_msg=name)
    (found,) = quotients("grpo", [""], GROUP)
    want = {"ratio": 1.5, "ratio_max": 4.0, "inverse_ratio_max": 2.0, "logprob_difference": 0.0}
    want |= {"clipped_high": 1 / 6, "clipped_low": 1 / 6}
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-12, err_msg=name)


def test_corrections_by_hand() -> None:
    """The weights are 4, 0.25 and 1 where all ratios are 1 and the advantage is -1."""
    (answer,) = [drawn([1, 1, 1], -1)]
    drew = [p - math.log(w) for p, w in zip(answer.numbers["old"], (4, 0.25, 1), strict=True)]
    document = Prompted(2, [Answer({**answer.numbers, "drawn": drew})])
    for options, want in (
        ("correction=truncate correction_max=3", 3 + 0.25 + 1),
        ("correction=band correction_min=0.5 correction_max=5", 4 + 0 + 1),
    ):
        (found,) = quotients("grpo", [f"{options} beta_kl=0"], document)
        np.testing.assert_allclose((found["loss"], found["correction"]), want / 3, rtol=1e-12)


# --- layouts, context ranks, microbatches ---

VARIANTS = [
    ("dpo", ("label_smoothing=0.1", "sft_weight=0.5")),
    ("dpo", ("loss=simpo", "beta=2", "gamma=0.5")),
    ("kto", ("beta=0.4",)),
    ("grpo", ("correction=truncate", "dual_clip=1.5")),
    ("grpo", ("mean=answers", "ratio=answer", "kl=k2")),
    ("grpo", ("loss=cispo", "old=recorded", "kl=k1", "mean=max_length", "max_length=9")),
]


def random_pairs(count: int) -> list[Prompted]:
    """Documents with every extra that any objective reads."""
    rng = np.random.default_rng(3)

    def answer(preference: float) -> Answer:
        n = int(rng.integers(1, 7))
        policy = -3 * rng.random(n)
        near = {name: policy + 0.3 * rng.normal(size=n) for name in ("reference", "old", "recorded", "drawn")}
        constant = {"preference": np.full(n, preference), "advantage": np.full(n, rng.normal())}
        return Answer({"policy": policy, **near, **constant})

    prompts = [1, 2, *rng.integers(1, 6, count - 2).tolist()]
    return [Prompted(prompt, [answer(1), answer(-1)]) for prompt in prompts]


def test_layout_context_ranks_and_microbatches_change_nothing() -> None:
    """Each document alone in its row with prompts written out, against shared prompts in 4 rows, of which two
    make a microbatch of padding, whose slots lie on 4 ranks in a random order."""
    objectives = [make_objective(*variant) for variant in VARIANTS]
    documents = random_pairs(5)
    alone = packed([[document] for document in documents], 32, shared=False, seed=None)
    together = packed([documents[:2], documents[2:], [], []], 64, shared=True, seed=0)
    found = zip(run(objectives, alone), run(objectives, together, context=4, microbatches=2), strict=True)
    for variant, (want, got) in zip(VARIANTS, found, strict=True):
        for name, x in want.quotients.items():
            np.testing.assert_allclose(got.quotients[name], x, rtol=1e-12, err_msg=f"{variant}: {name}")
        assert any(np.any(x) for x in alone.of_answers(want.gradient))
        for a, b in zip(together.of_answers(got.gradient), alone.of_answers(want.gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14, err_msg=str(variant))


# --- losses written for one unpacked answer ---


@dataclass(frozen=True)
class ClippedAnswer(UnpackedObjective):
    """GRPO's mean over answers."""

    def loss(self, log_probs_L: Any, weights_L: Any, extras: Mapping[str, Any]) -> Any:
        ratio_L = jnp.exp(log_probs_L - extras["old"])
        clipped_L = jnp.clip(ratio_L, 0.8, 1.2)
        loss_L = -jnp.minimum(ratio_L * extras["advantage"], clipped_L * extras["advantage"])
        return (weights_L * loss_L).sum() / weights_L.sum()


@dataclass(frozen=True)
class Ordered(UnpackedObjective):
    """It depends on the order of the tokens, and has no value without any."""

    def loss(self, log_probs_L: Any, weights_L: Any, extras: Mapping[str, Any]) -> Any:
        at_L = jnp.arange(len(log_probs_L))
        return (at_L * log_probs_L).sum() ** 2 / weights_L.sum() + jnp.log((weights_L * at_L).sum() + 1)


def test_a_loss_of_one_unpacked_answer_on_a_packed_buffer() -> None:
    documents = random_pairs(4)
    batch = packed([documents[:2], documents[2:]], 64, shared=True, seed=0)
    packed_grpo = make_objective("grpo", ["mean=answers", "beta_kl=0"])
    objectives = [packed_grpo, ClippedAnswer(8), Ordered(8)]
    want, clipped, ordered = run(objectives, batch, context=4, microbatches=2)
    np.testing.assert_allclose(clipped.quotients["loss"], want.quotients["loss"], rtol=1e-12)
    np.testing.assert_allclose(clipped.gradient, want.gradient, rtol=1e-10, atol=1e-14)

    def alone(logp_n: Any) -> Any:
        return (jnp.arange(len(logp_n)) * logp_n).sum() ** 2 / len(logp_n)

    answers = batch.of_answers(batch.log_probs)
    with jax.enable_x64(True):
        losses = [float(alone(logp)) + math.log(math.comb(len(logp), 2) + 1) for logp in answers]
        gradients = [np.asarray(jax.grad(alone)(jnp.asarray(logp))) / len(answers) for logp in answers]
    np.testing.assert_allclose(ordered.quotients["loss"], np.mean(losses), rtol=1e-12)
    for got, expected in zip(batch.of_answers(ordered.gradient), gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)


def test_tokens_that_are_not_supervised_keep_their_place() -> None:
    """In a conversation of two answers the gap between them counts, with weights of 0."""
    batch = packed([[Prompted(3, [Answer({"policy": [-1.0] * 6})])]], 16, shared=False, seed=None)
    ((row, slots),) = batch.slots
    for x in (batch.weights, batch.log_probs):
        x[row, slots[2:4]] = 0
    (found,) = run([Ordered(8)], batch)
    np.testing.assert_allclose(found.quotients["loss"], (0 + 1 + 4 + 5) ** 2 / 4 + math.log(11), rtol=1e-12)


def test_an_answer_longer_than_the_longest_gives_nan() -> None:
    batch: Packed = packed([[GROUP]], 32, shared=True, seed=None)
    four, three = run([ClippedAnswer(4), ClippedAnswer(3)], batch)
    assert np.isfinite(four.quotients["loss"])
    assert np.isnan(three.quotients["loss"])


# --- settings ---


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("dpo", "loss=sigmod", "loss=sigmod; expected one of sigmoid, hinge, ipo, simpo"),
        ("dpo", "beta=0", "beta=0.0; expected more than 0"),
        ("dpo", "beta=nan", "beta=nan; expected more than 0"),
        ("dpo", "label_smoothing=0.5", "label_smoothing=0.5; expected at least 0 and less than 0.5"),
        ("dpo", "loss=ipo label_smoothing=0.1", "label_smoothing=0.1 with loss=ipo; expected"),
        ("dpo", "gamma=0.5", "gamma=0.5 with loss=sigmoid; expected"),
        ("dpo", "length_average=yes", "'length_average=yes'; expected a value such as False"),
        ("kto", "kl=mean", "kl=mean; expected one of answers, mismatched, none"),
        ("kto", "desired_weight=-1", "desired_weight=-1.0; expected at least 0"),
        ("grpo", "clip_low=1.5", "clip_low=1.5; expected more than 0 and at most 1"),
        ("grpo", "dual_clip=1.1", "dual_clip=1.1; expected more than 1.2"),
        ("grpo", "dual_clip=3 loss=cispo", "dual_clip with loss=cispo; expected"),
        ("grpo", "mean=max_length", "mean=max_length with max_length=0; expected"),
        ("grpo", "max_length=9", "max_length=9 with mean=tokens; expected"),
        ("grpo", "ratio=answer", "ratio=answer with mean=tokens; expected it with mean=answers"),
        ("grpo", "clip=0.2", "'clip=0.2'; expected NAME=VALUE"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, options: str, found: str) -> None:
    with pytest.raises(UserError) as refused:
        make_objective(name, options.split())
    assert f"train.objective_options has {found}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "extras", "scored"),
    [
        ("sft", "", (), ()),
        ("dpo", "", ("preference",), ("reference",)),
        ("dpo", "reference_free=true", ("preference",), ()),
        ("dpo", "loss=simpo", ("preference",), ()),
        ("kto", "", ("preference",), ("reference", "old")),
        ("kto", "kl=none", ("preference",), ("reference",)),
        ("grpo", "", ("advantage", "recorded"), ("reference", "old")),
        ("grpo", "beta_kl=0 old=current correction=band", ("advantage", "recorded", "drawn"), ()),
    ],
)
def test_what_an_objective_needs(
    name: str, options: str, extras: tuple[str, ...], scored: tuple[str, ...]
) -> None:
    objective = make_objective(name, options.split())
    assert (objective.extras, objective.scored) == (extras, scored)
    assert objective.is_policy == (name != "sft")


def test_a_class_that_is_no_objective_is_not_registered() -> None:
    class Mine:
        pass

    with pytest.raises(ValueError, match="does not inherit"):
        register_objective("mine", Mine)  # type: ignore[arg-type]
