"""Windows of long recordings: all of the recording, none too long, cut where it is quietest."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.data.audio.recordings import AudioError, load_audio
from jaxthd.data.audio.windows import Window, in_windows
from jaxthd.data.example import Clip, Samples

RATE = 8000
PAUSES = (2.9, 5.45, 8.1)
"""Seconds at which pauses of 0.3 s begin."""


def spoken(seconds: float, pauses: tuple[float, ...] = PAUSES) -> np.ndarray:
    """Noise whose loudness changes, with pauses that are nearly silent."""
    rng, count = np.random.default_rng(0), round(seconds * RATE)
    loudness = np.repeat(rng.uniform(0.05, 0.3, count // 800 + 1), 800)[:count]
    sound = rng.normal(0, 1, count) * loudness
    for start in pauses:
        sound[round(start * RATE) : round((start + 0.3) * RATE)] *= 1e-3
    return np.clip(sound, -1, 1)


def heard(clip: Clip | Samples) -> np.ndarray:
    """The samples at the recording's own rate."""
    if isinstance(clip, Samples):
        return clip.samples
    samples, _ = soundfile.read(clip.path)
    start = round(clip.offset * RATE)
    return samples[start : None if clip.duration is None else start + round(clip.duration * RATE)]


@pytest.mark.parametrize("in_memory", [False, True])
def test_windows_are_the_whole_recording_and_end_in_its_pauses(tmp_path: Path, in_memory: bool):
    """Also of a range of a recording, whose offset and duration are kept."""
    sound = spoken(11.03)
    soundfile.write(tmp_path / "long.flac", sound, RATE)
    sound, _ = soundfile.read(tmp_path / "long.flac")
    whole = Samples(sound, RATE) if in_memory else Clip(tmp_path / "long.flac")
    windows = in_windows(whole, 4.0)
    np.testing.assert_array_equal(np.concatenate([heard(x.recording) for x in windows]), sound)
    assert not any(x.overlap for x in windows)
    ends = np.cumsum([len(heard(x.recording)) / RATE for x in windows])
    np.testing.assert_allclose([x.begin for x in windows[1:]], ends[:-1], atol=1e-3)
    assert len(windows) == 4
    for end, pause in zip(ends[:-1], PAUSES, strict=True):
        assert pause + 0.05 < end < pause + 0.25, "the middle of the quietest 0.2 s is inside of the pause"
    if not in_memory:
        part = [x.recording for x in in_windows(Clip(tmp_path / "long.flac", 2.0, 8.5), 4.0)]
        assert part[0].offset == 2.0
        assert part[-1].offset + part[-1].duration == pytest.approx(10.5)
        np.testing.assert_array_equal(
            np.concatenate([heard(x) for x in part]), sound[2 * RATE : round(10.5 * RATE)]
        )


def test_a_recording_that_is_not_too_long_stays_as_it_is(tmp_path: Path):
    soundfile.write(tmp_path / "a.wav", spoken(3.0), RATE)
    assert in_windows(Clip(tmp_path / "a.wav"), 3.0) == [Window(Clip(tmp_path / "a.wav"), 0.0, 3.0)]


@pytest.mark.parametrize("most", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("beyond", [0.0001, 0.3, 2.0])
@pytest.mark.parametrize("kind", ["noise", "silence"])
def test_no_window_is_too_long_or_too_short_to_be_heard(most: float, beyond: float, kind: str):
    """Whatever is at its end: the last window has what features need, too. A silence is cut as late as can
    be: it needs the fewest windows."""
    count = round((3 * most + beyond) * 16000)
    sound = np.zeros(count) if kind == "silence" else np.random.default_rng(1).normal(0, 0.1, count)
    windows = in_windows(Samples(sound, 16000), most)
    lengths = [len(heard(x.recording)) / 16000 for x in windows]
    overlaps = [x.overlap for x in windows]
    ends = [x.end for x in windows]
    assert lengths == pytest.approx([x.seconds for x in windows], abs=1e-3)
    assert all(x.begin >= end - 1e-3 for x, end in zip(windows[2:], ends, strict=False)), "twice is enough"
    assert sum(lengths) - sum(overlaps) == pytest.approx(count / 16000, abs=1e-3)
    assert overlaps[0] == 0
    most_shared = min(2.0, most / 4) + 1e-9
    assert all(0 < x <= most_shared if kind == "noise" else x == 0 for x in overlaps[1:])
    assert max(lengths) <= most + 1e-4
    assert min(lengths) >= min(0.5, most / 4) - 1e-4
    if kind == "silence" and most == 3.0:
        assert len(windows) == 4


def test_the_place_is_the_quietest_by_definition():
    """Each place of 0.2 s within the last 5 s of a window, one after the other."""
    sound = spoken(14.0, ())
    first, second = in_windows(Samples(np.repeat(sound, 2), 16000), 12.0)
    samples = np.repeat(sound, 2)
    starts = range(round(7.0 * 16000), round(11.8 * 16000) + 1, 160)
    energy = [np.square(samples[start : start + 3200]).sum() for start in starts]
    middle = len(first.recording.samples) / 16000 - second.overlap / 2
    assert middle == pytest.approx(starts[int(np.argmin(energy))] / 16000 + 0.1, abs=1e-3)


def test_one_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(AudioError, match=r"none\.wav: no such file"):
        in_windows(Clip(tmp_path / "none.wav"), 4.0)
    whole = spoken(8.0)
    soundfile.write(tmp_path / "cut.wav", whole, RATE)
    data = (tmp_path / "cut.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(data[: len(data) // 2])
    with pytest.raises(AudioError, match=r"cut\.wav"):
        in_windows(Clip(tmp_path / "cut.wav"), 2.0)


@pytest.mark.parametrize("pauses", [(5.8, 6.1, 10.9, 11.2), ()])
def test_what_a_window_decodes_is_that_part_of_the_file(tmp_path: Path, pauses: tuple[float, ...]):
    """Through load_audio, as documents are made: two channels at twice the rate, so that each pause is half
    as long. What a window shares with the one before is the same in both."""
    sound = spoken(18.0, pauses)
    soundfile.write(tmp_path / "two.ogg", np.stack([sound, sound / 2], 1), 2 * RATE)
    windows = in_windows(Clip(tmp_path / "two.ogg"), 4.0)
    assert [x.overlap > 0 for x in windows] == [False] + [not pauses] * (len(windows) - 1)
    parts = [load_audio(x.recording.path, x.recording.offset, x.recording.duration) for x in windows]
    shared = [round(x.overlap * 2 * RATE) for x in windows]
    whole = load_audio(tmp_path / "two.ogg")
    once = [part[count:] for part, count in zip(parts, shared, strict=True)]
    np.testing.assert_array_equal(np.concatenate(once), whole)
    for window, part in zip(windows, parts, strict=True):
        at = round(window.begin * 2 * RATE)
        np.testing.assert_array_equal(part, whole[at : at + len(part)])
