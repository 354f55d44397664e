"""Data sets in a real S3 server, moto's: each kind of set is what it is on a disk. Nightly:

    python -m pytest -m nightly tests/stores --python-reference PYTHON

PYTHON has moto: pip install "moto[server]".
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.config.data import AugmentConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Example
from jaxthd.data.sources.noises import read_augmentation
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.sources.tarred import index_tar
from jaxthd.errors import StorageError, UserError
from jaxthd.files import remote_path, stores
from jaxthd.files.remote_path import as_path
from jaxthd.index import main as index
from tests.data.sets import sound, write_parquet, write_tar
from tests.stores.servers import SECRET, Server

pytestmark = pytest.mark.nightly


def upload(folder: Path, s3: Server, to: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put(f"{to}/{path.relative_to(folder)}", path.read_bytes())
    return f"{s3.url}/{to}"


def cut(name: str, **more: Any) -> str:
    supervisions = [{"id": name, "start": 0.0, "duration": 1.0, "channel": 0, "text": name}]
    plain = {"id": name, "start": 0.0, "duration": 1.0, "channel": 0, "type": "MonoCut"}
    return json.dumps(plain | {"supervisions": supervisions} | more) + "\n"


def make_sets(folder: Path) -> dict[str, str]:
    """A set of each kind in the folder: what names it, by kind."""
    names = [f"r{n}" for n in range(6)]
    sounds = {name: sound(1 + n / 8, seed=n) for n, name in enumerate(names)}
    for name in names:
        (folder / f"{name}.wav").write_bytes(sounds[name])
    lines = [{"audio_filepath": f"{name}.wav", "text": name, "duration": 1} for name in names]
    for n in (0, 1):
        half = lines[3 * n : 3 * n + 3]
        (folder / f"m_{n}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in half))
        write_tar(folder / f"a_{n}.tar", {x["audio_filepath"]: sounds[x["text"]] for x in half})
    shar = folder / "shar"
    shar.mkdir()
    for n in (0, 1):
        half = names[3 * n : 3 * n + 3]
        (shar / f"cuts.{n:06d}.jsonl").write_text("".join(map(cut, half)))
        write_tar(shar / f"recording.{n:06d}.tar", {f"{name}.wav": sounds[name] for name in half})
    recordings = {
        name: {"id": name, "sources": [{"type": "file", "channels": [0], "source": f"{name}.wav"}]}
        | {"sampling_rate": 16_000, "num_samples": 16_000, "duration": 1.0}
        for name in names
    }
    (folder / "cuts.jsonl").write_text("".join(cut(name, recording=recordings[name]) for name in names))
    tables = folder / "tables"
    tables.mkdir()
    rows = [{"audio": {"bytes": sounds[name], "path": None}, "text": name} for name in names]
    write_parquet(tables / "train-00000-of-00001.parquet", rows)
    return {
        "lines": "m_{0..1}.jsonl",
        "tars": "m_{0..1}.jsonl::a_{0..1}.tar",
        "shar": "shar",
        "cuts": "cuts.jsonl",
        "tables": "tables",
        "table": "tables/train-00000-of-00001.parquet",
    }


def read(path: str, tars: str = "") -> tuple[list[Example], str]:
    source = open_source(SourceSetting(path, tarred_audio=tars))
    examples, skipped = read_source(source, DataConfig())
    assert skipped == []
    return examples, source.digest()


def test_each_kind_of_set_is_what_it_is_on_a_disk(tmp_path, s3):
    there = f"{s3.url}/sets"
    sets = make_sets(tmp_path)
    upload(tmp_path, s3, "sets")
    for kind, named in sets.items():
        path, _, tars = named.partition("::")
        both = [read(f"{root}/{path}", tars and f"{root}/{tars}") for root in (there, tmp_path)]
        (remote, digest), (local, expected) = both
        assert digest == expected, kind
        assert [x.key for x in remote] == [x.key for x in local]
        for a, b in zip(remote, local, strict=True):
            ours, theirs = (
                load_audio(c.path, c.offset, c.duration, member=c.member) for c in (a.clips[0], b.clips[0])
            )
            np.testing.assert_array_equal(ours, theirs, err_msg=kind)


def test_index_files_in_the_store_spare_other_machines_the_headers(tmp_path, s3, monkeypatch, capsys):
    content = {f"{n}.wav": random.Random(n).randbytes(200_000) for n in range(90)}
    size = write_tar(tmp_path / "large.tar", content).stat().st_size
    s3.put("indexed/large.tar", (tmp_path / "large.tar").read_bytes())
    index([f"{s3.url}/indexed/large.tar"])
    assert "1 index files written" in capsys.readouterr().out
    assert "large.tar.index" in stores.listed(f"{s3.url}/indexed").files
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    remote_path._cache.cache_clear()
    remote_path._pinned.clear()
    before = s3.seen()["bytes"]
    assert index_tar(as_path(f"{s3.url}/indexed/large.tar")).members.keys() == content.keys()
    assert s3.seen()["bytes"] - before < size / 15


def test_noises(tmp_path, s3):
    make_sets(tmp_path)
    upload(tmp_path, s3, "noises")
    found = read_augmentation(AugmentConfig(noise_manifest=f"{s3.url}/noises/m_0.jsonl"))
    assert len(found.augmentation.noises) == 3


def test_a_list_that_lags_is_no_smaller_data_set(tmp_path, s3):
    """A shard that the store's list does not show yet is missed: the set's index lists it."""
    make_sets(tmp_path)
    index = {"fields": {"cuts": [f"cuts.{n:06d}.jsonl" for n in (0, 1)]}}
    (tmp_path / "shar" / "shar_index.json").write_text(json.dumps(index))
    last = {
        name: (tmp_path / "shar" / name).read_bytes()
        for name in ("cuts.000001.jsonl", "recording.000001.tar")
    }
    for name in last:
        (tmp_path / "shar" / name).unlink()
    url = upload(tmp_path, s3, "lag") + "/shar"
    s3.faults({"match": "list-type=2", "kind": "lag"})
    assert len(list(as_path(url).iterdir())) == 3
    for name, content in last.items():
        s3.put(f"lag/shar/{name}", content)
    assert len(list(as_path(url).iterdir())) == 3
    with pytest.raises(UserError, match=r"lists 2 files .* of which 1 are not among"):
        read(url)
    s3.faults()
    assert len(read(url)[0]) == 6


def test_credentials_are_asked_for_and_never_shown(s3, monkeypatch):
    s3.put("plain", b"x")
    s3.faults({"match": "", "kind": "403"})
    with pytest.raises(StorageError, match=r"^s3://speech/plain: the store refuses to read it") as refused:
        as_path(f"{s3.url}/plain").is_file()
    assert "AWS_ACCESS_KEY_ID and its like" in str(refused.value)
    s3.faults()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    stores._store.cache_clear()
    with pytest.raises(StorageError, match=r"^s3://speech/plain: ") as absent:
        as_path(f"{s3.url}/plain").is_file()
    for error in (refused, absent):
        assert SECRET not in str(error.value)
        assert "an-access-key" not in str(error.value)


def test_writing_replaces_what_was_seen_alone(s3):
    url = f"{s3.url}/marker"
    first = stores.write(url, b"1", replacing="")
    with pytest.raises(stores.ConflictError):
        stores.write(url, b"2", replacing="")
    second = stores.write(url, b"2", replacing=first)
    with pytest.raises(stores.ConflictError):
        stores.write(url, b"3", replacing=first)
    s3.faults({"match": "^PUT", "kind": "lost", "times": 1})
    third = stores.write(url, b"3", replacing=second)  # done the first time, and no answer came
    assert stores.read_now(url)[0] == b"3"
    stores.delete([url, url])
    remote_path._pinned.clear()
    assert not as_path(url).is_file()
    assert third
