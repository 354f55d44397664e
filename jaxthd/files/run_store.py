"""A run's folder in an object store: what is sent there, and how it comes back.

URL/run.json, the record, is written last, in one request, and names every file of the run: a reader sees the
files of one record or of the next, whatever a list of the folder shows and wherever a process was killed. It
is written only over the record that this process has seen, so that of two runs in one folder the later one
goes on.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import StorageError, UserError
from jaxthd.files import stores
from jaxthd.files.atomic import write_atomically
from jaxthd.files.user_cache import user_cache

RECORD = "run.json"
CHECKPOINTS = "checkpoints"
AT_ONCE = 8
"""Files that are sent or fetched at the same time."""
_LOCAL = ("lock", RECORD)
"""Files of a run that stay on the machine."""
_UNUSED = 86_400.0
"""Seconds after which a copy that nobody opened is removed, when another one of the run is made."""


class Record(NamedTuple):
    """Names a run's files in a store. files: sizes, by path in the folder. etag: of the record itself."""

    session: str
    files: Mapping[str, int]
    etag: str

    @property
    def text(self) -> str:
        """The record as it is written."""
        return json.dumps({"session": self.session, "files": dict(self.files)}, indent=1) + "\n"


def read_record(url: str) -> Record | None:
    """The record of the run at a URL; None where there is none. Raises StorageError."""
    try:
        content, info = stores.read_now(f"{url}/{RECORD}")
    except FileNotFoundError:
        return None
    try:
        stored: dict[str, Any] = json.loads(content)
        files = {str(name): int(size) for name, size in stored["files"].items()}
        if any(name.startswith("/") or ".." in name.split("/") for name in files):
            raise ValueError("a file's name leads out of the folder")
        return Record(str(stored["session"]), files, info.etag)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{url}/{RECORD} is no record of a run ({error}); expected one that jaxthd wrote"
        ) from error


