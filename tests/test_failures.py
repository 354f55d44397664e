"""A command that fails leaves nothing behind: no folder, no file, and what was there is as it was."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.__main__ import commands, main
from jaxthd.files.config_file import load_config
from jaxthd.files.jsonl import read_lines
from tests.helpers import save_run
from tests.shared_programs import shared_programs
from tests.test_generate import CONFIG

GRPO = "--train.objective grpo --rollout.rewards wer"
GOOD, HALF, LOST, CUT, EMPTY = (
    f"--data.manifest {name}.jsonl --data.validation-manifest {name}.jsonl"
    for name in ("good", "half", "lost", "cut", "empty")
)
FAILING = {
    "train missing.py": "no config at missing.py",
    "train raises.py": "raises.py, line 2: ZeroDivisionError",
    "train my.py --data.capacity 0": "data.capacity is 0",
    "train my.py --data.manifest missing.jsonl": "no manifest at .*missing.jsonl",
    f"train my.py {EMPTY}": "empty.jsonl",
    f"train my.py {LOST}": "2 items of 2: .*no such file",
    f"train my.py {HALF} --workdir deep/er/run": "max_skipped_share .* 2 items of 4",
    f"train my.py {CUT}": "4 items of 4",
    f"train my.py {GOOD} --train.init-from missing": "no checkpoint at .*missing",
    f"train my.py {GOOD} --train.init-from damaged": "cannot be read",
    f"train my.py {GOOD} --data.tokenizer missing": "no tokenizer at .*missing",
    f"train good --workdir other {LOST}": "2 items of 2",
    f"grpo my.py {LOST} {GRPO}": "2 items of 2",
    f"grpo my.py {GOOD} {GRPO} --rollout.rewards missing.reward": "missing",
    f"grpo my.py {GOOD} {GRPO} --train.init-from damaged": "cannot be read",
    "preferences good --manifest missing.jsonl --out new/pairs.jsonl": "no manifest at missing.jsonl",
    "preferences damaged --manifest good.jsonl --out new/pairs.jsonl": "cannot be read",
    "preferences damaged --manifest half.jsonl --out pairs.jsonl": "cannot be read",
    "preferences my.py --weights missing --manifest good.jsonl --out new/x.jsonl": "no checkpoint at missing",
    "evaluate good --data.validation-manifest missing.jsonl": "no manifest at .*missing.jsonl",
    "evaluate good --data.validation-manifest lost.jsonl --out new/results": "nothing of .* can be used",
    "evaluate damaged --data.validation-manifest good.jsonl": "cannot be read",
    "evaluate my.py --weights missing --data.validation-manifest good.jsonl": "no checkpoint at missing",
    "evaluate my.py --weights damaged --data.validation-manifest good.jsonl --out new/x": "cannot be read",
    "generate good --audio missing.wav --out new/answers.jsonl": "missing.wav: no such file",
    "generate good --audio missing.wav gone.wav --out answers.jsonl": "2 of 2 could not be used",
    "generate damaged --prompt Hm? --out new/answers.jsonl": "cannot be read",
    "import-config missing.yaml": "no file at missing.yaml",
    "generate good --chat missing.jsonl": "no file at missing.jsonl",
    "score good --manifest missing.jsonl --out new/scores.jsonl": "no manifest at .*missing.jsonl",
    "score good --manifest lost.jsonl --out scores.jsonl": "nothing of .* can be used",
    "score damaged --manifest good.jsonl --out new/deep/scores.jsonl": "cannot be read",
    "align missing --manifest good.jsonl --out new/times": "no run at missing",
    "convert import missing --out new/weights": "no checkpoint at missing",
    "convert import text.txt --out weights": "text.txt is no whole .nemo archive",
    "convert export missing --out new/exported": "missing holds no checkpoints",
    "convert export damaged --out exported": "cannot be read",
    "convert export good --out exported --format salm": "salm format",
    "plan missing.py": "no config at missing.py",
    "plan my.py --data.manifest missing.jsonl": "no manifest at .*missing.jsonl",
    f"plan my.py {LOST}": "usable documents",
    f"plan my.py {GOOD} {GRPO}": "draws its answers",
    f"plan my.py {GOOD} --out text.txt/plan.png": "text.txt",
    "estimate missing.py": "no config at missing.py",
    "estimate my.py --data.capacity 0 --no-compile": "data.capacity is 0",
    "describe missing.py": "no config at missing.py",
    "doctor --kernels missing.py": "no config at missing.py",
    "index missing.tar": "missing.tar is no tar file",
    "draw missing": "missing/metrics.jsonl does not exist",
}
"""Command line -> what its error says: faulty configs, data, checkpoints and outputs."""


def seen(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below the folder with its size and the time of its last change; folders by name alone."""
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {
        name: (0, 0) if (folder / name).is_dir() else (stat.st_size, stat.st_mtime_ns)
        for name, stat in stats.items()
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder: configs, manifests, a run, and one whose weights are damaged."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my.py").write_text(
        CONFIG.replace("tensor=2", "").replace("microbatches=4", "validate_every=0")
    )
    (folder / "raises.py").write_text("def config():\n    return 1 / 0\n")
    (folder / "text.txt").write_text("no weights\n")
    rng = np.random.default_rng(0)
    for i in range(4):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(16000 * rng.uniform(0.2, 0.9))), 16000)
        (folder / f"cut{i}.wav").write_bytes((folder / f"{i}.wav").read_bytes()[:44])
    sets = {
        "good": ["0.wav", "1.wav", "2.wav", "3.wav"],
        "half": ["0.wav", "1.wav", "gone.wav", "lost.wav"],
        "lost": ["gone.wav", "lost.wav"],
        "cut": ["cut0.wav", "cut1.wav", "cut2.wav", "cut3.wav"],
        "empty": [],
    }
    for name, files in sets.items():
        lines = [{"audio_filepath": file, "text": f"number {i}"} for i, file in enumerate(files)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(folder / "my.py")
    save_run(replace(config, data=replace(config.data, manifest=("good.jsonl",))), folder / "good", step=3)
    shutil.copytree(folder / "good", folder / "damaged")
    (folder / "damaged" / "checkpoints" / "3" / "state" / "_METADATA").write_text("{")
    with pytest.MonkeyPatch.context() as patch, shared_programs():
        patch.chdir(folder)
        yield folder


def test_every_command_is_tried() -> None:
    assert {line.split()[0] for line in FAILING} == commands().keys()


@pytest.mark.parametrize("line", FAILING)
def test_a_command_that_fails_leaves_nothing(home: Path, line: str) -> None:
    before = seen(home)
    with pytest.raises(SystemExit, match=f"error: (.|\n)*{FAILING[line]}"):
        main(line.split())
    assert seen(home) == before


def test_an_answer_that_was_given_stays(home: Path) -> None:
    """Its file does, in a folder that is made for it, though another recording could not be used."""
    with pytest.raises(SystemExit, match="1 of 2 could not be used"):
        main(["generate", "good", "--audio", "missing.wav", "0.wav", "--out", "some/answers.jsonl"])
    assert [line["end"] == "skipped" for line in read_lines(Path("some/answers.jsonl"))] == [True, False]
    shutil.rmtree("some")
