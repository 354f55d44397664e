"""The figures of README and docs: lists them with their age, measures them again, and renders the pages.

    python scripts/claims.py                                    all claims, with values, bounds and age
    python scripts/claims.py --stale                            those whose code has changed since
    python scripts/claims.py --run packing soak [--write]   runs their commands again and compares
    python scripts/claims.py --run stale --write --minutes 60   as many stale ones as fit; again: the rest
    python scripts/claims.py --run all --input FILE=my.jsonl --input PYTHON=torch-env/bin/python
    python scripts/claims.py --run all --read runs/claims/X     reads the logs of an earlier run instead
    python scripts/claims.py --render                           writes the figures into the pages
    python scripts/claims.py --verify                           whether file, texts and pages agree

The claims are docs/claims/claims.toml; the texts that hold their figures are docs/claims/texts.md. --run
needs an idle machine, runs one command after the other, and keeps what each prints in runs/claims. A claim
holds if its command ends with status 0 and every value is within its bound. --write puts the new values of
the claims that hold into the file, with date, commit, machine, versions and a digest of the claim's code, and
renders the pages. A claim is stale where that digest is another one now: what a docstring says, or where a
function lies, does not change it (scripts/measurements/running.py). Exits 1 if a claim does not hold or a
command fails; the others are measured and written all the same.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.errors import UserError, readable_errors
from jaxthd.terminal.tables import table
from scripts.measurements.claims_file import Claim, Claims, load, shown, write_measured
from scripts.measurements.pages import FIGURE, all_pages, parts, render, render_all
from scripts.measurements.running import Outcome, changed_files, digest, measured_now, outcome, run

ROOT = Path(__file__).parents[1]


def claims_of(root: Path) -> Path:
    return root / "docs" / "claims" / "claims.toml"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", metavar="CLAIM", help="claims to measure again; or all, or stale")
    parser.add_argument("--stale", action="store_true", help="list the claims whose code has changed")
    parser.add_argument("--minutes", type=float, help="begin no claim that would end later than this")
    parser.add_argument("--verify", action="store_true", help="exit 1 where file, texts and pages disagree")
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
    elif options.stale or not (options.render or options.verify):
        print(listing(load(file), options.root, only_stale=options.stale))
    if options.render or options.write:
        for page in render_all(options.root, parts(file.with_name("texts.md")), load(file).claims):
            print(f"rendered {page}")
    if options.verify:
        faults = list(disagreements(load(file), options.root))
        print("\n".join([*faults, f"{len(faults)} faults"]))
        held = held and not faults
    if not held:
        sys.exit(1)


def listing(claims: Claims, root: Path, *, only_stale: bool) -> str:
    """All values with their bounds, and the age of each claim; or only the stale claims."""
    why = {name: staleness(claim, root) for name, claim in claims.claims.items()}
    shown_claims = [claim for name, claim in claims.claims.items() if why[name] or not only_stale]
    rows = []
    for claim in shown_claims:
        days = (date.today() - claim.measured.date).days
        state = why[claim.name] or "as measured"
        age = [days, state, "by hand" if claim.by_hand else f"{claim.minutes} min"]
        for name, value in list(claim.values.items())[: 1 if only_stale else None]:
            rows.append([f"{claim.name}.{name}", shown(value.value), value.unit, value.bound, *age])
            age = ["", "", ""]
    told = "\n".join(f"  {claim.name}: {claim.what}" for claim in shown_claims)
    summary = f"{sum(map(bool, why.values()))} of {len(why)} claims are stale"
    columns = "|value|unit|bound|days old|its code|takes"
    shown_table = table(f"Claims of {claims_of(root)}", columns, rows, left=(0, 2, 3, 5)) if rows else ""
    return f"{told}\n\n{shown_table}\n{summary}"


def staleness(claim: Claim, root: Path) -> str:
    """Why a claim is stale; "" where its code is as it was measured."""
    if not claim.measured.code:
        return "unknown, measured before digests"
    return "" if digest(root, claim.code) == claim.measured.code else "has changed"


def disagreements(claims: Claims, root: Path) -> Iterator[str]:
    """What is wrong with the file, its texts and the pages, a line each."""
    texts, pages = parts(claims_of(root).with_name("texts.md")), all_pages(root)
    for claim in claims.claims.values():
        if missing := [path for path in claim.code if not (root / path).exists()]:
            yield f"{claim.name}: {', '.join(missing)}: not there; expected code that its values depend on"
        if claim.shown not in claim.command:
            yield f"{claim.name}: shown is no part of its command"
        if claim.measured.date > date.today():
            yield f"{claim.name}: measured on {claim.measured.date}, which is to come"
        for name, value in claim.values.items():
            if not value.holds(value.value):
                yield f"{claim.name}.{name} is {value.value}, expected {value.bound}"
    for page in pages:
        if page.read_text() != render(page, texts, claims.claims):
            yield f"{page}: edit docs/claims, not the page; then run python scripts/claims.py --render"
    on_pages = [name for page in pages for name in parts(page)]
    if sorted(on_pages) != sorted(texts):
        yield f"the parts {sorted(set(texts) ^ set(on_pages))} are not on one page and in the texts"
    used = {claim for text in texts.values() for claim, *_ in FIGURE.findall(text)}
    if unused := claims.claims.keys() - used:
        yield f"no part shows a figure of {', '.join(sorted(unused))}"


def run_again(claims: Claims, options: argparse.Namespace) -> bool:
    """Measures the chosen claims again, one after the other, and says what holds. Returns whether all do."""
    if changed := [] if options.read else changed_files(options.root):
        first = changed[0].strip()
        print(f"The work tree has changes that are not committed: {len(changed)} files, {first} ...")
    rows: list[list[str]] = []
    problems: dict[str, list[str]] = {}
    names = options.run
    if "stale" in names:
        names = [*names, *(name for name, claim in claims.claims.items() if staleness(claim, options.root))]
    chosen = claims.chosen([name for name in names if name != "stale"])
    by_hand = [claim for claim in chosen if claim.by_hand]
    count = 0
    for claim, result in outcomes([x for x in chosen if not x.by_hand], claims, options):
        count += 1
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
    print(f"{count - len(problems)} of {count} claims hold")
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
        folder = options.root / "runs" / "claims" / datetime.now().strftime("%Y-%m-%d_%H%M%S_%f")
        folder.mkdir(parents=True)
    end = time.monotonic() + 60 * (options.minutes or math.inf)
    for number, claim in enumerate(chosen):
        if number and time.monotonic() + 60 * claim.minutes > end:
            print(f"{len(chosen) - number} claims are left, the next is {claim.name}: give the command again")
            return
        log = folder / f"{claim.name}.log"
        print(f"{claim.name} (about {claim.minutes} min): {claim.command}\n  {log}", flush=True)
        try:
            if options.read is None:
                now = measured_now(claim, options.root, options.machine)
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
