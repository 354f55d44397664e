"""Writes docs/configuration.md, the reference of every setting, from the dataclasses in jaxthd/config.py.

python scripts/write_reference.py
"""

import re
from pathlib import Path

from jaxthd.terminal.settings import Setting, all_groups

REFERENCE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

<!-- Written by scripts/write_reference.py from jaxthd/config.py: change it there, and run that. -->

These are all settings of a run. A [config file](../configs/cp2.py) gives them in Python, for instance as
`DataConfig(max_documents=32)`; relative paths in it are relative to its folder. A run keeps its own in
`config.json`. Every command that takes either lets you override them by the names below:

    jaxthd train configs/cp2.py --data.manifest a.jsonl b.jsonl --mesh.no-fsdp

The defaults are those of the dataclasses. `jaxthd train configs/cp2.py --help data` lists a group with the
values that the file gives; `--help-all` lists all groups. Settings that cannot work are refused before
anything is loaded, with what to change (`jaxthd/validate/`).
"""


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [HEAD]
    for group in all_groups():
        lines += [
            f"## {group.path}",
            "",
            f"`{group.kind}`. {_markdown(group.text)}",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *map(_row, group.settings),
            "",
        ]
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    types, default = " or ".join(map(_code, setting.types)), _code(repr(setting.default))
    return f"| {_code(setting.option)} | {types} | {default} | {_markdown(setting.text)} |"


def _code(text: str) -> str:
    """Code in a table cell, with | escaped because a bare one would end the cell."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def _markdown(text: str) -> str:
    """Plain text with Markdown's own characters escaped."""
    return re.sub(r"([\\`*<|\[])", r"\\\1", text)


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    print(REFERENCE)
