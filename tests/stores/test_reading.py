"""Objects in stores are read as files are, through faults of the network; what is wrong is named."""

import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Member
from jaxthd.data.sources.tarred import index_tar
from jaxthd.data.workers import Workers
from jaxthd.errors import StorageError, UserError
from jaxthd.files import remote_path
from jaxthd.files.paths import home_path
from jaxthd.files.range_cache import RangeCache
from jaxthd.files.remote_path import BLOCK, RemotePath, as_path, open_range
from tests.data.sets import read_manifest, sound, write_tar
from tests.stores.servers import ROOT, Server

CONTENT = random.Random(0).randbytes(5 * BLOCK + 12345)


def loaded(url: str, epoch: int) -> bytes:
    """What a worker process does."""
    return as_path(url).read_bytes()


@pytest.fixture
def url(folder: Path, http: Server, request: pytest.FixtureRequest) -> str:
    """An object of this test alone."""
    http.faults()
    name = re.sub(r"\W+", "-", request.node.name)
    (folder / name).write_bytes(CONTENT)
    return f"{http.url}/{name}"


def test_an_object_is_read_as_a_file(url, http):
    path, local = home_path(url), io.BytesIO(CONTENT)
    assert (str(path), path.name, path.suffix) == (url, url.rpartition("/")[2], "")
    assert (path / "x.wav", path.with_name("b.tar")) == (
        as_path(url + "/x.wav"),
        as_path(http.url + "/b.tar"),
    )
    assert path / "/x.wav" == Path("/x.wav")
    assert path.is_file()
    assert not path.with_name("none").is_file()
    assert path.stat().st_size == len(CONTENT)
    draws = random.Random(1)
    with path.open("rb") as file:
        for _ in range(200):
            at, size = draws.randrange(len(CONTENT) + 10), draws.choice((1, 100, 5000, BLOCK, 3 * BLOCK))
            assert (file.seek(at), local.seek(at)) == (at, at)
            assert file.read(size) == local.read(size)
    before = http.seen()
    again = pickle.loads(pickle.dumps(path))
    assert again == path
    assert again.read_bytes() == CONTENT
    assert http.seen() == before  # all of it is in the cache, and the path has been looked at


def test_reading_fetches_what_is_asked_for(url, http):
    path = as_path(url)
    assert isinstance(path, RemotePath)
    before = http.seen().get("bytes", 0)
    assert path.range(1000, 4000) == CONTENT[1000:4000]
    assert path.range(1000, 4000) == CONTENT[1000:4000]
    assert http.seen()["bytes"] - before == 3000


def test_a_manifest_and_its_tar_file(folder, http, tmp_path):
    files = {
        f"{n}.{kind}": sound(1 + n / 4, seed=n, kind=kind) for n, kind in enumerate(("wav", "flac", "mp3"))
    }
    write_tar(folder / "audio.tar", files)
    (folder / "loose.wav").write_bytes(files["0.wav"])
    lines = [{"audio_filepath": name, "text": "one", "duration": 1} for name in files]
    (folder / "in_tar.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = {"audio_filepath": "loose.wav", "text": "one"}
    (folder / "loose.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "of_urls.jsonl").write_text(
        json.dumps(line | {"audio_filepath": f"{http.url}/loose.wav"}) + "\n"
    )
    examples, skipped = read_manifest(f"{http.url}/in_tar.jsonl", tarred_audio=f"{http.url}/audio.tar")
    local, _ = read_manifest(str(folder / "in_tar.jsonl"), tarred_audio=str(folder / "audio.tar"))
    for manifest in (f"{http.url}/loose.jsonl", tmp_path / "of_urls.jsonl"):
        examples += read_manifest(str(manifest))[0]
        local += read_manifest(str(folder / "loose.jsonl"))[0]
    assert (len(examples), skipped) == (5, [])
    for there, here in zip(examples, local, strict=True):
        (a,), (b,) = there.clips, here.clips
        heard = [load_audio(c.path, c.offset, c.duration, member=c.member) for c in (a, b)]
        np.testing.assert_array_equal(*heard)


@pytest.mark.parametrize("kind", ["503", "cut", "slow", "lost"])
def test_faults_that_pass(url, http, kind):
    http.faults({"match": "^GET", "kind": kind, "times": 2, "seconds": 0.5})
    assert as_path(url).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("503", "the store failed: .* attempts to read"),
        ("cut", "the store failed"),
        ("slow", "the store did not answer in time"),
    ],
)
def test_a_store_that_does_not_recover_is_named(url, http, kind, says, monkeypatch):
    monkeypatch.setenv("JAXTHD_STORE_SECONDS", "1")
    http.faults({"match": "^GET", "kind": kind, "seconds": 3})
    with pytest.raises(StorageError, match=f"^{url}: {says}.*JAXTHD_STORE_SECONDS"):
        as_path(url).read_bytes()


