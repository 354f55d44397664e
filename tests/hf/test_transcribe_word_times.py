"""jaxthd align asks the head for word times of Nemotron 3.5 Transcribe."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

import jaxthd
from jaxthd.align import main
from jaxthd.inference.alignment.viterbi import frames_needed
from jaxthd.run import startup
from tests.hf.transcribe_folder import write_folder
from tests.waves import talk

SECONDS = (3.41, 0.77, 6.2, 0.3)
"""Of recordings; the third is longer than a chunk."""
TEXTS = ("<spk:1> one <spk:0> two, three", "six", "we are \u2014 here", "far too much is said in here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, lines = tmp_path_factory.mktemp("transcribe"), []
    write_folder(folder / "model")
    for n, (text, seconds) in enumerate(zip(TEXTS, SECONDS, strict=True)):
        soundfile.write(folder / f"{n}.wav", talk(n, round(16000 * seconds)), 16000)
        lines.append({"audio_filepath": f"{n}.wav", "duration": seconds, "text": text})
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_folder_as_it_is_published_aligns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, all recordings in one buffer; and each alone."""
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    out = folder / "times"
    given = ["--manifest", str(folder / "said.jsonl"), "--out", str(out), "--data.workers", "0"]
    main([str(folder / "model"), *given])
    lines = [json.loads(line) for line in (out / "words.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["1:0.wav", "2:1.wav", "3:2.wav"]
    words = [[word["word"] for word in line["words"]] for line in lines]
    assert words == [["one", "two,", "three"], ["six"], ["we", "are", "here"]]
    assert [word.get("speaker") for word in lines[0]["words"]] == ["1", "0", "0"]
    (skipped,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    needed = frames_needed(np.array(list(b" far too much is said in here")))
    frames = f"which need {needed} frames of the head for word times, and its recording makes 8"
    assert frames in skipped["reason"]
    model = jaxthd.load(folder / "model")
    for n, line in enumerate(lines):
        (alone,) = model.align([(folder / f"{n}.wav", TEXTS[n])])
        got = [[x.start, x.end, x.score] for x in alone.words]
        want = [[x["start"], x["end"], x["score"]] for x in line["words"]]
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert 0 <= got[0][0] < got[-1][1] <= SECONDS[n]
        letters = len(f" {' '.join(TEXTS[n].split()[-1:])}")
        assert got[-1][1] - got[-1][0] >= 0.04 * letters - 1e-6, "a frame of 40 ms for each letter"


def test_a_folder_without_its_alignment_tokenizer_is_refused(folder: Path) -> None:
    copy = folder / "copy"
    copy.mkdir()
    for file in (folder / "model").iterdir():
        if file.is_file():
            (copy / file.name).symlink_to(file)
    with pytest.raises(jaxthd.UserError, match="the alignment tokenizer of the head for word times"):
        jaxthd.load(copy).align([(folder / "1.wav", "six")])
