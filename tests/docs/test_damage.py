"""The table of damage in docs/data.md: each row is made as files, and read as a run reads it."""

import base64
import gzip
import json
import lzma
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError
from tests.data.sets import sound, write_arrow, write_parquet, write_tar

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
GOOD = 4
"""Items of every set that nothing is wrong with."""
Made = tuple[str, str]
"""(the manifest, its tar files)"""
DAMAGE: dict[tuple[str, str], Callable[[Path], Made]] = {}


def damage(source: str, what: str) -> Callable[[Callable[[Path], Made]], Callable[[Path], Made]]:
    """Registers what makes the set of a row of the page's table."""

    def register(make: Callable[[Path], Made]) -> Callable[[Path], Made]:
        DAMAGE[source, what] = make
        return make

    return register


def line(name: str, **more: Any) -> dict[str, Any]:
    return {"audio_filepath": name, "text": "one", **more}


def good(folder: Path) -> list[dict[str, Any]]:
    for number in range(GOOD):
        (folder / f"{number}.wav").write_bytes(sound(0.5, seed=number))
    return [line(f"{number}.wav") for number in range(GOOD)]


def manifest(folder: Path, *bad: dict[str, Any] | str, name: str = "m.jsonl") -> str:
    lines = [x if isinstance(x, str) else json.dumps(x) for x in [*good(folder), *bad]]
    (folder / name).write_text("".join(f"{x}\n" for x in lines))
    return str(folder / name)


# --- manifests ---


@damage("manifests", "a line that is no JSON object")
def _(folder: Path) -> Made:
    return manifest(folder, "{'audio_filepath': 'a.wav'}"), ""


@damage("manifests", 'a field of another type: `"duration": "2 s"`')
def _(folder: Path) -> Made:
    return manifest(folder, line("0.wav", duration="2 s")), ""


@damage("manifests", "a recording that is not there, or that nothing can decode")
def _(folder: Path) -> Made:
    (folder / "noise.wav").write_bytes(bytes(1000))
    return manifest(folder, line("gone.wav"), line("noise.wav")), ""


@damage("manifests", "a recording that ends before the line's `duration`, or before its own header says")
def _(folder: Path) -> Made:
    (folder / "cut.wav").write_bytes(sound(0.5)[:8000])
    return manifest(folder, line("0.wav", duration=2.0), line("cut.wav")), ""


@damage("manifests", "a recording in a field that is not read: `wav`, `audio_path`")
def _(folder: Path) -> Made:
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "One."}]
    return manifest(folder, {"messages": chat, "wav": "0.wav"}, {"messages": chat, "audio_path": "0.wav"}), ""


