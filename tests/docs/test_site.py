"""The site lists every page, and shows what the pages hold. `.ci/run` builds it with --strict."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxthd

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", SITE / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()


def pages_of(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [page for inner in (node.values() if isinstance(node, dict) else node) for page in pages_of(inner)]


def test_the_navigation_has_every_page_once() -> None:
    listed = pages_of(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"])
    made = ["index.md", HOOKS.API, HOOKS.COMMANDS, HOOKS.CONFIGS, HOOKS.RECIPES]
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    shown = [page.as_posix() for page in pages if page.parts[0] != "claims"]
    assert sorted(listed) == sorted([*made, *shown])


def test_links_to_files_lead_to_pages_of_the_site() -> None:
    """`mkdocs build --strict` ends with an error at a link to a file that the site does not hold."""
    pages = {
        page: (ROOT / "docs" / page)
        for page in pages_of(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"])
    }
    texts = {page: path.read_text() for page, path in pages.items() if path.exists()}
    texts[HOOKS.RECIPES] = HOOKS.recipes_page()
    texts["index.md"] = HOOKS.home((ROOT / "README.md").read_text())
    lost = []
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", HOOKS.on_page_markdown(text)):
            path = os.path.normpath(Path(page).parent / target)
            if path not in pages and not (ROOT / "docs" / path).is_file():
                lost.append((page, target))
    assert not lost


def test_the_reference_has_every_public_name_below_the_module_that_defines_it() -> None:
    entries = re.findall(r"^::: jaxthd\.([\w.]+)\.(\w+)$", HOOKS.api_page(), re.M)
    old = {"EncoderConfig"}  # FastConformer's name in older config files
    assert {name: module for module, name in entries} == {
        name: module for name, module in jaxthd._HOMES.items() if name not in old
    }
    assert len(entries) == len(jaxthd.__all__) - len(old)


@pytest.mark.parametrize(
    ("page", "site"),
    [
        ("[a](../configs/cp2.py)", "[a](reference/configs.md#cp2)"),
        ("[a](../configs/recipes/README.md)", "[a](reference/recipes.md)"),
        ("<!-- claims: five -->\n| a | b |\n", "\n| a | b |\n"),
        ("| `str \\| int` | a \\| b, \\<c> |", "| `str | int` | a \\| b, &lt;c> |"),
        ("`a \\| b` outside of a table", "`a \\| b` outside of a table"),
    ],
)
def test_a_page_says_the_same_on_the_site(page: str, site: str) -> None:
    assert HOOKS.on_page_markdown(page) == site


def test_docstrings_are_plain_text() -> None:
    text = "a * b, <c>, x[0], _RT and x_RT, `*args`:\n    code * <d>"
    assert HOOKS.escaped(text) == "a \\* b, &lt;c>, x\\[0], \\_RT and x_RT, `*args`:\n\n    code * <d>"


def test_the_readme_links_to_the_pages_beside_it() -> None:
    assert "](first_run.md)" in HOOKS.home("[a](docs/first_run.md)")


def test_every_command_is_described() -> None:
    commands = re.findall(r"^## jaxthd ([\w-]+)\n\n\w.*\.\n\n    jaxthd \1", HOOKS.commands_page(), re.M)
    named = re.findall(r"^\| `jaxthd ([\w-]+)", (ROOT / "README.md").read_text(), re.M)
    assert sorted(commands) == sorted(set(named))


def test_the_config_files_are_shown_whole() -> None:
    for path in (ROOT / "configs").glob("*.py"):
        assert f"{{ #{path.stem} }}\n\n```python\n{path.read_text()}```\n" in HOOKS.configs_page()