class RunStore:
    """The run in the store at `url`, and its folder on this machine, `folder`.

    fetch() first, then claim(), then push() as often as there is something new, all by one process.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        base = user_cache() / "runs" / hashlib.blake2b(self.url.encode(), digest_size=12).hexdigest()
        self.folder, self._seen = base, base.with_name(f"{base.name}.json")
        self._session = uuid.uuid4().hex
        self._record: Record | None = None
        self._sent: dict[str, tuple[int, int]] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder on this machine. Raises UserError where another process holds it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.folder.name}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.url} is in use by another run on this machine; expected one at a time: wait "
                    f"for it, "
                    "stop it, or choose another --workdir"
                ) from error
            yield

    def fetch(self) -> None:
        """Makes the folder what the store holds; or leaves it, where it is that and what was not sent yet.

        Raises StorageError, and UserError for a record that is none.
        """
        self._record = read_record(self.url)
        seen: dict[str, Any] = json.loads(self._seen.read_text()) if self._seen.exists() else {}
        if self._record is not None and seen.get("record") == self._record.text and self.folder.is_dir():
            self._sent = {name: (size, at) for name, (size, at) in seen["sent"].items()}
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._seen.unlink(missing_ok=True)
        self.folder.mkdir(parents=True)
        if self._record is not None:
            fetch_files(self.url, self._record, self.folder)
            self._sent = {name: _mark(self.folder / name) for name in self._record.files}

    def claim(self) -> None:
        """Says in the store that this run goes on there: an older one cannot write its record any more.

        Raises ConflictError where another run has begun there since fetch(), and StorageError.
        """
        self._write(self._record.files if self._record else {}, self._sent)

    def has_new_checkpoints(self) -> bool:
        """Whether whole checkpoints came or went since the last push."""
        steps = {path.name for path in (self.folder / CHECKPOINTS).glob("*") if path.name.isdecimal()}
        return steps != {name.split("/")[1] for name in self._sent if _is_of_checkpoint(name)}

    def push(self) -> bool:
        """Sends what is new, writes the record, and deletes what it names no more; returns whether it did.

        Raises ConflictError where another run has begun there, and StorageError.
        """
        # The checkpoints first: the lines of metrics up to a checkpoint are on the disk before it is.
        files = [*_checkpoint_files(self.folder), *_other_files(self.folder)]
        marks = {}
        for name in files:
            with suppress(OSError):  # an old checkpoint that has just been deleted
                marks[name] = _mark(self.folder / name)
        new = [name for name, mark in marks.items() if self._sent.get(name) != mark]
        before = self._record.files if self._record else {}
        if not new and marks.keys() == before.keys():
            return False
        with ThreadPoolExecutor(AT_ONCE) as threads:
            sizes = dict(zip(new, threads.map(self._send, new), strict=True))
        gone = {
            name.split("/")[1] for name, size in sizes.items() if size is None and _is_of_checkpoint(name)
        }
        held = {}
        for name, (size, _) in marks.items():
            sent = sizes.get(name, size)
            # Of a checkpoint that was deleted meanwhile nothing is named.
            if sent is not None and not (_is_of_checkpoint(name) and name.split("/")[1] in gone):
                held[name] = sent
        self._write(held, {name: marks[name] for name in held})
        stores.delete(f"{self.url}/{name}" for name in before.keys() - held.keys())
        return True

    def _send(self, name: str) -> int | None:
        """Sends a file; returns its size, or None where it is gone."""
        path = self.folder / name
        try:
            content: bytes | Path = path if _is_of_checkpoint(name) else path.read_bytes()
            size = path.stat().st_size if isinstance(content, Path) else len(content)
            stores.write(f"{self.url}/{name}", content)
            return size
        except FileNotFoundError:
            return None

    def _write(self, files: Mapping[str, int], sent: dict[str, tuple[int, int]]) -> None:
        """Writes the record over the one that was seen last. Raises ConflictError, StorageError.

        sent: the marks that the files had here when they were sent.
        """
        record = Record(self._session, dict(sorted(files.items())), self._record.etag if self._record else "")
        etag = stores.write(f"{self.url}/{RECORD}", record.text.encode(), replacing=record.etag)
        self._record, self._sent = record._replace(etag=etag), sent
        write_atomically(self._seen, json.dumps({"record": record.text, "sent": sent}))


def fetch_files(url: str, record: Record, folder: Path) -> None:
    """Fetches the files of a record into a folder. Raises StorageError, also for one that is not whole."""

    def fetch(name: str) -> None:
        path, size = folder / name, record.files[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stores.read_into(f"{url}/{name}", path)
        except FileNotFoundError as error:
            raise StorageError(
                f"{url}/{name} is gone, and {url}/{RECORD} names it; expected the files of a run: another "
                f"run may "
                "just have replaced it, so try again; or put it back"
            ) from error
        # A file of text may be newer, and longer, than the record; lines that a checkpoint lacks are dropped.
        if _is_of_checkpoint(name) and path.stat().st_size != size:
            raise StorageError(f"{url}/{name} has {path.stat().st_size} bytes; expected {size}: put it back")

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(fetch, record.files))


def local_copy(url: str) -> Path:
    """A copy of the run at a URL, as it is now, on this machine, to be read. It is fetched once.

    Raises UserError where there is no run, and StorageError.
    """
    url = url.rstrip("/")
    record = read_record(url)
    if record is None:
        raise UserError(
            f"{url} holds no run ({RECORD} is not there); expected the workdir of one: correct it, or copy a "
            "published checkpoint to a disk and name the copy"
        )
    name = hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
    kept = user_cache() / "copies"
    folder = kept / f"{name}-{hashlib.blake2b(record.text.encode(), digest_size=12).hexdigest()}"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / f"{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not folder.is_dir():
            for old in kept.glob(f"{name}-*"):
                if time.time() - old.stat().st_mtime > _UNUSED:
                    shutil.rmtree(old, ignore_errors=True)
            scratch = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            fetch_files(url, record, scratch)
            scratch.rename(folder)
    os.utime(folder)
    return folder


def _is_of_checkpoint(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/")


def _checkpoint_files(folder: Path) -> list[str]:
    """The files of whole checkpoints: orbax gives these their names when they are."""
    whole = [path for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return [str(path.relative_to(folder)) for step in whole for path in _files_below(step)]


def _other_files(folder: Path) -> list[str]:
    names = [str(path.relative_to(folder)) for path in _files_below(folder, without=CHECKPOINTS)]
    return [name for name in names if name not in _LOCAL and not name.endswith(".tmp")]


def _files_below(folder: Path, without: str = "") -> Iterator[Path]:
    for at, folders, files in os.walk(folder):
        if without and Path(at) == folder and without in folders:
            folders.remove(without)
        yield from (Path(at) / name for name in files)


def _mark(path: Path) -> tuple[int, int]:
    """Returns a size and a time: they show that a file has changed."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
