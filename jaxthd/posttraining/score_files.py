"""A folder with the log-probabilities of documents' tokens, by a digest of each document.

It grows by whole files, each replaced in one go and named by what it holds. So a kill leaves no half file,
and several processes may add to a folder at a time. A damaged file counts as missing, and is reported.
"""

import hashlib
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxthd.files.jsonl import naming

DIGEST_BYTES = 16


class ScoreFiles:
    """Digest of a document -> log-probabilities of its supervised tokens, [s], in their order.

    folder: made at the first flush.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[bytes, Float[np.ndarray, " s"]] = {}
        self._new: dict[bytes, Float[np.ndarray, " s"]] = {}
        self.read()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def scores(self) -> Mapping[bytes, Float[np.ndarray, " s"]]:
        """All that is here, by digest."""
        return self._found

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def __getitem__(self, digest: bytes) -> Float[np.ndarray, " s"]:
        return self._found[digest]

    def read(self) -> None:
        """Reads all files, those that other processes have written since too."""
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                    digests, lengths = stored["digests"], stored["lengths"]
                    scores = np.split(stored["log_probs"], np.cumsum(lengths)[:-1])
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                print(f"warning: {path} cannot be read ({error}): computed anew", file=sys.stderr)
                continue
            self._found |= {digest.tobytes(): x for digest, x in zip(digests, scores, strict=True)}

    def add(self, scores: Mapping[bytes, Float[np.ndarray, " s"]]) -> None:
        """Keeps what is new of these; `flush` writes it."""
        new = {digest: x for digest, x in scores.items() if digest not in self._found}
        self._found |= new
        self._new |= new

    @property
    def unwritten(self) -> int:
        """Documents that the next flush writes."""
        return len(self._new)

    def flush(self) -> None:
        """Writes what was added since the last flush. Raises OSError, which names the file."""
        if not self._new:
            return
        digests = np.frombuffer(b"".join(self._new), np.uint8).reshape(-1, DIGEST_BYTES)
        lengths = np.array([len(x) for x in self._new.values()])
        path = self.folder / f"{hashlib.sha256(digests.tobytes()).hexdigest()[:16]}.npz"
        scratch = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
        with naming(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with scratch.open("wb") as file:
                    np.savez(
                        file,
                        digests=digests,
                        lengths=lengths,
                        log_probs=np.concatenate([*self._new.values()]),
                    )
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)
        self._new = {}
