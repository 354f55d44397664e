"""Requests to object stores, by URL: s3, gs, az, and http(s) for reading. Each is retried within a time
limit.

Credentials come from the environment (AWS_..., GOOGLE_..., AZURE_...) or from the machine's role, as obstore
finds them. No message holds one: URLs with a user or a query, where signatures stand, are refused.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from jaxthd.errors import StorageError, UserError

SCHEMES = ("s3", "gs", "az", "http", "https")
SECONDS = "JAXTHD_STORE_SECONDS"
"""Environment variable: seconds in which a store may fail to answer a request before it is given up."""
DEFAULT_SECONDS = 120.0
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds between two attempts: the first, doubled each time, and the most."""

T = TypeVar("T")
_URL = re.compile(rf"({'|'.join(SCHEMES)})://", re.I)
_NAMES = {
    "s3": "AWS_ACCESS_KEY_ID",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}


class ObjectInfo(NamedTuple):
    """An object as it is now. size: bytes. etag: changes with its content. modified: seconds since 1970."""

    size: int
    etag: str
    modified: float


class Listing(NamedTuple):
    """Holds the files and folders of a folder in a store, by name."""

    files: dict[str, ObjectInfo]
    folders: tuple[str, ...]


class ConflictError(Exception):
    """An object is not the one that was to be replaced: somebody else has written it."""


def is_url(text: str | Path) -> bool:
    """Whether a text is the URL of a store."""
    return _URL.match(str(text)) is not None


def time_limit() -> float:
    """Seconds in which a store may fail to answer a request before it is given up."""
    return float(os.environ.get(SECONDS) or DEFAULT_SECONDS)


def head(url: str) -> ObjectInfo:
    """Asks for an object's size and etag. Raises FileNotFoundError, and StorageError for other causes."""
    obstore, store, key = _opened(url)
    return _info(_answered(url, "read", lambda: obstore.head(store, key)))


def read(url: str, start: int, end: int, etag: str = "") -> bytes:
    """Reads bytes `start` to `end` of an object.

    etag: of the object that is meant; "" for whatever is there. Raises FileNotFoundError, and StorageError
    for an object that has changed, and for other causes.
    """
    obstore, store, key = _opened(url)
    if end <= start:
        return b""
    options: dict[str, Any] = {"range": (start, end)} | (
        {"if_match": etag} if etag and not etag.startswith("W/") else {}
    )

    def attempt() -> bytes:
        found = bytes(obstore.get(store, key, options=options).bytes())
        if len(found) != end - start:
            raise ConnectionError(f"{len(found)} of {end - start} bytes came")
        return found

    return _answered(url, "read", attempt)


def read_now(url: str) -> tuple[bytes, ObjectInfo]:
    """Reads a whole object as it is at this moment. Raises as head."""
    obstore, store, key = _opened(url)

    def attempt() -> tuple[bytes, ObjectInfo]:
        result = obstore.get(store, key)
        info = _info(result.meta)
        found = bytes(result.bytes())
        if len(found) != info.size:
            raise ConnectionError(f"{len(found)} of {info.size} bytes came")
        return found, info

    return _answered(url, "read", attempt)


def read_into(url: str, path: Path) -> None:
    """Fetches a whole object, as it is at this moment, into a file. Raises as head."""
    obstore, store, key = _opened(url)

    def attempt() -> None:
        result = obstore.get(store, key)
        with path.open("wb") as file:
            written = sum(file.write(chunk) for chunk in result)
        if written != result.meta["size"]:
            raise ConnectionError(f"{written} of {result.meta['size']} bytes came")

    _answered(url, "read", attempt)


def write(url: str, content: bytes | Path, *, replacing: str | None = None) -> str:
    """Writes an object in one go: others see the old one or the whole new one. Returns its etag.

    content: its bytes, or the local file that holds them. replacing: the etag of the object that is replaced,
    "" if none is there; None: whatever is there. Raises ConflictError where another is there, StorageError.
    """
    obstore, store, key = _opened(url)
    if url.lower().startswith("http"):
        raise UserError(f"{url} can only be read; expected a URL of s3, gs or az to write to: choose one")
    mode: Any = None
    if replacing is not None:
        mode = {"e_tag": replacing} if replacing else "create"
    errors = obstore.exceptions

    def attempt() -> str:
        try:
            more = {"mode": mode, "use_multipart": False} if mode else {}
            return str(obstore.put(store, key, content, **more)["e_tag"])
        except (errors.PreconditionError, errors.AlreadyExistsError) as error:
            # The answer to an earlier attempt may have been lost on its way, and the object be ours.
            found, info = read_now(url)
            if isinstance(content, bytes) and found == content:
                return info.etag
            raise ConflictError(url) from error

    return _answered(url, "write", attempt)


