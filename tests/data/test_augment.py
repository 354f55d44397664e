"""Augmentation: each change is what it says; draws depend on seed, epoch and document. No validation."""

import gzip
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.config import AugmentConfig, Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.augment import Augmentation, add_noise, change_speed, low_pass, reverberate
from jaxthd.data.dataset import SpeechData
from jaxthd.data.sources.noises import read_augmentation, read_recordings
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from tests.data.sets import read_manifest
from tests.data.test_sources import assert_same

RNG = np.random.default_rng(0)
SPEECH = RNG.normal(0, 0.1, 12_000).astype(np.float32)


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE).astype(
        np.float32
    )


def decibels(x: np.ndarray, y: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(np.square(x, dtype=float)) / np.mean(np.square(y, dtype=float))))


def pitch(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * SAMPLE_RATE / len(samples))


def test_each_change_is_what_it_says():
    noise = RNG.normal(0, 3.0, 5_000).astype(np.float32)  # shorter than the speech, and louder
    for ratio in (-5.0, 0.0, 12.0):
        noisy = add_noise(SPEECH, noise, ratio)
        np.testing.assert_allclose(decibels(SPEECH, noisy - SPEECH), ratio, atol=1e-3)
        np.testing.assert_allclose((noisy - SPEECH)[5_000:10_000], (noisy - SPEECH)[:5_000], atol=1e-6)
    np.testing.assert_array_equal(add_noise(SPEECH, np.zeros(9, np.float32), 0.0), SPEECH)
    np.testing.assert_array_equal(add_noise(0 * SPEECH, noise, 0.0), 0 * SPEECH)
    for speed in (0.9, 1.1, 2.0):
        faster = change_speed(tone(440), speed)
        assert len(faster) == pytest.approx(SAMPLE_RATE / speed, abs=1)
        assert pitch(faster) == pytest.approx(440 * speed, rel=0.002)
    passed = low_pass(tone(500) + tone(6000), 3000.0)
    assert decibels(passed, tone(500)) == pytest.approx(0.0, abs=0.05)
    assert pitch(low_pass(tone(6000), 3000.0)[2000:]) == pytest.approx(6000, rel=0.01)
    assert decibels(low_pass(tone(6000), 3000.0)[2000:], tone(6000)) < -45
    assert decibels(low_pass(tone(3000), 3000.0)[2000:], tone(3000)) == pytest.approx(-3.0, abs=0.1)


