"""rollout.rewards and rollout.reward_options: what they mean, and what is said where they are wrong."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxthd.config import Config, RolloutConfig, TrainConfig
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.rl.rewards.find import bound
from jaxthd.rl.rewards.registry import BUILT_IN, reward_settings
from jaxthd.rl.rewards.rewarder import Rewarder
from tests.rl.rewards.groups import group

HERE = "tests.rl.rewards.functions"
CONFIG = Config(train=TrainConfig(normaliser="none"), rollout=RolloutConfig(max_new_tokens=20))


@pytest.fixture(autouse=True)
def forget_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports happen in this process here, in place of a worker."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("_rewards"):
            del sys.modules[name]


def config(rewards: tuple[str, ...], *options: str) -> Config:
    return replace(CONFIG, rollout=replace(CONFIG.rollout, rewards=rewards, reward_options=options))


def function(name: str, *options: str, folders: tuple[str, ...] = ()):
    (setting,) = reward_settings(config((name,), *options))
    return bound(setting, folders)


def test_names_weights_and_options():
    asked = config(
        ("wer", "overlong=0.5", f"{HERE}.words=-2"), "overlong.penalty=2", f"{HERE}.words.separator=.=;"
    )
    found = reward_settings(asked)
    assert [(each.name, each.weight) for each in found] == [
        ("wer", 1),
        ("overlong", 0.5),
        (f"{HERE}.words", -2),
    ]
    assert [each.options for each in found] == [{}, {"penalty": "2"}, {"separator": ".=;"}]


def test_functions_get_their_settings():
    drawn = group("One", "one", "x" * 19, reference="one")
    assert function("wer")(drawn) == [-1, 0, -1], "train.normaliser"
    assert function("wer", "wer.normaliser=basic", "wer.lowest=-inf")(drawn) == [0, 0, -1]
    assert function("overlong")(drawn) == [0, 0, -1], "rollout.max_new_tokens"
    assert function("overlong", "overlong.max_tokens=36")(drawn) == [0, 0, 0]
    assert function("format", "format.pattern=[a-z.]+=?")(drawn) == [0, 1, 1]
    assert function(f"{HERE}.words", f"{HERE}.words.scale=2")(drawn) == [2, 2, 2]


def test_settings_have_the_type_that_the_function_says(tmp_path: Path):
    (tmp_path / "typed_rewards.py").write_text(
        "from __future__ import annotations\n"
        "def f(group, text: str, number: float, flag=False, other=None, **more):\n"
        "    return [text, number, flag, other, more]\n"
    )
    name = "typed_rewards.f"
    options = ("text=1", "number=1", "flag=True", "other=[1, 2]", "extra=some text")
    found = function(name, *(f"{name}.{each}" for each in options), folders=(str(tmp_path),))
    assert found(group("a")) == ["1", 1.0, True, [1, 2], {"extra": "some text"}]
    with pytest.raises(UserError, match="needs the setting 'number'"):
        function(name, f"{name}.text=1", folders=(str(tmp_path),))
    with pytest.raises(UserError, match="flag=2; expected a value of type bool"):
        function(name, f"{name}.flag=2", folders=(str(tmp_path),))


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ((), (), "rollout.rewards is empty"),
        (("were",), (), r"'were'; expected one of wer, .*perhaps you meant wer"),
        (
            ("nothing like it",),
            (),
            r"'nothing like it'; expected one of wer, .*my_rewards\.politeness: correct",
        ),
        (("a..b",), (), r"'a\.\.b'"),
        (("my_rewards.f()",), (), r"'my_rewards\.f\(\)'"),
        (("wer", "wer=0.5"), (), "'wer' twice"),
        (("wer=much",), (), "'wer=much', whose weight is no finite number"),
        (("wer=",), (), "'wer='"),
        (("wer=nan",), (), "'wer=nan'"),
        (("wer=inf",), (), "'wer=inf'"),
        (("wer",), ("wer.lowest",), r"'wer\.lowest'; expected NAME\.SETTING=VALUE"),
        (
            ("wer",),
            ("cer.lowest=-1",),
            r"'cer\.lowest=-1'; .* one of rollout.rewards \(wer\); perhaps .* wer:",
        ),
        (("wer",), ("lowest=-1",), "'lowest=-1'"),
        (("wer",), ("wer.lowset=-1",), r"wer has the settings normaliser, lowest; perhaps you meant lowest"),
        (("wer",), ("wer.lowest=much",), r"wer\.lowest=much; expected a value of type float"),
        (("overlong",), ("overlong.max_tokens=6.5",), r"max_tokens=6\.5; expected a value of type int"),
        (("format",), (), r"needs the setting 'pattern'; expected format\.pattern=VALUE"),
        (("equals",), (), "needs the setting 'field'"),
        ((f"{HERE}.word",), (), r"functions\.py has no 'word'; .*perhaps you meant 'words'"),
        (("tests.rl.rewards.misbehaving.WAYS",), (), "is of type dict; expected a function"),
        ((f"{HERE}.where",), (f"{HERE}.where.scale=1",), "where has no settings"),
        (
            ("my_reward.f",),
            (),
            "no module 'my_reward'; expected my_reward.py in .*; perhaps you meant 'my_rewards'",
        ),
        (("my_rewards.inner.f",), (), r"cannot be imported: ModuleNotFoundError: .*not a package|no module"),
        (("my_rewards.no_group",), (), r"declared as no_group\(\); expected a group as its first argument"),
        (("my_rewards.by_name",), (), r"declared as by_name\(\*, group\)"),
        (
            ("broken_rewards.f",),
            (),
            r"cannot be imported: ZeroDivisionError: .* \(broken_rewards\.py, line 2\)",
        ),
        (("wrong_rewards.f",), (), r"cannot be imported: SyntaxError"),
        (("ending_rewards.f",), (), r"cannot be imported: SystemExit: 3"),
        (("needing_rewards.f",), (), r"cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_bad_settings_are_a_users_matter(
    rewards: tuple[str, ...], options: tuple[str, ...], message: str, tmp_path: Path
):
    (tmp_path / "my_rewards.py").write_text("def no_group(): pass\ndef by_name(*, group): pass\n")
    (tmp_path / "broken_rewards.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "wrong_rewards.py").write_text("def f(group)\n")
    (tmp_path / "ending_rewards.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needing_rewards.py").write_text("import not_there\n")
    with pytest.raises(UserError, match=message):
        _ = [bound(setting, (str(tmp_path),)) for setting in reward_settings(config(rewards, *options))]


def test_a_function_beside_the_config_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the run is continued from its workdir alone, which keeps the folder."""
    for folder in ("configs", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}_rewards.py").write_text(
            "def f(group): return [1 for _ in group.answers]"
        )
    file = tmp_path / "configs" / "mine.py"
    file.write_text(
        "from jaxthd.config import Config, RolloutConfig\n"
        "def config():\n"
        "    names = ('configs_rewards.f=2', 'here_rewards.f')\n"
        "    return Config(rollout=RolloutConfig(rewards=names))\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    loaded = load_config(file)
    assert loaded.rollout.reward_folders == (f"{tmp_path}/configs",)
    with Rewarder.of(loaded) as rewards:
        rewards.submit(0, group("a"))
        (found,) = rewards.collect()
    assert found.rewards == (3,)
    assert load_config(Path(__file__).parents[3] / "configs" / "single.py").rollout.reward_folders == ()


def test_every_built_in_function_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "post_training.md").read_text()
    for name, each in BUILT_IN.items():
        assert f"| `{name}` |" in page
        assert each.__doc__
