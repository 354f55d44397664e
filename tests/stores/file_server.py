"""An HTTP server of the files in a folder, with ranges and etags: `python -m tests.stores.file_server PORT
FOLDER`.
"""

import hashlib
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        path = self.folder / unquote(self.path).strip("/")
        if not path.is_file():
            return self._send(404, b"", {})
        content = path.read_bytes()
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        when = self.date_time_string(int(path.stat().st_mtime))
        more = {"ETag": etag, "Last-Modified": when, "Accept-Ranges": "bytes"}
        if self.headers.get("If-Match") not in (None, etag):
            return self._send(412, b"", {})
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked:
            start, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            more |= {"Content-Range": f"bytes {start}-{last}/{len(content)}"}
            return self._send(206, content[start : last + 1], more)
        return self._send(200, content, more)

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


if __name__ == "__main__":
    Files.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Files).serve_forever()
