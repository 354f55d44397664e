"""Recordings as files, in tar shards and as Lhotse Shar make the same documents; mixed, stopped, resumed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig, SpecAugmentConfig
from jaxthd.data import speech
from jaxthd.data.dataset import SpeechData
from jaxthd.data.sources.registry import validation_sources
from jaxthd.errors import UserError
from jaxthd.planning import lengths as planned
from tests.data.sets import sound, write_arrow, write_parquet, write_tar

TABLES = ("parquet", "arrow") if find_spec("pyarrow") else ()
KINDS = ("plain", "tarred", "shar", "cuts", *TABLES)
LINES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/: m.jsonl, 12 lines, ragged ranges of 9 recordings, one of which is damaged; tarred/: the same in
    manifest_{0..2}.json with audio_{0..2}.tar; shar/: the same in two shards. Keys are the same in all.
    """
    made, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for kind in KINDS:
        (made / kind).mkdir()
    lines, audio = [], {}
    for n in range(LINES):
        whole = n - n % 4 if n % 4 < 2 else n  # one in four is another range of the recording before it
        name = f"{whole}-sub1.wav" if whole < n else f"{n}.wav"
        audio[name] = (
            audio[f"{whole}.wav"]
            if whole < n
            else sound(1.5 + rng.random(), (16_000, 8000, 22_050)[n % 3], seed=n)
        )
        offset, seconds = round(rng.uniform(0.0, 0.5), 3), round(rng.uniform(0.3, 0.9), 3)
        line = {"audio_filepath": name, "text": "é" * n + "x", "offset": offset, "duration": seconds}
        lines.append(line | ({"context": f"Number {n}?", "system_prompt": "Listen."} if n % 5 == 0 else {}))
    audio["7.wav"] = b"no recording"
    for name, data in audio.items():
        (made / "plain" / name).write_bytes(data)
    write(made / "plain" / "m.jsonl", lines)
    for shard in range(3):
        own = lines[4 * shard : 4 * shard + 4]
        write(made / "tarred" / f"manifest_{shard}.json", [{**line, "shard_id": shard} for line in own])
        files = {line["audio_filepath"]: audio[line["audio_filepath"]] for line in reversed(own)}
        held = {name: data for name, data in files.items() if "-sub" not in name}
        write_tar(made / "tarred" / f"audio_{shard}.tar", held)
    for shard, own in enumerate((lines[:7], lines[7:])):
        write(made / "shar" / f"cuts.00000{shard}.jsonl", [cut(line) for line in own])
        held = {f"{line['audio_filepath']}.wav": audio[line["audio_filepath"]] for line in own}
        write_tar(made / "shar" / f"recording.00000{shard}.tar", held)
    for shard, own in enumerate((lines[:5], lines[5:])):
        filed = [cut(line) | {"recording": of_file(line)} for line in own]
        write(made / "cuts" / f"cuts_{shard}.jsonl", filed)
    shutil.copytree(made / "plain", made / "cuts" / "audio")
    rows = [{**line, "audio": audio[line["audio_filepath"]]} for line in lines]
    for shard, own in enumerate((rows[:7], rows[7:]) if TABLES else ()):
        write_parquet(made / "parquet" / f"train-0000{shard}-of-00002.parquet", hugging_face(own), group=3)
        write_arrow(made / "arrow" / f"data-0000{shard}-of-00002.arrow", hugging_face(own), group=2)
    return made


def of_file(line: dict[str, Any]) -> dict[str, Any]:
    """The recording of a cut."""
    source = {"type": "file", "channels": [0], "source": f"audio/{line['audio_filepath']}"}
    return {"id": "r", "sources": [source], "channel_ids": [0]}


