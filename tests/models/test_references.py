"""Mixers and decoder equal the transformers library's NemotronH (scripts/references/nemotron_h.py)."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.models.hybrid import HybridDecoder
from jaxthd.models.mixers import MLP, Attention, Mamba2, MoE
from jaxthd.ops.cross_entropy import supervised_log_probs
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import Buffer, Init
from jaxthd.parallel.stages import KINDS
from tests.helpers import CAPACITY, assert_same, row_arrays, spans

FOLDER = Path(__file__).parents[1] / "references"
VARIANTS = ("nemotron_h", "nemotron_h_latent")
BLOCK = 16


def model_config(fields: dict[str, Any]) -> ModelConfig:
    """From NemotronHConfig's fields. The scan's chunk is another than the reference's 16, on purpose."""
    llm = LLMConfig(
        pattern=str(fields["hybrid_override_pattern"]),
        vocab_size=int(fields["vocab_size"]),
        dim=int(fields["hidden_size"]),
        q_heads=int(fields["num_attention_heads"]),
        kv_heads=int(fields["num_key_value_heads"]),
        head_dim=int(fields["head_dim"]),
        ffn_dim=int(fields["intermediate_size"]),
        mamba_heads=int(fields["mamba_num_heads"]),
        mamba_head_dim=int(fields["mamba_head_dim"]),
        mamba_state=int(fields["ssm_state_size"]),
        mamba_groups=int(fields["n_groups"]),
        mamba_conv=int(fields["conv_kernel"]),
        mamba_chunk=12,
        mamba_dt_limit=(float(fields["time_step_min"]), float("inf")),
        experts=int(fields["n_routed_experts"]),
        experts_per_token=int(fields["num_experts_per_tok"]),
        expert_dim=int(fields["moe_intermediate_size"]),
        shared_expert_dim=int(fields["moe_shared_expert_intermediate_size"]),
        latent_dim=int(fields.get("moe_latent_size", 0)),
        router_scale=float(fields["routed_scaling_factor"]),
    )
    return ModelConfig(llm=llm, attention_block=BLOCK, expert_block=4)


def group(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(f"{prefix}."): v for k, v in arrays.items() if k.startswith(f"{prefix}.")}


def mixer_params(kind: str, theirs: dict[str, np.ndarray], llm: LLMConfig) -> dict[str, Any]:
    """One layer's parameters (or their gradients) under our names, from what follows "mixer." on disk."""

    def linear(name: str) -> dict[str, np.ndarray]:
        return {"w": theirs[f"{name}.weight"].T}

    def experts(name: str) -> np.ndarray:
        return np.stack([theirs[f"experts.{e}.{name}.weight"].T for e in range(llm.experts)])

    match kind:
        case "M":
            inner, shared = llm.mamba_heads * llm.mamba_head_dim, llm.mamba_groups * llm.mamba_state
            rows = np.split(theirs["in_proj.weight"], np.cumsum([inner, inner, shared, shared]))
            taps, biases = (
                np.split(a, [inner, inner + shared], axis=-1)
                for a in (theirs["conv1d.weight"][:, 0].T, theirs["conv1d.bias"])
            )
            return {
                **{name: {"w": w.T} for name, w in zip(("z", "x", "b", "c", "dt"), rows, strict=True)},
                **{f"conv_{name}": w for name, w in zip("xbc", taps, strict=True)},
                **{f"conv_bias_{name}": b for name, b in zip("xbc", biases, strict=True)},
                "dt_bias": theirs["dt_bias"],
                "a_log": theirs["A_log"],
                "d": theirs["D"],
                "norm": {"weight": theirs["norm.weight"]},
                "out": linear("out_proj"),
            }
        case "*":
            return {name: linear(f"{name}_proj") for name in "qkv"} | {"out": linear("o_proj")}
        case "-":
            return {"up": linear("up_proj"), "down": linear("down_proj")}
        case "E":
            shared_expert = {name: linear(f"shared_experts.{name}_proj") for name in ("up", "down")}
            ours = {"router": linear("gate"), "shared": shared_expert}
            ours |= {name: experts(f"{name}_proj") for name in ("up", "down")}
            if llm.latent_dim:
                ours |= {"latent_in": linear("fc1_latent_proj"), "latent_out": linear("fc2_latent_proj")}
            return ours
    raise ValueError(kind)


def mixer_buffers(kind: str, theirs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"correction_bias": theirs["gate.e_score_correction_bias"]} if kind == "E" else {}


