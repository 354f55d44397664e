"""Words that no one trained on are found in time: a model learns letters from synthetic speech in minutes.
The times that it gives other words, of other voices, are compared with where those were put."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxthd import align, train
from jaxthd.config import Config, DataConfig, LLMConfig, ModelConfig, SpecAugmentConfig, TrainConfig
from jaxthd.models.front_ends.stacked.settings import Stacked
from tests.spoken_times import NEW_VARIANTS, VARIANTS, Spoken, made_up_words, write_spoken

WORDS, NEW_WORDS = 2000, 300
MEDIAN, NEARLY_ALL = 0.040, 0.120
"""Most seconds of the median error, and of 95% of the errors."""


def words_config(folder: Path) -> Config:
    encoder = Stacked(
        mel_bands=80, stack=4, layers=4, dim=144, heads=4, head_dim=36, rope_fraction=1.0, ffn_dim=432
    )
    return Config(
        data=DataConfig(
            manifest=(str(folder / "train.jsonl"),),
            validation_manifest="",
            capacity=2048,
            audio_capacity=6400,
            max_documents=32,
            spec_augment=SpecAugmentConfig(freq=(1, 20)),
        ),
        model=ModelConfig(encoder=encoder, llm=LLMConfig(pattern="-", dim=144)),
        train=TrainConfig(
            steps=1200,
            learning_rate=2e-3,
            warmup_steps=100,
            ctc_loss=1.0,
            ctc_max_labels=72,
            validate_every=0,
        ),
    )


def errors(folder: Path, said: dict[str, list[Spoken]]) -> dict[str, np.ndarray]:
    """Seconds by which words begin and end too late."""
    found: dict[str, list[float]] = {"start": [], "end": []}
    for line in (folder / "words.jsonl").read_text().splitlines():
        of_line = json.loads(line)
        true = said.pop(of_line["key"].partition(":")[2])
        assert [word["word"] for word in of_line["words"]] == [word.text for word in true]
        for word, spoken in zip(of_line["words"], true, strict=True):
            found["start"].append(word["start"] - spoken.start)
            found["end"].append(word["end"] - spoken.end)
    assert not said
    return {name: np.array(x) for name, x in found.items()}


@pytest.mark.nightly
def test_words_that_nobody_trained_on_are_found_in_time(tmp_path: Path, record_property) -> None:
    words = made_up_words(0, WORDS + NEW_WORDS)
    write_spoken(tmp_path, "train", words[:WORDS], 2500, VARIANTS, 1)
    manifest, said = write_spoken(tmp_path, "new", words[WORDS:], 200, NEW_VARIANTS, 2)
    file = tmp_path / "words.py"
    file.write_text(
        "from pathlib import Path\nfrom tests.test_word_times import words_config\n\n"
        f"def config():\n    return words_config(Path({str(tmp_path)!r}))\n"
    )
    train.main([str(file), "--workdir", str(tmp_path / "run")])
    align.main([str(tmp_path / "run"), "--manifest", str(manifest), "--out", str(tmp_path / "times")])
    for name, late in errors(tmp_path / "times", said).items():
        median, nearly_all = np.quantile(np.abs(late), [0.5, 0.95])
        figures = f"median {1000 * median:.0f} ms, 95% under {1000 * nearly_all:.0f} ms, {len(late)} words"
        record_property(name, f"{figures}, on average {1000 * late.mean():+.0f} ms")
        assert median < MEDIAN
        assert nearly_all < NEARLY_ALL
