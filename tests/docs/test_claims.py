"""README and docs say what docs/claims says; scripts/claims.py compares, writes, and knows what is stale."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest

from tests.docs.command_lines import Texts

ROOT = Path(__file__).parents[2]
PLAIN = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--say")
print("speed  1,234.5  of", parser.parse_args().say)
"""
TOY = """\
# A comment that stays.
[inputs]
FILE = "a.txt"

[fast]
what = "It is fast."
of = ["code"]
command = "python say.py --say FILE"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[fast.values]
speed = { value = 1000, unit = "a second", bound = ">= 900", read = '^speed +([\\d,.]+)' }

[slow]
what = "It takes long."
of = ["code"]
command = "echo begun; sleep 60; echo late 7"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[slow.values]
late = { value = 7, unit = "", bound = "== 7", read = 'late (\\d+)' }

[broken]
what = "It ends well."
of = ["code"]
command = "echo size 3.00 MiB; exit 3"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[broken.values]
size = { value = 2048, unit = "KiB", bound = "1 to 4096", read = 'size (.*)' }

[old]
what = "Somebody looked."
of = ["code"]
by_hand = "with a watch"
minutes = 0
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[old.values]
speed = { value = 2, unit = "", bound = "<= 3" }
"""
PAGE = "# Page\n\n<!-- claims: speed -->\nIt runs at 1,000.\n<!-- end -->\n\nMore.\n"
CODE = '''"""A module."""

from jaxthd.errors import UserError


def twice(x: int) -> int:
    """Twice x."""
    return 2 * x


LEAST = 3
"""The least."""
'''


def claims(root: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, what it prints) of the command for a repository."""
    command = [sys.executable, str(ROOT / "scripts" / "claims.py"), "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def file_of(root: Path) -> Path:
    return root / "docs" / "claims" / "claims.toml"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a claims file of its own, a page, code, and a command that prints a number."""
    (tmp_path / "docs" / "claims").mkdir(parents=True)
    file_of(tmp_path).write_text(TOY)
    texts = "<!-- claims: speed -->\nIt runs at {fast.speed:,.0f}.\n<!-- end -->\n"
    (tmp_path / "docs" / "claims" / "texts.md").write_text(texts)
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "say.py").write_text(PLAIN)
    (tmp_path / "a.txt").touch()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text(CODE)
    return tmp_path


def test_pages_texts_and_claims_agree_and_name_code_that_exists() -> None:
    """A figure edited by hand, a claim without code or page, and a value beyond its bound are faults."""
    status, said = claims(ROOT, "--verify")
    assert status == 0, said


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("README.md", "1,000", "1,001", "edit docs/claims, not the page"),
        ("docs/claims/claims.toml", 'of = ["code"]', 'of = ["gone"]', "fast: gone: not there"),
        ("docs/claims/claims.toml", "value = 7,", "value = 8,", "slow.late is 8, expected == 7"),
        ("docs/claims/claims.toml", "2026-11-20", "2999-01-01", "fast: measured on 2999-01-01"),
        ("docs/claims/texts.md", "{fast.speed:,.0f}", "{fast.sped}", "{fast.sped} names no value"),
        ("docs/claims/texts.md", "fast.speed", "old.speed", "no part shows a figure of"),
    ],
)
def test_what_disagrees_is_said(toy: Path, file: str, old: str, new: str, fault: str) -> None:
    path = toy / file
    path.write_text(path.read_text().replace(old, new, 1))
    status, said = claims(toy, "--verify")
    assert status == 1
    assert fault in said


def test_commands_name_files_that_exist_and_can_be_parsed() -> None:
    tables = tomllib.loads(file_of(ROOT).read_text())
    commands = {name: claim["command"] for name, claim in tables.items() if "command" in claim}
    shown = Texts()
    for name, command in commands.items():
        for path in re.findall(r"\b(?:scripts|configs)/\S+", command):
            assert (ROOT / path).is_file(), path
        shown.read(name, f"    {command}\n")
    shown.check_settings()
    assert not shown.faults, "\n".join(shown.faults)
    assert shown.lines > 20


