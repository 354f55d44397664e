"""Names of published families lead to ours: by their own tables, read the other way."""

from pathlib import Path

import numpy as np
import pytest

from jaxthd.config import AdaptConfig, Config, LLMConfig, ModelConfig, RopeConfig
from jaxthd.hf.family_names import our_names, patterns_of
from jaxthd.models.adapt import matches, parameter_names, projections
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.steps.blueprint import Blueprint
from jaxthd.validate import DeviceFacts, findings
from tests.hf.published import shapes_of
from tests.validate.test_validate import with_changes

CPU = DeviceFacts("cpu", 1, "cpu")
BLOCKS = {"*": Attention(qk_norm=True, rope=RopeConfig(1e6)), "-": MLP(form="swiglu", inner=64)}
QWEN = LLMConfig(pattern="*-*-", blocks=BLOCKS)
OTHER = LLMConfig(pattern="M*-", blocks={**BLOCKS, "M": Mamba2()})
"""A decoder that no family can hold: heads are rotated beside Mamba2."""
HYBRID = LLMConfig(pattern="M*-M", blocks={"*": Attention(), "-": MLP(inner=64), "M": Mamba2()})
SPEECH, TEXT = ModelConfig(llm=QWEN), ModelConfig(encoder=None, llm=QWEN)


def found(pattern: str, model: ModelConfig) -> dict[str, tuple[set[str], bool]]:
    """Family -> (our names, whether these hold more than is named)."""
    shapes = shapes_of(Config(model=model))
    return {x.title: (set(x.arrays), x.is_part) for x in our_names(pattern, model, shapes)}


MIXER = "decoder.layers.attention.mixer"


@pytest.mark.parametrize(
    ("model", "pattern", "expected"),
    [
        (TEXT, "q_proj", {"Qwen3ForCausalLM": ({f"{MIXER}.q.w"}, False)}),
        (TEXT, "model.layers.*.self_attn.q_proj", {"Qwen3ForCausalLM": ({f"{MIXER}.q.w"}, False)}),
        (TEXT, "self_attn.[kv]_proj.weight", {"Qwen3ForCausalLM": ({f"{MIXER}.{x}.w" for x in "kv"}, False)}),
        (TEXT, "model.layers.1.self_attn.o_proj", {"Qwen3ForCausalLM": ({f"{MIXER}.out.w"}, True)}),
        (TEXT, "embed_tokens", {"Qwen3ForCausalLM": ({"embedding"}, False)}),
        (TEXT, "proj", {}),
        (TEXT, "encoder.layers.*.self_attn.q_proj", {}),
        (
            SPEECH,
            "q_proj",
            {
                "Qwen3ForCausalLM": ({f"{MIXER}.q.w"}, False),
                "ParakeetEncoder": (
                    {"encoder.blocks.attention.q.w", "encoder.blocks.attention.q.bias"},
                    False,
                ),
            },
        ),
        (
            ModelConfig(encoder=None, llm=OTHER),
            "self_attn.q_proj",
            {"most families": ({f"{MIXER}.q.w"}, False)},
        ),
        (ModelConfig(encoder=None, llm=OTHER), "model.layers.*", {}),
        (
            ModelConfig(encoder=None, llm=HYBRID),
            "in_proj",
            {
                "NemotronHForCausalLM": (
                    {f"decoder.layers.mamba.mixer.{x}.w" for x in ("z", "x", "b", "c", "dt")},
                    False,
                )
            },
        ),
    ],
)
def test_a_familys_name_is_that_of_our_arrays(model, pattern, expected):
    """Also the end of a name; one tensor that holds several of ours; some of the layers of an array."""
    assert found(pattern, model) == expected


def test_our_patterns_match_what_was_chosen_and_nothing_else():
    """Of the names of a whole model, drawn at random and by parts."""
    rng, model = np.random.default_rng(0), Blueprint(Config(model=SPEECH)).model
    names = parameter_names(model)
    sets = [set(rng.choice(names, n, replace=False).tolist()) for n in (1, 2, 5, len(names) - 1, len(names))]
    sets += [{name for name in names if part in name} for part in ("attention", "decoder", "norm", ".q.")]
    for chosen in sets:
        patterns = patterns_of(chosen, names)
        assert {name for name in names if matches(name, patterns)} == chosen
    assert patterns_of([name for name in names if name.startswith("decoder.")], names) == ["decoder.*"]
    assert patterns_of(["embedding", "head"], names) == ["embedding", "head"]
    assert patterns_of([], names) == []
    assert patterns_of([f"{MIXER}.q"], list(projections(model))) == [f"{MIXER}.q"]


@pytest.mark.parametrize(
    ("setting", "pattern", "advice"),
    [
        (
            "adapt.lora_targets",
            "q_proj",
            f"jaxthd's own name of a projection, '{MIXER}.q' for what NemotronHForCausalLM calls so, or "
            "'encoder.blocks.attention.q' for what ParakeetEncoder calls so: give that",
        ),
        (
            "adapt.freeze",
            "model.layers.*.mixer.q_proj",
            "a pattern of parameter names, such as",
        ),
        (
            "adapt.freeze",
            "!backbone.layers.1.mixer.down_proj",
            "'decoder.layers.mlp.mixer.down.w' for what NemotronHForCausalLM calls so (all layers of its "
            "kind, which cannot be chosen by themselves)",
        ),
        ("adapt.freeze", "encoder.layers.*", "'encoder.blocks.*' for what ParakeetEncoder calls so: give"),
        (
            "adapt.lora_targets",
            "*.wq",
            f"a pattern of projection names, such as {MIXER}.q",
        ),
        ("adapt.lora_targets", "mixr", "a pattern of projection names, such as"),
    ],
)
def test_the_message_has_the_pattern_to_give(setting: str, pattern: str, advice: str):
    """And that one is right: it matches."""
    config = with_changes({setting: (pattern,), "adapt.lora_rank": 4})
    (finding,) = findings(config, CPU)
    assert str(finding).startswith(f"{setting} {pattern.removeprefix('!')!r} matches nothing; expected ")
    assert advice in str(finding)
    if "'" in finding.expected.removeprefix("jaxthd's"):
        right = finding.expected.split("'")[2 - ("jaxthd's" not in finding.expected)]
        assert not findings(with_changes({setting: (right,), "adapt.lora_rank": 4}), CPU)


def test_the_page_shows_the_message_as_it_is():
    """docs/adapting.md, of a Qwen3 with a Parakeet encoder."""
    page = (Path(__file__).parents[2] / "docs" / "adapting.md").read_text()
    adapt = AdaptConfig(lora_rank=4, lora_targets=("q_proj",))
    (finding,) = findings(Config(model=SPEECH, adapt=adapt), CPU)
    assert str(finding) in " ".join(page.split())