def test_refused_and_missing(url, http):
    http.faults({"match": "", "kind": "403"})
    with pytest.raises(StorageError, match=f"^{url}: the store refuses to read it .*credentials"):
        as_path(url).read_bytes()
    http.faults()
    with pytest.raises(FileNotFoundError, match=f"^{url}-none: no such object"):
        as_path(f"{url}-none").read_bytes()
    with pytest.raises(FileNotFoundError, match=f"no manifest at {url}-none"):
        read_manifest(f"{url}-none")
    with pytest.raises(UserError, match=f"^{url} is in a store, and is needed on a disk"):
        as_path(url).unlink()


def test_an_object_that_changes_ends_the_run(url, folder):
    path = as_path(url)
    sent = pickle.dumps(path) if path.is_file() else b""
    (folder / path.name).write_bytes(CONTENT[::-1])
    for each in (path, pickle.loads(sent)):
        with pytest.raises(StorageError, match=f"^{url} has changed since this run read it first"):
            each.read_bytes()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("http://user:hush@{}", id="user"),
        pytest.param("http://{}?X-Amz-Signature=hush", id="query"),
    ],
)
def test_urls_with_credentials_are_refused(http, form):
    with pytest.raises(UserError, match="holds a user, a password or a query") as error:
        as_path(form.format(f"{http.url[7:]}/a.wav")).is_file()
    assert "hush" not in str(error.value)


def test_workers_end_the_run(url, http, monkeypatch):
    """Not the item: a store that does not answer is no reason to skip it."""
    monkeypatch.setenv("JAXTHD_STORE_SECONDS", "1")
    workers = Workers(1)
    try:
        assert workers.submit(loaded, [(url, 0)]).result() == [CONTENT]
        http.faults({"match": "^(GET|HEAD)", "kind": "503"})
        with pytest.raises(StorageError, match="attempts"):
            workers.submit(loaded, [(f"{url}-other", 0)]).result()
    finally:
        workers.close()


def test_the_cache_is_bounded_and_mends_itself(tmp_path):
    cache = RangeCache(tmp_path / "parts", 100_000)
    for n in range(100):
        cache.put("s3://a/b", "1", n, bytes([n]) * 5000)
    parts = sorted((tmp_path / "parts").glob("??/*"))
    assert 0 < sum(path.stat().st_size for path in parts) <= 100_000
    assert cache.get("s3://a/b", "1", 99, 5099) == bytes([99]) * 5000
    assert cache.get("s3://a/b", "2", 99, 5099) is None
    for path in parts:
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)
    assert cache.get("s3://a/b", "1", 99, 5099) is None
    RangeCache(tmp_path / "none", 0).put("s3://a/b", "1", 0, b"x")
    assert not (tmp_path / "none").exists()


def test_processes_share_the_cache(url, http, tmp_path):
    """Three at once, in a cache that holds less than the object: each reads it right."""
    program = (
        "import sys, hashlib; from jaxthd.files.remote_path import as_path\n"
        "for _ in range(3): print(hashlib.md5(as_path(sys.argv[1]).read_bytes()).hexdigest())"
    )
    environment = os.environ | {"JAXTHD_CACHE_GB": f"{4 * BLOCK / 1e9}"}
    command = [sys.executable, "-c", program, url]
    readers = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    expected = 3 * (hashlib.md5(CONTENT).hexdigest() + "\n")
    assert [reader.communicate()[0] for reader in readers] == 3 * [expected]
    held = sum(path.stat().st_size for path in (tmp_path / "cache" / "jaxthd" / "ranges").glob("??/*"))
    assert held <= 6 * BLOCK
    remote_path._cache.cache_clear()
    assert as_path(url).read_bytes() == CONTENT
    before = http.seen()
    assert as_path(url).read_bytes() == CONTENT
    assert http.seen() == before


def test_a_tar_file_is_read_through_once(folder, http, tmp_path):
    """Then a few bytes tell where each recording lies, and each is one request."""
    content = {f"{n}.wav": random.Random(n).randbytes(200_000) for n in range(90)}
    size = write_tar(folder / "large.tar", content).stat().st_size
    path = as_path(f"{http.url}/large.tar")
    before = http.seen().get("bytes", 0)
    index = index_tar(path)
    through = http.seen()["bytes"] - before
    shutil.rmtree(tmp_path / "cache" / "jaxthd" / "ranges")
    before = http.seen()
    assert index_tar(path) == index
    member = index.members["40.wav"]
    assert isinstance(member, Member)
    file, at = open_range(path, member.start, member.size)
    assert (at, file.read()) == (0, content["40.wav"])
    after = http.seen()
    assert through >= size
    assert after["bytes"] - before["bytes"] < size / 15
    assert after["GET"] - before["GET"] <= 4
