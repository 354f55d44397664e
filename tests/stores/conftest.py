import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxthd.files import remote_path, stores
from tests.stores.servers import Server, http_server, s3_server


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and nothing that an earlier test has looked at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(stores.SECONDS, "6")
    for forget in (stores._store.cache_clear, remote_path._cache.cache_clear, remote_path._pinned.clear):
        forget()
    return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[Server]:
    with http_server(folder) as server:
        yield server
        server.faults()


@pytest.fixture(scope="module")
def s3_process(request: pytest.FixtureRequest) -> Iterator[Server]:
    with s3_server(request.config.getoption("--python-reference") or sys.executable) as server:
        yield server


@pytest.fixture
def s3(s3_process: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """moto's server, in a process of its own, as the store of this process's environment."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    s3_process.faults()
    yield s3_process
    s3_process.faults()
