"""Filters: what they bound, what they drop and where that is listed, whether durations are known or not."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, FilterConfig, ModelConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.data.example import Alternative, Example, Samples, Turn
from jaxthd.data.filters import Filter
from jaxthd.data.skipped import FILTERED
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.planning.lengths import measure, read_examples

TEXTS = {
    "short": (0.3, "a"),
    "fine": (1.0, "one two"),
    "long": (2.0, "one two three"),
    "dense": (1.0, "x" * 40),
}
TEXTS |= {"empty-ish": (1.0, "é"), "fine too": (0.5, "three")}
BOUNDS = FilterConfig(seconds=(0.4, 1.5), characters_per_second=(2.0, 0.0), tokens_per_second=(0.0, 30.0))
DROPPED = {
    "1": "seconds: at least",
    "3": "seconds: at most",
    "4": "tokens_per_second: at most",
    "5": "characters_per_second: at least",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """known.jsonl has durations, unknown.jsonl has none; both have a line that is not JSON."""
    rng = np.random.default_rng(0)
    for kind in ("known", "unknown"):
        lines = []
        for name, (seconds, text) in TEXTS.items():
            soundfile.write(tmp_path / f"{name}.wav", rng.normal(0, 0.1, round(seconds * 16_000)), 16_000)
            line = {"audio_filepath": f"{name}.wav", "text": text}
            lines.append(json.dumps(line | ({"duration": seconds} if kind == "known" else {})))
        (tmp_path / f"{kind}.jsonl").write_text("\n".join([*lines, "{", ""]))
    return tmp_path


def config(folder: Path, kind: str, bounds: FilterConfig = BOUNDS, **data: Any) -> Config:
    path = str(folder / f"{kind}.jsonl")
    defaults = {"manifest": (path,), "validation_manifest": path, "workers": 0}
    defaults |= {"max_skipped_share": 0.2, "packing": "padded", "capacity": 128, "audio_capacity": 400}
    return Config(
        data=DataConfig(**{**defaults, "filter": bounds, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16)),
    )


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_what_is_dropped_is_listed_and_no_skipped_share(folder, kind, capsys):
    settings = config(folder, kind)
    (folder / kind).mkdir()
    data = SpeechData(settings, folder / kind)
    if kind == "known":
        printed = capsys.readouterr().out
        assert "data.filter drops 4 of 7 training items (57.1%): " in printed
        assert "seconds: at least 0.4 (1)" in printed
        assert "tokens_per_second: at most 30 (1)" in printed
    with data.training() as loader:
        found = [key for _, report in islice(loader, 12) for row in report.keys for key in row]
    assert {key.partition(":")[0] for key in found} == {"2", "6"}
    data.require_few_skipped()  # one line of 7 is faulty; more than half are dropped
    assert data.skipped_text().startswith("1 of 7 training items (14.3%): not JSON")
    listed = map(json.loads, (folder / kind / "skipped.jsonl").read_text().splitlines())
    reasons = {line["key"].partition(":")[0]: line["reason"] for line in listed}
    assert reasons.pop("7").startswith("not JSON")
    assert {
        n: reason[len(FILTERED) :].partition(",")[0].rpartition(" ")[0] for n, reason in reasons.items()
    } == DROPPED
    assert "tokens_per_second: at most 30, and this has 40: 40 in 1 s" in reasons["4"]
    with data.validation() as loader:
        held_out = [key for _, report in loader for row in report.keys for key in row]
    assert len(held_out) == len(TEXTS), "validation sets are measured whole"
    assert len(measure(read_examples(settings)[0], settings)[0].tokens) == 2, "the planner sees what is left"


def test_the_position_belongs_to_the_filter_and_an_unfiltered_run_keeps_its_own(folder):
    def position(bounds: FilterConfig) -> dict[str, Any]:
        with SpeechData(config(folder, "known", bounds), folder).training() as loader:
            next(loader)
            return json.loads(json.dumps(loader.get_state()))

    assert "filter" not in position(FilterConfig())["identity"]
    state = position(BOUNDS)
    other = replace(BOUNDS, seconds=(0.4, 1.6))
    with (
        SpeechData(config(folder, "known", other), folder).training() as loader,
        pytest.raises(UserError, match=r"filter: .*'max_seconds': 1\.5.* then"),
    ):
        loader.set_state(state)
    with pytest.raises(UserError, match=r"holds nothing that can be used.*data\.filter\.seconds: at least 9"):
        SpeechData(config(folder, "known", FilterConfig(seconds=(9.0, 0.0))), folder)


def test_preferences_prompts_and_texts_have_no_rates():
    judge = Filter(
        FilterConfig(characters_per_second=(5.0, 0.0), seconds=(0.0, 3.0)), ByteTokenizer()
    ).why_dropped
    clip = Samples(np.zeros(16_000, np.float32), 16_000)
    asked, answered = Turn("user", (clip,)), Turn("assistant", ("a",))
    assert "characters_per_second: at least 5, and this has 1: 1 in 1 s" in judge(
        Example("1:", (asked, answered)), 1.0
    )
    alternatives = (Alternative("a", 1.0), Alternative("b", -1.0))
    for example in (
        Example("1:", (asked,), alternatives),
        Example("1:", (asked,)),
        Example("1:", (Turn("user", ("a",)), answered)),
    ):
        assert judge(example, 1.0) == ""
    assert "seconds: at most 3, and this has 4" in judge(Example("1:", (asked,), alternatives), 4.0)
    assert not Filter(FilterConfig(), ByteTokenizer())
    assert Filter(FilterConfig(tokens_per_second=(0.0, 1.0)), ByteTokenizer())
