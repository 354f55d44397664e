"""Whether a run of jaxthd grpo survives kill -9 at random moments, bit-identical.

    python scripts/check_grpo_survival.py [--kills 10] [--seed 0]

Runs `python -m jaxthd.grpo` on a tiny model and noise, on four simulated devices, with dynamic sampling and
a reference policy that is refreshed: once uninterrupted; once killed repeatedly, while drawing, rewarding,
updating or saving, and restarted by the same command. Every line of metrics that any of them ever wrote, and
in the end every answer in rollouts.jsonl, must equal the uninterrupted run's to the bit. Prints a table;
exits 1 if a check fails. Takes about 5 minutes on 2 cores.

The runs' config is this file: config() below.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxthd.config import Config, PostTrainingConfig, RolloutConfig, TrainConfig
from jaxthd.files.config_file import load_config
from jaxthd.files.jsonl import read_lines

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.check_survival import Row, Run, finish, killed, write_recordings

STEPS = 24


def config() -> Config:
    base = load_config(Path(__file__).with_name("check_survival.py"))
    return replace(
        base,
        posttraining=PostTrainingConfig(reference_every=5),
        rollout=RolloutConfig(
            prompts=4,
            group_size=3,
            answers_at_once=12,
            tokens_at_once=2,
            max_new_tokens=6,
            temperature=0.9,
            top_p=0.95,
            rewards=("length", "wer=0.5"),
            updates=2,
            dynamic_sampling=2,
        ),
        train=TrainConfig(
            objective="grpo",
            steps=STEPS,
            learning_rate=1e-2,
            warmup_steps=2,
            checkpoint_every=3,
            trackers=(),
        ),
    )


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"kills": 10, "seed": 0}.items():
        options.add_argument(f"--{name}", type=int, default=default)
    chosen = options.parse_args(argv)
    rng = np.random.default_rng(chosen.seed)
    with tempfile.TemporaryDirectory(prefix="jaxthd-survival-") as name:
        folder = Path(name)
        write_recordings(folder)
        uninterrupted = Run(folder, "uninterrupted", "grpo", __file__)
        status = finish(uninterrupted)
        want = {line["step"]: line for line in uninterrupted.lines()}
        whole = status == 0 and list(want) == list(range(1, STEPS + 1))
        rows = [Row("uninterrupted", f"{len(want)} steps" if whole else uninterrupted.log(), whole)]
        if whole:
            run = Run(folder, "killed", "grpo", __file__)
            rows.append(killed(run, chosen.kills, want, rng, step_seconds=1.0))
            drawn = [read_lines(x.workdir / "rollouts.jsonl") for x in (run, uninterrupted)]
            same = drawn[0] == drawn[1]
            rows.append(Row("rollouts.jsonl", f"{len(drawn[0])} answers, {len(drawn[1])} wanted", same))
    for row in rows:
        print(f"{'holds' if row.holds else 'FAILS':5}  {row.check}: {row.found}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
