"""Admission refuses kernels broken on purpose; measurements are cached by everything they depend on."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxthd.kernels import attention_probe, encoder_probe
from jaxthd.kernels.admission import MEASURED, Kernel, admit, error_bound
from jaxthd.kernels.attention_probe import QUANTITIES, attention_kernel, probe_errors
from jaxthd.kernels.scan_probe import scan_kernel, scan_kernels
from jaxthd.ops import pallas_launch
from jaxthd.ops.attention import blockwise, thd
from jaxthd.ops.attention.contract import AttentionBackend, AttentionShape, Call
from jaxthd.ops.attention.relative import RelativeShape
from jaxthd.ops.backend import Machine
from jaxthd.ops.scan import pallas as scan_pallas
from jaxthd.ops.scan import ssd as scan_ssd
from jaxthd.ops.scan.contract import ScanShape
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing import intervals
from jaxthd.packing.intervals import key_intervals
from jaxthd.parallel.mesh import AXES
from tests.ops.test_scan import broken_decays

XLA = blockwise.BACKEND
SHAPE = AttentionShape("float32", 4, 2, 8)
CPU = Machine("cpu", "cpu", 1, None, "0.10.2", "0.10.2", "3.11.7", None, None, None, None)


def gradients_eight_times_too_large(*given: Any) -> Any:
    return tuple(8 * x for x in XLA.backward(*given))


def backward_with_its_own_log_sum_exp(q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any) -> Any:
    """Uses its own log-sum-exp, not the one over all calls: right on one device, wrong in a ring."""
    return XLA.backward(q, k, v, out, XLA.forward(q, k, v, *given[1:])[1], *given)


def nan_where_nothing_is_seen(q: Any, k: Any, v: Any, call: Call, scale: float) -> Any:
    out, lse = XLA.forward(q, k, v, call, scale)
    return jnp.where(jnp.isneginf(lse)[..., None], jnp.nan, out), lse


def log_sum_exp_in_base_two(*given: Any) -> Any:
    out, lse = XLA.forward(*given)
    return out, lse / jnp.log(2)


def documents_run_together(q: Any, k: Any, v: Any, call: Call, scale: float) -> Any:
    """The local call sees everything before a token, other documents too."""
    old = call.intervals
    lo = jnp.where(call.causal, 0, old.lo)
    seen = key_intervals(jnp.where(old.hi > old.lo, lo, 0), old.hi, call.block)
    return XLA.forward(q, k, v, call._replace(intervals=seen), scale)


def nothing_runs(*given: Any) -> Any:
    raise RuntimeError("No valid engine configs\nand a long trace")


@pytest.mark.parametrize(
    ("forward", "backward", "wrong"),
    [
        (XLA.forward, gradients_eight_times_too_large, {"dq", "dk", "dv"}),
        (XLA.forward, backward_with_its_own_log_sum_exp, {"dq", "dk", "dv"}),
        (nan_where_nothing_is_seen, XLA.backward, {"output", "dq", "dk"}),
        (log_sum_exp_in_base_two, XLA.backward, {"log-sum-exp", "dq", "dk", "dv"}),
        (documents_run_together, XLA.backward, set(QUANTITIES)),
    ],
)
def test_a_broken_back_end_is_refused_with_the_numbers(forward, backward, wrong, tmp_path: Path):
    broken = AttentionBackend("broken", XLA.unfit, forward, backward)
    verdict = admit(attention_kernel(broken, SHAPE), CPU, tmp_path)
    assert {name for name, error in verdict.errors.items() if error > verdict.bound} == wrong
    assert verdict.refusal is not None
    assert verdict.refusal.startswith("it is off from xla, by output")
    assert "\n" not in verdict.refusal
    if backward is gradients_eight_times_too_large:
        assert all(verdict.errors[name] == pytest.approx(7) for name in wrong)
    # Refused again without measuring: the errors are cached, not the verdict.
    again = admit(attention_kernel(broken, SHAPE), CPU, tmp_path)
    assert again.is_cached
    assert again.refusal == verdict.refusal


def is_window(q: Any, call: Call) -> bool:
    return call.causal and call.documents is None


def has_shared_keys(q: Any, call: Call) -> bool:
    return not call.causal and call.documents is None and len(q) > 64


def is_alone(q: Any, call: Call) -> bool:
    return call.alone


WRONG = [is_alone, is_window, has_shared_keys]
WRONG += [lambda q, call, n=n: len(q) == n for n in (16, 32, 64)]


@pytest.mark.parametrize("is_wrong", WRONG)
def test_what_is_wrong_in_one_kind_of_call_is_refused(is_wrong, monkeypatch: pytest.MonkeyPatch):
    """Nothing is compiled: calls are counted by the scale of what they return."""

    def forward(q: Any, k: Any, v: Any, call: Call, scale: float) -> Any:
        return (2.0 if is_wrong(q, call) else 1.0) * jnp.ones_like(q), jnp.ones(q.shape[:2])

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, call: Call, scale: float) -> Any:
        return tuple(map(jnp.ones_like, (q, k, v)))

    def right(q: Any, *given: Any) -> Any:
        return jnp.ones_like(q), jnp.ones(q.shape[:2])

    monkeypatch.setattr(attention_probe, "as_in_a_step", lambda run: run)
    monkeypatch.setattr(attention_probe.blockwise, "BACKEND", AttentionBackend("xla", None, right, backward))
    attention_probe._programs.cache_clear()
    backend = AttentionBackend("other", XLA.unfit, forward, backward, takes_any_intervals=True)
    assert probe_errors(backend, SHAPE)["output"] == 1
    # A fused library is not asked for what it does not take.
    is_of_any = is_wrong is not is_alone
    assert probe_errors(backend._replace(takes_any_intervals=False), SHAPE)["output"] == (not is_of_any)
    attention_probe._programs.cache_clear()


def test_the_encoder_s_probe_has_several_tiles_of_frames(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def counted(attend: Any, lo: Any, hi: Any, *given: Any) -> Any:
        sizes.append((len(lo), int((hi - lo).max())))
        return tuple(map(jnp.ones_like, (given[-1], *given[:-1])))

    monkeypatch.setattr(encoder_probe, "as_in_a_step", lambda run: run)
    monkeypatch.setattr(encoder_probe, "_results", counted)
    for longest in (7, 43, 375):
        encoder_probe.probe_errors(RelativeShape("float32", 2, 16, longest))
    assert all(frames >= 256 for frames, _ in sizes)
    assert [most for _, most in sizes[::2]] == [7, 43, 375]


@pytest.mark.parametrize(
    ("dtype", "off"), [("float32", 2e-4), ("bfloat16", 0.05), ("float16", 0.01)], ids=str
)
def test_what_is_a_little_off_is_refused(dtype: str, off: float, tmp_path: Path):
    """Off by a few roundings of the dtype; no single tensor shows it."""

    def scaled(*given: Any) -> Any:
        out, lse = XLA.forward(*given)
        return (1 + off) * out, lse

    broken = AttentionBackend("broken", XLA.unfit, scaled, XLA.backward)
    verdict = admit(attention_kernel(broken, replace(SHAPE, dtype=dtype)), CPU, tmp_path)
    assert verdict.refusal is not None
    assert verdict.errors["output"] == pytest.approx(off, rel=0.2)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 2e-4), ("bfloat16", 0.03)], ids=str)
def test_a_scan_that_is_a_little_off_is_refused(dtype: str, off: float, tmp_path: Path):
    shape = ScanShape(dtype, 2, 1, 16, 16, 32)

    def scaled(*given: Any, **settings: Any) -> Any:
        return (1 + off) * ssd(*given, **settings)

    assert admit(scan_kernel(scan_ssd.BACKEND, shape), CPU, tmp_path).refusal is None
    broken = scan_kernel(scan_ssd.BACKEND._replace(name="broken", scan=scaled), shape)
    verdict = admit(broken, CPU, tmp_path)
    assert verdict.refusal is not None
    assert verdict.errors["y"] == pytest.approx(off, rel=0.3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_blockwise_one_is_well_within_the_bound(dtype: str):
    errors = probe_errors(XLA, replace(SHAPE, dtype=dtype))
    assert 0 < max(errors.values()) < error_bound(dtype) / 4


def test_one_that_does_not_run_is_refused_and_tried_again(tmp_path: Path):
    broken = AttentionBackend("broken", XLA.unfit, nothing_runs, nothing_runs)
    for _ in range(2):
        verdict = admit(attention_kernel(broken, SHAPE), CPU, tmp_path)
        assert verdict.refusal == "the probe failed with RuntimeError: No valid engine configs"
        assert not verdict.is_cached
    assert not list(tmp_path.iterdir())


def test_the_probe_runs_under_the_axes_of_a_step(tmp_path: Path):
    """Under these axes libraries ask for the current mesh, and some then fail."""

    def asking(*given: Any) -> Any:
        under = jax.sharding.get_abstract_mesh()
        assert under.manual_axes == AXES, under
        return XLA.forward(*given)

    def refusing(*given: Any) -> Any:
        assert jax.sharding.get_abstract_mesh().empty, "Global mesh resource is not set"

    assert admit(attention_kernel(XLA._replace(forward=asking), SHAPE), CPU, tmp_path).refusal is None
    verdict = admit(attention_kernel(XLA._replace(name="other", forward=refusing), SHAPE), CPU, tmp_path)
    assert verdict.refusal == "the probe failed with AssertionError: Global mesh resource is not set"


KERNELS: list[tuple[Kernel, dict[str, Any]]] = [
    (
        attention_kernel(XLA, SHAPE),
        {"dtype": "bfloat16", "q_heads": 8, "kv_heads": 4, "head_dim": 16, "tokens": 64, "documents": 4},
    ),
    (
        scan_kernel(scan_ssd.BACKEND, ScanShape("float32", 2, 1, 16, 16, 16)),
        {
            "dtype": "bfloat16",
            "heads": 4,
            "groups": 2,
            "head_dim": 32,
            "state": 32,
            "chunk": 32,
            "states_enter": True,
        },
    ),
]


@pytest.mark.parametrize(("kernel", "changes"), KERNELS, ids=lambda x: getattr(x, "kind", ""))
def test_measurements_are_kept_by_all_that_they_hold_for(
    kernel: Kernel, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured = []

    def counted() -> dict[str, float]:
        measured.append(1)
        return dict.fromkeys(kernel.quantities, 1e-6)

    def is_measured(kernel: Kernel = kernel, **facts: Any) -> bool:
        measured.clear()
        verdict = admit(replace(kernel, probe=counted), replace(CPU, **facts), tmp_path)
        assert verdict.refusal is None
        assert verdict.is_cached == (not measured)
        return bool(measured)

    assert is_measured()
    assert not is_measured()
    assert not is_measured(devices=8)
    for fact, value in {
        "kind": "NVIDIA H100",
        "compute_capability": "9.0",
        "jax": "0.11.1",
        "jaxlib": "0.11.1",
        "cudnn": 91400,
        "driver": "570.1",
        "transformer_engine": "2.18.0",
    }.items():
        assert is_measured(**{fact: value}), fact
        assert not is_measured(**{fact: value}), fact
    assert set(changes) == set(kernel.shape.__dataclass_fields__)
    for field, value in changes.items():
        changed = replace(kernel, shape=replace(kernel.shape, **{field: value}))
        assert is_measured(changed), field
        assert not is_measured(changed), field
    assert is_measured(replace(kernel, name="other"))
    assert is_measured(replace(kernel, kind="other"))
    # A change to the measured code or to the probe; a damaged file; a file that names another
    # measurement.
    source = tmp_path / "code" / "source.py"
    source.parent.mkdir()
    with monkeypatch.context() as more_code:
        more_code.setattr("jaxthd.kernels.admission.MEASURED", (*MEASURED, source.parent))
        for text in ("written", "changed"):
            source.write_text(text)
            assert is_measured()
            assert not is_measured()
    assert not is_measured()
    for damage in ("{", json.dumps({"errors": dict.fromkeys(kernel.quantities, 0.0)}), "[]"):
        for file in tmp_path.glob(f"{kernel.kind}-{kernel.name}-*.json"):
            file.write_text(damage)
        assert is_measured()
    # If the folder cannot be written, nothing is cached, and admission still works.
    assert admit(replace(kernel, probe=counted), CPU, source).refusal is None


def test_a_measurement_is_of_the_sources_that_compute():
    """It depends on the code that is compared, and on the probe that compares it."""
    for module in (thd, pallas_launch, scan_pallas, attention_probe, intervals):
        assert any(Path(module.__file__ or "").is_relative_to(folder) for folder in MEASURED)


def test_a_scan_without_the_mask_of_boundaries_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scan_pallas, "_decays", broken_decays)
    shape = ScanShape("float32", 2, 1, 16, 16, 32)
    pallas = replace(scan_kernels(shape)[0], unfit=lambda machine: None)
    for is_cached in (False, True):
        verdict = admit(pallas, CPU, tmp_path)
        assert verdict.is_cached == is_cached
        assert verdict.refusal is not None
        wording = r"it is off from xla, by y \S+, .*dC \S+ of the largest value; expected 1.0e-04 at most"
        assert re.fullmatch(wording, verdict.refusal)
        assert min(verdict.errors.values()) > verdict.bound
