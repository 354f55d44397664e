"""The setting data.columns: what the fields of lines and rows are called in a data set."""

from jaxthd.config import DataConfig
from jaxthd.data.sources.lines import READ, Entry
from jaxthd.data.sources.recordings import LISTS
from jaxthd.data.tables import SUFFIXES
from jaxthd.errors import UserError

FIELDS = (READ - {"audio_filepath", "shard_id", *LISTS}) | {"audio", "sampling_rate"}
"""The fields that data.columns may name."""


def columns_of(settings: tuple[str, ...]) -> dict[str, str]:
    """Returns data.columns as {field: column}; "" for a field that is left out, which may be any.

    Raises UserError for a setting that is not FIELD=COLUMN, and for an unknown field.
    """
    for setting in settings:
        if not is_column(setting):
            field, mark, _ = setting.partition("=")
            raise UserError(
                f"data.columns has {field + mark!r}; expected FIELD=COLUMN, with one of the fields "
                f"{', '.join(sorted(FIELDS))}, or NAME= for one to leave out: correct data.columns"
            )
    return {field: column for field, _, column in (setting.partition("=") for setting in settings)}


def is_column(setting: str) -> bool:
    """Whether a setting is FIELD=COLUMN with a field that is read, or NAME=."""
    field, mark, column = setting.partition("=")
    return bool(mark and field) and (not column or field in FIELDS)


class LineColumns:
    """Renames the fields of a manifest's lines as data.columns says, and notes which columns occurred.

    A line without a column keeps the field of that name, since one manifest may hold lines of several forms.
    """

    def __init__(self, data: DataConfig, title: str) -> None:
        named = columns_of(data.columns)
        self._dropped = {field for field, column in named.items() if not column}
        self._named = {f: c for f, c in named.items() if c and f != "sampling_rate"}
        self._absent, self._title, self._names = set(self._named.values()), title, dict[str, None]()
        self._is_beside_tables = any(
            map(_is_table, (*data.manifest, *(s.path for s in data.validation_sets)))
        )

    def rename(self, entry: Entry) -> Entry:
        """Returns the line with its fields renamed. A recording that is named replaces any other."""
        if not self._named and not self._dropped:
            return entry
        self._absent -= entry.keys()
        if self._absent:
            self._names |= dict.fromkeys(list(entry)[:20])
        there = {f: entry[c] for f, c in self._named.items() if entry.get(c) is not None}
        replaced = self._dropped | there.keys() | {self._named[f] for f in there}
        if "audio" in there:
            replaced |= {"audio_filepath", *LISTS}
        return {name: value for name, value in entry.items() if name not in replaced} | there

    def require(self) -> None:
        """Raises UserError where no line had a column that data.columns names.

        Beside tables, which all have the columns, a manifest may have the fields' own names.
        """
        if self._absent and not self._is_beside_tables:
            raise UserError(
                f"data.columns names {min(self._absent)!r}, which no line of {self._title} has; expected one "
                f"of its fields {', '.join(list(self._names)[:20])}: correct data.columns"
            )


def _is_table(path: str) -> bool:
    return path.startswith("huggingface:") or path.endswith(SUFFIXES)
