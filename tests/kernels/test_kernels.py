"""The back-end of a run: the one asked for if it is admitted, otherwise an error or the next one."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
)
from jaxthd.errors import UserError
from jaxthd.kernels import choose
from jaxthd.kernels.admission import Kernel, Verdict
from jaxthd.kernels.choose import LARGE_KERNELS, attention_shapes, scan_shapes, using, with_admitted
from jaxthd.models.blocks import Mamba2
from jaxthd.ops.attention import blockwise, pallas_kernels
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import AttentionBackend
from jaxthd.ops.attention.ring import packed_attention
from jaxthd.ops.backend import Machine
from jaxthd.ops.scan import pallas as scan_pallas
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs, ScanShape
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.mesh import make_mesh
from jaxthd.planning.compiled_step import abstract_batch
from jaxthd.run.startup import prepared
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, state_shardings
from jaxthd.steps.training import make_train_step
from tests.ops.test_scan import broken_decays

XLA = blockwise.BACKEND
ROOT = Path(__file__).parents[2]


def eight_times(*given: Any) -> Any:
    return tuple(8 * x for x in XLA.backward(*given))


def asking(llm: LLMConfig | None = None, **compute: Any) -> Config:
    """A config whose settings that are not given need no admission."""
    compute = {"attention_backend": "xla", "scan_backend": "xla", "encoder_attention": "blocks"} | compute
    return Config(
        model=ModelConfig(llm=llm or LLMConfig()),
        compute=ComputeConfig(**compute, block_sizes=BlockSizes(scan=16)),
    )


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In these tests "te" can run and is wrong, and "cudnn" cannot run."""
    monkeypatch.setitem(BACKENDS, "te", AttentionBackend("te", XLA.unfit, XLA.forward, eight_times))
    return []


def test_what_is_not_admitted_is_an_error_with_the_numbers(lines: list[str], tmp_path: Path):
    with pytest.raises(UserError) as caught:
        with_admitted(asking(attention_backend="te"), lines.append, tmp_path)
    message = str(caught.value)
    assert 'compute.attention_backend is "te", but it is off from xla, by output' in message
    assert "dk 7.0e+00" in message
    assert (
        "expected a back-end that computes the attention right here: set compute.attention_backend to"
        in message
    )
    assert not lines
    with pytest.raises(UserError, match="it runs on NVIDIA GPUs, and this is cpu"):
        with_admitted(asking(attention_backend="cudnn"), lines.append, tmp_path)


@pytest.mark.usefixtures("on_a_gpu")
def test_auto_takes_the_next_one_and_says_why(lines: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "pallas", BACKENDS["cudnn"]._replace(name="pallas"))
    config = asking(attention_backend="auto")
    assert with_admitted(config, lines.append, tmp_path).compute.attention_backend == "xla"
    (line,) = lines
    assert line.startswith("attention: xla; not te: it is off from xla")
    assert "; not cudnn: it computes in bfloat16 or float16" in line


@pytest.mark.usefixtures("on_a_gpu")
def test_auto_takes_the_first_that_is_admitted(lines: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "cudnn", XLA._replace(name="cudnn"))
    config = asking(attention_backend="auto")
    assert with_admitted(config, lines.append, tmp_path).compute.attention_backend == "cudnn"
    (line,) = lines
    assert line.startswith("attention: cudnn; not te: it is off from xla")


def test_the_blockwise_one_is_not_measured(lines: list[str], tmp_path: Path):
    config = using(Config(), attention_backend="xla", scan_backend="xla", encoder_attention="blocks")
    assert with_admitted(config, lines.append, tmp_path) == config
    assert not list(tmp_path.iterdir())


def test_auto_on_a_cpu_is_xla_without_a_word(lines: list[str], tmp_path: Path):
    found = with_admitted(Config(), lines.append, tmp_path).compute
    assert (found.attention_backend, found.scan_backend, found.encoder_attention) == ("xla", "xla", "blocks")
    assert not lines


