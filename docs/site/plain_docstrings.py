"""An extension of griffe, which reads the docstrings for the reference of the Python API."""

from typing import Any

import griffe
from escaping import escaped  # hooks.py has put this folder on the path


class PlainDocstrings(griffe.Extension):
    """Escapes what is special in Markdown: docstrings here are plain text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escaped(obj.docstring.value)
