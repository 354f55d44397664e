"""Operations that a step's documents ask for, against sizes of weights by hand."""

from dataclasses import replace

import pytest

from jaxthd.config import AdaptConfig, Config, EncoderConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.kernels.machine import peak_flops
from jaxthd.models.blocks import MLP, Attention, MoE
from jaxthd.models.front_ends.whisper.settings import Whisper
from jaxthd.planning.model_flops import model_flops
from jaxthd.planning.parameters import parameter_groups
from jaxthd.planning.search import flops_per_slot

DIM, FFN, VOCABULARY = 32, 96, 264
LLM = LLMConfig(
    pattern="-*-",
    dim=DIM,
    blocks={"-": MLP(inner=FFN), "*": Attention(heads=4, kv_heads=2, head_dim=8)},
    vocab_size=VOCABULARY,
)
CONFIG = Config(model=ModelConfig(encoder=None, llm=LLM))
FFN_BLOCK, ATTENTION, HEAD = 2 * DIM * FFN, DIM * 8 * (4 + 2 + 2 + 4), DIM * VOCABULARY
"""Weights of a block, by hand."""


def report(tokens: int, supervised: int, audio_seconds: float = 0.0) -> BatchReport:
    return BatchReport((RowReport(0, 1, tokens, supervised, tokens + 50, audio_seconds, 1.0, 1),), (("a",),))


def test_a_decoder_costs_six_operations_a_weight_and_token_and_the_head_only_at_targets():
    norms = 4 * DIM
    token, target = 2 * FFN_BLOCK + ATTENTION + norms, HEAD
    assert model_flops(CONFIG)(report(100, 30)) == 6 * (100 * token + 30 * target)


def test_a_tied_embedding_is_the_head_at_targets_and_a_gate_one_matrix_more():
    tied = replace(LLM.with_settings("-", form="swiglu"), tied_embedding=True)
    found = model_flops(replace(CONFIG, model=ModelConfig(encoder=None, llm=tied)))(report(100, 30))
    token = 3 * FFN_BLOCK + ATTENTION + 4 * DIM  # two MLPs, each with half an MLP more
    assert found == 6 * (100 * token + 30 * HEAD)


def test_weights_that_are_frozen_have_no_gradient_of_their_own():
    lora = replace(CONFIG, adapt=AdaptConfig(freeze=("*", "!head.*", "!decoder.norm.*")))
    whole, own = model_flops(CONFIG)(report(100, 0)), model_flops(lora)(report(100, 0))
    assert own == pytest.approx(whole * 4 / 6, rel=0.02)


def test_experts_count_as_often_as_a_token_is_routed():
    moe = replace(LLM, pattern="E", blocks={"E": MoE(experts=8, experts_per_token=2, inner=48)})
    more = moe.with_settings("E", experts_per_token=4)
    found = [model_flops(replace(CONFIG, model=ModelConfig(encoder=None, llm=x))) for x in (moe, more)]
    fewer, twice = (count(report(1, 0)) for count in found)
    assert twice - fewer == 6 * 2 * (2 * DIM * 48)


def test_encoder_and_adapter_count_a_frame_of_80_ms_and_frozen_before_all_only_forward():
    encoder = EncoderConfig(layers=1, dim=16, heads=2, ffn_dim=32, subsampling_channels=4, num_mels=16)
    config = replace(CONFIG, model=ModelConfig(encoder=encoder, llm=LLM))
    groups = parameter_groups(config)
    parts = {part: sum(x.parameters for x in groups if x.part == part) for part in ("encoder", "adapter")}
    ten_seconds = report(0, 0, 10.0)
    assert model_flops(config)(ten_seconds) == 6 * 125 * sum(parts.values())
    frozen = replace(config, adapt=AdaptConfig(freeze=("encoder.*",)))
    assert model_flops(frozen)(ten_seconds) == 125 * (2 * parts["encoder"] + 6 * parts["adapter"])


def test_layers_that_compute_more_positions_than_outputs_count_them_all():
    """Whisper's layers run at 50 positions a second here, of which four make an audio token."""
    config = replace(CONFIG, model=ModelConfig(encoder=Whisper(model_dim=16, heads=2, joined=4), llm=LLM))
    groups = parameter_groups(config)
    parts = {part: sum(x.parameters for x in groups if x.part == part) for part in ("encoder", "adapter")}
    flops = model_flops(config)(report(0, 0, 10.0))
    assert flops == pytest.approx(6 * (500 * parts["encoder"] + 125 * parts["adapter"]))
    _, per_frame = flops_per_slot(config)
    assert per_frame == pytest.approx(parts["encoder"] / 2 + parts["adapter"] / 8)


def test_each_depth_of_multi_token_prediction_counts_with_the_head_once_more():
    mtp = replace(LLM, mtp_pattern="-", mtp_depths=2)
    config = replace(CONFIG, model=ModelConfig(encoder=None, llm=mtp))
    without = replace(config, train=TrainConfig(mtp_loss=0.0))
    assert model_flops(without)(report(7, 3)) == model_flops(CONFIG)(report(7, 3))
    targets = model_flops(config)(report(0, 3)) - model_flops(without)(report(0, 3))
    assert targets == 6 * 3 * 2 * HEAD
    own = model_flops(config)(report(1, 0)) - model_flops(without)(report(1, 0))
    assert own >= 6 * 2 * FFN_BLOCK


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_the_devices_name(kind: str, tera: int | None):
    assert peak_flops(kind) == (tera and tera * 1e12)
