"""A fault that a user can mend: bad settings, bad input. All else is a defect of ours and keeps its
traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """The message says what was found, what was expected, and what to change."""


class StorageError(Exception):
    """A store does not answer, refuses, or holds another object than before.

    It is no fault of an item that is read: what skips items, which catches ValueError and OSError, lets it
    through, and the run ends. The message says as UserError's does what was found, expected, and what to
    change.
    """


@contextmanager
def readable_errors() -> Iterator[None]:
    """In a command: what the user can mend ends it with one message and exit status 1, no traceback."""
    try:
        yield
    except (UserError, StorageError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
