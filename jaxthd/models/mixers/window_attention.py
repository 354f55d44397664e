"""Grouped-query attention in a sliding window of llm.window tokens (GPT-OSS, 2025).

Its keys are no runs of whole documents. So it is computed blockwise if compute.attention_backend is one of
the fused libraries. Blocks of keys outside all windows of a block of queries are skipped, and so are whole
context ranks.
"""

from jaxthd.config import LLMConfig
from jaxthd.models.mixers.attention import COST_KEYS, Attention
from jaxthd.models.mixers.attention import cost as cost_of_all
from jaxthd.models.mixers.contract import LayerKind


class WindowAttention(Attention):
    """Attention in which a token sees llm.window tokens of its document: itself and those before it."""

    in_window = True


def cost(llm: LLMConfig) -> float:
    return cost_of_all(llm, min(COST_KEYS, llm.window))


KIND = LayerKind("W", "window_attention", "attention in a window", WindowAttention, cost)