def test_a_claim_that_holds_is_written_and_rendered_and_the_rest_of_the_file_stays(toy: Path) -> None:
    given = f"FILE={toy / 'a.txt'}"
    status, said = claims(toy, "--run", "fast", "--write", "--machine", 'my "one"', "--input", given)
    assert (status, "1 of 1 claims hold" in said) == (0, True), said
    before, after = TOY.splitlines(), file_of(toy).read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 2
    assert changed[1] == before[11].replace("1000", "1234.5")
    measured = tomllib.loads(file_of(toy).read_text())["fast"]["measured"]
    assert (measured["date"], measured["machine"]) == (date.today(), 'my "one"')
    assert re.fullmatch("[0-9a-f]{16}", measured["code"])
    assert "It runs at 1,234." in (toy / "README.md").read_text()


MOVED = "# a comment\nfrom jaxthd.elsewhere import UserError\n" + CODE.split("\n", 3)[3]


@pytest.mark.parametrize(
    ("name", "code", "stale"),
    [
        ("one.py", CODE, 3),
        ("one.py", CODE.replace("Twice x", "Two times x").replace("The least", "Least"), 3),
        ("one.py", CODE.replace("2 * x", "2 * x  # why"), 3),
        ("deeper/two.py", MOVED, 3),
        ("one.py", CODE.replace("2 * x", "3 * x"), 4),
        ("one.py", CODE.replace("= 3", "= 4"), 4),
        ("one.py", CODE + "\n\nMOST = 9\n", 4),
    ],
    ids=["as it was", "docstrings", "a comment", "moved", "a function", "a constant", "another constant"],
)
def test_a_claim_is_stale_where_its_code_has_changed_and_not_its_words(
    toy: Path, name: str, code: str, stale: int
) -> None:
    """The other three were measured before there were digests: they are stale in any case."""
    claims(toy, "--run", "fast", "--write", "--input", f"FILE={toy / 'a.txt'}")
    (toy / "code" / "one.py").unlink()
    (toy / "code" / name).parent.mkdir(exist_ok=True)
    (toy / "code" / name).write_text(code)
    _, said = claims(toy, "--stale")
    assert f"{stale} of 4 claims are stale" in said
    assert ("has changed" in said) == ("fast.speed" in said) == (stale == 4)
    assert said.count("unknown, measured before digests") == 3


def test_stale_claims_are_run_until_the_minutes_are_over_and_the_rest_the_next_time(toy: Path) -> None:
    """What is left after the first call begins with the second claim; a claim that is fresh is not run."""
    text = TOY.replace("sleep 60; ", "").replace("exit 3", "true").replace("--say FILE", "--say it")
    file_of(toy).write_text(text)
    arguments = "--run", "stale", "--write", "--minutes", "0.5"
    for name, left in (("fast", "2 claims are left, the next is slow"), ("slow", "1 claims are left")):
        _, said = claims(toy, *arguments)
        assert f"{name} (about 1 min)" in said
        assert left in said
        assert "1 of 1 claims hold" in said
    status, said = claims(toy, *arguments)
    assert (status, "claims are left" in said) == (0, False), said
    assert "1 of 4 claims are stale" in claims(toy, "--stale")[1]


def test_what_fails_is_said_and_loses_nothing_of_the_others(toy: Path) -> None:
    """One command ends with status 3, one takes too long, one value is beyond its bound."""
    text = TOY.replace('bound = ">= 900"', 'bound = "<= 1100"').replace("--say FILE", "--say it")
    file_of(toy).write_text(text)
    status, said = claims(toy, "--run", "all", "--write", "--limit", "0.02")
    assert status == 1
    assert "no longer holds: fast: speed is 1234.5, expected <= 1100" in said
    assert "no longer holds: slow: no end after" in said
    assert "not printed: late" in said
    assert "no longer holds: broken: exit status 3" in said
    assert "broken.size" in said
    assert "3,072" in said
    assert "by hand, not run: old" in said
    assert "0 of 3 claims hold" in said
    assert file_of(toy).read_text() == text
    assert (toy / "README.md").read_text() == PAGE


