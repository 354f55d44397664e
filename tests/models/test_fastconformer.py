"""FastConformer: packed equals each clip alone, on one device and on several, and equals ParakeetEncoder."""

import functools
import json
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxthd.config import Config, EncoderConfig, ModelConfig
from jaxthd.hf.parakeet import encoder_config, encoder_tensors
from jaxthd.models.front_ends.fastconformer import attention as encoder_attention
from jaxthd.models.front_ends.fastconformer.module import FastConformerEncoder
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import Buffer, Init
from tests.helpers import assert_same
from tests.hf.published import BASE, arranged, group, load_reference, nested, shapes_of

CONFIG = EncoderConfig(num_mels=16, layers=2, dim=32, heads=4, ffn_dim=64, subsampling_channels=16)
LENGTHS = (8, 16, 17, 9, 100, 203)
BLOCK = 16
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options with which gradient programs compile in 3 s instead of 9; their sizes are tiny."""
FRAMES, LARGE = 64, 180
"""Encoder frames of the buffers: LENGTHS need 47; with a clip of 1003 mel frames more they need 173."""
assert LARGE <= encoder_attention.DENSE_FRAMES


@pytest.fixture(scope="module", autouse=True)
def both_forms_of_attention():
    """Buffers of LARGE frames are computed blockwise, smaller ones densely: each form checks the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_attention, "DENSE_FRAMES", LARGE - 1)
        yield


class Packed(NamedTuple):
    """A buffer, and the encoder frames of each clip in it."""

    mels: np.ndarray
    mask: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    cotangent: np.ndarray
    spans: dict[int, slice]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self[:-1]


