"""The files of a Hugging Face data set in a folder, and how many rows its own records count in them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxthd.data.parquet_footer import row_groups
from jaxthd.data.sources.containers import damaged, refuse_unread, require_all_parts
from jaxthd.data.sources.lines import parse
from jaxthd.data.tables import SUFFIXES
from jaxthd.errors import UserError

STATE, INFO, INFOS, DICT = "state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"
SUMMARY = "_metadata"
"""The summary of parquet files that Spark, Dask and pyarrow write beside them."""
_SHARD = re.compile(r"-\d+-of-\d+$")
_SPLIT = re.compile(r"(train|test|valid|val|dev|eval)", re.I)


class Count(NamedTuple):
    """Rows that a record counts in files.

    is_binding: False for a record that keeps its numbers when rows change.
    """

    record: Path
    files: tuple[Path, ...]
    rows: int
    is_binding: bool = True


def is_table_folder(folder: Path) -> bool:
    """Whether a folder holds tables, or what save_to_disk of datasets writes."""
    return any((folder / name).is_file() for name in (STATE, DICT)) or bool(_tables_in(folder))


def _tables_in(folder: Path) -> list[Path]:
    """The tables of a folder, or of the folder `data` in it, by name, without what datasets has cached."""
    for within in (folder, folder / "data"):
        found = [path for suffix in SUFFIXES for path in sorted(within.glob(f"*{suffix}"))]
        found = [path for path in found if not path.name.startswith("cache-")]
        if found:
            return found
    return []


def files_of_folder(folder: Path, setting: str) -> list[Path]:
    """The files of a folder, in order.

    Raises UserError where they are of several data sets, or none, and where the folder says that it has more.
    """
    state, splits = folder / STATE, sorted(x.parent.name for x in folder.glob(f"*/{STATE}"))
    title = f"{folder} ({setting})"
    if state.is_file():
        files = _files_of_state(folder, state)
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise UserError(
                f"{len(missing)} of the {len(files)} files that {state} lists are not there, {missing[0]} "
                f"first; expected all of them ({setting}): fetch them"
            )
    elif files := _tables_in(folder):
        _require_one_split(files, title)
        _require_summarised(files, title)
    else:
        raise UserError(_without_tables(folder, splits, setting))
    refuse_unread(files[0].parent, re.compile(rf".*({'|'.join(map(re.escape, SUFFIXES))})"), setting)
    require_all_parts(files, title, "name the files that are to be read, with braces")
    return files


def _without_tables(folder: Path, splits: Sequence[str], setting: str) -> str:
    """The message for a folder that holds splits, or nothing that its index names."""
    try:
        listed = [str(name) for name in parse((folder / DICT).read_bytes())["splits"]]
    except (OSError, ValueError, LookupError, TypeError):
        listed = []
    absent = sorted(set(listed) - set(splits))
    missing = f" ({DICT} lists {', '.join(absent)}, too, and there is no such folder)" if absent else ""
    return (
        f"{folder} ({setting}) holds the splits {', '.join(splits) or 'of a data set'}{missing}; expected "
        f"one of them: name {folder / (splits or ['train'])[0]}, for example"
    )


def _require_one_split(files: Sequence[Path], title: str) -> None:
    parts = sorted({_SHARD.sub("", path.stem) + path.suffix for path in files})
    names = {_SHARD.sub("", path.stem) for path in files}
    is_mixed = len({path.suffix for path in files}) > 1 or any(_SHARD.search(path.stem) for path in files)
    if len(parts) > 1 and (is_mixed or any(map(_SPLIT.match, names))):
        raise UserError(
            f"{title} holds {', '.join(parts)}; expected the files of one split, of one kind: "
            f"name them, such as {files[0]} or {files[0].parent}/train-{{00000..00003}}-of-00004.parquet"
        )


def _files_of_state(folder: Path, state: Path) -> list[Path]:
    """The files that save_to_disk of datasets has written."""
    try:
        found = parse(state.read_bytes())
        files = [folder / str(file["filename"]) for file in found["_data_files"]]
        if found.get("_indices_data_files") or not files:
            raise ValueError("the rows are chosen by indices, or there are none")
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(
            f"{state} cannot be used ({error!r}); expected what save_to_disk of datasets writes: call "
            "flatten_indices and save the data set anew, or name its files"
        ) from error
    return files


def _require_summarised(files: Sequence[Path], title: str) -> None:
    """Raises UserError where the summary of parquet files names others besides."""
    counts = list(_summarised(files))
    absent = [path for count in counts for path in count.files if not path.is_file()]
    if absent:
        raise UserError(
            f"{title} has a summary, {counts[0].record}, of {len(counts)} files, of which {len(absent)} are "
            f"not there, {absent[0]} first; expected all of them: fetch them, or take the summary away"
        )


def _summarised(files: Sequence[Path]) -> Iterator[Count]:
    path = files[0].parent / SUMMARY
    if not path.is_file():
        return
    rows: dict[Path, int] = {}
    try:
        for group in row_groups(path):
            file = path.parent / group.file
            rows[file] = rows.get(file, 0) + group.rows
    except (ValueError, OSError) as error:
        raise damaged(path, "", error) from error
    yield from (Count(path, (file,), count) for file, count in rows.items() if file != path.parent)


def counts_of_folder(folder: Path, files: Sequence[Path]) -> list[Count]:
    """The rows that the folder's records count in its files.

    They are dataset_info.json, dataset_infos.json, the summary of parquet files, and the head of README.md
    as the Hub writes it. What save_to_disk writes of a filtered data set keeps the numbers from before, and a
    README may be older than the files, so these do not bind.
    """
    counts = list(_summarised(files))
    for name in (INFO, INFOS, "README.md"):
        path = folder / name
        for split in _split_of(_splits_in(path), files):
            is_binding = name != "README.md" and not (folder / STATE).is_file()
            rows, lengths = split.get("num_examples"), split.get("shard_lengths")
            if type(rows) is int:
                counts.append(Count(path, tuple(files), rows, is_binding))
            if isinstance(lengths, list) and len(lengths) == len(files):
                counts += [Count(path, (f,), n, is_binding) for f, n in zip(files, lengths, strict=True)]
    return counts


def _splits_in(record: Path) -> list[dict[str, Any]]:
    """The splits that a record lists, each with its name; none where it lists several data sets."""
    try:
        text = record.read_text(encoding="utf-8")
        if record.suffix == ".md":
            marked = re.match(r"---\n(.*?)\n---\s", text, re.S)
            info = yaml.safe_load(marked[1])["dataset_info"] if marked else {}
        else:
            info = json.loads(text)
        if record.name == INFOS:
            info = list(info.values())
        if isinstance(info, list):
            info = info[0] if len(info) == 1 else {}
        splits = info.get("splits") or {}
        listed = [{"name": name, **x} for name, x in splits.items()] if isinstance(splits, dict) else splits
        return [dict(split) for split in listed]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return []


def _split_of(splits: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[dict[str, Any]]:
    """The split whose name is in the names of all files, or the only one; none if that is not clear."""
    words = [set(re.split(r"[-_.]", path.name)) | {path.parent.name} for path in files]
    fitting = [split for split in splits if all(split.get("name") in each for each in words)]
    found = fitting if len(splits) > 1 else splits
    return list(found) if len(found) == 1 else []


def require_counts(counts: Sequence[Count], rows: Mapping[Path, int], setting: str) -> list[str]:
    """Notes on records that do not bind and count other numbers of rows than there are.

    rows: those of each file. Raises UserError for a record that binds.
    """
    notes = []
    for record, files, expected, is_binding in counts:
        there = sum(rows[path] for path in files)
        if there != expected:
            what = files[0].name if len(files) == 1 else f"{len(files)} files, {files[0].name} first"
            text = f"counts {expected:,} rows in {what}, and there are {there:,}"
            if is_binding:
                raise UserError(
                    f"{record} {text}; expected the rows that it counts ({setting}): fetch the files again, "
                    "or name them with braces where these are all that you want"
                )
            notes.append(f"{record.name} {text}")
    return notes
