"""README and docs say what docs/claims says; scripts/claims.py compares and writes. Nothing is measured."""

import re
from datetime import date
from pathlib import Path

import pytest

from jaxthd.errors import UserError
from scripts.claims import claims_of, main
from scripts.measurements.claims_file import SIZES, Value, load, number, shown
from scripts.measurements.pages import FIGURE, all_pages, parts, render, rendered
from tests.docs.command_lines import Texts

ROOT = Path(__file__).parents[2]
CLAIMS = load(claims_of(ROOT))
TEXTS = parts(ROOT / "docs" / "claims" / "texts.md")
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
command = "python say.py --say FILE"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[fast.values]
speed = { value = 1000, unit = "a second", bound = ">= 900", read = '^speed +([\\d,.]+)' }

[slow]
what = "It takes long."
command = "echo begun; sleep 60; echo late 7"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[slow.values]
late = { value = 7, unit = "", bound = "== 7", read = 'late (\\d+)' }

[broken]
what = "It ends well."
command = "echo size 3.00 MiB; exit 3"
minutes = 1
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[broken.values]
size = { value = 2048, unit = "KiB", bound = "1 to 4096", read = 'size (.*)' }

[old]
what = "Somebody looked."
by_hand = "with a watch"
minutes = 0
measured = { date = 2026-11-20, commit = "abc", machine = "that one", versions = "jax 0.10.2" }
[old.values]
speed = { value = 2, unit = "", bound = "<= 3" }
"""
PAGE = "# Page\n\n<!-- claims: speed -->\nIt runs at 1,000.\n<!-- end -->\n\nMore.\n"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a claims file of its own, a page, and a command that prints a number."""
    (tmp_path / "docs" / "claims").mkdir(parents=True)
    claims_of(tmp_path).write_text(TOY)
    texts = "<!-- claims: speed -->\nIt runs at {fast.speed:,.0f}.\n<!-- end -->\n"
    (tmp_path / "docs" / "claims" / "texts.md").write_text(texts)
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "say.py").write_text(PLAIN)
    return tmp_path


@pytest.mark.parametrize("page", all_pages(ROOT), ids=lambda page: page.stem)
def test_the_parts_of_a_page_are_what_the_claims_render(page: Path) -> None:
    again = "edit docs/claims, not the page; then run python scripts/claims.py --render"
    assert page.read_text() == render(page, TEXTS, CLAIMS.claims), again


def test_every_part_is_on_one_page_and_every_claim_in_a_part() -> None:
    on_pages = [name for page in all_pages(ROOT) for name in parts(page)]
    assert sorted(on_pages) == sorted(TEXTS)
    assert {claim for text in TEXTS.values() for claim, *_ in FIGURE.findall(text)} == CLAIMS.claims.keys()


@pytest.mark.parametrize("name", CLAIMS.claims)
def test_recorded_values_are_within_their_bounds(name: str) -> None:
    claim = CLAIMS.claims[name]
    assert all(value.holds(value.value) for value in claim.values.values())
    assert claim.measured.date <= date.today()


COMMANDS = {name: claim for name, claim in CLAIMS.claims.items() if claim.command}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_what_it_is_and_names_files_that_exist(name: str) -> None:
    claim = COMMANDS[name]
    assert claim.shown in claim.command
    for path in re.findall(r"\b(?:scripts|configs)/\S+", claim.command):
        assert (ROOT / path).is_file(), path


def test_commands_can_be_parsed() -> None:
    shown = Texts()
    for name, claim in COMMANDS.items():
        shown.read(name, f"    {claim.command}\n")
    shown.check_settings()
    assert not shown.faults, "\n".join(shown.faults)
    assert shown.lines > 20


def test_a_claim_that_holds_is_written_and_rendered_and_the_rest_of_the_file_stays(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "a.txt").touch()
    given = f"FILE={toy / 'a.txt'}"
    main(["--root", str(toy), "--run", "fast", "--write", "--machine", 'my "one"', "--input", given])
    before, after = TOY.splitlines(), claims_of(toy).read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 2
    assert changed[1] == before[10].replace("1000", "1234.5")
    measured = load(claims_of(toy)).claims["fast"].measured
    assert (measured.date, measured.machine) == (date.today(), 'my "one"')
    assert "It runs at 1,234." in (toy / "README.md").read_text()
    assert "1 of 1 claims hold" in capsys.readouterr().out


