"""README and the pages of docs/ are true: what they name exists, and their examples say what they print."""

import doctest
import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
from flax.nnx import traversals

from jaxthd.__main__ import commands
from jaxthd.config import AdaptConfig, Config, LLMConfig, ModelConfig
from jaxthd.config.listing import all_groups
from jaxthd.config.removed import REMOVED
from jaxthd.models.adapt import dotted
from jaxthd.steps.blueprint import Blueprint
from jaxthd.validate import DeviceFacts, findings
from tests.data.sets import read_manifest
from tests.docs.reference import REFERENCE

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DECISIONS = (ROOT / "docs" / "decisions").glob("*.md")
PAGES = [README, *sorted(page for page in (*(ROOT / "docs").glob("*.md"), *DECISIONS) if page != REFERENCE)]
PACKAGE = ROOT / "jaxthd"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def settings() -> set[str]:
    """Every setting and every group of them as the command line names it, without its dashes."""
    found = {setting.option.removeprefix("--") for group in all_groups() for setting in group.settings}
    return found | {group.path.replace("_", "-") for group in all_groups()}


def code_of(text: str) -> str:
    """The code of a page, a line each: inline, indented by four spaces, and fenced."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return "\n".join([*re.findall(r"`([^`\n]+)`", rest), *re.findall(r"^    (.*)$", rest, re.M), *fenced])


def found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something inside one."""
    module, rest = name, ""
    while not found(module):
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}".rstrip(".")
    try:
        return bool(attrgetter(rest)(import_module(module)) if rest else True)
    except AttributeError:
        return False


@each_page
def test_settings_that_a_page_names_exist(page: Path) -> None:
    """By their paths in Python; tests/docs/test_command_lines.py has the flags. Those that there were may be
    named: old configs may have them."""
    named = re.findall(
        r"^((?:mesh|data|compute|adapt|posttraining|rollout|train)\.\w+)$", code_of(page.read_text()), re.M
    )
    removed = {f"{group}.{name}" for group, names in REMOVED.items() for name in names}
    assert {path.replace("_", "-") for path in set(named) - removed} - settings() == set()


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https:)([^)#]*)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"(?<![\w./])((?:jaxthd|tests|scripts|configs|docs)/[\w/.]*\w)", code_of(text)):
        assert (ROOT / path).exists(), path


@each_page
def test_headings_that_a_page_links_to_exist(page: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        target = page.parent / link if link else page
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


@each_page
def test_names_that_a_page_gives_exist(page: Path) -> None:
    code = code_of(page.read_text())
    for name in set(re.findall(r"(?<![\w/.-])(?:jaxthd|scripts)(?:\.(?!NAME)\w+)+", code)):
        assert exists(name), name


@each_page
def test_the_examples_of_a_page_say_what_they_print(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_the_readme_is_short_and_says_early_what_has_not_run() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert "On a GPU little has run" in " ".join(lines[:15])


def test_every_page_is_found_from_the_readme() -> None:
    links = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text()))
    pages = {page.relative_to(ROOT) for page in (*PAGES[1:], REFERENCE)}
    assert {str(page) for page in pages if len(page.parts) == 2} <= links
    named = "".join(page.read_text() for page in PAGES)
    assert all(f"(decisions/{page.name})" in named for page in pages if len(page.parts) == 3)


def test_every_command_is_in_the_readme_s_table() -> None:
    assert set(re.findall(r"^\| `jaxthd ([\w-]+)", README.read_text(), re.M)) == set(commands())


def test_the_lines_that_the_page_about_data_shows_can_be_read(tmp_path: Path) -> None:
    shown = re.findall(r"^    (\{.*\})$", (ROOT / "docs" / "data.md").read_text(), re.M)
    manifest = tmp_path / "shown.jsonl"
    manifest.write_text("\n".join(shown) + "\n")
    examples, faults = read_manifest(manifest)
    assert faults == []
    assert [turn.role for turn in examples[0].turns] == ["user", "assistant"]
    assert [len(example.clips) for example in examples] == [1] * len(shown)
    assert [len(example.alternatives) for example in examples] == [0] * 6 + [2, 2, 1]
    assert all(json.loads(line) for line in shown)


NEMO = (ROOT / "docs" / "coming_from_nemo.md").read_text()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_translations_of_nemo_s_patterns_hold_for_every_model(tied: bool) -> None:
    """What a row freezes or adapts is in the model, tied or not, and is what NeMo's own patterns name."""
    shown = re.findall(r"`(--adapt\.(?:freeze|lora-targets) [^`]+)`", NEMO)
    trains = {}
    for flags in shown:
        field, *patterns = shlex.split(flags)
        name = field.removeprefix("--adapt.").replace("-", "_")
        adapt = AdaptConfig(lora_rank=4 * (name == "lora_targets"), **{name: tuple(patterns)})
        config = Config(model=ModelConfig(llm=LLMConfig(tied_embedding=tied)), adapt=adapt)
        if "PATTERN" not in flags and "router" not in flags:  # this model has no experts
            assert findings(config, DeviceFacts("cpu", 1, "cpu")) == [], flags
            flat = traversals.flatten_mapping(Blueprint(config).trained)
            trains[flags] = {dotted(path) for path, is_trained in flat.items() if is_trained}
    without_llm = next(names for flags, names in trains.items() if "embedding" in flags)
    assert {name.partition(".")[0] for name in without_llm} == {"encoder", "adapter"}
    without_encoder = trains['--adapt.freeze "encoder.*"']
    assert not any(name.startswith("encoder.") for name in without_encoder)
    lora = next(names for flags, names in trains.items() if "lora-targets" in flags)
    assert {name.partition(".")[0] for name in lora if ".lora." in name} == {"decoder"}
    assert any(name.startswith("encoder.") for name in lora)


OTHERS = {"bias", "optimizer", "window"}
"""Keys of NeMo's that are not the settings of these names: LoRA's biases, a group, a window of samples."""


def denied(page: str) -> list[str]:
    """Returns the options that a page's tables deny although a setting has the same words in its name."""
    last = [set(re.split(r"[-.]", name.rpartition(".")[2])) for name in settings() if name[-1].isalnum()]
    rows = [row.split("|") for row in page.splitlines() if re.search(r"\bdo(es)? not exist\b", row)]
    options = [option for row in rows for option in re.findall(r"`([^`]+)`", row[1])]
    words = {option: set(re.split(r"[-._*: ]", option.lower())) for option in options}
    return [o for o in options if words[o] in last and o not in OTHERS]


def test_nothing_that_exists_is_denied():
    assert denied((ROOT / "docs" / "coming_from_nemo.md").read_text()) == []
    row = "| `lora.lora_dropout`, `lora.lora_A_init`, `max-skipped_share` | do not exist |"
    assert denied(row) == ["lora.lora_dropout", "max-skipped_share"]
