"""Writes tests/references/post_training.json: TRL's losses of preferences and of drawn answers.

    python -m tests.references.post_training    # with torch and trl (made with 1.16.0); a few seconds

TRL's own methods compute the losses, from random log-probabilities in float64, in trainers that were never
initialised. The file holds a list of inputs for each of dpo, kto and grpo, and of cases: jaxthd's options for
the objective, TRL's name of the variant, the loss, its gradient and the metrics that both have.

Answers are lists of numbers of their tokens. dpo: `policy` and `reference` have the chosen answers first,
then the rejected ones. kto: `mismatched` are the answers that estimate the divergence. grpo: TRL computes the
weights that correct for drawing inside a method that also generates, so they are computed here as they are
there.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from tests.references.common import arguments

LENGTHS = {"dpo": (3, 5, 1, 4, 2, 6), "kto": (4, 2, 5, 1, 3), "grpo": (3, 6, 1, 4, 2, 5)}
MISMATCHED = (2, 5, 1, 3, 4)
LABELS = (True, False, False, True, False)
ADVANTAGES = (1.25, -0.5, -0.75, 0.8, -1.5, 0.7)
MAX_LENGTH = 8
Numbers = list[list[float]]
ACCELERATOR = SimpleNamespace(
    device="cpu",
    num_processes=1,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)


def drawn(lengths: tuple[int, ...], low: float = -3.0, high: float = 0.0) -> Numbers:
    return [[round(float(torch.empty(1).uniform_(low, high)), 3) for _ in range(n)] for n in lengths]


def near(policy: Numbers, spread: float) -> Numbers:
    return [[round(p + float(torch.randn(1)) * spread, 3) for p in answer] for answer in policy]


def padded(answers: Numbers) -> torch.Tensor:
    """[answers, longest], 0 behind an answer's end."""
    parts = [torch.tensor(answer, dtype=torch.float64) for answer in answers]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def mask_of(answers: Numbers) -> torch.Tensor:
    return padded([[1.0] * len(answer) for answer in answers]).long()


class Outputs(SimpleNamespace):
    """A model's outputs: what a loss reads, and zeros for what only metrics read."""

    @classmethod
    def of(cls, log_probs: torch.Tensor) -> "Outputs":
        zeros = torch.zeros_like(log_probs)
        return cls(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trainer(kind: type, **fields: Any) -> Any:
    """A trainer that was never initialised, with these attributes."""
    made: Any = object.__new__(kind)
    common: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": ACCELERATOR,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    made.__dict__.update(common | fields)
    return made


def case(
    options: list[str],
    name: str,
    answers: Numbers,
    loss_of: Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]],
) -> dict[str, Any]:
    """loss_of: takes the padded log-probabilities, which it masks; returns the loss and metrics."""
    leaf = padded(answers).requires_grad_()
    loss, metrics = loss_of(leaf * mask_of(answers))
    loss.backward()
    assert leaf.grad is not None
    gradient = [leaf.grad[i, : len(answer)].tolist() for i, answer in enumerate(answers)]
    return {
        "options": options,
        "trl": name,
        "loss": loss.item(),
        "gradient": gradient,
        "metrics": {key: float(value) for key, value in metrics.items()},
    }


# --- DPO ---