def test_what_fails_is_said_and_loses_nothing_of_the_others(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command ends with status 3, one takes too long, one value is beyond its bound."""
    text = TOY.replace('bound = ">= 900"', 'bound = "<= 1100"').replace("--say FILE", "--say it")
    claims_of(toy).write_text(text)
    with pytest.raises(SystemExit, match="1"):
        main(["--root", str(toy), "--run", "all", "--write", "--limit", "0.02"])
    said = capsys.readouterr().out
    assert "no longer holds: fast: speed is 1234.5, expected <= 1100" in said
    assert "no longer holds: slow: no end after" in said
    assert "not printed: late" in said
    assert "no longer holds: broken: exit status 3" in said
    assert "broken.size" in said
    assert "3,072" in said
    assert "by hand, not run: old" in said
    assert "0 of 3 claims hold" in said
    assert claims_of(toy).read_text() == text
    assert (toy / "README.md").read_text() == PAGE


def test_logs_are_read_again_without_running(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims_of(toy).write_text(TOY.replace("--say FILE", "--say it"))
    main(["--root", str(toy), "--run", "fast"])
    (folder,) = (toy / "runs" / "claims").iterdir()
    (toy / "say.py").unlink()
    main(["--root", str(toy), "--run", "fast", "--read", str(folder), "--write"])
    assert load(claims_of(toy)).claims["fast"].values["speed"].value == 1234.5
    (folder / "fast.log").write_text("cut off")
    with pytest.raises(SystemExit):
        main(["--root", str(toy), "--run", "fast", "--read", str(folder)])
    assert "fast.log is not a whole log" in capsys.readouterr().out


def test_a_missing_input_is_said(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims_of(toy).write_text(TOY.replace('"a.txt"', '"data/a.txt"'))
    with pytest.raises(SystemExit):
        main(["--root", str(toy), "--run", "fast"])
    assert "give --input FILE=PATH" in capsys.readouterr().out
    with pytest.raises(UserError, match="expected NAME=VALUE, with NAME of FILE"):
        main(["--root", str(toy), "--run", "fast", "--input", "OTHER=x"])
    with pytest.raises(UserError, match="no claim is called slo"):
        main(["--root", str(toy), "--run", "slo"])


def test_claims_are_listed_with_their_age(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(toy)])
    line = next(line for line in capsys.readouterr().out.splitlines() if "fast.speed" in line)
    assert line.split()[1:7] == [
        "1,000",
        "a",
        "second",
        ">=",
        "900",
        str((date.today() - date(2026, 11, 20)).days),
    ]


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
    lines[10] = line
    claims_of(toy).write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        load(claims_of(toy))


@pytest.mark.parametrize(
    ("take", "found"),
    [("first", 3), ("last", 2), ("max", 9), ("min", 2), ("median", 3), ("sum", 14), ("count", 3)],
)
def test_a_value_takes_one_of_several_numbers(take: str, found: float) -> None:
    assert Value(0, "", ">= 0", r"^x (\d+)", take).find("x 3\nx 9\nx 2\ny 5\n") == found


def test_numbers_are_read_and_written_as_commands_and_pages_print_them() -> None:
    assert [number(text, "") for text in ("4,096", "1.2e-07", "-0.5")] == [4096, 1.2e-7, -0.5]
    assert number("512.00 MiB", "GiB") == 0.5
    assert SIZES.keys() == {"KiB", "MiB", "GiB"}
    assert [shown(x) for x in (4096, 3.4e-5, 7.0)] == ["4,096", "3.4e-5", "7.0"]
    assert shown(11.42, ".1f") == "11.4"


def test_a_figure_that_no_claim_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"packing\.randon"):
        rendered("{packing.randon}", CLAIMS.claims)


def test_a_number_edited_by_hand_is_found(toy: Path) -> None:
    (toy / "README.md").write_text(PAGE.replace("1,000", "1,001"))
    texts = parts(toy / "docs" / "claims" / "texts.md")
    page = render(toy / "README.md", texts, load(claims_of(toy)).claims)
    assert page == PAGE != (toy / "README.md").read_text()
