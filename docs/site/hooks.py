"""What the site has besides the pages of docs/: README as its home, the config files, the Python API.

mkdocs calls the functions that begin with on_; docs/site/mkdocs.yml names this file.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from escaping import escaped  # noqa: E402

import jaxthd  # noqa: E402

API, COMMANDS, CONFIGS = "reference/api.md", "reference/commands.md", "reference/configs.md"
RECIPES = "reference/recipes.md"
TOPICS = {
    "config": "Configuration",
    "files": "Configuration",
    "data": "Data",
    "packing": "Packing",
    "models": "Modules",
    "objectives": "Objectives",
    "steps": "Training",
    "parallel": "Training",
    "checkpoints": "Checkpoints",
    "inference": "Generation and scoring",
    "errors": "Errors",
}
"""A package of jaxthd -> the section of its public names. Other packages have one of their own name."""
API_HEAD = """\
# Python API: every name

What `import jaxthd` gives, from the docstrings. [Python API, by example](../api.md) shows the names at work.
A suffix such as `_RT` names the dimensions of an array; [architecture](../architecture.md) has the words.
The fields of the config classes are on [a page of their own](../configuration.md).
"""
SETTINGS = {"members": "false", "separate_signature": "false", "show_signature": "false"}
"""How a config is shown: its fields have a page of their own."""
COMMANDS_HEAD = """\
# Commands

`jaxthd NAME` and `python -m jaxthd.NAME` are the same. `--help` after a name lists its options,
`--help data` a group of [settings](../configuration.md).
"""
CONFIGS_HEAD = """\
# Config files

The files of `configs/`. A copy of one is a good beginning for a file of your own:
[every setting](../configuration.md).
"""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that docs/ does not hold."""
    from mkdocs.structure.files import File

    pages = {API: api_page(), COMMANDS: commands_page(), CONFIGS: configs_page()}
    pages["index.md"] = home((ROOT / "README.md").read_text())
    pages[RECIPES] = recipes_page()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as Python-Markdown reads it, which knows neither \\< nor, inside the code of a table, \\|.

    Links to config files and recipes lead to their pages. Comments, which are for scripts, are left out.
    """
    text = re.sub(r"\]\(\.\./configs/(\w+)\.py\)", rf"]({CONFIGS}#\1)", markdown)
    text = text.replace("](../configs/recipes/README.md)", f"]({RECIPES})")
    text = re.sub(r"^<!--.*?-->\n", "\n", text, flags=re.M | re.S).replace("\\<", "&lt;")
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", code_in_table, row[0]), text, flags=re.M)


def code_in_table(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def home(readme: str) -> str:
    """README's links to docs/ as links beside it."""
    return "---\nhide: [navigation]\n---\n" + re.sub(r"\]\(docs/", "](", readme)


def api_page() -> str:
    """A section for each topic, with an entry for each public name in it."""
    topics: dict[str, list[str]] = {topic: [] for topic in TOPICS.values()}
    for name in jaxthd.__all__:
        if getattr(getattr(jaxthd, name), "__name__", name) != name:  # an old name of something else
            continue
        home_of = jaxthd._HOMES[name]
        package = home_of.partition(".")[0]
        topic = TOPICS.get(package, package.replace("_", " ").capitalize())
        options = {"heading": f"jaxthd.{name}", "toc_label": name} | (SETTINGS if package == "config" else {})
        lines = [
            f"::: jaxthd.{home_of}.{name}",
            "    options:",
            *(f"      {k}: {v}" for k, v in options.items()),
        ]
        topics.setdefault(topic, []).append("\n".join(lines) + "\n")
    sections = [f"## {topic}\n\n" + "\n".join(entries) for topic, entries in topics.items() if entries]
    return "\n".join([API_HEAD, *sections])


def commands_page() -> str:
    """What the file of each command says of it: a file directly in jaxthd/ with a main()."""
    sections = []
    for path in sorted((ROOT / "jaxthd").glob("[!_]*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            name = path.stem.replace("_", "-")
            sections.append(f"## jaxthd {name}\n\n{escaped(ast.get_docstring(module) or '')}\n")
    return "\n".join([COMMANDS_HEAD, *sections])


def configs_page() -> str:
    """The text of each config file, below a heading with its name as the anchor."""
    sections = [
        f"## configs/{path.name} {{ #{path.stem} }}\n\n```python\n{path.read_text()}```\n"
        for path in sorted((ROOT / "configs").glob("*.py"))
    ]
    return "\n".join([CONFIGS_HEAD, *sections])


def recipes_page() -> str:
    """The README of the recipes, with its links to docs/ as links from the folder of this page."""
    return (ROOT / "configs" / "recipes" / "README.md").read_text().replace("](../../docs/", "](../")