def listed(url: str) -> Listing:
    """Lists a folder. A store's list may lag behind what was written: nothing that must be exact rests on it.

    Raises StorageError; for http, which has no lists, it is empty.
    """
    if url.lower().startswith("http"):
        return Listing({}, ())
    obstore, store, key = _opened(url)
    prefix = key.rstrip("/")
    found = _answered(url, "list", lambda: obstore.list_with_delimiter(store, prefix or None))
    skip = len(prefix) + 1 if prefix else 0
    files = {each["path"][skip:]: _info(each) for each in found["objects"]}
    return Listing(files, tuple(each[skip:].rstrip("/") for each in found["common_prefixes"]))


def delete(urls: Iterable[str]) -> None:
    """Deletes objects; one that is not there is no error. Raises StorageError."""
    for url in urls:
        obstore, store, key = _opened(url)
        with suppress(FileNotFoundError):
            _answered(url, "write", partial(obstore.delete, store, key))


def _opened(url: str) -> tuple[Any, Any, str]:
    """(obstore, the store, the object's key). Raises UserError for a URL that is refused."""
    try:
        import obstore
    except ImportError as error:
        raise UserError(
            f"{_shown(url)} is in a store, and obstore is not installed; expected it: pip install "
            f"'jaxthd[stores]'"
        ) from error
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or "?" in url:
        raise UserError(
            f"{_shown(url)} holds a user, a password or a query, which would be kept with the run; "
            f"expected a URL "
            "without: give credentials in the environment, or as the machine's role"
        )
    root = f"{parts.scheme.lower()}://{parts.netloc}"
    return (
        obstore,
        _store(root),
        unquote(parts.path).strip("/") if root[:4] == "http" else url[len(root) + 1 :],
    )


@lru_cache(64)
def _store(root: str) -> Any:
    from obstore.store import from_url

    plain = root.startswith("http://") or any(
        os.environ.get(name, "").startswith("http://")
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
    )
    limit = time_limit()
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=min(10.0, limit / 2)), "allow_http": plain}
    client |= {"timeout": timedelta(seconds=max(limit / 2, 1.0))}
    # Attempts are repeated here (_answered), where a body that was cut short is an error too.
    retry: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=limit)}
    return from_url(root, client_options=client, retry_config=retry)  # type: ignore[call-overload]


def _answered(url: str, doing: str, attempt: Callable[[], T]) -> T:
    """The answer to a request, which is repeated until the time limit where the store is the cause."""
    from obstore import exceptions as errors

    limit, wait, attempts = time_limit(), FIRST_WAIT, 0
    began = time.monotonic()
    while True:
        attempts += 1
        try:
            return attempt()
        except (ConflictError, StorageError, UserError):
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{url}: no such object in the store; correct its URL, or write it"
            ) from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise StorageError(f"{url}: {_refused(url, doing, _short(error))}") from error
        except errors.PreconditionError as error:
            raise StorageError(
                f"{url} has changed since this run read it first; expected the object that the run "
                f"began with: "
                "put it back, or start the run again, which then compares its data with the checkpoint's"
            ) from error
        except (errors.BaseError, OSError, ValueError) as error:
            text = _short(error)
            if re.search(r"169\.254\.|metadata|credential|token", text, re.I) and not _STATUS.search(text):
                raise StorageError(f"{url}: {_refused(url, doing, text)}") from error
            spent = time.monotonic() - began
            if spent + wait > limit:
                is_slow = re.search("TimedOut|timed out", str(error))
                slow = "did not answer in time" if is_slow else "failed"
                raise StorageError(
                    f"{url}: the store {slow}: {attempts} attempts to {doing} in {spent:.0f} s, the "
                    f"last: {text}. "
                    f"Expected an answer within {limit:g} s: see to the network and the store's "
                    f"address, or set "
                    f"{SECONDS} to wait longer; the same command continues the run"
                ) from error
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, LONGEST_WAIT)


_STATUS = re.compile(r"status code: 5\d\d")


def _refused(url: str, doing: str, text: str) -> str:
    name = _NAMES.get(url.partition(":")[0].lower(), "")
    where = f"{name} and its like in the environment, or as the machine's role" if name else "that need none"
    return (
        f"the store refuses to {doing} it ({text}); expected credentials that may {doing} it: give them "
        f"by {where}; "
        "stores say so too of an object that is missing, where listing is not allowed"
    )


def _short(error: Exception) -> str:
    """The first line of an error, without queries, where signatures stand, and without obstore's dump."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"\?\S+", "?...", re.sub(r"^.*?Error performing ", "", line))[:300] or type(error).__name__


def _shown(url: str) -> str:
    """A URL without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _info(meta: Any) -> ObjectInfo:
    modified: datetime = meta["last_modified"]
    return ObjectInfo(int(meta["size"]), str(meta.get("e_tag") or ""), modified.timestamp())
