"""The command line that most commands share: where settings come from, and what --help shows."""

import re
import shutil
from operator import attrgetter
from pathlib import Path

import pytest

from jaxthd.config import AdaptConfig, Config, MeshConfig, TrainConfig
from jaxthd.config.listing import all_groups, groups, value_at
from jaxthd.errors import UserError
from jaxthd.files.run_folder import write_config
from jaxthd.models.front_ends import FastConformer
from jaxthd.terminal.arguments import WEIGHTS, CommandLine, parse_command_line
from tests.hf.published import REFERENCES

OPTIONS = {"weights": WEIGHTS, "top-k": {"type": int, "default": 0, "help": "so many"}}
FILE = "from jaxthd.config import *\ndef config(): return Config(train=TrainConfig(steps=7))\n"


def parse(*words: str) -> CommandLine:
    return parse_command_line("score", list(words), OPTIONS, "What it does.\n\n    jaxthd score runs/my\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_config(tmp_path / "run", Config(adapt=AdaptConfig(lora_rank=4), train=TrainConfig(steps=9)))
    return tmp_path / "run"


def test_settings_are_those_of_the_run_and_flags_override_them(run: Path):
    for source in (run, f"{run}@best", f"{run}@6", run / "config.json"):
        for words in ([str(source)], ["--config", str(source)]):
            line = parse(*words, "--train.learning-rate", "0.5", "--mesh.no-fsdp", "--top-k", "3")
            assert (line.config.adapt.lora_rank, line.config.train.steps) == (4, 9)
            assert (line.config.train.learning_rate, line.config.mesh.fsdp) == (0.5, False)
            assert (line.path, line.options.top_k) == (run, 3)
            assert line.weights() == [str(run if source == run / "config.json" else source)]
            assert line.given == ("train.learning_rate", "mesh.fsdp")
            assert parse(*words, "--weights", "a", "b").weights() == ["a", "b"]


@pytest.mark.parametrize("option", ["--adapt.dora", "--compute.unroll-layers"])
def test_a_boolean_setting_takes_true_and_false(option: str, run: Path):
    """Alone, with no-, and as a word or after =, in any case; what follows is not swallowed."""
    group, _, name = option.rpartition(".")
    path, written = (
        option.removeprefix("--").replace("-", "_"),
        option.replace("unroll-layers", "unroll_layers"),
    )

    def value(*words: str) -> bool:
        line = parse(str(run), *words, "--train.steps", "3", "--weights", "true")
        assert (line.config.train.steps, line.options.weights) == (3, ["true"])
        assert line.given == (path, "train.steps")
        return attrgetter(path)(line.config)

    for words in ((option,), (option, "True"), (written, "true"), (f"{option}=TRUE",)):
        assert value(*words) is True
    for words in ((f"{group}.no-{name}",), (option, "False"), (written, "false"), (f"{option}=false",)):
        assert value(*words) is False


def test_every_boolean_setting_takes_true_and_false(run: Path):
    own = [group for group in all_groups() if isinstance(value_at(Config(), group.path), group.kind)]
    known = [setting for group in own for setting in group.settings if setting.types == ("bool",)]
    for value in (True, False):
        line = parse(str(run), *(word for setting in known for word in (setting.option, str(value))))
        found = {setting.path: value_at(line.config, setting.path) for setting in known}
        assert found == dict.fromkeys(found, value)


@pytest.mark.parametrize("option", ["--json", "--no-compile"])
def test_a_commands_own_flag_takes_true_and_false(option: str, run: Path, capsys: pytest.CaptureFixture[str]):
    """As settings do; --compile is the opposite of --no-compile."""
    flags = {name: {"action": "store_true", "help": "so"} for name in ("json", "no-compile")}
    name = option.removeprefix("--").replace("-", "_")
    negated = {"--json": "--no-json", "--no-compile": "--compile"}[option]

    def value(*words: str) -> bool:
        line = parse_command_line("score", [str(run), *words, "--train.steps", "3"], OPTIONS | flags)
        assert line.given == ("train.steps",)
        assert line.config.train.steps == 3
        other = ({"json", "no_compile"} - {name}).pop()
        assert getattr(line.options, other) is False
        return getattr(line.options, name)

    for words in ((option,), (option, "True"), (f"{option}=true",), (negated, option)):
        assert value(*words) is True
    for words in ((), (negated,), (option, "False"), (f"{option}=FALSE",), (option, negated)):
        assert value(*words) is False
    for words in ((f"{option}=maybe",), (option, "b.jsonl")):
        with pytest.raises(SystemExit):
            value(*words)
    shown = capsys.readouterr().err
    assert f"{option} is 'maybe'; expected True or False: {option} True, or {negated}" in shown
    assert "b.jsonl" in shown


@pytest.mark.parametrize(
    "words", [["--adapt.dora", "1"], ["--adapt.dora=maybe"], ["--adapt.dora", "b.jsonl"]]
)
def test_another_value_of_a_boolean_setting_is_refused(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parse(str(run), *words)
    assert "expected True or False: --adapt.dora True, or --adapt.no-dora" in capsys.readouterr().err


def test_settings_of_a_file_have_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FILE)
    line = parse("my.py", "--data.manifest", "a.jsonl", "b.jsonl")
    assert (line.config.train.steps, line.run, line.weights()) == (7, None, [])
    assert line.config.data.manifest == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    assert line.config.rollout.mesh is None
    line = parse("my.py", "--mesh.data", "4", "--rollout.mesh.data", "2", "--rollout.mesh.tensor=2")
    assert line.config.rollout.mesh == MeshConfig(data=2, tensor=2)
    assert parse("my.py", "--rollout.mesh.no-fsdp").config.rollout.mesh == MeshConfig(fsdp=False)


def test_a_published_folder_has_settings_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its whole name is that of what is made of it: "qwen3-1.7b" has no suffix."""
    folder = tmp_path / "qwen3-1.7b"
    shutil.copytree(REFERENCES / "text_only", folder)
    monkeypatch.chdir(tmp_path)
    line = parse("qwen3-1.7b", "--train.steps", "3")
    assert (line.run, line.weights(), line.folder) == (None, ["qwen3-1.7b"], Path("runs/qwen3-1.7b"))
    assert (line.config.train.steps, line.config.train.init_from) == (3, (str(folder),))
    assert parse("qwen3-1.7b", "--weights", "other").weights() == ["other"]
    (tmp_path / "my.py").write_text(FILE)
    assert parse("my.py").folder == Path("runs/my")


def test_paths_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FILE)
    options = OPTIONS | {"out": {"type": Path}, "audio": {"type": Path, "nargs": "+"}}
    words = "~/my.py --weights ~/a@best b --data.manifest ~/m.jsonl --out=~/o --audio ~/a.wav b.wav"
    line = parse_command_line("score", words.split(), options)
    assert line.path == tmp_path / "my.py"
    assert line.weights() == [f"{tmp_path}/a@best", "b"]
    assert line.config.data.manifest == (f"{tmp_path}/m.jsonl",)
    assert (line.options.out, line.options.audio) == (tmp_path / "o", [tmp_path / "a.wav", Path("b.wav")])


def test_what_is_no_source_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"holds no run; expected the workdir"):
        parse(str(run.parent))
    with pytest.raises(FileNotFoundError, match="no run at"):
        parse(f"{run.parent / 'none'}@best")
    with pytest.raises(FileNotFoundError, match="no config at"):
        parse(str(run.parent / "none.py"))
    with pytest.raises(FileNotFoundError, match=r"no run at .*, and no config file"):
        parse(str(run.parent / "none"))
    for words in ((), (str(run), "--config", str(run)), (str(run), "--data.capcity", "1")):
        with pytest.raises(SystemExit) as ended:
            parse(*words)
        assert ended.value.code not in (0, None)
    shown = "".join(capsys.readouterr())
    assert "SOURCE is missing" in shown
    assert "drop one" in shown
    assert "data.capacity" in shown, "what may be meant"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_shows_the_commands_own_options_and_settings_by_group(
    columns: int, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nothing is cut; lines of settings fit the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))

    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parse(*words)
        assert ended.value.code == 0
        return capsys.readouterr().out

    own = shown("--help")
    assert own.index("--top-k") < own.index("Settings: --GROUP.SETTING")
    assert "What it does." in own
    assert "    jaxthd score runs/my" in own
    assert "--train.steps" not in own
    of_train = shown(str(run), "-h", "train")
    assert re.search(r"--train\.steps INT\W+Optimizer steps of the run\. \(default: 9\)", of_train)
    assert max(map(len, of_train.splitlines())) <= max(columns, 80)
    assert "--mesh.context" not in of_train
    assert re.search(r"--adapt\.lora-rank INT", shown("--config", str(run), "--help", "adapt"))
    every = re.sub(r"[\s│]+", " ", shown(str(run), "--help-all"))
    own_kinds = {group.kind for group in groups(FastConformer, "model.encoder")}
    other_encoder = [
        x for x in all_groups() if x.path.startswith("model.encoder") and x.kind not in own_kinds
    ]
    shown_groups = [group for group in all_groups() if group not in other_encoder]
    for setting in (setting for group in shown_groups for setting in group.settings):
        # A narrow terminal breaks a long name in two.
        assert re.search(rf"{re.escape(setting.option)}(?![a-z.-])", every.replace(" ", "")), setting.option
        assert setting.text.replace(" ", "") in every.replace(" ", "")


def test_help_of_no_group_names_the_groups(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse("--help", "trian")
    assert "mesh, data, model, compute, adapt, posttraining, rollout, train" in capsys.readouterr().err
