"""The output of `jaxthd evaluate`: its figures as a table, with notes."""

from collections.abc import Mapping
from typing import Any

from jaxthd.terminal.tables import table


def summary_text(summary: Mapping[str, Any]) -> str:
    """The figures of an evaluation as text: a table, and notes. summary: the content of summary.json."""

    def percent(x: float | None) -> str:
        """A share as a percentage; "-" where there is none, or it is NaN."""
        return f"{x:.2%}" if x is not None and x == x else "-"

    def number(x: float | None, digits: int) -> str:
        """A number with so many digits after the point; "-" where there is none."""
        return f"{x:.{digits}f}" if x is not None else "-"

    sets = summary["sets"]
    speakers = any(f["cpwer"] is not None for f in sets.values())
    rows = [
        [
            name,
            f["documents"],
            f"{f['audio_seconds'] / 3600:.3f}",
            number(f["loss"], 4),
            percent(f["accuracy"]),
            percent(f["wer"] if f["judged_by"] == "words" else None),
            f["substitutions"],
            f["deletions"],
            f["insertions"],
            percent(f["cer"]),
            *([percent(f["cpwer"])] if speakers else []),
            number(f["rtfx"], 1),
        ]
        for name, f in sets.items()
    ]
    columns = "set|documents|hours|loss|accuracy|WER|substituted|deleted|inserted|CER|"
    columns += "cpWER|" * speakers + "RTFx"
    notes = [
        f"Texts are compared after the normaliser {summary['evaluated']['normaliser']!r}. RTFx: seconds of "
        "audio for a second of scoring and decoding, without reading and compiling; measured on "
        f"{summary['measured_on']}."
    ]
    if by_letter := [name for name, f in sets.items() if f["judged_by"] == "characters"]:
        notes.append(
            f"{', '.join(by_letter)}: mostly of scripts without spaces between words, and judged by CER "
            "(spaces left out)."
        )
    for what, text in (
        ("cut_off", "hypotheses were cut off, and count as such: raise --train.max-new-tokens"),
        ("without_words", "references have no word and count in neither WER nor CER"),
    ):
        if count := sum(f[what] for f in sets.values()):
            notes.append(f"{count} {text}.")
    return "\n".join(["", table("Evaluation", columns, rows), "", *notes, *_comparisons(summary)])


def _comparisons(summary: Mapping[str, Any]) -> list[str]:
    """The lines on sets that guard, and on documents that are in the training data."""
    lines = []
    for name, f in summary.get("guard", {}).items():
        rates = {"WER" if f["judged_by"] == "words" else "CER": f}
        beside = {"insertions": "insertions", "cpwer": "cpWER"}
        rates |= {shown: f[key] for key, shown in beside.items() if key in f}
        for rate, x in rates.items():
            lines.append(
                f"{name}, guarded: {rate} {x['before']:.2%} before training, {x['after']:.2%} now: "
                f"{x['verdict']} ({100 * x['difference']:+.2f} points, 95% interval {100 * x['low']:+.2f} to "
                f"{100 * x['high']:+.2f}, {x['documents']} documents)."
            )
    for name, f in summary.get("contamination", {}).items():
        rate = f["error_rate_of_others"]
        others = f"; the error rate of the others is {rate:.2%}" if f["documents"] and rate == rate else ""
        lines.append(
            f"{name}: {f['documents']} documents are in the training data too, {f['by_text']} by their text "
            f"and {f['by_audio']} by their recording{others}."
        )
    return lines
