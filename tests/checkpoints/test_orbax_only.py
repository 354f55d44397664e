"""A checkpoint for those without jaxthd: names, shapes, restoring, as docs/checkpoints.md has them."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.checksum import named_arrays
from jaxthd.config import AdaptConfig, Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.front_ends import QFormer
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state
from tests.helpers import filled_state
from tests.meshes.models import deepseek, gpt_oss, kimi_linear, qwen3, qwen3_next

ROOT = Path(__file__).parents[2]
PAGE, EXAMPLE = ROOT / "docs" / "checkpoints.md", ROOT / "docs" / "examples" / "orbax_only.py"
# No two sizes are the same.
ENCODER = EncoderConfig(num_mels=24, layers=2, dim=20, heads=5, ffn_dim=28, subsampling_channels=6)
LLM = LLMConfig(
    pattern="MEM*-*",
    vocab_size=97,
    dim=16,
    blocks={
        "*": Attention(heads=6, kv_heads=3, head_dim=10),
        "-": MLP(inner=36),
        "M": Mamba2(heads=4, head_dim=11, state=13, conv=3),
        "E": MoE(experts=7, inner=9, shared_inner=15),
    },
)
FUTURE = replace(LLM.with_settings("E", latent=12), mtp_pattern="*E", mtp_depths=3, mtp_shared=False)
QFORMER = QFormer(
    **vars(replace(ENCODER, output_layers=(0, 1))) | {"kind": "fastconformer_qformer"},
    queries=3,
    query_layers=4,
    query_heads=2,
    query_ffn_dim=17,
)
CONFIGS = {
    "plain": Config(model=ModelConfig(encoder=ENCODER, llm=LLM, adapter_dim=14, adapter_bias=True)),
    "GELU": Config(
        model=ModelConfig(encoder=ENCODER, llm=LLM, adapter_dim=14, adapter_bias=True, adapter_form="gelu")
    ),
    "latent experts, future tokens": Config(model=ModelConfig(encoder=ENCODER, llm=FUTURE)),
    "Qwen3": Config(
        model=ModelConfig(
            encoder=None,
            llm=qwen3(LLM, "*-*E").with_settings("E", shared_inner=22).with_settings("*", bias=True),
        )
    ),
    "GPT-OSS": Config(
        model=ModelConfig(
            encoder=None,
            llm=gpt_oss(LLM, "W-*E").with_settings("E", shared_inner=22).with_settings("*W", qk_norm=True),
        )
    ),
    "DeepSeek-V3": Config(model=ModelConfig(encoder=None, llm=deepseek(LLM))),
    "Kimi-Linear": Config(model=ModelConfig(encoder=None, llm=kimi_linear(LLM))),
    "OLMo Hybrid": Config(
        model=ModelConfig(
            encoder=None,
            llm=qwen3(LLM, "*-").with_settings("*-", norm_after=True).with_settings("*", joint_norm=True),
        )
    ),
    "Qwen3-Next": Config(
        model=ModelConfig(encoder=None, llm=qwen3_next(LLM, "D-*E")),
    ),
    "outputs of several blocks": Config(
        model=ModelConfig(encoder=replace(ENCODER, output_layers=(0, 1)), llm=LLM, adapter_dim=14)
    ),
    "Q-Former": Config(model=ModelConfig(encoder=QFORMER, llm=LLM, adapter_dim=14)),
    "LoRA": Config(
        model=ModelConfig(encoder=ENCODER, llm=LLM), adapt=AdaptConfig(lora_rank=5, lora_targets=("*",))
    ),
}
LETTERS = {
    "attention": "*",
    "window_attention": "W",
    "latent_attention": "L",
    "mamba": "M",
    "delta": "D",
    "kimi_delta": "K",
    "mlp": "-",
    "moe": "E",
}
SEEN: Counter[str] = Counter()
PLACES = (
    "params/encoder",
    "buffers/encoder",
    "params/encoder/qformer",
    "params",
    "params/decoder/layers",
    "buffers/decoder/layers",
    "params/mtp/depths",
)
"""Where the names of each table of the page begin, in the order of the tables."""


def documented() -> dict[str, str]:
    """Every name that the page's tables of shapes give, with its shape as the page writes it."""
    _, *tables = PAGE.read_text().split("| name | shape | |\n")
    assert len(tables) == len(PLACES)
    found = {}
    for place, table in zip(PLACES, tables, strict=True):
        rows = table.partition("\n\n")[0]
        for name, shape in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", rows, re.M):
            parts = [part.split(",") for part in re.split(r"[{}]", name)]
            found |= {f"{place}/{''.join(chosen)}": shape for chosen in product(*parts)}
    return found