def test_a_command_settles_it_before_it_runs(capsys: pytest.CaptureFixture[str]):
    resolve_backend = prepared(Config()).compute
    assert (resolve_backend.attention_backend, resolve_backend.scan_backend) == ("xla", "xla")
    assert not capsys.readouterr().err


def test_what_is_not_settled_is_not_guessed():
    x = jnp.zeros((8, 2, 4))
    ids = jnp.ones((1, 8), jnp.int32)
    segments = make_segments(ids, ids, block=8, axis=None)
    with pytest.raises(ValueError, match="expected one of te, cudnn, pallas, xla"):
        packed_attention(x, x, x, segments, scale=1.0, exchange="ring", backend="auto")
    with pytest.raises(ValueError, match="expected one of pallas, xla"):
        scan(ScanInputs(x, x[..., 0], x[0, :, 0], x, x), segments, chunk=16, backend="auto")


def test_the_shape_is_that_of_a_tensor_rank():
    config = replace(Config(), mesh=MeshConfig(tensor=4))
    llm = config.model.llm.with_settings("*", heads=32, kv_heads=2, head_dim=64)
    (shape,) = attention_shapes(replace(config, model=replace(config.model, llm=llm)))
    assert (shape.q_heads, shape.kv_heads, shape.head_dim) == (8, 1, 64)


def test_the_shape_is_of_a_rank_s_buffers_of_a_microbatch():
    data = DataConfig(rows=8, capacity=128, max_documents=5)
    train = replace(Config().train, microbatches=2)
    config = replace(Config(), mesh=MeshConfig(data=2, context=4), data=data, train=train)
    (shape,) = attention_shapes(config)
    assert (shape.tokens, shape.documents) == (2 * 128 // 4, 2 * 5)


class Ask(NamedTuple):
    """A call of admission, with the answer "yes" but for `no`."""

    name: str
    shape: Any


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """What admission is asked; it measures nothing and refuses names and shapes in REFUSED."""
    asked: list[Ask] = []

    def admit(kernel: Kernel, machine: Machine, folder: Path | None) -> Verdict:
        asked.append(Ask(kernel.name, kernel.shape))
        size = getattr(kernel.shape, "tokens", 0), getattr(kernel.shape, "head_dim", 0)
        refusal = "it is too small" if set(REFUSED.get(kernel.name, ())) & set(size) else None
        return Verdict(kernel.name, refusal, {}, 1.0)

    monkeypatch.setattr("jaxthd.kernels.choose.admit", admit)
    return asked


REFUSED = {"te": (64, 96)}
"""Tokens and head dims that a back-end is refused for."""


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("pattern", "want", "said"),
    [
        ("WE*E", "te", ["attention: te", "attention in windows: xla; te does not compute it"]),
        ("WEWE", "pallas", ["attention: pallas; not te: it does not compute windows"]),
        ("L-*-", "cudnn", ["attention: cudnn; not te: it is too small (float32, 4 query"]),
    ],
)
def test_auto_is_for_all_attention_of_the_decoder(pattern: str, want: str, said: list[str], asked: list[Ask]):
    lines: list[str] = []
    dim = 96 if "L" in pattern else 32
    llm = LLMConfig(pattern=pattern)
    llm = llm.with_settings("".join({*"*W"} & {*pattern}), heads=4, kv_heads=2, head_dim=dim)
    llm = llm.with_settings("".join({"E"} & {*pattern}), experts=2)
    found = with_admitted(asking(attention_backend="auto", llm=llm), lines.append).compute.attention_backend
    assert found == want
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))
    if "L" in pattern:
        assert {ask.shape.kv_heads for ask in asked if ask.name == "cudnn"} == {2, 4}
        with pytest.raises(UserError, match=r"te.*too small.* of dim 96"):
            with_admitted(asking(attention_backend="te", llm=llm), lines.append)


