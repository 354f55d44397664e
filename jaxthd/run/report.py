"""The report of a run that has ended: what was trained, its figures, some answers, what comes next."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.objectives.metric import VALIDATION
from jaxthd.run.continuing import command_of
from jaxthd.run.display import Display
from jaxthd.run.progress import summary
from jaxthd.terminal.tables import clipped, printable

SAMPLES = 3
"""Answers of each kind that are shown."""


def end_report(
    workdir: Path,
    config: Config,
    lines: Sequence[Mapping[str, Any]],
    hypotheses: Sequence[Mapping[str, Any]],
    *,
    display: Display,
    parameters: str,
    skipped: str,
    supplied: Sequence[str] = (),
    normalise: Callable[[str], str] = str.lower,
) -> str:
    """The report as text, a few lines for each part.

    lines: of metrics.jsonl. hypotheses: of hypotheses.jsonl. display: how metrics are shown. parameters,
    skipped: as text; "" for none. supplied: parts of the supplier (Supplier.end).
    normalise: what texts go through before they are compared.
    """
    parts, is_done = [summary(lines, display)], lines[-1]["step"] >= config.train.steps
    if cut := sum(not x.get("ended", True) for x in hypotheses):
        most = config.train.max_new_tokens
        parts.append(
            f"  {cut} of {len(hypotheses)} answers were cut off at {most} tokens, so WER"
            f"{' and @best are' if config.train.best_by == 'wer' else ' is'} that of cut answers; if they "
            f"should be longer: --train.max-new-tokens {2 * most}"
        )
    if skipped:
        parts.append(f"  skipped: {skipped}")
    parts.append(f"\nTrained: {parameters}, on {', '.join(config.data.manifest)}")
    if config.train.validate_every and (sets := config.data.validation_sets):
        parts.append(f"Validated: on {', '.join(map(config.data.described, sets))}")
    parts += [*_samples(hypotheses, normalise), *supplied]
    picture = workdir / "curves.png"
    if picture.exists():
        parts += ["\nPictures", f"  {picture}: what it learned, and its speed, over the steps"]
    validated = any(name.startswith(VALIDATION) for line in lines for name in line)
    has_transcripts = bool(hypotheses) or bool(config.data.validation_sets and not validated)
    parts += [
        "\nNext",
        f"  jaxthd evaluate {workdir}" + " --data.validation-manifest FILE" * (not has_transcripts),
        f"  jaxthd generate {workdir}" + " --audio FILE" * (config.model.encoder is not None),
        f"  jaxthd {command_of(config)} {workdir}" + f" --train.steps {2 * config.train.steps}" * is_done,
        f"  jaxthd convert export {workdir} --out FOLDER",
    ]
    return "\n".join(parts)


def _samples(hypotheses: Sequence[Mapping[str, Any]], normalise: Callable[[str], str]) -> list[str]:
    """Answers that are right and that are wrong, from the first on."""

    def words(text: str) -> list[str]:
        """The text's words, as they are compared."""
        return normalise(text).split()

    right = [
        x for x in hypotheses if words(x["reference"]) and words(x["hypothesis"]) == words(x["reference"])
    ]
    wrong = [x for x in hypotheses if words(x["hypothesis"]) != words(x["reference"])]

    found = []
    if right:
        found += ["\nRight", *(f"  {one_line(x['reference'], 90)}" for x in right[:SAMPLES])]
    if wrong:
        found.append("\nWrong (what was said, what was written)")
        for x in wrong[:SAMPLES]:
            found += [
                f"  {one_line(x['reference'], 90)}",
                f"    {one_line(x['hypothesis'], 88) or '(nothing)'}",
            ]
    return found


def one_line(text: str, width: int) -> str:
    """The text on one line without control characters, at most so many letters wide."""
    return clipped(printable(" ".join(text.split())), width)
