"""Multi-token prediction of one document, written out: each head, expert and depth is computed separately.

Works on tensors by the names of published checkpoints (vLLM's nemotron_h_mtp.py, Megatron-LM's
multi_token_prediction.py), for patterns of * and E. xp: numpy, or jax.numpy to differentiate it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxthd.config import LLMConfig
from jaxthd.models.blocks import Attention, MoE


def rms_norm(x: Any, weight: Any, eps: float, xp: Any) -> Any:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softmax(x: Any, xp: Any) -> Any:
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(x: Any, tensors: Mapping[str, Any], block: Attention, xp: Any) -> Any:
    tokens, d = len(x), block.head_dim
    q, k, v = ((x @ tensors[f"{name}_proj.weight"].T).reshape(tokens, -1, d).swapaxes(0, 1) for name in "qkv")
    causal, heads = xp.tril(xp.ones((tokens, tokens), bool)), []
    for head in range(block.heads):
        shared = head // (block.heads // block.kv_heads)
        scores = xp.where(causal, q[head] @ k[shared].T / d**0.5, -xp.inf)
        heads.append(softmax(scores, xp) @ v[shared])
    return xp.concatenate(heads, axis=1) @ tensors["o_proj.weight"].T


def mlp(x: Any, tensors: Mapping[str, Any], name: str, xp: Any) -> Any:
    up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("up", "down"))
    return xp.maximum(x @ up.T, 0) ** 2 @ down.T


def experts(x: Any, tensors: Mapping[str, Any], block: MoE, xp: Any) -> Any:
    scores = 1 / (1 + xp.exp(-(x @ tensors["gate.weight"].T)))
    ranked = scores + tensors["gate.e_score_correction_bias"]
    chosen = ranked >= xp.sort(ranked, axis=1)[:, [-block.experts_per_token]]
    weights = xp.where(chosen, scores, 0)
    weights = block.router.scale * weights / weights.sum(axis=1, keepdims=True)
    y = mlp(x, tensors, "shared_experts", xp)
    for expert in range(block.experts):
        y = y + weights[:, [expert]] * mlp(x, tensors, f"experts.{expert}", xp)
    return y


def mtp_logits(
    tensors: Mapping[str, Any], llm: LLMConfig, depths: int, h_TD: Any, e_TD: Any, head_VD: Any, xp: Any = np
) -> list[Any]:
    """Logits of each depth k, [T - k - 1, V]: position t predicts token t + k + 2.

    h_TD: output of the decoder's final norm. e_TD: the tokens' embeddings. If there are fewer sets of weights
    than depths, all depths share one.
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
        # Only tokens with another token depth + 1 positions later; the embedding comes first.
        count = len(e_TD) - depth - 1
        if count < 1:
            found.append(xp.zeros((0, len(head_VD))))
            continue
        both = (
            rms_norm(e_TD[depth + 1 :], at["0.enorm.weight"], eps, xp),
            rms_norm(h_TD[:count], at["0.hnorm.weight"], eps, xp),
        )
        x = xp.concatenate(both, axis=1) @ at["0.eh_proj.weight"].T
        for number, letter in enumerate(llm.mtp_pattern):
            mixer = {
                name.removeprefix(f"{number}.mixer."): w
                for name, w in at.items()
                if name.startswith(f"{number}.mixer.")
            }
            normed = rms_norm(x, at[f"{number}.norm.weight"], eps, xp)
            block: Any = llm.blocks[letter]
            x = x + (attention if letter == "*" else experts)(normed, mixer, block, xp)
        h_TD = rms_norm(x, at[f"{size - 1}.final_layernorm.weight"], eps, xp)
        found.append(h_TD @ head_VD.T)
    return found
