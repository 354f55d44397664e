"""Stores for tests, each with a proxy of faults before it, in processes of their own."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[2]
BUCKET = "speech"
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=an-access-key/20260101/us-east-1/s3/aws4_request"
"""moto does not check the signature."""
SECRET = "a-secret-that-no-message-holds"
START_SECONDS = 120.0
"""A server that has not answered its first request by then will not. moto's takes 7 s where eight other
processes have the two cores, and 0.5 s alone."""


class Server(NamedTuple):
    """A store behind a proxy. url: of its folder, without a slash at its end. direct: without the proxy."""

    url: str
    proxy: str
    direct: str

    def faults(self, *rules: dict[str, Any]) -> None:
        """Replaces the proxy's faults (tests/stores/faulty_proxy.py)."""
        urlopen(
            Request(f"{self.proxy}/-/faults", json.dumps(rules).encode(), method="POST"), timeout=10
        ).close()

    def seen(self) -> dict[str, int]:
        """The requests by method, and the bytes, that went through the proxy so far."""
        with urlopen(f"{self.proxy}/-/seen", timeout=10) as answer:
            return json.loads(answer.read())

    def put(self, name: str, content: bytes) -> None:
        """Writes an object, not through the proxy."""
        form = {"Content-Type": "application/octet-stream", "Authorization": AUTHORIZATION}
        request = Request(f"{self.direct}/{BUCKET}/{name}", content, form, method="PUT")
        urlopen(request, timeout=30).close()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use the store as S3."""
        return {
            "AWS_ENDPOINT_URL": self.proxy,
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def s3_server(python: str) -> Iterator[Server]:
    """moto's S3 server. python: an interpreter with moto."""
    port = _free_port()
    with _process(port, [python, "-m", "moto.server", "-p", str(port)]) as direct:
        urlopen(Request(f"{direct}/{BUCKET}", method="PUT"), timeout=START_SECONDS).close()
        with _proxy(direct) as proxy:
            yield Server(f"s3://{BUCKET}", proxy, direct)


@contextmanager
def http_server(folder: Path) -> Iterator[Server]:
    """A server of a folder's files, by http."""
    port = _free_port()
    with (
        _process(port, [sys.executable, "-m", "tests.stores.file_server", str(port), str(folder)]) as direct,
        _proxy(direct) as proxy,
    ):
        yield Server(proxy, proxy, direct)


@contextmanager
def _proxy(direct: str) -> Iterator[str]:
    port = _free_port()
    with _process(port, [sys.executable, "-m", "tests.stores.faulty_proxy", str(port), direct]) as proxy:
        yield proxy


@contextmanager
def _process(port: int, command: list[str]) -> Iterator[str]:
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

        def said() -> str:
            output.seek(0)
            return output.read()[-2000:]

        try:
            until = time.monotonic() + START_SECONDS
            while True:
                assert process.poll() is None, f"{command} ended: {said()}"
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < until, f"{command} does not listen: {said()}"
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