def dpo() -> dict[str, Any]:
    policy = drawn(LENGTHS["dpo"])
    reference = near(policy, 0.4)
    pairs = len(policy) // 2
    mask = mask_of(policy)
    # A prompt of one token stands before every answer.
    whole = torch.cat([torch.zeros(len(policy), 1, dtype=torch.long), mask], 1)
    sums = padded(reference).sum(1)

    def loss_of(log_probs: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        inputs = {
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "completion_mask": whole,
            "ref_chosen_logps": sums[:pairs],
            "ref_rejected_logps": sums[pairs:],
        }
        standard = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
        run = trainer(DPOTrainer, **(standard | fields))
        loss = run._compute_loss(lambda **given: Outputs.of(log_probs), inputs, False)
        found = {name: values[-1] for name, values in run._metrics["train"].items()}
        # Where rewards are means TRL's are of sums all the same.
        names = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
        names |= {f"rewards_{side}": f"rewards/{side}" for side in ("chosen", "rejected")}
        names = {} if set(fields["loss_types"]) & {"ipo", "sigmoid_norm"} else names
        names |= {f"log_probs_{side}": f"logps/{side}" for side in ("chosen", "rejected")}
        return loss, {ours: found[theirs] for ours, theirs in names.items()}

    def of_type(options: list[str], beta: float, *types: str, weights: tuple[float, ...] = (1.0,)) -> Any:
        fields = {"beta": beta, "loss_types": types, "loss_weights": weights, "label_smoothing": 0.0}
        return case([*options, f"beta={beta}"], "+".join(types), policy, lambda x: loss_of(x, **fields))

    def reference_free(options: list[str], kind: str, mean: bool, **fields: Any) -> dict[str, Any]:
        def loss_of(log_probs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            run = trainer(CPOTrainer, alpha=0.0, loss_type=kind, **fields)
            of_answers = log_probs.sum(1) / (mask.sum(1) if mean else 1)
            losses, chosen, rejected = run.cpo_loss(of_answers[:pairs], of_answers[pairs:])
            rewards = {"rewards_chosen": chosen.mean(), "rewards_rejected": rejected.mean()}
            return losses.mean(), rewards

        settings = [f"{name.removeprefix('simpo_')}={value}" for name, value in fields.items()]
        return case([*options, *settings], f"CPO {kind}", policy, loss_of)

    cases = [
        of_type([], 0.3, "sigmoid"),
        of_type(["loss=hinge"], 1.5, "hinge"),
        of_type(["loss=ipo", "length_average=true"], 0.3, "ipo"),
        of_type(["length_average=true"], 2.0, "sigmoid_norm"),
        of_type(["sft_weight=0.7"], 0.3, "sigmoid", "sft", weights=(1.0, 0.7)),
        reference_free(["loss=simpo"], "simpo", True, beta=2.0, simpo_gamma=0.5, label_smoothing=0.0),
        reference_free(["loss=simpo"], "simpo", True, beta=2.0, simpo_gamma=0.5, label_smoothing=0.1),
        reference_free(["reference_free=true"], "sigmoid", False, beta=0.3, label_smoothing=0.2),
        reference_free(["reference_free=true", "loss=hinge"], "hinge", False, beta=0.3, label_smoothing=0.0),
    ]
    return {"inputs": {"policy": policy, "reference": reference}, "cases": cases}


# --- KTO ---


def kto() -> dict[str, Any]:
    policy = drawn(LENGTHS["kto"])
    reference = near(policy, 0.4)
    mismatched = drawn(MISMATCHED)
    # Below the policy's on average, so that the divergence is not 0.
    of_mismatched = [[round(p - 0.1, 3) for p in answer] for answer in near(mismatched, 0.2)]
    labels = torch.tensor(LABELS)

    def loss_of(log_probs: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        mask, kl_mask = mask_of(policy), mask_of(mismatched)
        first = torch.zeros(len(policy), 1, dtype=torch.long)
        whole, kl_whole = torch.cat([first, mask], 1), torch.cat([first, kl_mask], 1)
        inputs = {
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "completion_mask": whole,
            "KL_input_ids": kl_whole,
            "KL_attention_mask": torch.ones_like(kl_whole),
            "KL_completion_mask": kl_whole,
            "label": labels,
            "ref_logps": padded(reference).sum(1),
            "ref_KL_logps": padded(of_mismatched).sum(1),
        }

        def model(input_ids: torch.Tensor, **given: Any) -> Outputs:
            return Outputs.of(padded(mismatched) if input_ids is kl_whole else log_probs)

        run = trainer(KTOTrainer, loss_type="kto", calculate_KL=True, **fields)
        loss = run._compute_loss(model, inputs, False)
        found = {name: values[-1] for name, values in run._metrics["train"].items()}
        metrics = {"kl": found["kl"]}
        for ours, theirs in (("desired", "chosen"), ("undesired", "rejected")):
            metrics[f"rewards_{ours}"] = found[f"rewards/{theirs}"]
            metrics[f"log_probs_{ours}"] = found[f"logps/{theirs}"]
        return loss, metrics

    def weighted(desired: float, undesired: float) -> dict[str, Any]:
        options = ["kl=mismatched", "beta=0.3", f"desired_weight={desired}", f"undesired_weight={undesired}"]
        fields = {"beta": 0.3, "desirable_weight": desired, "undesirable_weight": undesired}
        return case(options, "kto", policy, lambda x: loss_of(x, **fields))

    inputs = {
        "policy": policy,
        "reference": reference,
        "labels": [1.0 if label else -1.0 for label in LABELS],
        "mismatched": mismatched,
        "mismatched_reference": of_mismatched,
    }
    return {"inputs": inputs, "cases": [weighted(1.0, 1.0), weighted(1.5, 0.5)]}


# --- GRPO ---


def grpo() -> dict[str, Any]:
    policy = drawn(LENGTHS["grpo"])
    old, reference = near(policy, 0.3), near(policy, 0.5)
    sampled = near(old, 0.4)
    mask = mask_of(policy)

    def weights(mode: str) -> torch.Tensor | None:
        """GRPOTrainer._generate_and_score_completions, where vllm_importance_sampling_mode is token_truncate
        or token_mask.
        """
        ratio = torch.exp(padded(old) - padded(sampled))
        if mode == "truncate":
            return ratio.clamp(max=1.5)
        return ratio.masked_fill((ratio < 0.7) | (ratio > 1.5), 0.0)

    def loss_of(log_probs: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        standard = {"beta": 0.0, "loss_type": "dapo", "importance_sampling_level": "token"}
        standard |= {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "correction": None}
        given: dict[str, Any] = standard | fields
        correction: Any = given.pop("correction")
        run = trainer(
            GRPOTrainer,
            args=SimpleNamespace(
                delta=given.pop("delta"), use_bias_correction_kl=False, steps_per_generation=1
            ),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=correction is not None,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX_LENGTH,
            _entropy_bonus_enabled=False,
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_probs, -log_probs, None),
            **given,
        )
        inputs = {
            "prompt_ids": torch.zeros(len(policy), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(policy), 1, dtype=torch.long),
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
            "old_per_token_logps": padded(old),
            "ref_per_token_logps": padded(reference),
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": correction and weights(correction),
        }
        loss = run._compute_loss(run.model, inputs)
        found = {name: values[-1] for name, values in run._metrics["train"].items()}
        metrics = {"kl": found["kl"]} if given["beta"] else {}
        # With one ratio an answer TRL's shares are of answers.
        if given["importance_sampling_level"] == "token" and given["loss_type"] != "cispo":
            metrics |= {f"clipped_{side}": found[f"clip_ratio/{side}_mean"] for side in ("low", "high")}
        return loss, metrics | {"entropy": found["entropy"]}

    def of(options: list[str], name: str, **fields: Any) -> dict[str, Any]:
        beta = f"beta_kl={fields.get('beta', 0.0)}"
        return case([*options, beta], name, policy, lambda x: loss_of(x, **fields))

    answers, dual = "mean=answers", ["dual_clip=1.4", "clip_low=0.1", "clip_high=0.3"]
    cispo: dict[str, Any] = {"loss_type": "cispo", "epsilon_high": 1.25}
    gspo: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    cases = [
        of([], "dapo"),
        of(["clip_low=0.1", "clip_high=0.3"], "dapo", epsilon_low=0.1, epsilon_high=0.3, beta=0.05),
        of(dual, "dapo, delta", epsilon_low=0.1, epsilon_high=0.3, delta=1.4),
        of([answers], "grpo", loss_type="grpo", beta=0.05),
        of(["mean=max_length", f"max_length={MAX_LENGTH}"], "dr_grpo", loss_type="dr_grpo"),
        of(["loss=cispo", "clip_low=1.0", "clip_high=0.25"], "cispo", **cispo, beta=0.05),
        of([answers, "ratio=answer"], "grpo, sequence", **gspo),
        of(["correction=truncate", "correction_max=1.5"], "dapo, token_truncate", correction="truncate"),
        of(
            ["correction=band", "correction_min=0.7", "correction_max=1.5", answers],
            "grpo, token_mask",
            correction="band",
            loss_type="grpo",
            beta=0.05,
        ),
    ]
    inputs = {"policy": policy, "old": old, "reference": reference, "drawn": sampled}
    return {"inputs": inputs | {"advantages": list(ADVANTAGES)}, "cases": cases}


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(options.seed)
    found = {"dpo": dpo(), "kto": kto(), "grpo": grpo()}
    for name, of in found.items():
        for each in of["cases"]:
            print(name, each["trl"], *each["options"], f"{each['loss']:.6f}", each["metrics"])
    lines = []
    for name, of in found.items():
        cases = ",\n".join(json.dumps(each) for each in of["cases"])
        lines.append(f'"{name}": {{"inputs": {json.dumps(of["inputs"])},\n"cases": [\n{cases}]}}')
    (options.out / "post_training.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
