"""Whether post-training helps: GRPO, DPO and more supervised training from one trained model, side by side.

    python scripts/compare_posttraining.py [--seeds 3] [--steps 80] [--folder runs/compare_posttraining]

All arms start from runs/first_run (configs/first_run.py, trained first if it is missing):
    grpo      configs/grpo.py: the reward is minus the word error rate
    shuffled  the same, but each prompt's answers get the rewards of another prompt's answers
    sft       supervised training goes on, for as long as grpo takes
    dpo       configs/dpo.py: pairs of the best and the worst of 8 answers
`sft` gets its number of steps from the median time of a step of both, measured in this run. Each arm is
trained with --seeds seeds, and decodes 2,000 held-out utterances greedily (new voices, new texts). The
intervals are from a bootstrap over utterances, paired (both arms on the same ones), 10,000 draws, the arm's
errors averaged over its seeds. For `dpo`, pairs that the start sampled on the held-out utterances tell
whether the margin between chosen and rejected grew there too.

Prints two tables. What is done already in --folder is not done again, so an interrupted comparison goes on.
Takes about 25 minutes on two cores with the defaults.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

import jaxthd.grpo
from jaxthd.data.sources.synthetic import synthetic_manifests
from jaxthd.errors import readable_errors
from jaxthd.files.jsonl import read_lines
from jaxthd.rl.rewards.group import Rewarded
from jaxthd.rl.rewards.rewarder import Rewarder
from jaxthd.run.metrics_file import read_metrics
from jaxthd.terminal.tables import show

ROOT = Path(__file__).parents[1]
CONFIGS, START = ROOT / "configs", ROOT / "runs" / "first_run"
UTTERANCES = 2000
DRAWS = 10_000
SHUFFLED = "grpo-with-shuffled-rewards"
"""The first argument of the process that this script starts for the arm of that name."""
CALIBRATION = {"grpo": 16, "sft": 70}
"""Steps of the runs that measure a step of both: its time is the median over them."""


class Comparison(NamedTuple):
    """Where the comparison lies, its seeds, and the steps of the arms that draw."""

    folder: Path
    seeds: Sequence[int]
    steps: int

    @property
    def validation(self) -> Path:
        return synthetic_manifests(1, UTTERANCES)[1]

    @property
    def pairs(self) -> Path:
        return self.folder / "held_out_pairs.jsonl"


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=80, help="steps of the arms grpo and shuffled")
    options.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare_posttraining")
    chosen = options.parse_args(argv)
    comparison = Comparison(chosen.folder.resolve(), range(chosen.seeds), chosen.steps)
    comparison.folder.mkdir(parents=True, exist_ok=True)
    jaxthd_command("train", CONFIGS / "first_run.py", "--workdir", START)
    sft_steps = calibrated(comparison)
    arms: dict[str, Callable[[Path, int], None]] = {
        "grpo": lambda workdir, seed: grpo_arm(workdir, seed, comparison.steps),
        "shuffled": lambda workdir, seed: grpo_arm(workdir, seed, comparison.steps, shuffled=True),
        "sft": lambda workdir, seed: sft_arm(workdir, seed, sft_steps),
        "dpo": lambda workdir, seed: dpo_arm(workdir, seed),
    }
    for seed in comparison.seeds:  # the arms in turn, so that the machine is the same for all of them
        for name, train in arms.items():
            workdir = comparison.folder / f"{name}-{seed}"
            train(workdir, seed)
            evaluate(comparison, workdir)
    evaluate(comparison, START)
    show_word_errors(comparison, list(arms))
    show_margins(comparison)


# --- the arms ---


def grpo_arm(workdir: Path, seed: int, steps: int, *, shuffled: bool = False) -> None:
    settings = [*seeds(seed), "--train.steps", steps, "--train.validate-every", steps]
    settings += ["--workdir", workdir]
    if shuffled:
        call(sys.executable, __file__, SHUFFLED, seed, CONFIGS / "grpo.py", *settings)
    else:
        jaxthd_command("grpo", CONFIGS / "grpo.py", *settings)


def sft_arm(workdir: Path, seed: int, steps: int) -> None:
    """More of what configs/first_run.py did, at a third of its learning rate."""
    settings = [*seeds(seed), "--train.steps", steps, "--train.validate-every", steps]
    settings += ["--train.init-from", START, "--train.learning-rate", 5e-4, "--train.warmup-steps", 20]
    settings += ["--train.checkpoint-every", steps, "--workdir", workdir]
    jaxthd_command("train", CONFIGS / "first_run.py", *settings)


def dpo_arm(workdir: Path, seed: int) -> None:
    jaxthd_command("train", CONFIGS / "dpo.py", *seeds(seed), "--workdir", workdir)


def seeds(seed: int) -> list[Any]:
    """Of the draws, and of the data's order."""
    return ["--train.seed", seed, "--data.seed", seed]