def expected_shape(name: str, shape: str, config: Config) -> list[int]:
    model = config.model
    encoder = model.audio_encoder if model.encoder else None
    n, block = ENCODER.layers, None
    if "/qformer/" in name:
        n = QFORMER.query_layers
    elif "/layers/" in name:
        letter = LETTERS[name.split("/layers/")[1].split("/")[0]]
        is_future = "/mtp/" in name
        block = model.llm.blocks[letter]
        n = (model.llm.mtp_pattern if is_future else model.llm.pattern).count(letter)
        n *= model.llm.mtp_modules if is_future else 1
    elif "/mtp/" in name:
        n = model.llm.mtp_modules
    names = {"n": n, "encoder": encoder, "llm": model.llm, "block": block, "adapter_dim": model.adapter_dim}
    return eval(shape, {"len": len}, names)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_array_has_the_name_and_the_shape_that_the_page_gives(config: Config) -> None:
    state, table = abstract_state(Blueprint(config)), documented()
    arrays = named_arrays({"params": state.params, "buffers": state.buffers})
    seen: Counter[str] = Counter()
    for dotted, array in arrays.items():
        name = dotted.replace(".", "/")
        own = re.sub(r"^(params|buffers)/mtp/layers/", r"\1/decoder/layers/", name)
        base, lora, letter = own.partition("/lora/")
        base += "/w" * bool(lora)
        assert base in table, f"{name} {array.shape} is not on the page"
        shape = expected_shape(name, table[base], config)
        if lora:
            shape[-1 if letter == "a" else -2] = config.adapt.lora_rank
        assert list(array.shape) == shape, name
        seen[base] += 1
    SEEN.update(seen)


def test_every_name_of_the_page_is_an_array_of_some_model() -> None:
    """The models above have all options between them."""
    if SEEN:  # by this process
        assert documented().keys() == SEEN.keys()


def test_the_page_names_the_top_of_the_tree() -> None:
    table = PAGE.read_text().partition("## The top of the tree")[2].partition("##")[0]
    named = {name for row in re.findall(r"^\|([^|]+)\|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(abstract_state(Blueprint(CONFIGS["plain"]))._fields)


STRANGER = """
import runpy, sys
from pathlib import Path
import jax, numpy as np
assert jax.device_count() == 3
restore = runpy.run_path(sys.argv[1])["restore"]
folder, out = Path(sys.argv[2]), Path(sys.argv[3])
whole, encoder = restore(folder), restore(folder, "params/encoder", "buffers/encoder", "step")
assert "jaxthd" not in sys.modules
assert all(len(x.sharding.device_set) == 3 for x in whole.values())
some = whole["params/decoder/layers/mlp/mixer/up/w"]
assert {shard.data.shape for shard in some.addressable_shards} == {(1, 16, 12)}
np.savez(out / "whole.npz", **whole)
np.savez(out / "encoder.npz", **encoder)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """(a run's checkpoints, its state by name). Two checkpoints, saved from four devices."""
    config = Config(
        mesh=MeshConfig(data=2, context=2), model=CONFIGS["plain"].model, data=DataConfig(capacity=64)
    )
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    state, folder = filled_state(blueprint, mesh), tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder, 2) as checkpoints:
        checkpoints.save(
            9, state._replace(step=state.step + 9, params=jax.tree.map(jnp.zeros_like, state.params)), {}, {}
        )
        checkpoints.save(10, state._replace(step=state.step + 10), {"rows": 3}, {})
    arrays = {name.replace(".", "/"): np.asarray(x) for name, x in named_arrays(state).items()}
    return folder, arrays | {"step": np.int32(10)}


def test_a_stranger_restores_all_or_the_encoder_on_other_devices(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    folder, arrays = saved
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    command = [sys.executable, "-W", "error", "-c", STRANGER, EXAMPLE, folder, tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    whole, encoder = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("whole", "encoder"))
    assert whole.keys() == arrays.keys()
    assert encoder.keys() == {
        name for name in arrays if name == "step" or name.startswith(("params/encoder/", "buffers/encoder/"))
    }
    for found in (whole, encoder):
        for name, array in found.items():
            assert array.dtype == arrays[name].dtype, name
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)