def test_logs_are_read_again_without_running(toy: Path) -> None:
    file_of(toy).write_text(TOY.replace("--say FILE", "--say it"))
    claims(toy, "--run", "fast")
    (folder,) = (toy / "runs" / "claims").iterdir()
    (toy / "say.py").unlink()
    assert claims(toy, "--run", "fast", "--read", str(folder), "--write")[0] == 0
    assert "speed = { value = 1234.5," in file_of(toy).read_text()
    (folder / "fast.log").write_text("cut off")
    status, said = claims(toy, "--run", "fast", "--read", str(folder))
    assert (status, "fast.log is not a whole log" in said) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "fast"), "give --input FILE=PATH"),
        (("--run", "fast", "--input", "OTHER=x"), "expected NAME=VALUE, with NAME of FILE"),
        (("--run", "slo"), "no claim is called slo"),
    ],
)
def test_missing_inputs_and_unknown_claims_are_said(
    toy: Path, arguments: tuple[str, ...], message: str
) -> None:
    file_of(toy).write_text(TOY.replace('"a.txt"', '"data/a.txt"'))
    status, said = claims(toy, *arguments)
    assert status == 1
    assert message in said


def test_claims_are_listed_with_their_age(toy: Path) -> None:
    line = next(line for line in claims(toy)[1].splitlines() if "fast.speed" in line)
    days = (date.today() - date(2026, 11, 20)).days
    assert line.split()[1:7] == ["1,000", "a", "second", ">=", "900", str(days)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('speed = { value = 1, unit = "", bound = ">= 0" }', "it needs one group"),
        ('speed = { value = 1, unit = "", bound = "about 1", read = \'(.)\' }', "about"),
        ('speed = { value = 1, unit = "", bound = ">= 0", take = "best", read = \'(.)\' }', "best"),
        ('speed = { unit = "", value = 1, bound = ">= 0", read = \'(.)\' }', "one such line"),
    ],
)
def test_a_file_that_has_not_the_form_is_refused(toy: Path, line: str, message: str) -> None:
    lines = TOY.splitlines()
    lines[11] = line
    file_of(toy).write_text("\n".join(lines))
    status, said = claims(toy)
    assert status == 1
    assert message in said


TAKES = {"first": 3, "last": 2, "max": 9, "min": 2, "median": 3, "sum": 14, "count": 3}


def test_a_value_takes_one_of_several_numbers_in_any_form_that_commands_print(toy: Path) -> None:
    """4,096 and 1.2e-07 are numbers, and sizes come in the claim's unit."""
    values = [
        f'{take} = {{ value = {x}, unit = "", bound = "== {x}", take = "{take}", read = \'^x (\\d+)\' }}'
        for take, x in TAKES.items()
    ]
    values += [
        'large = { value = 4096, unit = "", bound = "== 4096", read = \'large (.*)\' }',
        'small = { value = 1.2e-7, unit = "", bound = "== 1.2e-7", read = \'small (.*)\' }',
        'size = { value = 0.5, unit = "GiB", bound = "== 0.5", read = \'size (.*)\' }',
    ]
    said = "x 3\\nx 9\\nx 2\\ny 5\\nlarge 4,096\\nsmall 1.2e-07\\nsize 512.00 MiB\\n"
    head = TOY.partition("[slow]")[0].partition("speed =")[0]
    text = head.replace("python say.py --say FILE", f"printf '{said}'").replace("\\n", "\\\\n")
    file_of(toy).write_text(text + "\n".join(values) + "\n")
    status, printed = claims(toy, "--run", "fast")
    assert (status, "1 of 1 claims hold" in printed) == (0, True), printed