def pack(clips: dict[int, tuple[np.ndarray, np.ndarray]], frames: int, *, gap: int = 0) -> Packed:
    """Clips (mels, cotangent of their encoder frames) in the dict's order, each after `gap` padding frames.

    Padding holds 1000, so that a leak shows.
    """
    mels = np.full((frames * SUBSAMPLING, CONFIG.num_mels), 1000.0)
    mask = np.zeros(len(mels), bool)
    ids, positions = np.zeros(frames, np.int32), np.zeros(frames, np.int32)
    cotangent = np.full((frames, CONFIG.dim), 1000.0)
    spans, at = {}, 0
    for number, (key, (clip, clip_cotangent)) in enumerate(clips.items(), 1):
        at += gap
        n = -(-(len(clip)) // 8)
        mels[at * SUBSAMPLING :][: len(clip)] = clip
        mask[at * SUBSAMPLING :][: len(clip)] = True
        ids[at : at + n], positions[at : at + n] = number, np.arange(n)
        cotangent[at : at + n] = clip_cotangent
        spans[key], at = slice(at, at + n), at + n
    return Packed(mels, mask, ids, positions, cotangent, spans)


def random_clips(lengths: tuple[int, ...], seed: int = 0) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        c: (rng.normal(size=(n, CONFIG.num_mels)), rng.normal(size=(-(-(n) // 8), CONFIG.dim)))
        for c, n in enumerate(lengths)
    }


def shuffled(clips: dict, seed: int = 0) -> dict:
    keys = list(clips)
    return {keys[i]: clips[keys[i]] for i in np.random.default_rng(seed).permutation(len(keys))}


@functools.cache
def encoder64() -> tuple[Any, Any, Any]:
    """(graphdef, parameters, buffers) in float64; no value would hide an error."""
    with jax.enable_x64(True):
        encoder = FastConformerEncoder(CONFIG, Init(jax.random.key(0), jnp.float64))
        graphdef, params, buffers = nnx.split(encoder, nnx.Param, Buffer)
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), params)
        buffers = jax.tree.map(lambda x: x + rng.uniform(-0.5, 1.0, size=x.shape), buffers)
    return graphdef, params, buffers


@functools.cache
def parakeet() -> dict[str, np.ndarray]:
    arrays = load_reference("fastconformer")
    assert encoder_config(json.loads(str(arrays["config"])), ModelConfig(encoder=CONFIG)) == CONFIG
    return arrays


def from_parakeet(named: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """(parameters, buffers) from arrays by the library's names; also for gradients or statistics alone."""
    shapes = shapes_of(Config(model=replace(BASE, encoder=CONFIG)))
    tensors = encoder_tensors(ModelConfig(encoder=CONFIG), shapes)
    found = arranged([t for t in tensors if t.slices and t.name in named], named, shapes)
    trees: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, x in found.items():
        is_buffer = name.endswith((".mean", ".variance"))
        trees[is_buffer][name.removeprefix("encoder.")] = x
    params, buffers = map(nested, trees)
    return params, buffers


def parakeet_encoder(dtype: Any) -> tuple[Any, Any, Any]:
    """(graphdef, parameters, buffers) with the reference's weights."""
    states = jax.tree.map(jnp.zeros_like, encoder64()[1:])
    for state, values in zip(states, from_parakeet(group(parakeet(), "weight")), strict=True):
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jnp.asarray(x, dtype), values))
    return encoder64()[0], *states


def parakeet_clips() -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {c: (parakeet()[f"mels.{c}"], parakeet()[f"cotangent.{c}"]) for c in range(5)}


def forward(
    graphdef,
    params,
    buffers,
    mels,
    mask,
    ids,
    positions,
    *,
    train,
    axes=(),
    row_axes=(),
    rows=1,
    remat="full",
    attention="blocks",
):
    segments = make_segments(ids.reshape(rows, -1), positions.reshape(rows, -1), block=BLOCK, axis=None)
    encoder = nnx.merge(graphdef, params, buffers)
    encoder.remat, encoder.attention = remat, attention
    return encoder(mels, mask, segments, train=train, axes=axes, row_axes=row_axes)


def local_gradients(
    graphdef,
    params,
    buffers,
    mels,
    mask,
    ids,
    positions,
    cotangent,
    *,
    train,
    **settings,
):
    """(y, new buffers, this rank's gradient of its share of sum(y * cotangent), gradient of mels)."""

    def share(params, mels):
        args = (graphdef, params, buffers, mels, mask, ids, positions)
        y, new = forward(*args, train=train, **settings)
        return (y * cotangent).sum(), (y, new)

    (_, (y, new)), (dparams, dmels) = jax.value_and_grad(share, (0, 1), has_aux=True)(params, mels)
    return y, new, dparams, dmels


@functools.cache
def one_device(train: bool, remat: str = "full", attention: str = "blocks"):
    run = functools.partial(local_gradients, train=train, remat=remat, attention=attention)
    return jax.jit(run, static_argnums=0, compiler_options=QUICK)


def split_clips(packed: Packed, y: Any, dmels: Any) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Every clip's output and gradient of mels; checks that padding's are 0."""
    y, dmels = np.asarray(y), np.asarray(dmels)
    assert not y[packed.ids == 0].any()
    assert not dmels[~packed.mask].any()
    mel_spans = {c: slice(s.start * SUBSAMPLING, s.stop * SUBSAMPLING) for c, s in packed.spans.items()}
    return {c: (y[s], dmels[mel_spans[c]][packed.mask[mel_spans[c]]]) for c, s in packed.spans.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.1)])
def test_outputs_equal_parakeet(dtype, tolerance):
    """Clips of 8, 16, 17, 100 and 203 mel frames, tight and out of order, against each alone and unpadded.

    Outputs are of size 1; bfloat16 rounds by 2^-8 and passes through 12 residual steps.
    """
    packed = pack(shuffled(parakeet_clips(), seed=1), frames=FRAMES)
    run = jax.jit(functools.partial(forward, train=False), static_argnums=0)
    y, _ = run(*parakeet_encoder(jnp.float32), jnp.asarray(packed.mels, dtype), *packed.arrays[1:4])
    assert y.dtype == dtype
    for c, span in packed.spans.items():
        np.testing.assert_allclose(np.asarray(y[span], np.float32), parakeet()[f"output.{c}"], atol=tolerance)


def test_gradients_equal_parakeet():
    """Every parameter's. The key biases' are 0 in truth, where the reference's float32 rounding shows."""
    packed = pack(shuffled(parakeet_clips(), seed=1), frames=LARGE)
    with jax.enable_x64(True):
        _, _, dparams, _ = one_device(False)(*parakeet_encoder(jnp.float64), *packed.arrays)
    assert_same(nnx.to_pure_dict(dparams), from_parakeet(group(parakeet(), "grad"))[0], 1e-4)


def test_training_mode_equals_parakeet():
    """One clip with batch statistics; also compares the running statistics after it."""
    clip = int(parakeet()["train.clip"])
    packed = pack({clip: parakeet_clips()[clip]}, frames=FRAMES, gap=3)
    with jax.enable_x64(True):
        y, new, _, _ = one_device(True)(*parakeet_encoder(jnp.float64), *packed.arrays)
    np.testing.assert_allclose(y[packed.spans[clip]], parakeet()["train.output"], atol=1e-5)
    assert_same(new, from_parakeet(group(parakeet(), "train"))[1], 1e-5)


def test_packed_equals_each_clip_alone():
    """Float64, eval mode: outputs, gradients of parameters and mels; 1003 mel frames cross two chunks."""
    clips = random_clips((1003, *LENGTHS))
    packed = pack(shuffled(clips), frames=LARGE)
    with jax.enable_x64(True):
        y, new, dparams, dmels = one_device(False)(*encoder64(), *packed.arrays)
        together = split_clips(packed, y, dmels)
        assert_same(new, nnx.to_pure_dict(encoder64()[2]), 0)
        total = jax.tree.map(np.zeros_like, dparams)
        for c, clip in clips.items():
            # The clip is alone, at the start. Remat is off too, so that the programs share less code.
            alone = pack({c: clip}, frames=126)
            y, _, dparams_alone, dmels = one_device(False, remat="none")(*encoder64(), *alone.arrays)
            assert_same(together[c], split_clips(alone, y, dmels)[c], 1e-10)
            total = jax.tree.map(np.add, total, dparams_alone)
    assert_same(dparams, total, 1e-10)


def test_kernels_equal_blocks():
    """Float64, eval mode, with padding: outputs, gradients of parameters and mels."""
    clips = random_clips((1003, *LENGTHS))
    packed = pack(shuffled(clips), frames=LARGE)
    with jax.enable_x64(True):
        ways = "blocks", "pallas"
        found = [one_device(False, attention=way)(*encoder64(), *packed.arrays) for way in ways]
        for (y, _, dparams, dmels), name in zip(found, ways, strict=True):
            assert np.isfinite(y).all(), name
            split_clips(packed, y, dmels)
            assert_same((y, dparams, dmels), (found[0][0], *found[0][2:]), 1e-10)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, Any]:
    """Training mode in float64: every clip's (output, gradient of mels), the new buffers, gradients."""
    packed = pack(random_clips(LENGTHS), frames=FRAMES)
    with jax.enable_x64(True):
        y, new, dparams, dmels = one_device(True)(*encoder64(), *packed.arrays)
    return split_clips(packed, y, dmels), new, dparams


