"""A fault that a user can mend: bad settings, bad input. All else is a defect of ours and keeps its
traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """The message says what was found, what was expected, and what to change."""


@contextmanager
def readable_errors() -> Iterator[None]:
    """In a command: what the user can mend ends it with one message and exit status 1, no traceback."""
    try:
        yield
    except (UserError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
