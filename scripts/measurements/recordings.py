"""The recordings that a benchmark is given."""

from typing import Any

from jaxthd.data.sources.synthetic import synthetic_manifests


def _path(text: str) -> str:
    return str(synthetic_manifests()[0]) if text == "synthetic" else text


MANIFEST: dict[str, Any] = {
    "type": _path,
    "default": "synthetic",
    "help": "recordings; else the synthetic speech",
}
"""Of add_argument: a manifest's path. Without one it is that of the synthetic speech, made on first use."""