def test_padding_and_order_do_not_move_batch_statistics(trained):
    packed = pack(shuffled(random_clips(LENGTHS)), frames=FRAMES, gap=2)
    with jax.enable_x64(True):
        y, new, dparams, dmels = one_device(True)(*encoder64(), *packed.arrays)
    clips = split_clips(packed, y, dmels)
    assert_same((clips, new, dparams), trained, 1e-10)
    assert jax.tree.structure(new) == jax.tree.structure(nnx.to_pure_dict(encoder64()[2]))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).min(), new, nnx.to_pure_dict(encoder64()[2]))
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.parametrize("ranks", [{"data": 2, "context": 2}], ids=["2x2"])
def test_sharded_clips_equal_one_device(ranks, trained):
    """Each rank has its own clips, one of four has none: statistics, outputs and gradients are the same."""
    axes, count = tuple(ranks), int(np.prod(list(ranks.values())))
    clips = random_clips(LENGTHS)
    shares = {2: [(5, 0), (3, 1, 4, 2)], 4: [(1, 0), (), (5,), (2, 4, 3)]}[count]
    buffers = [pack({c: clips[c] for c in share}, frames=32) for share in shares]
    spec, whole = PartitionSpec(axes), PartitionSpec()

    def rank(params, stored, *arrays):
        y, new, dparams, dmels = local_gradients(
            encoder64()[0], params, stored, *arrays, train=True, axes=axes
        )
        return y, new, jax.lax.psum(dparams, axes), dmels

    mesh = jax.make_mesh(
        tuple(ranks.values()), axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:count]
    )
    mapped = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(whole, whole, *[spec] * 5),
        out_specs=(spec, whole, whole, spec),
        check_vma=False,
    )
    with jax.enable_x64(True):
        arrays = map(np.concatenate, zip(*(b.arrays for b in buffers), strict=True))
        y, new, dparams, dmels = jax.jit(mapped, compiler_options=QUICK)(*encoder64()[1:], *arrays)
    got: dict = {}
    for r, packed in enumerate(buffers):
        mine = slice(r * 32, (r + 1) * 32)
        got |= split_clips(packed, y[mine], dmels[mine.start * SUBSAMPLING : mine.stop * SUBSAMPLING])
    assert_same((got, new, dparams), trained, 1e-10)


CUT = [
    ({"context": 2}, 1, "dense", False),
    ({"data": 2, "context": 4}, 2, "blocks", True),
    ({"context": 4, "tensor": 2}, 1, "blocks", True),
    ({"context": 2, "pipeline": 2, "tensor": 2}, 1, "dense", True),
    ({"data": 2, "context": 2}, 2, "blocks", True),
    ({"context": 2}, 1, "kernels", False),
    ({"data": 2, "context": 2}, 2, "kernels", True),
]
"""(ranks, rows of a data rank, form of attention, whether it is exhaustive)."""


