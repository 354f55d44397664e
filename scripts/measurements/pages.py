"""The parts of README.md and docs/*.md that hold figures, rendered from the claims.

A part stands on its page between two marks, and in docs/claims/texts.md between the same marks, there with
the names of values in place of figures:

    <!-- claims: five -->
    Packed is {packing.random} times as fast (`{packing.command}`, {packing.date}). {measured}
    <!-- end -->

After a colon stands how the number is written, as in Python: {packing.random:.1f}. {measured} tells when,
where and with which jax all claims of the part were measured.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from scripts.measurements.claims_file import Claim, shown

PART = re.compile(r"^<!-- claims: (\w+) -->\n(.*?)^<!-- end -->$", re.M | re.S)
FIGURE = re.compile(r"\{(\w+)\.(\w+)(?::([^{}]+))?\}")
MEASURED = "{measured}"


def parts(page: Path) -> dict[str, str]:
    """The marked parts of a page, or of the texts, by name."""
    found = PART.findall(page.read_text())
    if len(found) != len(dict(found)) or len(found) != page.read_text().count("<!-- claims:"):
        raise UserError(
            f"{page} has a mark twice, or one without its end; expected each once, with <!-- end -->"
        )
    return dict(found)


def rendered(text: str, claims: Mapping[str, Claim]) -> str:
    """The text of a part with its figures."""

    def figure(match: re.Match[str]) -> str:
        claim = claims.get(match[1])
        match match[2]:
            case "command" if claim:
                return claim.shown or claim.command
            case "date" if claim:
                return claim.measured.date.isoformat()
            case name if claim and name in claim.values:
                return shown(claim.values[name].value, match[3] or "")
        raise UserError(f"{match[0]} names no value of the claims; expected {{CLAIM.VALUE}}")

    used = [claims[name] for name in dict.fromkeys(x[0] for x in FIGURE.findall(text)) if name in claims]
    return FIGURE.sub(figure, text).replace(MEASURED, measured_text(used) if MEASURED in text else "")


def measured_text(claims: list[Claim]) -> str:
    """When, where and with which jax some claims were measured, as a sentence."""
    dates = sorted({claim.measured.date.isoformat() for claim in claims})
    machines = dict.fromkeys(claim.measured.machine for claim in claims)
    versions = dict.fromkeys(
        x for claim in claims for x in re.findall(r"jax [\d.]+", claim.measured.versions)
    )
    days = " and ".join(dates) if len(dates) < 3 else f"{dates[0]} to {dates[-1]}"
    return f"Measured on {days} ({'; '.join([*machines, *versions])})."


def all_pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(page: Path, texts: Mapping[str, str], claims: Mapping[str, Claim]) -> str:
    """The page with all its parts rendered."""

    def part(match: re.Match[str]) -> str:
        if match[1] not in texts:
            raise UserError(
                f"{page} has a part {match[1]!r} that the texts lack; expected {', '.join(texts)}"
            )
        return f"<!-- claims: {match[1]} -->\n{rendered(texts[match[1]], claims)}<!-- end -->"

    return PART.sub(part, page.read_text())


def render_all(root: Path, texts: Mapping[str, str], claims: Mapping[str, Claim]) -> list[Path]:
    """Renders all pages in place. Returns those that have changed."""
    changed = []
    for page in all_pages(root):
        text = render(page, texts, claims)
        if text != page.read_text():
            write_atomically(page, text)
            changed.append(page)
    return changed
