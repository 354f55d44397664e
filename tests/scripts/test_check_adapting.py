"""scripts/check_adapting.py at a tiny size: train from a published checkpoint, evaluate, generate, export."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from scripts import check_adapting


@pytest.mark.exhaustive
def test_a_published_checkpoint_is_adapted_and_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Tensor parallel; the script exits 1 where a claim fails."""
    rng = np.random.default_rng(0)
    words = ("zero", "one", "two", "three", "four", "five")
    lines = []
    for number in range(24):
        seconds = 0.31 + 0.05 * number
        soundfile.write(tmp_path / f"{number}.wav", rng.normal(0, 0.1, round(16000 * seconds)), 16000)
        text = " ".join(rng.choice(words, size=1 + number % 4))
        lines.append({"audio_filepath": f"{number}.wav", "duration": round(seconds, 3), "text": text})
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--steps", "8", "--data", "1", "--tensor", "2", "--folder", str(tmp_path / "work")]
    check_adapting.main(["--manifest", str(tmp_path / "manifest.jsonl"), *options])
    said = capsys.readouterr().out
    assert "FAILS" not in said
    assert said.count("  holds  ") == 6
