"""The setting data.columns: what the fields of items are called in a data set."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxthd.data.sources.lines import READ, Entry
from jaxthd.data.sources.recordings import LISTS
from jaxthd.errors import UserError

OF_MESSAGES = ("role", "content")
"""Fields of a message, which data.columns may name too."""
OF_ITEMS = (READ - {"audio_filepath", *LISTS}) | {"audio", "sampling_rate"}
"""Fields of an item that data.columns may name; an item's audio_filepath is its audio."""
FIELDS = OF_ITEMS | {*OF_MESSAGES, "audio_filepath"}
"""All fields that data.columns may name."""
_CHATS = ("conversations", "messages", "prompt", "chosen", "rejected", "completion")
"""Fields of an item that may hold messages."""
_MOST_NAMES = 20


def columns_of(settings: Iterable[str]) -> dict[str, str]:
    """Returns data.columns as {field: column}; "" for a field that is left out, which may be any.

    Raises UserError for a setting that is not FIELD=COLUMN, and for an unknown field.
    """
    named = {}
    for setting in settings:
        field, mark, column = setting.partition("=")
        if not is_column(setting):
            raise UserError(
                f"data.columns has {field + mark!r}; expected FIELD=COLUMN, with one of the fields "
                f"{', '.join(sorted(FIELDS))}, or NAME= for one to leave out: correct data.columns"
            )
        named["audio" if column and field == "audio_filepath" else field] = column
    return named


def is_column(setting: str) -> bool:
    """Whether a setting is FIELD=COLUMN with a field that is read, or NAME=."""
    field, mark, column = setting.partition("=")
    return bool(mark and field) and (not column or field in FIELDS)


class Columns:
    """The names of a data set's fields, by data.columns, and which of these columns have occurred.

    An item without a column keeps the field of that name, since one data set may hold items of several forms.
    title: of the data set, for messages. named: {field: column}. dropped: names that are left out. absent:
    columns that no item has had yet.
    """

    def __init__(self, settings: Iterable[str] = (), title: str = "") -> None:
        columns, self.title = columns_of(settings), title
        self.dropped = frozenset(field for field, column in columns.items() if not column)
        self.named = {field: column for field, column in columns.items() if column}
        self.absent = set(self.named.values())
        self._of_items = {f: c for f, c in self.named.items() if f not in OF_MESSAGES}
        self._of_messages = {f: c for f, c in self.named.items() if f in OF_MESSAGES}
        self._names = dict[str, None]()

    def __bool__(self) -> bool:
        """Whether anything is renamed or left out."""
        return bool(self.named or self.dropped)

    @property
    def names(self) -> list[str]:
        """Names that items have had, for messages."""
        return list(self._names)[:_MOST_NAMES]

    def note(self, names: Collection[str]) -> None:
        """Notes the names of an item, or of a table's columns."""
        if self.absent:
            self.absent.difference_update(names)
            self._names |= dict.fromkeys(list(names)[:_MOST_NAMES])

    def rename(self, entry: Entry) -> Entry:
        """Returns an item with its fields renamed. A recording that is named replaces any other."""
        if not self:
            return entry
        self.note(entry)
        return self.in_messages(self._renamed(entry, self._of_items))

    def in_messages(self, entry: Entry) -> Entry:
        """Returns an item with the fields of its messages renamed."""
        if not self._of_messages:
            return entry
        chats = {name: entry[name] for name in _CHATS if isinstance(entry.get(name), list)}
        return entry | {name: list(map(self._message, items)) for name, items in chats.items()}

    def _message(self, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        self.note(item)
        return self._renamed(item, self._of_messages)

    def _renamed(self, entry: Entry, named: dict[str, str]) -> Entry:
        there = {f: entry[c] for f, c in named.items() if entry.get(c) is not None}
        replaced = self.dropped | there.keys() | {named[f] for f in there}
        if "audio" in there:
            replaced |= {"audio_filepath", *LISTS}
        return {name: value for name, value in entry.items() if name not in replaced} | there


def require_columns(data_sets: Sequence[Columns]) -> None:
    """Raises UserError where no item of the data sets, which have been read, has a column that data.columns
    names. One set may have the column and another the field's own name.
    """
    nowhere = set.intersection(*(each.absent for each in data_sets)) if data_sets else set()
    if nowhere:
        titles = ", ".join(dict.fromkeys(each.title for each in data_sets))
        names = dict.fromkeys(name for each in data_sets for name in each.names)
        raise UserError(
            f"data.columns names {min(nowhere)!r}, which no item of {titles} has; expected one of their "
            f"fields {', '.join(list(names)[:_MOST_NAMES])}: correct data.columns"
        )
