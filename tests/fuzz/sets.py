"""Data sets of several containers, of which one is damaged, missing or of another form.

Each of these functions writes a data set of 2 or 3 parts with 1 to 3 items each, one kind of damage, and
returns what must become of the items.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from jaxthd.data.sources.source import SourceSetting
from tests.fuzz.checks import Written
from tests.fuzz.lines import CUT


class Parts(NamedTuple):
    """The names of the items of each part, such as ["a0", "a1"], ["b0"]."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> "Parts":
        sizes = rng.integers(1, 4, rng.integers(2, 4))
        return cls(tuple(tuple(f"{'abc'[p]}{i}" for i in range(n)) for p, n in enumerate(sizes)))

    @property
    def items(self) -> dict[int, str]:
        return dict(enumerate((name for part in self.names for name in part), 1))

    def numbers(self, part: int, first: int = 0) -> frozenset[int]:
        """The numbers of a part's items from its item `first` on."""
        before = sum(map(len, self.names[:part]))
        return frozenset(range(before + 1 + first, before + 1 + len(self.names[part])))


WAVE = "s16.wav"
"""A sound recording of the folder."""


def damaged_container(rng: np.random.Generator, path: Path, *, cut_from: int = 1) -> tuple[str, bool | None]:
    """Takes a container away, empties it, cuts it or changes its form; says what it did, and whether the run
    must stop. cut_from: fewest bytes that a cut leaves."""
    data = path.read_bytes()
    match rng.integers(6):
        case 0:
            path.unlink()
            return f"{path.name} is gone", True
        case 1:
            path.write_bytes(b"")
            return f"{path.name} is empty", True
        case 2:
            size = int(rng.integers(cut_from, len(data)))
            path.write_bytes(data[:size])
            return f"{path.name} is cut at {size} of {len(data)} bytes", True
        case 3:
            forms: list[Callable[[bytes], bytes]] = [bz2.compress, lzma.compress, _html, _pointer]
            form = int(rng.integers(len(forms)))
            path.write_bytes(forms[form](data))
            return f"{path.name} is of form {form}", True
        case 4:
            path.unlink()
            path.mkdir()
            return f"{path.name} is a folder", True
        case _:
            at = int(rng.integers(len(data)))
            changed = bytearray(data)
            changed[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            return f"byte {at} of {path.name} is changed", None


def _html(_: bytes) -> bytes:
    return b"<!DOCTYPE html><html><body>404</body></html>\n"


def _pointer(_: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n"


def lines(rng: np.random.Generator, folder: Path) -> Written:
    """Manifests that braces name, plain or compressed."""
    parts, suffix = Parts.drawn(rng), str(rng.choice([".jsonl", ".json", ".jsonl.gz"]))
    for number, names in enumerate(parts.names):
        text = b""
        for name in names:
            (folder / f"{name}.wav").symlink_to(folder.parent / WAVE)
            text += json.dumps({"audio_filepath": f"{name}.wav", "text": "one two"}).encode() + b"\n"
        (folder / f"p{number}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    setting = SourceSetting(f"{folder}/p{{0..{len(parts.names) - 1}}}{suffix}")
    items = {number: f"{name}.wav" for number, name in parts.items.items()}
    at = int(rng.integers(len(parts.names)))
    path = folder / f"p{at}{suffix}"
    sound = Written(setting, items, "nothing", False, frozenset(), dict.fromkeys(items, 1))
    match rng.integers(5):
        case 0:
            return sound
        case 1:
            lost = int(rng.choice(list(items)))
            (folder / items[lost]).unlink()
            return sound._replace(damage=f"{items[lost]} is gone", lost=frozenset({lost}))
        case 2:
            more = path.read_bytes()
            path.write_bytes(b"" if suffix.endswith("gz") else b"\xef\xbb\xbf" + more)
            if suffix.endswith("gz"):
                first, _, rest = gzip.decompress(more).partition(b"\n")
                path.write_bytes(gzip.compress(first + b"\n") + gzip.compress(rest))
            return sound._replace(damage="joined gzip streams, or a byte order mark")
    data = path.read_bytes()
    damage, stops = damaged_container(rng, path, cut_from=data[:-1].rfind(b"\n") + 2)
    if "changed" in damage and not suffix.endswith("gz"):
        # A byte of plain text: the line may be another, or two.
        found = path.read_bytes().splitlines()
        if len(found) != len(data.splitlines()):
            path.write_bytes(data)
            return sound
        changed = parts.numbers(at)
        items = {n: "" if n in changed else name for n, name in items.items()}
        return Written(setting, items, damage)
    return sound._replace(damage=damage, stops=stops, lost=None)


def tables(rng: np.random.Generator, folder: Path) -> Written:
    """A folder of parquet or arrow files whose names or records count them."""
    parts, suffix = Parts.drawn(rng), str(rng.choice([".parquet", ".arrow"]))
    paths = [folder / f"train-{n:05d}-of-{len(parts.names):05d}{suffix}" for n in range(len(parts.names))]
    wave = (folder.parent / WAVE).read_bytes()
    for path, names in zip(paths, parts.names, strict=True):
        rows = [{"audio": {"bytes": wave, "path": f"{n}.wav"}, "text": "one two", "id": n} for n in names]
        write_table(rng, path, pyarrow.Table.from_pylist(rows))
    counts = len(parts.items)
    if rng.random() < 0.5:
        splits = {"train": {"name": "train", "num_examples": counts}}
        (folder / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    at = int(rng.integers(len(paths)))
    unnamed = dict.fromkeys(parts.items, "")
    sound = Written(
        SourceSetting(str(folder)), unnamed, "nothing", False, frozenset(), dict.fromkeys(unnamed, 1)
    )
    match rng.integers(6):
        case 0:
            return sound
        case 1:
            table = pyarrow.Table.from_pylist([{"text": "one", "id": name} for name in parts.names[at]])
            kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
            table = table.add_column(0, "audio", pyarrow.nulls(table.num_rows, kind))
            write_table(rng, paths[at], table)
            return sound._replace(damage=f"no recordings in {paths[at].name}", lost=parts.numbers(at))
        case 2:
            schema = open_schema(paths[at])
            write_table(rng, paths[at], schema.empty_table())
            return sound._replace(damage=f"no rows in {paths[at].name}", stops=True)
    damage, stops = damaged_container(rng, paths[at])
    return sound._replace(damage=damage, stops=stops, lost=None)


def open_schema(path: Path) -> pyarrow.Schema:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_schema(path)
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    opened = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    return opened(path.read_bytes()).schema


def write_table(rng: np.random.Generator, path: Path, table: pyarrow.Table) -> None:
    group = int(rng.integers(1, 4))
    if path.suffix == ".parquet":
        codec = str(rng.choice(["none", "snappy", "zstd", "gzip"]))
        pyarrow.parquet.write_table(table, path, row_group_size=group, compression=codec)
        return
    make = pyarrow.ipc.new_stream if rng.random() < 0.7 else pyarrow.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _damaged_tar(
    rng: np.random.Generator, path: Path, members: list[tuple[str, bytes]], names: tuple[str, ...]
) -> tuple[str, bool | None, int, int]:
    """Writes the tar file damaged. Returns what was done, whether the run must stop, and the first and last
    of `names` that are lost; none of them if the first is not less than the last."""
    each = len(members) // len(names)
    at = int(rng.integers(len(names)))
    data = tar_of(members)
    match rng.integers(6):
        case 0:
            if len(names) > 1:
                path.write_bytes(tar_of(members[: at * each] + members[(at + 1) * each :]))
                return f"{names[at]} is not in {path.name}", False, at, at + 1
        case 1:
            if at:
                path.write_bytes(tar_of(members[: at * each]) + tar_of(members[at * each :]))
                return f"{path.name} is two tar files joined", False, at, len(names)
        case 2:
            if at:
                with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                    found = tar.getmembers()[at * each]
                # Inside of the recording, or where the one before ends.
                size = found.offset_data + 100 if rng.random() < 0.5 else found.offset
                path.write_bytes(data[:size])
                return f"{path.name} is cut at {size} of {len(data)} bytes", False, at, len(names)
        case 3:
            path.write_bytes(gzip.compress(data))
            return f"{path.name} is compressed", True, 0, 0
        case 4:
            path.write_bytes(bytes(10_240))
            return f"{path.name} has no member", True, 0, 0
    path.write_bytes(data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512))
    return f"{path.name} has no end mark", False, 0, 0


def shar(rng: np.random.Generator, folder: Path) -> Written:
    """A Lhotse Shar directory."""
    parts, suffix = Parts.drawn(rng), str(rng.choice([".jsonl", ".jsonl.gz"]))
    wave = (folder.parent / WAVE).read_bytes()
    members = [
        [m for n in names for m in ((f"{n}.wav", wave), (f"{n}.json", b"{}"))] for names in parts.names
    ]
    for number, names in enumerate(parts.names):
        text = b"".join(json.dumps(CUT | {"id": name}).encode() + b"\n" for name in names)
        cuts = folder / f"cuts.{number:06d}{suffix}"
        cuts.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
        (folder / f"recording.{number:06d}.tar").write_bytes(tar_of(members[number]))
    items, at = parts.items, int(rng.integers(len(parts.names)))
    sound = Written(SourceSetting(str(folder)), items, "nothing", False, frozenset(), dict.fromkeys(items, 1))
    cuts, tar = folder / f"cuts.{at:06d}{suffix}", folder / f"recording.{at:06d}.tar"
    match rng.integers(6):
        case 0:
            return sound
        case 1 if len(parts.names) == 3:
            (folder / f"cuts.000001{suffix}").unlink()
            (folder / "recording.000001.tar").unlink()
            return sound._replace(damage="the second of three shards is gone", stops=True)
        case 2 | 3:
            return _of_tar(sound, parts, at, _damaged_tar(rng, tar, members[at], parts.names[at]))
    if rng.random() < 0.3:
        tar.unlink()
        return sound._replace(damage=f"{tar.name} is gone", stops=True)
    data = cuts.read_bytes()
    damage, stops = damaged_container(rng, cuts, cut_from=data[:-1].rfind(b"\n") + 2)
    if "changed" in damage and suffix == ".jsonl":
        cuts.write_bytes(data)
        return sound
    return sound._replace(damage=damage, stops=stops, lost=None)


def _of_tar(sound: Written, parts: Parts, at: int, done: tuple[str, bool | None, int, int]) -> Written:
    damage, stops, first, last = done
    lost = frozenset(sorted(parts.numbers(at))[first:last])
    return sound._replace(damage=damage, stops=stops, lost=lost)


def tarred(rng: np.random.Generator, folder: Path) -> Written:
    """NeMo's tarred data set: a manifest for each tar file, or one whose lines name it."""
    parts, wave = Parts.drawn(rng), (folder.parent / WAVE).read_bytes()
    many, last = rng.random() < 0.5, len(parts.names) - 1
    manifests = [folder / (f"m_{n}.json" if many else "m.json") for n in range(last + 1)]
    members = [[(f"{name}.wav", wave) for name in names] for names in parts.names]
    for number, names in enumerate(parts.names):
        entries = [{"audio_filepath": f"{n}.wav", "text": "one two", "shard_id": number} for n in names]
        with manifests[number].open("a") as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in entries))
        (folder / f"audio_{number}.tar").write_bytes(tar_of(members[number]))
    items = {number: f"{name}.wav" for number, name in parts.items.items()}
    path = f"{folder}/m_{{0..{last}}}.json" if many else f"{folder}/m.json"
    setting = SourceSetting(path, tarred_audio=f"{folder}/audio_{{0..{last}}}.tar")
    sound = Written(setting, items, "nothing", False, frozenset(), dict.fromkeys(items, 1))
    at = int(rng.integers(last + 1))
    tar = folder / f"audio_{at}.tar"
    match rng.integers(5):
        case 0:
            return sound
        case 1:
            tar.unlink()
            return sound._replace(damage=f"{tar.name} is gone", stops=True)
        case 2:
            text = json.dumps({"dataset_config": {"num_shards": last + 2}})
            (folder / "metadata.yaml").write_text(text)
            return sound._replace(damage=f"metadata.yaml counts {last + 2} tar files", stops=True)
    return _of_tar(sound, parts, at, _damaged_tar(rng, tar, members[at], parts.names[at]))


SETS: dict[str, Callable[[np.random.Generator, Path], Written]] = {
    "set: lines": lines,
    "set: tables": tables,
    "set: shar": shar,
    "set: tar files": tarred,
}
