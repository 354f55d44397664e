"""What a run uses: the back-end that was asked for and is admitted, or an error, or the next one."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxthd.cli import ready
from jaxthd.config import Config, MeshConfig
from jaxthd.errors import UserError
from jaxthd.kernels import attention_problem, with_admitted
from jaxthd.ops.attention import blockwise
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import Backend
from jaxthd.ops.ring import packed_attention
from jaxthd.packing.segments import make_segments

XLA = blockwise.BACKEND


def eight_times(*given: Any) -> Any:
    return tuple(8 * x for x in XLA.backward(*given))


def asking(**settings: Any) -> Config:
    return replace(Config(), model=replace(Config().model, **settings))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Here "te" can run and is wrong, "cudnn" cannot run."""
    monkeypatch.setitem(BACKENDS, "te", Backend("te", XLA.unfit, XLA.forward, eight_times))
    return []


def test_what_is_not_admitted_is_an_error_with_the_numbers(lines: list[str], tmp_path: Path):
    with pytest.raises(UserError) as caught:
        with_admitted(asking(attention_backend="te"), lines.append, tmp_path)
    message = str(caught.value)
    assert 'model.attention_backend is "te", but it is off from the blockwise one, by output' in message
    assert "dk 7.0e+00" in message
    assert "expected a back-end that computes attention right here: set model.attention_backend to" in message
    assert "or model.attention_unverified to use it all the same" in message
    assert not lines


def test_the_flag_overrides_a_measurement_and_says_so(lines: list[str], tmp_path: Path):
    config = asking(attention_backend="te", attention_unverified=True)
    assert with_admitted(config, lines.append, tmp_path) == config
    (line,) = lines
    assert "dk 7.0e+00" in line
    assert "used all the same, as model.attention_unverified says" in line


def test_the_flag_makes_nothing_run_that_cannot(lines: list[str], tmp_path: Path):
    config = asking(attention_backend="cudnn", attention_unverified=True)
    with pytest.raises(UserError, match="it runs on NVIDIA GPUs, and this is cpu") as caught:
        with_admitted(config, lines.append, tmp_path)
    assert "attention_unverified to use" not in str(caught.value)


def test_auto_takes_the_next_one_and_says_why(lines: list[str], tmp_path: Path):
    config = asking(attention_backend="auto", attention_unverified=True)
    assert with_admitted(config, lines.append, tmp_path).model.attention_backend == "xla"
    (line,) = lines
    assert line.startswith("attention: xla; not te: it is off from the blockwise one")
    assert "; not cudnn: it runs on NVIDIA GPUs" in line


def test_auto_takes_the_first_that_is_admitted(lines: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "cudnn", XLA._replace(name="cudnn"))
    config = asking(attention_backend="auto")
    assert with_admitted(config, lines.append, tmp_path).model.attention_backend == "cudnn"
    (line,) = lines
    assert line.startswith("attention: cudnn; not te: it is off from the blockwise one")


def test_the_blockwise_one_is_not_measured(lines: list[str], tmp_path: Path):
    assert with_admitted(Config(), lines.append, tmp_path) == Config()
    assert not list(tmp_path.iterdir())


def test_a_command_settles_it_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("jaxthd.cli.simulate_devices", lambda devices: False)
    nobody = Namespace(coordinator=None, processes=None, process=None)
    with ready(asking(attention_backend="auto"), nobody) as config:
        assert config == Config()
    assert "attention: xla; not te: it runs on NVIDIA GPUs" in capsys.readouterr().err


def test_what_is_not_settled_is_not_guessed():
    x = jnp.zeros((8, 2, 4))
    ids = jnp.ones((1, 8), jnp.int32)
    segments = make_segments(ids, ids, block=8, axis=None)
    with pytest.raises(ValueError, match="expected one of te, cudnn, xla"):
        packed_attention(x, x, x, segments, scale=1.0, exchange="ring", backend="auto")


def test_the_problem_is_that_of_a_tensor_rank():
    config = replace(Config(), mesh=MeshConfig(tensor=4))
    llm = replace(config.model.llm, q_heads=32, kv_heads=2, head_dim=64)
    problem = attention_problem(replace(config, model=replace(config.model, llm=llm)))
    assert (problem.q_heads, problem.kv_heads, problem.head_dim) == (8, 1, 64)
