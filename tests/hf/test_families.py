"""Imported checkpoints compute what the transformers library and NeMo do: logits, loss, every gradient."""

from math import inf

import numpy as np
import pytest

from jaxthd.config import EncoderConfig, LLMConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.parakeet import encoder_config
from jaxthd.hf.registry import export_families
from jaxthd.models.blocks import Attention, Mamba2, MoE
from tests.helpers import assert_same
from tests.hf.published import DEEPSEEK, HYBRIDS, LLMS, QWEN, SALM, Published, published


@pytest.fixture(
    scope="module",
    params=[
        "nemotron_omni",
        *SALM,
        *QWEN,
        "qwen2",
        "granite",
        DEEPSEEK[0],
        "gpt_oss",
        *HYBRIDS[:2],
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (*LLMS, "llama", "mistral", *DEEPSEEK[1:], *HYBRIDS[2:])
        ),
    ],
)
def family(request, tmp_path_factory) -> Published:
    return published(request.param, tmp_path_factory.mktemp("published") / request.param)


def test_logits_and_gradients_equal_transformers(family):
    """Ragged documents, each alone and all in one buffer; of every tensor that the checkpoint holds."""
    numbers = family.numbers
    alone = [family.run([n]) for n in numbers]
    order = [*numbers[1:], 0]
    packed_loss, packed_logits, packed_gradients = family.run(order)
    for place, n in enumerate(order):
        want = family.arrays[f"logits.{n}"]
        assert_same(alone[n][1][0], want, 1e-5)
        assert_same(packed_logits[place], want, 1e-5)
    np.testing.assert_allclose(sum(loss for loss, *_ in alone), family.arrays["loss"], rtol=1e-6)
    np.testing.assert_allclose(packed_loss, family.arrays["loss"], rtol=1e-6)

    want = family.gradients()
    summed = {name: sum(g[name].astype(np.float64) for *_, g in alone) for name in want}
    assert_same({name: packed_gradients[name] for name in want}, want, 1e-4)
    assert_same(summed, want, 1e-4)


def test_settings_that_are_the_librarys_defaults_may_be_absent():
    """As older versions write config.json; and under their older names."""
    fields = {"hybrid_override_pattern": "M*E", "attention_head_dim": 64, "mamba_n_groups": 4}
    llm = NEMOTRON_H.read(fields, LLMConfig())
    assert (llm.pattern, llm.dim, llm.vocab_size) == ("M*E", 4096, 131072)
    attention, mamba, moe = (llm.blocks[letter] for letter in "*ME")
    assert isinstance(attention, Attention)
    assert isinstance(mamba, Mamba2)
    assert isinstance(moe, MoE)
    assert (attention.head_dim, mamba.groups, mamba.dt_limit) == (64, 4, (0.0, inf))
    assert (moe.experts, moe.experts_per_token, moe.latent) == (8, 2, 0)
    encoder = encoder_config({"num_mel_bins": 128}, ModelConfig(encoder=EncoderConfig()))
    assert (encoder.layers, encoder.dim, encoder.num_mels, encoder.linear_bias) == (24, 1024, 128, True)
    with pytest.raises(UserError, match="no 'layer_types'"):
        NEMOTRON_H.read({}, LLMConfig())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({"pattern": f"M*{letter}-"}, f"with {letter}; expected") for letter in "DWL"),
        ({"pattern": "M*", "mtp_pattern": "WE"}, "mtp_pattern is 'WE', with W"),
    ],
)
def test_blocks_that_no_format_holds_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        export_families(ModelConfig(encoder=None, llm=LLMConfig(**settings)))