@damage("manifests", "a placeholder without a recording: `<audio>` in the text of a line that lists none")
def _(folder: Path) -> Made:
    chat = [{"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "One."}]
    return manifest(folder, {"messages": chat}), ""


@damage("manifests", "a last line that is cut in its middle")
def _(folder: Path) -> Made:
    path = Path(manifest(folder, line("0.wav")))
    path.write_text(path.read_text()[:-15])
    return str(path), ""


@damage("manifests", "a `.gz` file that is cut, or damaged anywhere")
def _(folder: Path) -> Made:
    packed = gzip.compress(Path(manifest(folder)).read_bytes())
    (folder / "m.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    return str(folder / "m.jsonl.gz"), ""


@damage("manifests", "a file without a line, also one of several")
def _(folder: Path) -> Made:
    manifest(folder, name="m_0.jsonl")
    (folder / "m_1.jsonl").write_text("")
    return str(folder / "m_{0..1}.jsonl"), ""


@damage("manifests", "a file of those in braces that is not there")
def _(folder: Path) -> Made:
    manifest(folder, name="m_0.jsonl")
    return str(folder / "m_{0..1}.jsonl"), ""


@damage("manifests", "another form: `.xz`, `.zst`, UTF-16, one JSON array")
def _(folder: Path) -> Made:
    (folder / "m.jsonl.xz").write_bytes(lzma.compress(Path(manifest(folder)).read_bytes()))
    return str(folder / "m.jsonl.xz"), ""


# --- tar files ---


def tarred(folder: Path, *bad: dict[str, Any], members: int = GOOD) -> tuple[str, Path]:
    path = manifest(folder, *bad)
    return path, write_tar(folder / "a.tar", {f"{n}.wav": sound(0.5, seed=n) for n in range(members)})


@damage("tar files", "a member that a line names and that is not there")
def _(folder: Path) -> Made:
    path, tar = tarred(folder, line("gone.wav"))
    return path, str(tar)


@damage("tar files", "a tar file that is cut: the members after the cut")
def _(folder: Path) -> Made:
    path, tar = tarred(folder, line(f"{GOOD}.wav"), members=GOOD + 1)
    tar.write_bytes(tar.read_bytes()[: (GOOD + 1) * 17_408 - 4000])
    return path, str(tar)


@damage("tar files", "no end mark, where all members that lines name are there")
def _(folder: Path) -> Made:
    path, tar = tarred(folder)
    tar.write_bytes(tar.read_bytes().rstrip(b"\0"))
    data = tar.read_bytes()
    tar.write_bytes(data + bytes(-len(data) % 512))
    return path, str(tar)


@damage("tar files", "members after the end mark, as of two files joined by `cat`")
def _(folder: Path) -> Made:
    path, tar = tarred(folder, line("other.wav"))
    other = write_tar(folder / "b.tar", {"other.wav": sound(0.5)})
    tar.write_bytes(tar.read_bytes() + other.read_bytes())
    return path, str(tar)


@damage("tar files", "a tar file without a member, or that is compressed")
def _(folder: Path) -> Made:
    path, tar = tarred(folder)
    tar.write_bytes(gzip.compress(tar.read_bytes()))
    return path, str(tar)


@damage("tar files", "a tar file of those in braces that is not there")
def _(folder: Path) -> Made:
    path, _ = tarred(folder)
    return path, str(folder / "a_{0..1}.tar")


# --- Lhotse ---


def cut(name: str, **more: Any) -> dict[str, Any]:
    spoken = {"id": name, "start": 0.0, "duration": 0.5, "channel": 0, "text": "one"}
    recording = {"sources": [{"type": "file", "channels": [0], "source": f"{name}.wav"}], "channel_ids": [0]}
    timed = {"start": 0.0, "duration": 0.5, "channel": 0}
    return {"id": name, "supervisions": [spoken], "recording": recording, "type": "MonoCut", **timed, **more}


def cuts(folder: Path, *bad: dict[str, Any]) -> str:
    good(folder)
    lines = [cut(str(n)) for n in range(GOOD)] + list(bad)
    (folder / "cuts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(folder / "cuts.jsonl")


@damage("Lhotse cuts", "features alone, a mixed cut, a recording by URL")
def _(folder: Path) -> Made:
    url = {"sources": [{"type": "url", "channels": [0], "source": "x"}], "channel_ids": [0]}
    bad = [cut("a", recording=None, features={}), cut("b", type="MixedCut"), cut("c", recording=url)]
    return cuts(folder, *bad), ""


@damage("Lhotse cuts", "a supervision that lies outside of its cut")
def _(folder: Path) -> Made:
    outside = {"id": "s", "start": 3.0, "duration": 1.0, "channel": 0, "text": "two"}
    return cuts(folder, cut("0", supervisions=[outside])), ""


def shar(folder: Path, shards: int = 2) -> Path:
    for shard in range(shards):
        names = [str(n) for n in range(GOOD)][shard::shards]
        write_tar(
            folder / f"recording.{shard:06}.tar",
            {f"{name}.wav": sound(0.5, seed=int(name)) for name in names}
            | {f"{name}.json": b"{}" for name in names},
        )
        text = "".join(json.dumps(cut(name)) + "\n" for name in names)
        (folder / f"cuts.{shard:06}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@damage("Shar", "a shard without cuts or without recordings, a gap in the shards' numbers")
def _(folder: Path) -> Made:
    (shar(folder, 3) / "cuts.000001.jsonl.gz").unlink()
    return str(folder), ""


@damage("Shar", "a file of cuts or of a field that is cut or empty")
def _(folder: Path) -> Made:
    path = shar(folder) / "cuts.000001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    return str(folder), ""


@damage("Shar", "a cut whose recording is not in the tar file")
def _(folder: Path) -> Made:
    path = shar(folder) / "cuts.000001.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()) + json.dumps(cut("gone")).encode() + b"\n"
    path.write_bytes(gzip.compress(lines))
    return str(folder), ""


# --- tables ---


def rows(count: int = GOOD) -> list[dict[str, Any]]:
    return [{"audio": {"bytes": sound(0.5, seed=n), "path": f"{n}.wav"}, "text": "one"} for n in range(count)]


@damage("parquet and arrow", "a part that is not there: `train-00000-of-00003` alone in a folder")
def _(folder: Path) -> Made:
    write_parquet(folder / "train-00000-of-00003.parquet", rows())
    return str(folder), ""


@damage("parquet and arrow", "other numbers of rows than `dataset_info.json` counts")
def _(folder: Path) -> Made:
    write_parquet(folder / "train.parquet", rows())
    info = {"splits": {"train": {"name": "train", "num_examples": 9}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return str(folder), ""


@damage("parquet and arrow", "a file that is cut, or has no row")
def _(folder: Path) -> Made:
    path = write_arrow(folder / "a.arrow", rows())
    path.write_bytes(path.read_bytes()[:-20_000])
    return str(path), ""


@damage("parquet and arrow", "a damaged row group of a parquet file: all of its rows")
def _(folder: Path) -> Made:
    path = write_parquet(folder / "a.parquet", rows(GOOD + 2), group=GOOD)
    import pyarrow.parquet

    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(1)
    texts = next(
        group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "text"
    )
    data = bytearray(path.read_bytes())
    start = texts.dictionary_page_offset or texts.data_page_offset
    data[start : start + texts.total_compressed_size] = b"\xff" * texts.total_compressed_size
    path.write_bytes(data)
    return str(path), ""


@damage("parquet and arrow", "a cell that holds no recording")
def _(folder: Path) -> Made:
    bad = {"audio": {"bytes": b"no sound", "path": "x.wav"}, "text": "one"}
    return str(write_parquet(folder / "a.parquet", [*rows(), bad])), ""


@damage("parquet and arrow", "a column of recordings that is not read, and no other")
def _(folder: Path) -> Made:
    renamed = [{"speech": row["audio"], "text": row["text"]} for row in rows()]
    return str(write_parquet(folder / "a.parquet", renamed)), ""


# --- every source ---


@damage("every source", "channels that cancel each other, samples that are not finite, under 20 ms")
def _(folder: Path) -> Made:
    noise = np.random.default_rng(0).normal(0, 0.1, 8000)
    encoded = {}
    import soundfile

    for name, samples in {
        "phase.wav": np.stack([noise, -noise], axis=1),
        "nan.wav": np.full(8000, np.nan),
        "short.wav": noise[:100],
    }.items():
        soundfile.write(folder / name, samples, 16000, subtype="FLOAT")
        encoded[name] = base64.b64encode((folder / name).read_bytes())
    return manifest(folder, *map(line, encoded)), ""


@damage("every source", "more than `data.max_skipped_share` of a set, training or validation")
def _(folder: Path) -> Made:
    return manifest(folder, *[line(f"gone{n}.wav") for n in range(40)]), ""


# --- the page ---


def table() -> list[tuple[str, str, str]]:
    """(source, damage, what happens) of each row of the page."""
    part = PAGE.read_text().split("## Damage\n", 1)[1].split("\n## ", 1)[0]
    lines = [row for row in part.splitlines() if row.startswith("| ")]
    cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in lines]
    found, source = [], ""
    for first, what, outcome in cells[2:]:
        source = first or source
        found.append((source, what, outcome))
    return found


def test_the_page_has_every_kind_of_damage_once() -> None:
    assert [(source, what) for source, what, _ in table()] == list(DAMAGE)


def outcome_of(made: Made, workdir: Path, share: float) -> tuple[str, str]:
    """(what happens, what is said of it)."""
    config = Config(
        data=DataConfig(
            manifest=(f"{made[0]}::{made[1]}" if made[1] else made[0],),
            validation_manifest="",
            workers=0,
            packing="padded",
            capacity=64,
            max_skipped_share=share,
        ),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )
    workdir.mkdir()
    try:
        data = SpeechData(config, workdir)
        with data.training() as loader:
            keys = {key for _, report in islice(loader, 24) for row in report.keys for key in row}
            data.require_few_skipped()
    except (UserError, FileNotFoundError) as error:
        return "stops the run", str(error)
    listed = (workdir / "skipped.jsonl").read_text() if (workdir / "skipped.jsonl").exists() else ""
    assert len(keys) == GOOD, (keys, listed)
    return ("skipped and listed" if listed else "read, and said"), listed


@pytest.mark.parametrize(("source", "what", "outcome"), table())
def test_what_the_page_says_happens(
    source: str, what: str, outcome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    made = DAMAGE[source, what](folder)
    share = 0.1 if "max_skipped_share" in what else 0.9
    happened, said = outcome_of(made, tmp_path / "run", share)
    assert happened == outcome, said
    if outcome == "read, and said":
        assert re.search(r"end mark|ends early", capsys.readouterr().out)
    else:
        assert said