@pytest.mark.parametrize(
    ("ranks", "rows", "form", "is_exhaustive"),
    [pytest.param(*x, marks=[pytest.mark.exhaustive] * x[-1], id=f"{x[0]}-{x[2]}") for x in CUT],
)
def test_clips_cut_over_ranks_equal_one_device(ranks, rows, form, is_exhaustive, trained, monkeypatch):
    """Clips of a row lie over its ranks one after the other: one spans up to five ranks, some have none."""
    monkeypatch.setattr(encoder_attention, "DENSE_FRAMES", LARGE - 1 if form == "dense" else 2)
    axes, data = tuple(ranks), ranks.get("data", 1)
    row_axes = tuple(axis for axis in axes if axis != "data")
    count, sharing = int(np.prod(list(ranks.values()))), int(np.prod([ranks[axis] for axis in row_axes]))
    clips = random_clips(LENGTHS)
    shares = {1: [range(6)], 2: [(3, 5), (0, 1, 4, 2)], 4: [(5,), (4, 0), (1, 2), (3,)]}[data * rows]
    buffers = [pack({c: clips[c] for c in share}, frames=64 if data * rows == 1 else 32) for share in shares]

    def rank(params, stored, *arrays):
        flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        y, new, dparams, dmels = local_gradients(
            encoder64()[0],
            params,
            stored,
            *flat,
            train=True,
            axes=axes,
            row_axes=row_axes,
            rows=rows,
            attention={"kernels": "pallas"}.get(form, "blocks"),
        )
        y, dmels = (x.reshape(rows, -1, *x.shape[1:]) for x in (y, dmels))
        return y, new, jax.lax.psum(dparams, axes), dmels

    mesh = jax.make_mesh(
        tuple(ranks.values()), axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:count]
    )
    spec, whole = PartitionSpec("data" if data > 1 else None, row_axes), PartitionSpec()
    mapped = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(whole, whole, *[spec] * 5),
        out_specs=(spec, whole, whole, spec),
        check_vma=False,
    )
    with jax.enable_x64(True):
        arrays = map(np.stack, zip(*(b.arrays for b in buffers), strict=True))
        y, new, dparams, dmels = jax.jit(mapped, compiler_options=QUICK)(*encoder64()[1:], *arrays)
    assert sharing > 1
    got: dict = {}
    for r, packed in enumerate(buffers):
        got |= split_clips(packed, y[r], dmels[r])
    assert_same((got, new, dparams), trained, 1e-10)


def test_attention_that_nothing_has_decided_on_is_the_same_over_ranks_and_on_one():
    """Over ranks it was the form for GPUs, which takes more memory: estimates were too high there."""
    assert FastConformerEncoder(CONFIG, nnx.Rngs(0)).attention == "blocks"


def test_a_batch_without_audio_is_finite_and_leaves_the_statistics():
    packed = pack({}, frames=FRAMES)
    with jax.enable_x64(True):
        y, new, dparams, dmels = one_device(True)(*encoder64(), *packed.arrays)
    split_clips(packed, y, dmels)
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(dparams))
    assert_same(new, nnx.to_pure_dict(encoder64()[2]), 0)


@pytest.mark.exhaustive
def test_memory_grows_linearly():
    """At twice the mel frames the compiled gradient takes at most 2.2 times as much temporary memory."""
    graphdef, *state = encoder64()
    state = jax.tree.map(lambda x: np.asarray(x, np.float32), state)

    def temporary(frames: int) -> int:
        arrays = [
            x.astype(np.float32) if x.dtype == np.float64 else x for x in pack({}, frames=frames).arrays
        ]
        return (
            one_device(True).lower(graphdef, *state, *arrays).compile().memory_analysis().temp_size_in_bytes
        )

    assert temporary(2048) <= 2.2 * temporary(1024)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match=r"num_mels is 20; it must be a multiple of 8"):
        FastConformerEncoder(EncoderConfig(num_mels=20), Init(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"dim 130 is not a multiple of encoder\.heads 4"):
        FastConformerEncoder(EncoderConfig(dim=130), Init(jax.random.key(0)))
    mels, mask, ids, positions, _ = map(jnp.asarray, pack({}, frames=8).arrays)
    with pytest.raises(ValueError, match="56 mel frames for 8 encoder frames"):
        forward(*encoder64(), mels[:56], mask[:56], ids, positions, train=False)
