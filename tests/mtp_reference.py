"""Multi-token prediction of one document, written out: every head, expert and depth by itself.

From tensors by the names that published checkpoints have (vLLM's nemotron_h_mtp.py, Megatron-LM's
multi_token_prediction.py), for patterns of * and E, with NumPy arrays or with what jax differentiates.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxthd.config import LLMConfig


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def attention(x: Any, tensors: Mapping[str, Any], llm: LLMConfig) -> Any:
    tokens, d = len(x), llm.head_dim
    q, k, v = ((x @ tensors[f"{name}_proj.weight"].T).reshape(tokens, -1, d).swapaxes(0, 1) for name in "qkv")
    causal, heads = jnp.tril(jnp.ones((tokens, tokens), bool)), []
    for head in range(llm.q_heads):
        shared = head // (llm.q_heads // llm.kv_heads)
        scores = jnp.where(causal, q[head] @ k[shared].T / d**0.5, -jnp.inf)
        heads.append(jax.nn.softmax(scores, axis=-1) @ v[shared])
    return jnp.concatenate(heads, axis=1) @ tensors["o_proj.weight"].T


def mlp(x: Any, tensors: Mapping[str, Any], name: str) -> Any:
    up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("up", "down"))
    return jnp.maximum(x @ up.T, 0) ** 2 @ down.T


def experts(x: Any, tensors: Mapping[str, Any], llm: LLMConfig) -> Any:
    scores = 1 / (1 + jnp.exp(-(x @ tensors["gate.weight"].T)))
    ranked = scores + tensors["gate.e_score_correction_bias"]
    chosen = ranked >= jnp.sort(ranked, axis=1)[:, [-llm.experts_per_token]]
    weights = jnp.where(chosen, scores, 0)
    weights = llm.router_scale * weights / weights.sum(axis=1, keepdims=True)
    y = mlp(x, tensors, "shared_experts")
    for expert in range(llm.experts):
        y = y + weights[:, [expert]] * mlp(x, tensors, f"experts.{expert}")
    return y


def mtp_logits(
    tensors: Mapping[str, Any], llm: LLMConfig, depths: int, h_TD: Any, e_TD: Any, head_VD: Any
) -> list[Any]:
    """Of each depth [T - k - 1, V]: at position t for the token t + k + 2.

    h_TD: what the decoder's final norm returns. e_TD: the tokens' embeddings. Fewer sets of weights than
    depths: one for all.
    """
    size, found, eps = len(llm.mtp_pattern), [], llm.norm_eps
    modules = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("mtp.")) // size
    for depth in range(depths):
        first = (depth if modules > 1 else 0) * size
        at = {
            f"{number}.{name.split('.', 3)[3]}": x
            for name, x in tensors.items()
            if name.startswith("mtp.")
            for number in [int(name.split(".")[2]) - first]
        }
        # Tokens that have one depth + 1 places on; the embedding comes first.
        count = len(e_TD) - depth - 1
        if count < 1:
            found.append(jnp.zeros((0, len(head_VD))))
            continue
        both = (
            rms_norm(e_TD[depth + 1 :], at["0.enorm.weight"], eps),
            rms_norm(h_TD[:count], at["0.hnorm.weight"], eps),
        )
        x = jnp.concatenate(both, axis=1) @ at["0.eh_proj.weight"].T
        for number, letter in enumerate(llm.mtp_pattern):
            mixer = {
                name.removeprefix(f"{number}.mixer."): w
                for name, w in at.items()
                if name.startswith(f"{number}.mixer.")
            }
            normed = rms_norm(x, at[f"{number}.norm.weight"], eps)
            x = x + (attention if letter == "*" else experts)(normed, mixer, llm)
        h_TD = rms_norm(x, at[f"{size - 1}.final_layernorm.weight"], eps)
        found.append(h_TD @ head_VD.T)
    return found