def hugging_face(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as datasets writes them: a struct in the column audio, and the text in another column."""
    names = ("offset", "duration", "context", "system_prompt")
    return [
        {"audio": {"bytes": row["audio"], "path": row["audio_filepath"]}, "sentence": row["text"]}
        | {name: row.get(name) for name in names}
        for row in rows
    ]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut(line: dict[str, Any]) -> dict[str, Any]:
    custom = {k: line[k] for k in ("context", "system_prompt") if k in line}
    supervisions = [{"start": 0.0, "duration": line["duration"], "text": line["text"]}]
    made = {"id": line["audio_filepath"], "start": line["offset"], "duration": line["duration"], "channel": 0}
    return made | {"supervisions": supervisions, "custom": custom or None, "type": "MonoCut"}


def named(folder: Path, *kinds: str) -> dict[str, Any]:
    """The fields of DataConfig that name the sets of these kinds."""
    tars = f"{folder}/tarred/audio__OP_0..2_CL_.tar"
    paths = {"plain": "plain/m.jsonl", "tarred": f"tarred/manifest__OP_0..2_CL_.json::{tars}", "shar": "shar"}
    paths |= {
        "cuts": "cuts/cuts_{0..1}.jsonl",
        "parquet": "parquet",
        "arrow": "arrow/data-{00000..00001}-of-00002.arrow",
    }
    return {"manifest": tuple(f"{folder}/{paths[k]}" for k in kinds)}


def config(folder: Path, *kinds: str, **data: Any) -> Config:
    masks = SpecAugmentConfig(freq=(1, 4), time=(2, 0.2))
    defaults = {"validation_manifest": "", "workers": 0, "rows": 2, "capacity": 128}
    defaults |= {"audio_capacity": 512, "max_documents": 4, "packing_bins": 3, "spec_augment": masks}
    return Config(
        data=DataConfig(**{**named(folder, *kinds), **defaults, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=0.5)),
    )


def stream(
    settings: Config, workdir: Path, steps: int, state: Any = None
) -> tuple[list[Any], Any, SpeechData]:
    """(that many steps, the position after them, the data), from a position or the start."""
    workdir.mkdir(exist_ok=True)
    data = SpeechData(settings, workdir)
    with data.training() as loader:
        if state is not None:
            loader.set_state(state)
        found = list(islice(loader, steps))
        position = json.loads(json.dumps(loader.get_state()))
    data.close()
    return found, position, data


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for (batch, report), (other, other_report) in zip(found, expected, strict=True):
        assert report == other_report
        for x, y in zip(*map(jax.tree.leaves, (batch, other)), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_same_recordings_make_the_same_batches_bit_for_bit(folder, tmp_path, kind):
    plain, _, data = stream(config(folder, "plain"), tmp_path / "plain", 7)
    same, _, other = stream(config(folder, kind), tmp_path / kind, 7)
    assert_same(same, plain)
    listed = [
        [
            (line["key"], line["reason"].partition(": ")[2])
            for line in map(json.loads, d.skipped.path.read_text().splitlines())
        ]
        for d in (data, other)
    ]
    assert [key for key, _ in listed[0]] == [key for key, _ in listed[1]] == ["8:7.wav"]
    assert "libsndfile cannot read it" in listed[1][0][1]


WEIGHTS = (1.0, 2.0, 3.0, 2.0, 1.0, 2.0)[: len(KINDS)]


def test_a_mixture_stopped_in_mid_epoch_goes_on_as_if_it_had_not_been(folder, tmp_path):
    """And is, bit for bit, the mixture of plain sets; with worker processes, too."""
    mixed, plain = (config(folder, *kinds, weights=WEIGHTS) for kinds in (KINDS, ("plain",) * len(KINDS)))
    whole, _, _ = stream(mixed, tmp_path / "whole", 14)
    assert_same(whole, stream(plain, tmp_path / "plain", 14)[0])
    drawn = [key.count("/") and int(key[0]) for _, report in whole for row in report.keys for key in row]
    shares = np.bincount(drawn) / len(drawn)
    np.testing.assert_allclose(shares, np.array(WEIGHTS) / sum(WEIGHTS), atol=0.08)
    ahead = replace(mixed, data=replace(mixed.data, workers=1))
    for stop, (before, after) in ((1, (mixed, ahead)), (9, (ahead, mixed))):
        first, position, _ = stream(before, tmp_path / f"a{stop}", stop)
        rest, _, _ = stream(after, tmp_path / f"b{stop}", 14 - stop, position)
        assert_same(first + rest, whole)


def test_a_process_opens_the_recordings_of_its_own_rows(folder, tmp_path, monkeypatch):
    opened: list[tuple[str, float]] = []
    original = speech.load_audio

    def noted(path: Path, offset: float, *rest: Any, **more: Any) -> Any:
        opened.append((Path(path).name, offset))
        return original(path, offset, *rest, **more)

    monkeypatch.setattr(speech, "load_audio", noted)
    settings = config(folder, *KINDS, weights=WEIGHTS, validation_manifest=f"{folder}/shar")
    data = SpeechData(settings, tmp_path)
    seen = []
    for rows in ([0], [1], [0, 1]):
        opened.clear()
        with data.validation(rows) as loader:
            keys = [key for _, report in loader for row in report.keys for key in row]
        seen.append((set(opened), set(keys)))
    (first, first_keys), (second, second_keys), (both, both_keys) = seen
    assert first | second == both
    assert not first & second
    assert first_keys | second_keys == both_keys
    assert len(both) == LINES == len(both_keys) + 1


def test_validation_reads_tar_files_and_shar(folder, tmp_path):
    base = config(folder, "plain")
    batches = []
    for kind in KINDS:
        data = replace(base.data, validation_manifest=named(folder, kind)["manifest"][0])
        with SpeechData(replace(base, data=data), tmp_path).validation() as loader:
            batches.append(list(loader))
        (source,) = validation_sources(data).values()
        assert source.setting.field == "data.validation_manifest"
    for batch in batches[1:]:
        assert_same(batch, batches[0])


def test_the_planner_measures_the_same_lengths_and_decodes_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    lengths = []
    for kind in KINDS:
        (examples,) = planned.read_examples(config(folder, kind))
        lengths.append(planned.measure(examples, config(folder, kind)))
    for found, unusable in lengths:
        assert unusable == lengths[0][1]
        assert len(found.tokens) == LINES
        for x, y in zip(found, lengths[0][0], strict=True):
            assert np.asarray(x == y).all()
    bare = tmp_path / "bare.json"
    names = ("4.wav", "4-sub1.wav", "7.wav")
    write(bare, [{"audio_filepath": name, "text": "x", "offset": 0.25} for name in names])
    settings = config(folder, "plain", manifest=(f"{bare}::{folder}/tarred/audio_1.tar",))
    (examples,) = planned.read_examples(settings)
    seconds = soundfile.info(folder / "plain" / "4.wav").duration - 0.25
    samples = [planned.clip_samples(clip) for example in examples for clip in example.clips]
    assert samples == [pytest.approx(16_000 * seconds, abs=1)] * 2 + [0]


def test_a_position_belongs_to_what_was_read_wherever_it_lies(folder, tmp_path):
    settings = config(folder, *KINDS, weights=WEIGHTS)
    whole, _, _ = stream(settings, tmp_path / "run", 8)
    _, position, _ = stream(settings, tmp_path / "run", 3)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    there = config(moved, *KINDS, weights=WEIGHTS)
    assert_same(stream(there, tmp_path / "there", 5, position)[0], whole[3:])
    changes: dict[str, Callable[[bytes], bytes]] = {
        "plain/m.jsonl": lambda data: data.replace(b'x"', b'y"'),
        "tarred/manifest_2.json": lambda data: data.replace(b'x"', b'y"'),
        "tarred/audio_1.tar": lambda data: data + bytes(512),
        "shar/cuts.000001.jsonl": lambda data: data.replace(b'x"', b'y"'),
        "shar/recording.000000.tar": lambda data: data + bytes(512),
        "arrow/data-00001-of-00002.arrow": lambda data: data.replace("éx".encode(), "éy".encode()),
    }
    for name, change in changes.items():
        if not (moved / name).exists():
            continue  # without pyarrow
        file = moved / name
        before = file.read_bytes()
        file.write_bytes(change(before))
        with pytest.raises(UserError, match=r"another stream of documents \(manifest: "):
            stream(there, tmp_path / "changed", 1, position)
        file.write_bytes(before)
    stream(there, tmp_path / "there", 1, position)
    shards = replace(there, data=replace(there.data, manifest=there.data.manifest[::-1]))
    with pytest.raises(UserError, match=r"another stream of documents \(manifest: "):
        stream(shards, tmp_path / "changed", 1, position)


def test_how_a_manifest_is_cut_into_shards_does_not_matter(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    lines = (folder / "plain" / "m.jsonl").read_bytes().splitlines(keepends=True)
    shutil.copytree(folder / "plain", tmp_path, dirs_exist_ok=True)
    for shard, own in enumerate((lines[:5], lines[5:6], lines[6:])):
        (tmp_path / f"m_{shard}.jsonl").write_bytes(b"".join(own))
    whole, position, _ = stream(config(folder, "plain"), tmp_path / "a", 4)
    cut_up = config(folder, "plain", manifest=(f"{tmp_path}/m_{{0..2}}.jsonl",))
    assert_same(stream(cut_up, tmp_path / "b", 4)[0], whole)
    stream(cut_up, tmp_path / "b", 1, position)


def test_sets_that_are_not_named_as_they_lie_are_refused(folder, tmp_path):
    base = config(folder, "plain", "shar")
    tars = replace(base.data, manifest=(f"{folder}/shar::a.tar",))
    with pytest.raises(UserError, match=r"shar \(data\.manifest\) is a folder, and a\.tar its tar files"):
        SpeechData(replace(base, data=tars), tmp_path)
    with pytest.raises(UserError, match=r"plain holds no cuts.*data\.validation_manifest"):
        SpeechData(replace(base, data=replace(base.data, validation_manifest=f"{folder}/plain")), tmp_path)
