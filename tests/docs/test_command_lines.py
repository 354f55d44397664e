"""Every command line and every flag in README, docs/ and docstrings can be parsed."""

import ast

import pytest

from tests.docs.command_lines import COMMANDS, ROOT, Texts
from tests.docs.reference import REFERENCE

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {"contributing.md": ["--strict", "--costs"], "cluster.md": ["--signal"]}
"""Flags of mkdocs, pytest and sbatch."""
NEMO = "coming_from_nemo.md"


def texts() -> list[tuple[str, str, list[str]]]:
    """(name, text, flags of other programs) of all pages, config files and commands."""
    found = []
    for page in PAGES:
        text = page.read_text()
        if page.name == NEMO:  # the first cell of a row says what NeMo calls it
            text = "\n".join(
                line.partition(" | ")[2] if line.startswith("|") else line for line in text.splitlines()
            )
        found.append((page.name, text, OTHERS.get(page.name, [])))
    files = [
        *sorted((ROOT / "configs").glob("*.py")),
        *(ROOT / "jaxthd" / f"{name.replace('-', '_')}.py" for name in COMMANDS),
    ]
    for file in files:
        found.append((file.name, ast.get_docstring(ast.parse(file.read_text())) or "", []))
    return found


def test_every_command_line_and_flag_can_be_parsed() -> None:
    """The reference of all settings counts too: its names are flags."""
    shown = Texts()
    for name, text, foreign in texts():
        shown.read(name, text, foreign)
    shown.check_settings()
    assert not shown.faults, "\n".join(shown.faults)
    assert shown.lines > 100
    assert shown.flags > 300
    assert REFERENCE in PAGES


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("`jaxthd trian configs/cp2.py`", "no command 'trian'"),
        ("`python -m jaxthd.trian configs/cp2.py`", "no command 'trian'"),
        ("    jaxthd train my.py --data.capcity 4096\n", "data.capcity"),
        ("`--data.capcity 4096`", "no flag --data.capcity"),
        ("`--every-tokens`", "no flag --every-tokens"),
        ("`--train.schedule step`", "step"),
        ("```bash\njaxthd train runs/my \\\n  --train.optimizer sgd\n```", "sgd"),
        ("    jaxthd train my.py --train.steps many   # how many\n", "many"),
        ("`jaxthd train my.py --adapt.dora maybe`", "expected True or False"),
        ("`jaxthd score runs/my --manifest a.jsonl --out b.jsonl --top-k two`", "--top-k"),
        ("`jaxthd generate runs/my b.wav`", "b.wav"),
        ("`jaxthd convert export runs/my --out x --format sal`", "sal"),
        ("`python scripts/check_meshes.py --dtype float16`", "float16"),
        ("`python scripts/check_meshs.py`", "no scripts/check_meshs.py"),
        ("`python scripts/launch_local.py 2 -- jaxthd train my.py --trian.steps 3`", "trian.steps"),
        ("`$ jaxthd train configs/none.py --mesh.contexts 2`", "mesh.contexts"),
    ],
)
def test_what_cannot_be_parsed_is_reported(text: str, why: str) -> None:
    shown = Texts()
    shown.read("page", text)
    shown.check_settings()
    assert shown.faults
    assert all(fault.startswith("page: ") for fault in shown.faults)
    assert why in shown.faults[0]


@pytest.mark.parametrize(
    "text",
    [
        "`jaxthd train my.py --adapt.dora True --compute.unroll-layers True --mesh.no-fsdp`",
        "    srun --ntasks-per-node=8 jaxthd train my.py --train.steps 3  # on all\n",
        "`jaxthd train configs/cp2.py --help data`",
        "```bash\nJAX_PLATFORMS=cpu jaxthd evaluate runs/my@best \\\n  --gallery 3\n```",
        "`import jaxthd`, `jaxthd train`, `python -m jaxthd.NAME`, `--data.capacity`, `--json`",
    ],
)
def test_what_can_be_parsed_is_not_reported(text: str) -> None:
    shown = Texts()
    shown.read("page", text)
    shown.check_settings()
    assert not shown.faults
