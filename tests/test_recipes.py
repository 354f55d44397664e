"""Recipes: each folder of configs/recipes is valid, says its command, and has a record."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from jaxthd.checkpoints.sources import load_config
from jaxthd.validate import DeviceFacts, validate

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
RECORDS = (RECIPES / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/config.py"))


def records() -> list[list[str]]:
    """The rows of the table of records, by column."""
    rows = [line.strip("| ").split(" | ") for line in RECORDS.splitlines() if re.match(r"\| `\w+` \|", line)]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_says_its_commands(name: str) -> None:
    path = RECIPES / name / "config.py"
    config = load_config(path)
    assert validate(config, DeviceFacts("cpu", 2, "cpu")) == []
    command = "grpo" if config.train.objective == "grpo" else "train"
    assert f"jaxthd {command} configs/recipes/{name}/config.py" in path.read_text()
    assert len(config.data.validation_sets) >= 1
    started = replace(config.train, init_from=("runs/recipes/base",))
    assert validate(replace(config, train=started), DeviceFacts("cpu", 2, "cpu")) == [], "from the base"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_a_record_with_its_evidence(name: str) -> None:
    """A day that has been, a commit, and minutes under 30."""
    found = [row for row in records() if row[0] == f"`{name}`"]
    assert found, f"{name} is not in the table of configs/recipes/README.md"
    for _, _, _, minutes, evidence in found:
        assert 0 < float(minutes) < 30
        day, commit, machine = evidence.split(", ", 2)
        assert date.fromisoformat(day) >= date(2026, 11, 1)
        assert re.fullmatch(r"[0-9a-f]{8}", commit)
        assert machine
    assert len({row[1] for row in found}) == len(found)
    assert {row[0].strip("`") for row in records()} == set(NAMES)


def test_halves_of_a_persons_recordings_judge_texts_that_they_do_not_teach(tmp_path: Path) -> None:
    texts = [f"Press {n} to call, or 12!" for n in range(40)] + ["Goodbye.", "Star"] * 2 + ["..."]
    items = [{"audio_filepath": f"{n}.ogg", "duration": 1.5, "text": text} for n, text in enumerate(texts)]
    items.append({"audio_filepath": "long.ogg", "duration": 31.0, "text": "Much too long"})
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    script = RECIPES / "one_speaker" / "lists.py"
    command = [sys.executable, script, tmp_path / "manifest.jsonl", tmp_path / "lists"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.count("left out") == 2
    assert "long.ogg: 31.0 s" in printed
    found = {
        name: [json.loads(line) for line in (tmp_path / "lists" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("learned_0", "judged_0", "learned_1", "judged_1")
    }
    for half in (0, 1):
        learned, judged = found[f"learned_{half}"], found[f"judged_{half}"]
        assert len(learned) + len(judged) == 44, "nothing is lost"
        assert not {x["text"] for x in learned} & {x["text"] for x in judged}
        assert sum(x["text"] in ("goodbye", "star") for x in learned) == 4
    judged = [x["audio_filepath"] for half in (0, 1) for x in found[f"judged_{half}"]]
    assert sorted(judged) == sorted(str(tmp_path / f"{n}.ogg") for n in range(40))
    assert "press three to call or one two" in {x["text"] for each in found.values() for x in each}