@pytest.mark.parametrize(("platform", "want"), [("cpu", "blocks"), ("tpu", "blocks"), ("gpu", "pallas")])
def test_auto_of_the_encoder_on_each_platform(
    platform: str, want: str, asked: list[Ask], monkeypatch: pytest.MonkeyPatch
):
    """As the help of the setting says."""
    monkeypatch.setattr(choose, "this_machine", lambda: replace(GPU, platform=platform))
    monkeypatch.setitem(REFUSED, "pallas", (64,) if platform == "tpu" else ())
    encoder = replace(EncoderConfig(), dim=128, heads=2)
    config = asking(LLMConfig(pattern="-"), attention_backend="auto", encoder_attention="auto")
    config = replace(config, model=replace(config.model, encoder=encoder))
    assert with_admitted(config, [].append).compute.encoder_attention == want
    help_of_it = " ".join((ROOT / "jaxthd/config/compute.py").read_text().split())
    assert '"auto": pallas on GPUs where it is admitted, else blocks.' in help_of_it


GPU = Machine("gpu", "NVIDIA H100", 1, "9.0", "0.10.2", "0.10.2", "3.11.7", 12090, 91600, "570.1", None)
SMALL = LLMConfig(blocks={"M": Mamba2(heads=2, groups=1, head_dim=16, state=16)})


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes admission believe there is a GPU; the kernels are still interpreted."""
    monkeypatch.setattr(choose, "this_machine", lambda: GPU)


@pytest.mark.usefixtures("on_a_gpu")
def test_the_scan_kernels_are_measured_and_used(lines: list[str], tmp_path: Path):
    for asked in ("pallas", "auto"):
        config = asking(replace(SMALL, pattern="M"), attention_backend="auto", scan_backend=asked)
        assert with_admitted(config, lines.append, tmp_path).compute.scan_backend == "pallas"
    assert lines == ["scan: pallas"]
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("scan-pallas-")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_broken_scan_is_an_error_with_the_numbers(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As if no document began between chunks: refused, and skipped by auto."""
    monkeypatch.setattr(scan_pallas, "_decays", broken_decays)
    with pytest.raises(UserError) as caught:
        with_admitted(asking(scan_backend="pallas", llm=SMALL), lines.append, tmp_path)
    message = str(caught.value)
    assert 'compute.scan_backend is "pallas", but it is off from xla, by y ' in message
    assert (
        "expected a back-end that computes the scan right here: set compute.scan_backend to auto" in message
    )
    config = asking(replace(SMALL, pattern="M"), attention_backend="auto", scan_backend="auto")
    assert with_admitted(config, lines.append, tmp_path).compute.scan_backend == "xla"
    (line,) = lines
    assert line.startswith("scan: xla; not pallas: it is off from xla, by y ")


@pytest.mark.usefixtures("on_a_gpu")
def test_gpus_take_large_products_where_no_sizes_are_given(lines: list[str], tmp_path: Path):
    config = using(asking(llm=SMALL), block_sizes=None)
    sizes = replace(config.compute.blocks, **LARGE_KERNELS)
    assert with_admitted(config, lines.append, tmp_path) == using(config, block_sizes=sizes)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_scan_that_the_kernels_do_not_take_is_left_to_xla(lines: list[str], tmp_path: Path):
    config = asking(replace(SMALL, pattern="M"), attention_backend="auto", scan_backend="auto")
    config = using(config, block_sizes=BlockSizes(scan=48))
    assert with_admitted(config, lines.append, tmp_path).compute.scan_backend == "xla"
    assert lines == ["scan: xla; not pallas: chunk 48 is no power of two from 16 up"]
    with pytest.raises(UserError, match="chunk 48 is no power"):
        with_admitted(using(config, scan_backend="pallas"), lines.append, tmp_path)


