"""Footers of parquet files, against what pyarrow says of sound ones, and damaged."""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from jaxthd.data.parquet_footer import row_groups
from jaxthd.data.tables import errors_of_tables, open_table
from tests.data.sets import sound, write_parquet
from tests.fuzz.damage import damaged_bytes

pytest.importorskip("pyarrow")

ROWS = [{"audio": {"bytes": sound(0.1, seed=n), "path": f"{n}.wav"}, "text": "one"} for n in range(20)]


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"write_page_index": True}])
def test_a_footer_is_read_as_pyarrow_reads_it(tmp_path: Path, options):
    import pyarrow.parquet as parquet

    table = pyarrow_table()
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1, **options)
    metadata = parquet.read_metadata(tmp_path / "a.parquet")
    found = row_groups(tmp_path / "a.parquet")
    assert len(found) == metadata.num_row_groups == 20
    for number, group in enumerate(found):
        theirs = metadata.row_group(number)
        columns = [theirs.column(n) for n in range(theirs.num_columns)]
        starts = [c.dictionary_page_offset or c.data_page_offset for c in columns]
        ends = [s + c.total_compressed_size for s, c in zip(starts, columns, strict=True)]
        assert group == (theirs.num_rows, max(ends), "")


def pyarrow_table():
    import pyarrow

    return pyarrow.Table.from_pylist(ROWS).replace_schema_metadata({"x": "y" * 300})


def test_a_summary_names_the_files_of_its_groups(tmp_path: Path):
    import pyarrow.parquet as parquet

    collected: list = []
    parquet.write_to_dataset(pyarrow_table(), tmp_path / "set", metadata_collector=collected)
    parquet.write_metadata(pyarrow_table().schema, tmp_path / "_metadata", metadata_collector=collected)
    assert [(group.rows, group.file) for group in row_groups(tmp_path / "_metadata")] == [
        (20, next((tmp_path / "set").iterdir()).name)
    ]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + struct.pack("<I", 99) + b"PAR1"])
def test_a_file_without_a_footer_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"it has no footer|its footer is damaged"):
        row_groups(tmp_path / "a.parquet")


def test_a_damaged_footer_is_an_error_and_no_crash(tmp_path: Path):
    """pyarrow's RowGroupMetaData.column ends the process at some of these."""
    good = write_parquet(tmp_path / "good.parquet", ROWS).read_bytes()
    length = int.from_bytes(good[-8:-4], "little")
    rng, refused = np.random.default_rng(0), 0
    for _ in range(300):
        footer = damaged_bytes(rng, good[-8 - length : -8])
        data = good[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1"
        (tmp_path / "a.parquet").write_bytes(data)
        try:
            row_groups(tmp_path / "a.parquet")
        except ValueError:
            refused += 1
    assert refused > 100


def test_statistics_that_do_not_fit_a_column_end_no_process(tmp_path: Path):
    """pyarrow 26's RowGroupMetaData.column does not catch this exception: the process was aborted."""
    path = write_parquet(tmp_path / "a.parquet", [{"text": ["one", "two"]}])
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    # The histogram of the levels is a list of two numbers, of which 0x26 is the head; 0x16 is that of one.
    heads = [n for n in range(len(data) - 8 - length, len(data) - 8) if data[n] == 0x26]
    assert heads
    for at in heads:
        path.write_bytes(data[:at] + b"\x16" + data[at + 1 :])
        with suppress(*errors_of_tables()):
            table = open_table(path)
            table.read(0, ["text"])