def with_shuffled_rewards(seed: int, argv: list[str]) -> None:
    """`jaxthd grpo`, but a prompt's answers get the rewards of those to another prompt of the step."""
    collect, rng = Rewarder.collect, np.random.default_rng(seed)

    def shuffled(self: Rewarder, *, are_counted: bool = True) -> list[Rewarded]:
        found = collect(self, are_counted=are_counted)
        if not are_counted:  # a validation's
            return found
        order = rng.permutation(len(found))
        return [
            own._replace(rewards=found[i].rewards, by_function=found[i].by_function, failure=found[i].failure)
            for own, i in zip(found, order, strict=True)
        ]

    Rewarder.collect = shuffled  # type: ignore[method-assign]
    with readable_errors():
        jaxthd.grpo.main(argv)


def calibrated(comparison: Comparison) -> int:
    """Steps of supervised training that take as long as the steps of GRPO; kept in a file."""
    kept = comparison.folder / "step_seconds.json"
    if not kept.exists():
        measured = {}
        for arm, steps in CALIBRATION.items():
            workdir = comparison.folder / f"calibration-{arm}"
            (grpo_arm if arm == "grpo" else sft_arm)(workdir, 0, steps)
            measured[arm] = statistics.median(step_seconds(workdir))
        kept.write_text(json.dumps(measured) + "\n")
    measured = json.loads(kept.read_text())
    ratio = measured["grpo"] / measured["sft"]
    print(f"median seconds of a step: {measured}: {ratio:.1f} steps of sft for one of grpo", flush=True)
    return round(ratio * comparison.steps)


def step_seconds(workdir: Path) -> list[float]:
    """Of each step but the first, which compiles."""
    return [line["step_seconds"] for line in read_metrics(workdir) if line["step"] > 1]


# --- measuring ---


def evaluate(comparison: Comparison, workdir: Path) -> None:
    """Word errors of the held-out utterances, and for dpo the log-probabilities of the held-out pairs."""
    out = results_folder(comparison, workdir)
    if not (out / "validation.jsonl").exists():
        settings = ["--data.validation-manifest", f"validation={comparison.validation}"]
        jaxthd_command("evaluate", workdir, *settings, "--out", out, "--gallery", 0)
    if workdir != START and not workdir.name.startswith("dpo"):
        return
    if not comparison.pairs.exists():
        options = ["--manifest", comparison.validation, "--max-new-tokens", 24, "--out", comparison.pairs]
        jaxthd_command("preferences", START, *options)
    if not (out / "pairs.jsonl").exists():
        options = ["--data.max-documents", 72, "--out", out / "pairs.jsonl"]
        jaxthd_command("score", workdir, "--manifest", comparison.pairs, *options)


def results_folder(comparison: Comparison, workdir: Path) -> Path:
    return comparison.folder / "results" / workdir.name