def test_an_interpreted_scan_is_not_measured(lines: list[str], tmp_path: Path):
    config = asking(scan_backend="pallas")
    assert with_admitted(config, lines.append, tmp_path) == config
    assert not lines
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("on_a_gpu")
def test_no_kernels_are_used_where_the_attention_is_asked_to_be_xla_s(lines: list[str], tmp_path: Path):
    config = asking(SMALL, encoder_attention="auto", scan_backend="auto")
    found = with_admitted(config, lines.append, tmp_path).compute
    assert (found.attention_backend, found.scan_backend, found.encoder_attention) == ("xla", "xla", "blocks")
    assert not lines


def test_what_no_layer_uses_is_not_measured(lines: list[str], tmp_path: Path):
    config = asking(attention_backend="te", scan_backend="auto", llm=replace(SMALL, pattern="-"))
    assert with_admitted(config, lines.append, tmp_path).compute.attention_backend == "xla"
    assert not lines


LAYOUTS = [
    (MeshConfig(context=4, tensor=2), "buffer", (8, 2, 32, True)),
    (MeshConfig(context=2, tensor=4), "whole", (4, 1, 64, False)),
]
OTHER_LAYOUTS = [(MeshConfig(tensor=8), "buffer", (2, 1, 64, False))]


@pytest.mark.parametrize(
    ("sizes", "layout", "want"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in OTHER_LAYOUTS)],
    ids=str,
)
def test_the_scan_s_shape_is_what_a_rank_scans(
    sizes: MeshConfig, layout: Any, want: Any, monkeypatch: pytest.MonkeyPatch
):
    """The shape is what the mixer passes to the scan when a step is traced."""
    llm = replace(SMALL, pattern="M", dim=32, vocab_size=264).with_settings("M", heads=16, groups=4)
    encoder = EncoderConfig(num_mels=16, layers=1, dim=16, heads=8, ffn_dim=16, subsampling_channels=8)
    model = replace(Config().model, encoder=encoder, llm=llm)
    data = DataConfig(rows=1, capacity=256, audio_capacity=0, round_to=16, max_documents=4)
    config = Config(mesh=sizes, model=model, compute=ComputeConfig(context_layout=layout), data=data)
    scanned = set()

    def recorded(inputs: ScanInputs, segments: Any, *, chunk: int, backend: str) -> Any:
        """Keeps the shape of each call, without the dtype."""
        x, b, own = inputs.x, inputs.b, segments if segments.splits is None else segments.splits.on_rank
        size = scan_pallas.chunk_of(chunk, len(x) // own.rows // own.context_chunks)
        scanned.add((x.shape[1], b.shape[1], size, own.context > 1))
        return scan(inputs, segments, chunk=chunk, backend=backend)

    monkeypatch.setattr("jaxthd.models.blocks.mamba2.scan", recorded)
    mesh = make_mesh(sizes)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_state(Blueprint(config)),
        state_shardings(Blueprint(config), mesh),
    )
    step: Any = make_train_step(Blueprint(config), mesh)
    step.trace(state, abstract_batch(config))
    assert scanned == {want}
    heads, groups, chunk, states_enter = want
    assert scan_shapes(config) == [ScanShape("float32", heads, groups, 16, 16, chunk, states_enter)]


SHORT = EncoderConfig(num_mels=16, layers=1, dim=32, heads=2, ffn_dim=16, chunk_seconds=0.5)


@pytest.mark.usefixtures("on_a_gpu")
def test_the_encoder_s_kernels_are_measured_and_a_broken_one_is_refused(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = asking(LLMConfig(pattern="-"), attention_backend="auto", encoder_attention="auto")
    config = replace(config, model=replace(config.model, encoder=SHORT))
    assert with_admitted(config, lines.append, tmp_path).compute.encoder_attention == "pallas"
    assert lines == ["encoder attention: pallas"]
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("encoder attention-pallas-")
    file.unlink()
    right = pallas_kernels._Pairs.bias_at
    monkeypatch.setattr(pallas_kernels._Pairs, "bias_at", lambda x, seen, width: right(x, seen, width - 2))
    assert with_admitted(config, lines.append, tmp_path).compute.encoder_attention == "blocks"
    assert lines[1].startswith("encoder attention: blocks; not pallas: it is off from xla, by output ")
