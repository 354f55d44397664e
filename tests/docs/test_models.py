"""docs/models.md has a row for each family that is read and written, and each row is true."""

from pathlib import Path

import numpy as np
import pytest

from tests.docs.models import MODELS, REFERENCES, ROWS, SPEECH, TABLE, Row, written

TESTS = Path(__file__).parents[1]


def test_the_table_is_of_the_present_families():
    assert MODELS.read_text() == written(), "run python scripts/write_reference.py"


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.models)
def test_a_row_names_what_compares_it(row: Row):
    """The reference, and the test that reads it, by its name or by that of all of its kind."""
    helpers = [TESTS / "hf" / name for name in ("published.py", "speech_folders.py")]
    assert (REFERENCES / f"{row.reference}.npz").is_file()
    assert any(row.reference in file.read_text() for file in (TESTS / row.compared, *helpers))


@pytest.mark.parametrize(
    "row", [x for x in ROWS.values() if x.compared == SPEECH], ids=lambda row: row.models
)
def test_a_row_says_whether_a_table_of_positions_is_not_trained(row: Row):
    with np.load(REFERENCES / f"{row.reference}.npz") as arrays:
        has_table = any(name.endswith("embed_positions.weight") for name in arrays)
    assert (row.trained == TABLE) == has_table