def decoder_state(theirs: dict[str, np.ndarray], llm: LLMConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters, buffers) of the whole HybridDecoder: layers of a kind are stacked."""
    params: dict[str, list[Any]] = {}
    buffers: dict[str, list[Any]] = {}
    for i, kind in enumerate(llm.pattern):
        layer = group(theirs, f"backbone.layers.{i}")
        mixer = mixer_params(kind, group(layer, "mixer"), llm)
        params.setdefault(KINDS[kind], []).append({"norm": {"weight": layer["norm.weight"]}, "mixer": mixer})
        if "mixer.gate.e_score_correction_bias" in layer:
            held = {"mixer": mixer_buffers(kind, group(layer, "mixer"))}
            buffers.setdefault(KINDS[kind], []).append(held)

    def stacked(layers: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: jax.tree.map(lambda *x: np.stack(x), *same) for name, same in layers.items()}

    norm = {"weight": theirs["backbone.norm_f.weight"]}
    return {"layers": stacked(params), "norm": norm}, {"layers": stacked(buffers)}


class Reference(NamedTuple):
    arrays: dict[str, np.ndarray]
    config: ModelConfig

    @property
    def lengths(self) -> list[int]:
        return [len(self.arrays[f"tokens.{c}"]) for c in range(4)]

    def model(self, prefix: str) -> dict[str, Any]:
        """The parameters ("weight") or their gradients ("grad")."""
        theirs = group(self.arrays, prefix)
        return {
            "embedding": theirs["backbone.embeddings.weight"],
            "decoder": decoder_state(theirs, self.config.llm)[0],
            "head": theirs["lm_head.weight"],
        }


@functools.cache
def reference(variant: str) -> Reference:
    arrays = dict(np.load(FOLDER / f"{variant}.npz"))
    return Reference(arrays, model_config(group(arrays, "config")))


def segments_of(lengths: list[int]) -> Any:
    ids, positions = row_arrays(lengths)
    return make_segments(jnp.asarray(ids)[None], jnp.asarray(positions)[None], block=BLOCK, axis=None)


@functools.cache
def whole_model(variant: str) -> Any:
    """Jitted: (tokens, targets, supervised, segments) -> ((loss, logits), gradients)."""
    config = reference(variant).config
    abstract = nnx.eval_shape(lambda: HybridDecoder(config, Init(jax.random.key(0))))
    graph = nnx.split(abstract, nnx.Param, Buffer)[0]
    theirs = group(reference(variant).arrays, "weight")
    state = reference(variant).model("weight"), decoder_state(theirs, config.llm)[1]
    params, buffers = jax.tree.map(jnp.asarray, state)

    def loss(params, tokens, targets, supervised, segments):
        decoder = nnx.merge(graph, params["decoder"], buffers)
        h_ND = decoder.norm(decoder(params["embedding"][tokens], segments)[0])
        logp_N = supervised_log_probs(h_ND, params["head"], targets, supervised, BLOCK, 20)
        return -logp_N.sum(), h_ND @ params["head"].T

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return functools.partial(run, params)


def run_documents(variant: str, documents: list[int]) -> tuple[float, list[np.ndarray], Any]:
    """The documents in one buffer: (loss, logits of each, gradients)."""
    arrays, lengths = reference(variant).arrays, reference(variant).lengths
    tokens, targets = np.zeros((2, CAPACITY), np.int32)
    supervised = np.zeros(CAPACITY, bool)
    where = spans([lengths[c] for c in documents])
    for c, span in zip(documents, where, strict=True):
        tokens[span] = arrays[f"tokens.{c}"]
        targets[span.start : span.stop - 1] = tokens[span][1:]
        supervised[span.start : span.stop - 1] = True
    given = (*map(jnp.asarray, (tokens, targets, supervised)), segments_of([lengths[c] for c in documents]))
    (loss, logits), gradients = whole_model(variant)(*given)
    return float(loss), [np.asarray(logits)[span] for span in where], gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixers_equal_transformers(variant):
    """Each layer's mixer on the input it has there; what lies in padding is large."""
    arrays, config = reference(variant).arrays, reference(variant).config
    makers = {
        "M": lambda init: Mamba2(config, init),
        "*": lambda init: Attention(config, init),
        "-": lambda init: MLP(config.llm.dim, config.llm.ffn_dim, config, init),
        "E": lambda init: MoE(config, init),
    }
    length = reference(variant).lengths[int(arrays["mixer.document"])]
    mixers, inputs = {}, {}
    for i, kind in enumerate(config.llm.pattern):
        theirs = group(arrays, f"weight.backbone.layers.{i}.mixer")
        abstract = nnx.eval_shape(lambda kind=kind: makers[kind](Init(jax.random.key(0))))
        graph = nnx.split(abstract, nnx.Param, Buffer)[0]
        state = mixer_params(kind, theirs, config.llm), mixer_buffers(kind, theirs)
        mixers[i] = graph, *jax.tree.map(jnp.asarray, state)
        inputs[i] = np.full((CAPACITY, config.llm.dim), 30, np.float32)
        inputs[i][:length] = arrays[f"mixer.{i}.input"]

    @jax.jit
    def run(inputs, segments):
        return {i: nnx.merge(*mixer)(inputs[i], segments) for i, mixer in mixers.items()}

    outputs = run(inputs, segments_of([length]))
    for i in mixers:
        assert_same(outputs[i][:length], arrays[f"mixer.{i}.output"], 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_loss_equal_transformers(variant):
    """Documents of 1, 5, 16 and 37 tokens, one at a time and all in one buffer."""
    arrays = reference(variant).arrays
    alone = [run_documents(variant, [c]) for c in range(4)]
    packed_loss, packed_logits, _ = run_documents(variant, [2, 0, 3, 1])
    for c, place in enumerate([1, 3, 0, 2]):
        assert_same(alone[c][1][0], arrays[f"logits.{c}"], 1e-5)
        assert_same(packed_logits[place], arrays[f"logits.{c}"], 1e-5)
    np.testing.assert_allclose(sum(loss for loss, *_ in alone), arrays["loss"], rtol=1e-6)
    np.testing.assert_allclose(packed_loss, arrays["loss"], rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_whole_model_equal_transformers(variant):
    """Of every parameter, embedding and head included, packed and summed over documents alone."""
    want = reference(variant).model("grad")
    assert_same(run_documents(variant, [2, 0, 3, 1])[2], want, 2e-5)
    alone = [run_documents(variant, [c])[2] for c in range(4)]
    assert_same(jax.tree.map(lambda *g: sum(np.asarray(x, np.float64) for x in g), *alone), want, 2e-5)
