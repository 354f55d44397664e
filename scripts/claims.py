"""The figures of README and docs: lists them with their age, measures them again, and renders the pages.

    python scripts/claims.py                                    all claims, with values, bounds and age
    python scripts/claims.py --run packing survival [--write]   runs their commands again and compares
    python scripts/claims.py --run all --input FILE=my.jsonl --input PYTHON=torch-env/bin/python
    python scripts/claims.py --run all --read runs/claims/X     reads the logs of an earlier run instead
    python scripts/claims.py --render                           writes the figures into the pages

The claims are docs/claims/claims.toml; the texts that hold their figures are docs/claims/texts.md. --run
needs an idle machine, runs one command after the other, and keeps what each prints in runs/claims. A claim
holds if its command ends with status 0 and every value is within its bound. --write puts the new values of
the claims that hold into the file, with date, commit, machine and versions, and renders the pages. Exits 1 if
a claim does not hold or a command fails; the others are measured and written all the same.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.errors import UserError, readable_errors
from jaxthd.terminal.tables import table
from scripts.measurements.claims_file import Claim, Claims, load, shown, write_measured
from scripts.measurements.pages import parts, render_all
from scripts.measurements.running import Outcome, changed_files, git, measured_now, outcome, run

ROOT = Path(__file__).parents[1]


def claims_of(root: Path) -> Path:
    return root / "docs" / "claims" / "claims.toml"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", metavar="CLAIM", help="claims to measure again; all: every one")
    parser.add_argument("--write", action="store_true", help="keep the new values of the claims that hold")
    parser.add_argument("--render", action="store_true", help="write the figures into README and docs")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="logs to read instead of running")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=VALUE", help="for commands")
    parser.add_argument(
        "--limit", type=float, help="minutes a command may take; default 3 times its usual + 5"
    )
    parser.add_argument("--machine", default="", help="what to say of this machine; default: its processor")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if (options.write or options.read) and not options.run:
        parser.error("--write and --read need --run CLAIM ... or --run all")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    file = claims_of(options.root)
    held = True
    if options.run:
        held = run_again(load(file), options)
    elif not options.render:
        print(listing(load(file), options.root))
    if options.render or options.write:
        for page in render_all(options.root, parts(file.with_name("texts.md")), load(file).claims):
            print(f"rendered {page}")
    if not held:
        sys.exit(1)


def listing(claims: Claims, root: Path) -> str:
    """All values with their bounds, and the age of each claim."""
    rows = []
    for claim in claims.claims.values():
        days, commits = (date.today() - claim.measured.date).days, commits_since(claim.measured.commit, root)
        age = [days, commits, "by hand" if claim.by_hand else f"{claim.minutes} min"]
        for name, value in claim.values.items():
            rows.append([f"{claim.name}.{name}", shown(value.value), value.unit, value.bound, *age])
            age = ["", "", ""]
    claimed = "\n".join(f"  {claim.name}: {claim.what}" for claim in claims.claims.values())
    columns = "|value|unit|bound|days old|commits behind|takes"
    return f"{claimed}\n\n{table(f'Claims of {claims_of(root)}', columns, rows, left=(0, 2, 3))}"


def commits_since(commit: str, root: Path) -> str:
    return git(root, "rev-list", "--count", f"{commit.split()[0]}..HEAD") or "?"


def run_again(claims: Claims, options: argparse.Namespace) -> bool:
    """Measures the chosen claims again, one after the other, and says what holds. Returns whether all do."""
    if changed := [] if options.read else changed_files(options.root):
        first = changed[0].strip()
        print(f"The work tree has changes that are not committed: {len(changed)} files, {first} ...")
    rows: list[list[str]] = []
    problems: dict[str, list[str]] = {}
    chosen = claims.chosen(options.run)
    by_hand = [claim for claim in chosen if claim.by_hand]
    for claim, result in outcomes([x for x in chosen if not x.by_hand], claims, options):
        failed = [result] if isinstance(result, str) else result.problems
        print(f"  {'FAILS' if failed else 'holds'}  {'; '.join(failed)}".rstrip(), flush=True)
        if failed:
            problems[claim.name] = failed
        if not isinstance(result, str):
            rows += compared(claim, result)
            if options.write and not failed:
                file = claims_of(options.root)
                write_measured(file, claim.name, result.measured, result.minutes, result.values)
    print(f"\n{table('Measured again', '|now|before|change|unit|bound|', rows, left=(0, 4, 5, 6))}\n")
    for claim in by_hand:
        print(f"by hand, not run: {claim.name}: {claim.by_hand}")
    for name, found in problems.items():
        print(f"no longer holds: {name}: {'; '.join(found)}")
    print(f"{len(chosen) - len(by_hand) - len(problems)} of {len(chosen) - len(by_hand)} claims hold")
    if problems:
        print("Mend the code, or change bound, value and text in docs/claims to what is so today.")
    return not problems


def outcomes(
    chosen: Sequence[Claim], claims: Claims, options: argparse.Namespace
) -> Iterator[tuple[Claim, Outcome | str]]:
    """(claim, its outcome, or why there is none) of each."""
    inputs = {**claims.inputs, **given_inputs(options.input, claims)}
    folder = options.read
    if folder is None:
        folder = options.root / "runs" / "claims" / datetime.now().strftime("%Y-%m-%d_%H%M%S")
        folder.mkdir(parents=True)
    for claim in chosen:
        log = folder / f"{claim.name}.log"
        print(f"{claim.name} (about {claim.minutes} min): {claim.command}\n  {log}", flush=True)
        try:
            if options.read is None:
                now = measured_now(options.root, options.machine)
                limit = options.limit or 3 * claim.minutes + 5
                run(claim, inputs, now, log, options.root, limit)
            yield claim, outcome(claim, log)
        except (UserError, OSError) as error:
            yield claim, str(error)


def given_inputs(given: Sequence[str], claims: Claims) -> dict[str, str]:
    """--input NAME=VALUE, as a dict; paths are those of the working directory."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in claims.inputs or not value:
            raise UserError(f"--input {text}: expected NAME=VALUE, with NAME of {', '.join(claims.inputs)}")
        found[name] = str(Path(value).absolute()) if Path(value).exists() else value
    return found


def compared(claim: Claim, result: Outcome) -> Iterator[list[str]]:
    """Rows of the table: each value now and before."""
    for name, value in claim.values.items():
        found = result.values.get(name)
        if found is None:
            yield [f"{claim.name}.{name}", "?", shown(value.value), "", value.unit, value.bound, "FAILS"]
            continue
        change = f"{found / value.value - 1:+.0%}" if value.value else ""
        holds = "holds" if value.holds(found) else "FAILS"
        yield [
            f"{claim.name}.{name}",
            f"{found:,.6g}",
            shown(value.value),
            change,
            value.unit,
            value.bound,
            holds,
        ]


if __name__ == "__main__":
    with readable_errors():
        main()
