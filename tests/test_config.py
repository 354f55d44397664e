"""Config files: loading, errors, and the settings shared by runs that are compared with each other."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jaxthd.checkpoints.sources import load_config
from jaxthd.config import AugmentConfig, Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.files.config_file import with_absolute_paths
from jaxthd.files.run_folder import source_of
from jaxthd.models.front_ends import FastConformer
from jaxthd.validate import DeviceFacts, validate

CONFIGS = Path(__file__).parents[1] / "configs"
IMPORT = "from jaxthd.config import *\n\n"
CPU = DeviceFacts("cpu", 2, "cpu")
GPUS = DeviceFacts("gpu", 32, "NVIDIA H100", "9.0", vocabulary=131072)


def settings(config: Config) -> dict[str, Any]:
    """Dotted path -> value."""

    def flat(node: dict[str, Any], prefix: str) -> dict[str, Any]:
        out = {}
        for name, value in node.items():
            out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        return out

    return flat(asdict(config), "")


def changed(config: Config, base: Config) -> set[str]:
    was = settings(base)
    return {path for path, value in settings(config).items() if value != was[path]}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_is_valid_without_a_warning_and_names_its_command(path: Path) -> None:
    config = load_config(path)
    gpus = replace(GPUS, devices=config.mesh.devices, vocabulary=config.model.llm.vocab_size)
    assert validate(config, CPU if config.mesh.devices <= 2 else gpus) == []
    command = "grpo" if config.train.objective == "grpo" else "train"
    assert f"jaxthd {command} configs/{path.name}" in path.read_text()


def test_runs_that_are_compared_differ_in_what_they_compare_only() -> None:
    cp2, single, padded = (load_config(CONFIGS / f"{name}.py") for name in ("cp2", "single", "padded"))
    assert changed(single, cp2) == {"mesh.context"}
    batch = {"data.packing", "data.rows", "data.capacity", "data.audio_capacity"}
    assert changed(padded, single) == batch


def test_nano_is_the_model_of_its_table() -> None:
    llm = load_config(CONFIGS / "nemotron3_nano.py").model.llm
    counts = {letter: llm.pattern.count(letter) for letter in "M*-E"}
    assert (len(llm.pattern), counts) == (52, {"M": 23, "*": 6, "-": 0, "E": 23})


def test_a_config_file_may_vary_its_neighbour(tmp_path: Path) -> None:
    """Two folders have files of the same names: each imports its own neighbour, also if both are loaded."""
    base = "from jaxthd.config import *\ndef config(): return Config(data=DataConfig(rows={}))\n"
    variant = (
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from jaxthd import MeshConfig, load_config\n"
        "def config():\n"
        "    base = load_config(Path(__file__).with_name('base.py'))\n"
        "    return replace(base, mesh=MeshConfig(context=2))\n"
    )
    for rows in (3, 5):
        folder = tmp_path / str(rows)
        folder.mkdir()
        (folder / "base.py").write_text(base.format(rows))
        (folder / "variant.py").write_text(variant)
    for rows in (3, 5, 3):
        config = load_config(tmp_path / str(rows) / "variant.py")
        assert (config.data.rows, config.mesh) == (rows, MeshConfig(context=2))


@pytest.mark.parametrize(
    ("name", "text", "error", "fragment"),
    [
        ("missing.py", None, FileNotFoundError, "missing.py; expected a Python file with a function config"),
        ("empty.py", "", ValueError, "defines no function config()"),
        ("value.py", "config = 3", ValueError, "defines no function config()"),
        ("dict.py", "def config(): return {}", ValueError, "returns dict; expected jaxthd.config.Config"),
        ("run.yaml", "data: {}", ValueError, "ends in .py"),
        ("broken.py", "\ndef config(): return undefined", ValueError, "broken.py, line 2: NameError"),
        ("syntax.py", "def config(:", ValueError, "syntax.py, line 1: "),
        ("below.py", f"{IMPORT}1 / 0", ValueError, "below.py, line 3: ZeroDivisionError"),
        (
            "typo.py",
            f"{IMPORT}def config():\n    return Config(\n        adapt=AdaptConfig(lora_rnak=8))",
            ValueError,
            "line 5: AdaptConfig has no field 'lora_rnak'; perhaps you meant lora_rank",
        ),
        (
            "moved.py",
            f"{IMPORT}def config(): return Config(train=TrainConfig(lora_rank=8))",
            ValueError,
            "TrainConfig has no field 'lora_rank'; it is a field of AdaptConfig: move it there",
        ),
        (
            "unknown.py",
            f"{IMPORT}def config(): return Config(train=SpecAugmentConfig(qwertyuiop=8))",
            ValueError,
            "its fields are ",
        ),
    ],
)
def test_errors_of_loading_say_what_to_change(
    tmp_path: Path, name: str, text: str | None, error: type[Exception], fragment: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error) as caught:
        load_config(tmp_path / name)
    assert fragment in str(caught.value)


def test_relative_paths_are_of_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command is started. Names that are no paths stay as they are."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my.py").write_text(
        f"{IMPORT}def config(): return Config(\n"
        "    data=DataConfig(\n"
        "        manifest=('a_{0..3}.jsonl::../t.tar', 'synthetic', 'mine:x', 'shar:b', '/c.jsonl'),\n"
        "        validation_manifest='dev=d.jsonl',\n"
        "        tokenizer='tok'),\n"
        "    train=TrainConfig(init_from=('runs/a@best',)))\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/my.py")
    data, folder = config.data, tmp_path / "configs"
    assert data.manifest == (
        f"{folder}/a_{{0..3}}.jsonl::{tmp_path}/t.tar",
        "synthetic",
        "mine:x",
        f"shar:{folder}/b",
        "/c.jsonl",
    )
    assert data.validation_manifest == f"dev={folder}/d.jsonl"
    assert data.tokenizer == f"{folder}/tok"
    assert config.train.init_from == (f"{folder}/runs/a@best",)
    assert with_absolute_paths(config, "/elsewhere") == config
    assert with_absolute_paths(Config(), "/elsewhere") == Config()


def test_paths_may_be_in_the_home_folder_and_what_exists_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for name in ("lang=de.jsonl", "mine:x", "shar:y", "~z"):
        (tmp_path / name).touch()
    config = with_absolute_paths(
        Config(
            data=DataConfig(
                manifest=(
                    "~/a_{0..3}.jsonl",
                    "manifest:~/b",
                    "mine:x",
                    "shar:y",
                    "~z",
                    "mine:z",
                    "a::~/t.tar",
                ),
                validation_manifest=("lang=de.jsonl", "dev=~/d.jsonl"),
                tokenizer="~/tok",
                augment=AugmentConfig(noise_manifest="~/n.jsonl", room_manifest="~/r.jsonl"),
            ),
            train=TrainConfig(init_from=("~/runs/a@best",)),
        ),
        tmp_path,
    )
    data, here = config.data, str(tmp_path)
    existing = f"{here}/mine:x", f"{here}/shar:y", f"{here}/~z"
    assert data.manifest == (
        "/home/x/a_{0..3}.jsonl",
        "manifest:/home/x/b",
        *existing,
        "mine:z",
        f"{here}/a::/home/x/t.tar",
    )
    assert data.validation_manifest == (f"{here}/lang=de.jsonl", "dev=/home/x/d.jsonl")
    assert data.tokenizer == "/home/x/tok"
    assert (data.augment.noise_manifest, data.augment.room_manifest) == ("/home/x/n.jsonl", "/home/x/r.jsonl")
    assert config.train.init_from == ("/home/x/runs/a@best",)
    assert source_of("~/runs/a@best") == (Path("/home/x/runs/a"), "best")
    monkeypatch.setenv("HOME", here)
    (tmp_path / "my.py").write_text(f"{IMPORT}def config(): return Config()\n")
    assert load_config("~/my.py") == Config()


def test_a_mistake_has_its_line_also_in_a_file_given_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("\n\nundefined\n")
    with pytest.raises(ValueError, match=r"^my\.py, line 3: NameError"):
        load_config("my.py")


@pytest.mark.parametrize("seconds", [0.02, 0.0333, 0.29, 1.15, 10.0])
def test_chunk_frames_is_the_longest_chunk_that_audio_is_cut_into(seconds: float) -> None:
    front_end, samples = FastConformer(chunk_seconds=seconds), round(seconds * 16000)
    lengths = range(samples, 3 * samples, 80 if samples > 1000 else 1)
    assert front_end.longest == max(piece.frames for n in lengths for piece in front_end.pieces(n))


def test_the_mesh_multiplies_out() -> None:
    mesh = MeshConfig(data=2, context=3, pipeline=5, tensor=7)
    assert (mesh.sizes, mesh.devices, mesh.audio_ranks) == ((2, 3, 5, 7), 210, 105)