def wrong_words(comparison: Comparison, workdirs: Sequence[Path]) -> dict[str, Float64[np.ndarray, "..."]]:
    """Errors [runs, utterances] and words [utterances] of the reference, in the same order."""
    errors, words = [], []
    for workdir in workdirs:
        lines = read_lines(results_folder(comparison, workdir) / "validation.jsonl")
        lines.sort(key=lambda line: line["key"])
        errors.append([x["substitutions"] + x["deletions"] + x["insertions"] for x in lines])
        words.append([line["words"] for line in lines])
    return {"errors": np.array(errors, np.float64), "words": np.array(words[0], np.float64)}


def interval(
    difference: Float64[np.ndarray, " utterances"], words: Float64[np.ndarray, " utterances"]
) -> tuple[float, float, float]:
    """(mean, low, high): a difference of word error rates, and its 95 % interval."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(words), (DRAWS, len(words)))
    rates = difference[drawn].sum(1) / words[drawn].sum(1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(difference.sum() / words.sum()), float(low), float(high)


def show_word_errors(comparison: Comparison, arms: Sequence[str]) -> None:
    start = wrong_words(comparison, [START])
    words = start["words"]
    means = {"start": start["errors"][0]}
    rows = [["start", f"{start['errors'].sum() / words.sum():.2%}", "", "", "", ""]]
    for arm in arms:
        workdirs = [comparison.folder / f"{arm}-{seed}" for seed in comparison.seeds]
        errors = wrong_words(comparison, workdirs)["errors"]
        means[arm] = errors.mean(0)
        seconds = [sum(step_seconds(workdir)) for workdir in workdirs]
        rates = errors.sum(1) / words.sum()
        rows.append(
            [
                arm,
                f"{rates.mean():.2%}",
                "  ".join(f"{rate:.2%}" for rate in rates),
                as_text(interval(means[arm] - means["start"], words)),
                str(len(step_seconds(workdirs[0])) + 1),
                f"{np.mean(seconds) / 60:.1f} min",
            ]
        )
    title = f"Word error rate of {len(words)} held-out utterances ({int(words.sum())} words)"
    show(title, "arm|WER|of each seed|minus start (95 %)|steps|training", rows)
    others = [["grpo", other] for other in arms if other != "grpo"]
    rows = [
        [f"{one} minus {other}", as_text(interval(means[one] - means[other], words))] for one, other in others
    ]
    show("The arms against each other", "arms|difference of WER (95 %)", rows)


def as_text(found: tuple[float, float, float]) -> str:
    mean, low, high = (100 * x for x in found)
    return f"{mean:+.2f} points ({low:+.2f} to {high:+.2f})"


def show_margins(comparison: Comparison) -> None:
    """Of the held-out pairs: how much likelier the chosen answer is than the rejected one."""
    rows = []
    start = margins(comparison, START)
    rows.append(["start", len(start), f"{start.mean():.2f}", f"{(start > 0).mean():.1%}", ""])
    for seed in comparison.seeds:
        workdir = comparison.folder / f"dpo-{seed}"
        found = margins(comparison, workdir)
        grew = f"{(found - start).mean():+.2f}, in {(found > start).mean():.1%} of pairs"
        rows.append([workdir.name, len(found), f"{found.mean():.2f}", f"{(found > 0).mean():.1%}", grew])
    columns = "model|pairs|mean margin|chosen likelier|margin minus the start's"
    show("Held-out pairs: log-probability of chosen minus rejected", columns, rows)


def margins(comparison: Comparison, workdir: Path) -> Float64[np.ndarray, " pairs"]:
    lines = read_lines(results_folder(comparison, workdir) / "pairs.jsonl")
    lines.sort(key=lambda line: line["key"])
    answers = [line["answers"] for line in lines]
    return np.array([chosen["log_prob"] - rejected["log_prob"] for chosen, rejected in answers])


# --- commands ---


def jaxthd_command(*arguments: Any) -> None:
    call(sys.executable, "-m", "jaxthd", *arguments)


def call(*command: Any) -> None:
    said = [str(each) for each in command]
    print("+ " + " ".join(said[1:]), flush=True)
    subprocess.run(said, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:2] == [SHUFFLED]:
        with_shuffled_rewards(int(sys.argv[2]), sys.argv[3:])
    else:
        main()
