"""Writes index files beside tar files, also in stores, so that no run reads their headers.

    jaxthd index 's3://speech/audio_{0..511}.tar' my/shar

PATH is a tar file, several in braces, what stands behind "::" in --data.manifest, or a folder, whose files
that end in .tar are meant. A run makes index files by itself where it can write beside its tar files; this
command is for stores, where no run writes, and for a start of many machines at once. Tar files of less than
16 MiB have none. An index file that is there and current is kept. Exits with status 1 where a tar file is
damaged; the others are indexed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jaxthd.data.example import Member
from jaxthd.data.sources.lines import expand_braces
from jaxthd.data.sources.tar_index_files import LEAST, read_index, write_index
from jaxthd.data.sources.tarred import index_tar
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.paths import home_path


class Indexed(NamedTuple):
    """The outcome for a tar file. outcome: "written", "kept", "small" or "damaged". members: recordings and
    other files in it. text: what is wrong with it."""

    outcome: str
    members: int
    text: str


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    parser = argparse.ArgumentParser(
        prog="jaxthd index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", nargs="+", help="tar files or folders of them, also by URL")
    tars = list(tar_files(parser.parse_args(argv).path))
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(index_file, tars))
    for each in found:
        if each.text:
            print(f"warning: {each.text}", file=sys.stderr)
    count = {name: [each for each in found if each.outcome == name] for name in ("written", "kept", "small")}
    print(
        f"{len(count['written'])} index files written and {len(count['kept'])} kept, of "
        f"{sum(each.members for each in found):,} members; {len(count['small'])} tar files need none"
    )
    if any(each.outcome == "damaged" for each in found):
        sys.exit(1)


def tar_files(paths: Sequence[str]) -> Iterator[Path]:
    """The tar files that these texts name. Raises UserError where one is not there."""
    for text in paths:
        for name in expand_braces(text.rpartition("::")[2]):
            path = home_path(name)
            if path.is_file():
                yield path
                continue
            within = sorted(path.glob("*.tar")) if path.is_dir() else []
            if not within:
                raise UserError(
                    f"{path} is no tar file, and no folder of files that end in .tar; expected one: correct "
                    "the path"
                )
            yield from within


def index_file(path: Path) -> Indexed:
    """Sees to the index file of a tar file. Raises UserError where it cannot be written, and as index_tar."""
    is_small = path.stat().st_size < LEAST
    is_there = not is_small and read_index(path, beside=True) is not None
    index = index_tar(path)
    members = sum(isinstance(each, Member) for each in index.members.values())
    if index.damage or is_small or is_there:
        outcome = "damaged" if index.damage else "small" if is_small else "kept"
        return Indexed(outcome, members, index.note)
    if read_index(path, beside=True):  # index_tar may have written it
        return Indexed("written", members, index.note)
    try:
        write_index(path, index.members, index.end)
    except OSError as error:
        raise UserError(
            f"the index file of {path} cannot be written ({error}); expected a folder that may be written "
            "to: run the command where it may be"
        ) from error
    return Indexed("written", members, index.note)


if __name__ == "__main__":
    with readable_errors():
        main()
