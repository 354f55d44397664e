"""A proxy before an HTTP server, with faults: a process of its own, `python -m tests.stores.faulty_proxy PORT
URL`.

POST /-/faults takes a list of rules, which replace the earlier ones: {"match": regular expression of "METHOD
path", "kind": one of FAULTS, "times": how often (default: for ever), "seconds": of slow ones}. GET /-/seen
returns how many requests came, by method, and the bytes that were handed on.
"""

import http.client
import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("503", "403", "cut", "slow", "lost", "lag")
"""Refused for a while; refused; a body that breaks off; an answer that waits; done, and no answer; old lists.
"""


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = ""
    rules: list[dict[str, Any]] = []  # noqa: RUF012 - one program, one proxy
    lists: dict[str, bytes] = {}  # noqa: RUF012
    seen: Counter[str] = Counter()  # noqa: RUF012
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _fault(self) -> dict[str, Any]:
        with self.lock:
            for rule in self.rules:
                if rule.get("times", 1) > 0 and re.search(rule["match"], f"{self.command} {self.path}"):
                    if "times" in rule:
                        rule["times"] -= 1
                    return rule
        return {"kind": ""}

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/-/"):
            return self._control(body)
        fault = self._fault()
        kind = fault["kind"]
        with self.lock:
            self.seen[self.command] += 1
        if kind == "slow":
            time.sleep(fault["seconds"])
        if kind in ("503", "403"):
            return self._send(int(kind), {}, b"<Error><Code>SlowDown</Code></Error>")
        status, headers, found = self._forwarded(body)
        if kind == "lost":
            self.close_connection = True
            return None
        if kind == "lag":
            found = self.lists.setdefault(self.path, found)
        with self.lock:
            self.seen["bytes"] += len(found)
        self._send(status, headers, found, cut=kind == "cut")
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(self.upstream)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "host")}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        found = answer.read()
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        connection.close()
        return answer.status, kept, found

    def _send(self, status: int, headers: dict[str, str], found: bytes, *, cut: bool = False) -> None:
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(found))
        own = ("content-length", "server", "date")
        kept = {name: value for name, value in headers.items() if name.lower() not in own}
        self.send_response(status)
        for name, value in (kept | {"Content-Length": length}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(found[: len(found) // 2] if cut else found)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _control(self, body: bytes) -> None:
        with self.lock:
            if self.command == "POST":
                Proxy.rules = json.loads(body)
                Proxy.lists = {}
            answer = json.dumps(self.seen).encode()
        self._send(200, {}, answer)


if __name__ == "__main__":
    Proxy.upstream = sys.argv[2]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Proxy).serve_forever()
