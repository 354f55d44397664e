"""The files of a tokenizer: a copy of them, and a digest of what they say."""

import hashlib
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from jaxthd.files.paths import home_path

BUILT_IN = ("bytes", "synthetic")
"""Tokenizers that need no file."""
FOLDER = "tokenizer"
"""Where a run keeps its tokenizer, in its workdir."""
NAMES = ("tokenizer.json", "tekken.json")
"""Files that are a tokenizer."""
BYTE_PAIRS, SETTINGS = ("vocab.json", "merges.txt"), "tokenizer_config.json"
"""Files that are one together, where SETTINGS names the class Qwen2Tokenizer, and none of NAMES is there."""
PATTERNS = ("*tokenizer*", "tekken.json", "*.jinja", "special_tokens_map.json", "generation_config.json")
_SETTINGS = ("config.json", "chat_template.json")
"""Further files that may say which tokens are special, and how turns are written."""
BESIDE = (
    *PATTERNS,
    *BYTE_PAIRS,
    "*processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a published checkpoint that are handed on beside its weights."""
ALIGNMENT = "alignment_tokenizer"
"""The folder beside them with the tokenizer of a head for word times; it goes along."""


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copies a tokenizer's file, or the tokenizer's files of a checkpoint's folder, into the new folder."""
    folder.mkdir(parents=True)
    if tokenizer.is_dir():
        copy_files(tokenizer, folder, (*BESIDE, *_SETTINGS))
    else:
        name = tokenizer.name if tokenizer.name in NAMES else NAMES[0]
        shutil.copyfile(tokenizer, folder / name)


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer's file, or the files of one."""
    return any((folder / name).is_file() for name in NAMES) or has_byte_pairs(folder)


def has_byte_pairs(folder: Path) -> bool:
    """Whether the folder's tokenizer is that of BYTE_PAIRS."""
    if any((folder / name).is_file() for name in NAMES):
        return False
    if not all((folder / name).is_file() for name in (*BYTE_PAIRS, SETTINGS)):
        return False
    return '"Qwen2Tokenizer' in (folder / SETTINGS).read_text(encoding="utf-8")


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copies the files of the folder `source` whose names match into `folder`, but those it has already."""
    for file in sorted(source.iterdir()):
        is_wanted = file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)
        if is_wanted and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    if (source / ALIGNMENT).is_dir() and not (folder / ALIGNMENT).exists():
        shutil.copytree(source / ALIGNMENT, folder / ALIGNMENT)


def tokenizer_digest(tokenizer: str | Path) -> str:
    """A tokenizer's identity, wherever its files lie: the name of a built-in one, else a digest of its files.

    Raises OSError where they cannot be read.
    """
    if tokenizer in BUILT_IN:
        return str(tokenizer)
    path, digest = home_path(tokenizer), hashlib.sha256()
    files = {"tokenizer.json": path}
    if path.is_dir():
        names = (*PATTERNS, *_SETTINGS, *(BYTE_PAIRS if has_byte_pairs(path) else ()))
        found = (f for f in path.iterdir() if f.is_file() and any(fnmatch(f.name, x) for x in names))
        files = {file.name: file for file in found}
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()