def test_a_room_is_a_convolution_that_moves_nothing_and_keeps_the_power():
    direct = np.zeros(400, np.float32)
    direct[100] = -0.3
    np.testing.assert_allclose(reverberate(SPEECH, direct), -SPEECH, atol=1e-6)
    response = direct.copy()
    response[[40, 180, 390]] = (0.02, 0.2, -0.1)
    heard = reverberate(SPEECH, response)
    expected = np.convolve(SPEECH.astype(float), response)[100 : 100 + len(SPEECH)]
    expected *= np.sqrt(np.mean(SPEECH.astype(float) ** 2) / np.mean(expected**2))
    np.testing.assert_allclose(heard, expected, atol=1e-6)
    assert decibels(heard, SPEECH) == pytest.approx(0.0, abs=1e-4)
    np.testing.assert_array_equal(reverberate(SPEECH, 0 * response), SPEECH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """speech.jsonl: 6 recordings; noise.jsonl: 3, and 3 faulty lines; room.jsonl: 2, one in stereo."""
    made = tmp_path_factory.mktemp("augment")
    rng = np.random.default_rng(1)

    def manifest(kind: str, seconds: list[float], **fields: Any) -> list[str]:
        lines = []
        for number, length in enumerate(seconds):
            samples = rng.normal(0, 0.1, (round(length * 16_000), 1 + (kind == "room" and number)))
            if kind == "room":
                samples *= np.exp(-np.arange(len(samples)) / 200)[:, None]
            soundfile.write(made / f"{kind}{number}.wav", samples, 16_000)
            lines.append(json.dumps({"audio_filepath": f"{kind}{number}.wav"} | fields))
        return lines

    (made / "speech.jsonl").write_text(
        "\n".join(manifest("speech", [0.4, 0.9, 1.2, 0.5, 0.7, 1.0], text="one"))
    )
    noises = manifest("noise", [0.3, 2.0, 3.0])
    noises += [
        json.dumps({"audio_filepath": "gone.wav"}),
        json.dumps({"audio_filepath": "noise0.wav", "offset": 9}),
    ]
    (made / "noise.jsonl").write_text("\n".join([*noises, "{", ""]))
    (made / "room.jsonl").write_text("\n".join(manifest("room", [0.1, 0.2])))
    return made


def everything(folder: Path, **changes: Any) -> AugmentConfig:
    manifests = {f"{kind}_manifest": str(folder / f"{kind}.jsonl") for kind in ("noise", "room")}
    return AugmentConfig(**{"speed": (0.9, 1.0, 1.1), "shares": ("low_pass=0.5",), **manifests, **changes})


def test_draws_depend_on_seed_epoch_and_document_alone(folder: Path):
    augment = read_augmentation(everything(folder)).augmentation
    made = {
        (seed, epoch, key): augment(SPEECH, seed, epoch, key)
        for seed in range(2)
        for epoch in range(3)
        for key in ("1:a", "2:b", "3:c", "4:d")
    }
    again = read_augmentation(everything(folder)).augmentation
    for at, samples in reversed(made.items()):
        np.testing.assert_array_equal(again(SPEECH, *at), samples)
    assert len({samples.tobytes() for samples in made.values()}) > 20
    assert {len(samples) for samples in made.values()} == {13_333, 12_000, 10_909}
    # What one change draws does not depend on the others.
    without_noise = replace(
        again, noises=(), config=replace(again.config, shares=("low_pass=0.5", "noise=0"))
    )
    lengths = [len(without_noise(SPEECH, *at)) for at in made]
    assert lengths == [len(samples) for samples in made.values()]
    assert {len(augment(SPEECH, 0, 0, str(n), changes_speed=False)) for n in range(20)} == {12_000}


def test_shares_and_ratios_are_those_of_the_settings(folder: Path):
    settings = AugmentConfig(
        noise_manifest=str(folder / "noise.jsonl"), shares=("noise=0.3",), noise_snr=(3.0, 9.0)
    )
    augment = read_augmentation(settings).augmentation
    ratios = []
    for number in range(300):
        noisy = augment(SPEECH, 0, 0, f"{number}:x")
        if noisy is not SPEECH:
            ratios.append(decibels(SPEECH, noisy - SPEECH))
    assert 60 < len(ratios) < 120  # five deviations from 90 would be 50 and 130
    assert 3.0 - 1e-3 < min(ratios) < 3.5
    assert 8.5 < max(ratios) < 9.0 + 1e-3
    off = Augmentation(AugmentConfig(), augment.noises)
    assert off(SPEECH, 0, 0, "1:x") is not None
    assert Augmentation(AugmentConfig())(SPEECH, 0, 0, "1:x") is SPEECH


def config(folder: Path, augment: AugmentConfig, **data: Any) -> Config:
    path = str(folder / "speech.jsonl")
    defaults = {"manifest": (path,), "validation_manifest": path, "workers": 0, "rows": 2}
    defaults |= {"capacity": 64, "audio_capacity": 400, "packing_bins": 2, "augment": augment}
    return Config(
        data=DataConfig(**{**defaults, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=0.5)),
    )


def stream(
    settings: Config, workdir: Path, steps: int, state: Any = None
) -> tuple[list[Any], Any, list[Any]]:
    """(training batches, the position after them, validation batches)"""
    workdir.mkdir(exist_ok=True)
    data = SpeechData(settings, workdir)
    with data.training() as loader:
        if state is not None:
            loader.set_state(state)
        found = list(islice(loader, steps))
        position = json.loads(json.dumps(loader.get_state()))
    with data.validation() as loader:
        held_out = list(loader)
    data.close()
    return found, position, held_out


def test_a_speed_that_would_make_a_document_too_large_is_not_applied(folder: Path):
    """Recordings of 0.4 to 1.2 s, four times as slow, for buffers of 4 s and 64 slots, 12.5 a second."""
    settings = config(folder, AugmentConfig(speed=(0.25,)))
    tokenizer = load_tokenizer(settings.data.tokenizer)
    documents = SpeechDocuments(
        settings, tokenizer, train=True, augmentation=Augmentation(settings.data.augment)
    )
    examples, _ = read_manifest(folder / "speech.jsonl")
    seconds = [sum(len(x.features) for x in documents(example).pieces) / 100 for example in examples]
    assert seconds == pytest.approx([1.6, 0.9, 1.2, 2.0, 2.8, 1.0], abs=0.03)


def test_a_run_is_augmented_the_same_with_workers_and_after_a_stop(folder: Path, tmp_path: Path):
    whole, _, held_out = stream(config(folder, everything(folder)), tmp_path / "a", 10)
    plain, _, plain_held_out = stream(config(folder, AugmentConfig()), tmp_path / "b", 10)
    assert_same(held_out, plain_held_out)
    assert any((x.features.sum() != y.features.sum()) for (x, _), (y, _) in zip(whole, plain, strict=True))
    first, position, _ = stream(config(folder, everything(folder), workers=1), tmp_path / "c", 4)
    rest, _, _ = stream(config(folder, everything(folder)), tmp_path / "d", 6, position)
    assert_same(first + rest, whole)
    listed = [json.loads(line) for line in (tmp_path / "a" / "skipped.jsonl").read_text().splitlines()]
    noises = [(x["key"], x["reason"].partition(": ")[2] or x["reason"]) for x in listed]
    assert [key for key, _ in noises] == ["4:gone.wav", "5:noise0.wav", "6:"]
    assert noises[0][1].startswith("no such file")
    assert noises[1][1].startswith("-8.700 s from offset 9.0 s")
    for other in (everything(folder, noise_snr=(0.0, 1.0)), AugmentConfig()):
        with pytest.raises(UserError, match=r"another stream of documents \(.*augment: "):
            stream(config(folder, other), tmp_path / "e", 1, position)


def test_a_noise_that_cannot_be_decoded_is_left_out_and_said_once(folder: Path, tmp_path: Path, capfd: Any):
    (tmp_path / "n.jsonl").write_text(json.dumps({"audio_filepath": "n.flac"}))
    soundfile.write(tmp_path / "n.flac", RNG.normal(0, 0.1, 16_000), 16_000)
    data = bytearray((tmp_path / "n.flac").read_bytes())
    data[200:-8000] = bytes(len(data) - 8200)  # the header and the last frame are whole
    (tmp_path / "n.flac").write_bytes(data)
    settings = AugmentConfig(noise_manifest=str(tmp_path / "n.jsonl"), shares=("noise=1",))
    found = []
    for changes in (settings, AugmentConfig()):
        with SpeechData(config(folder, changes), tmp_path).training() as loader:
            found.append(next(loader))
    jax.tree.map(np.testing.assert_array_equal, *(batch for batch, *_ in found))
    said = [line for line in capfd.readouterr().err.splitlines() if "is not used as a noise" in line]
    assert said
    assert all(str(tmp_path / "n.flac") in line for line in said)
    assert len(said) <= 2, "once in each process"


def test_manifests_of_noises_must_be_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    soundfile.write(tmp_path / "n.wav", np.zeros(8000), 8000)
    line = b'{"audio_filepath": "n.wav"}\n'
    for name, data, said in (
        ("n.jsonl", b"", "holds no bytes"),
        ("n.jsonl", line + line[:9], "line 2: the file ends within a line"),
        ("n.jsonl.gz", gzip.compress(line * 99, mtime=0)[:-9], "ended before the end-of-stream marker"),
    ):
        (tmp_path / name).write_bytes(data)
        (tmp_path / "sound.jsonl").write_bytes(line)
        with pytest.raises(UserError, match=rf"{name}.*{said}"):
            read_recordings(f"{tmp_path}/{{sound.jsonl,{name}}}", "data.x")
    (tmp_path / "n-0-of-2.jsonl").write_bytes(line)
    read_augmentation(AugmentConfig(noise_manifest=f"{tmp_path}/n-0-of-2.jsonl", shares=("noise=1",)))
    assert "1 of the 2 parts that n-0-of-2.jsonl's name counts" in capsys.readouterr().out


def test_manifests_of_noises_that_cannot_be_used_are_refused(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"no manifest at .*; expected a file of recordings.*: correct data\.x"
    ):
        read_recordings(str(tmp_path / "n.jsonl"), "data.x")
    (tmp_path / "n.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"no usable line \(1 skipped\)[^$]*audio_filepath is missing"):
        read_recordings(str(tmp_path / "n.jsonl"), "data.x")
    (tmp_path / "n.jsonl").write_text(json.dumps({"audio_filepath": "ä" * 200}))
    with pytest.raises(UserError, match=r"\(1 skipped, 1:ä+ first: .*cannot be looked up \(.*too long"):
        read_recordings(str(tmp_path / "n.jsonl"), "data.x")
    soundfile.write(tmp_path / "long.wav", np.zeros(11 * 8000), 8000)
    (tmp_path / "n.jsonl").write_text('{"audio_filepath": "long.wav"}\n')
    assert len(read_recordings(str(tmp_path / "n.jsonl"), "data.x")[0]) == 1
    with pytest.raises(UserError, match=r"11\.000 s from offset 0\.0 s; expected 0\.05 to 10 s"):
        read_recordings(str(tmp_path / "n.jsonl"), "data.x", most_seconds=10.0)
