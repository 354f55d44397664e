"""NeMo's metadata.yaml beside tar files, which counts them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from jaxthd.data.sources.tarred import shard_number
from jaxthd.errors import UserError


class Counted(NamedTuple):
    """The tar files of one folder. total: those that the file `metadata` counts. named: by the setting."""

    metadata: Path
    folder: Path
    total: int
    named: int


def counted_tars(manifest: Path, tars: Sequence[Path]) -> list[Counted]:
    """Returns the counts of NeMo's metadata for each folder of tar files, beside them or their manifest.

    That of a manifest "..._version_1.json" is metadata_version_1.yaml, else metadata.yaml.
    Source: NeMo's convert_to_tarred_audio_dataset.py.
    """
    version = re.search(r"_version_\d+(?=\.json)", manifest.name)
    name = f"metadata{version[0] if version else ''}.yaml"
    folders = sorted({path.parent for path in tars})
    counted = []
    for folder in folders:
        places = [folder / name, *([manifest.parent / name] if len(folders) == 1 else [])]
        for path in places:
            if total := _total(path):
                counted.append(Counted(path, folder, total, sum(tar.parent == folder for tar in tars)))
                break
    return counted


def _total(path: Path) -> int:
    """dataset_config.num_shards of a file of metadata; 0 without it, or in one of another program."""
    try:
        metadata = yaml.safe_load(path.read_text())
        total = metadata["dataset_config"]["num_shards"]
    except (yaml.YAMLError, OSError, UnicodeError, LookupError, TypeError):
        return 0
    return total if type(total) is int and total > 0 else 0


def require_counted_tars(counted: Sequence[Counted], tars: Sequence[Path], setting: str) -> list[str]:
    """Notes on tar files that metadata counts and the setting leaves out.

    Raises UserError where such tar files are not there at all.
    """
    notes = []
    for metadata, folder, total, named in counted:
        if named >= total:
            continue
        suffix = next(path.suffix for path in tars if path.parent == folder)
        there = sum(shard_number(path) is not None for path in folder.glob(f"*{suffix}"))
        if there < total:
            raise UserError(
                f"{metadata} counts {total} tar files, and {folder} holds {there}; expected all of them "
                f"({setting}): fetch the others, or take that file away where these are all that you want"
            )
        notes.append(f"{named} of the {total} tar files that {metadata.name} counts")
    return notes
