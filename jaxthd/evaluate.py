"""Evaluates a model on validation sets: loss, accuracy, word and character error rate, speed.

    jaxthd evaluate runs/my
    jaxthd evaluate runs/my@best --data.validation-manifest clean=clean.jsonl other=other.jsonl
    jaxthd evaluate my.py --weights published_folder --train.normaliser english

All documents of data.validation_manifest are read. Their last answers are decoded greedily, up to
train.max_new_tokens. The results lie beside the run's weights, by checkpoint and set, in
runs/my/evaluations/2400/clean+other; those of published weights in runs/NAME/evaluations, NAME being the
config file's. The folder receives
    SET.jsonl           for each set: hypotheses, references and errors
    summary.json        the figures of the printed table
    error_gallery.png   spectrograms and texts of the documents with the highest word error rates
    skipped.jsonl       every document that was skipped, with the reason

Several processes evaluate together as they train together (jaxthd.train).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxthd.config import Config, FrontEnd
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError, readable_errors
from jaxthd.figures.error_gallery import Case, draw_gallery
from jaxthd.files.jsonl import finite
from jaxthd.files.run_folder import EMA, source_of
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.evaluator import Evaluation, Evaluator, Hypothesis
from jaxthd.inference.model import Model
from jaxthd.inference.wer import Errors, Normaliser, errors_of, make_normaliser, summed
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import local_rows
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.planning.sizes import with_answer_length
from jaxthd.run.evaluations import (
    SUMMARY,
    checkpoint_of,
    evaluated_settings,
    evaluation_folder,
    holds,
    require_free,
)
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.startup import check, devices_ready
from jaxthd.terminal.arguments import PROCESS_OPTIONS, WEIGHTS, parse_command_line
from jaxthd.terminal.tables import table

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "out": {"type": Path, "metavar": "FOLDER", "help": "another folder for the results"},
    "gallery": {
        "type": int,
        "metavar": "N",
        "default": 8,
        "help": "documents in error_gallery.png, 8 by default; 0: no picture",
    },
    **PROCESS_OPTIONS,
}


class ScoredDocument(NamedTuple):
    """A document's hypothesis with its errors.

    reference, hypothesis: after the normaliser. words, characters: errors of
    the hypothesis against the reference.
    """

    decoded: Hypothesis
    reference: str
    hypothesis: str
    words: Errors
    characters: Errors


class SetResult(NamedTuple):
    """An evaluated set. documents: those with an answer, in the set's order."""

    name: str
    found: Evaluation
    documents: list[ScoredDocument]


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("evaluate", argv, OPTIONS, __doc__)
    weights, options = line.weights(), line.options
    if not weights:
        raise UserError("--weights is missing; expected the workdir of a run, or checkpoints: name them")
    with devices_ready(line.config.mesh, options):
        beside = line.folder / "evaluations"
        evaluate(line.config, weights, options.out, beside=beside, gallery=options.gallery)


def evaluate(
    config: Config,
    weights: Sequence[str | Path],
    out: Path | None = None,
    *,
    beside: Path = Path("evaluations"),
    gallery: int = 8,
) -> dict[str, Any]:
    """Writes the results into a folder and prints their table; returns what summary.json holds.

    weights: as jaxthd.checkpoints.weights.load_weights. out: the folder; None: one of the run's evaluations
    (jaxthd.run.evaluations), or of `beside` for weights that are not those of one run. gallery: most
    documents in error_gallery.png.
    Of several processes (jaxthd.run.startup.devices_ready) all call it.
    Raises UserError for a config that cannot work on this machine, and for data or weights that cannot be
    used, and where `out` holds the results of another evaluation.
    """
    if not config.data.validation_sets:
        raise UserError("data.validation_manifest is empty; expected one set or more: name them")
    check(config)
    config = with_answer_length(config.without_mtp)
    is_chosen = out is None
    weights, out, evaluated = _folder(config, weights, out, beside)
    with ExitStack() as stack:
        with RemovedOnFailure(out):
            outputs = OutputFolder(out)
            if is_chosen and holds(out) is None:  # another one at the same time then takes another folder
                outputs.write_text(SUMMARY, json.dumps({"evaluated": evaluated}) + "\n")
            model = Model(config, weights)
            data = stack.enter_context(closing(SpeechData(model.config, out, training=False)))
            results = _evaluated(model, data)
            summary = {
                "evaluated": evaluated,
                "measured_on": _devices(model),
                "skipped_documents": len(data.skipped),
                "sets": {result.name: set_figures(result) for result in results},
            }
            for result in results:
                outputs.write_lines(f"{result.name}.jsonl", map(document_line, result.documents))
            outputs.write_text(SUMMARY, json.dumps(finite(summary), indent=2) + "\n")
        if is_first():
            _draw_gallery(results, data, config.model.encoder, gallery, out / "error_gallery.png")
        print(_table(summary))
        if summary["skipped_documents"]:
            print(f"{summary['skipped_documents']} skipped documents are listed in {data.skipped.path}")
        print(out)
    return summary


def _folder(
    config: Config, weights: Sequence[str | Path], out: Path | None, beside: Path
) -> tuple[Sequence[str | Path], Path, dict[str, Any]]:
    """(the weights, of a run those of one checkpoint; the folder for the results; what they depend on)."""
    of_run = checkpoint_of(weights)
    evaluated = evaluated_settings(config, weights)
    if of_run:
        # A run that goes on may save another checkpoint meanwhile.
        workdir, step = of_run[0], exchange(of_run[1])[0]
        which = str(step) + EMA * source_of(weights[0])[1].endswith(EMA)
        weights, beside = [f"{workdir}@{which}"], workdir / "evaluations" / which
        evaluated |= {"weights": "the run's", "checkpoint": int(which) if which.isdecimal() else which}
    if out:
        require_free(out, evaluated)
        return weights, out, evaluated
    return (
        weights,
        evaluation_folder(beside, [x.name for x in config.data.validation_sets], evaluated),
        evaluated,
    )


def _evaluated(model: Model, data: SpeechData) -> list[SetResult]:
    config, weights = model.config, model.weights
    evaluator = Evaluator(model.blueprint, model.mesh, data.stop_ids)
    rows = local_rows(model.mesh, config.data.rows)
    results = []
    for each in config.data.validation_sets:
        with closing(data.validation(rows, each.name)) as batches:
            found = evaluator(weights, batches)
        order = {example.key: n for n, example in enumerate(data.validation_examples(each.name))}
        documents = scored(found.hypotheses, config.train.normaliser, order)
        results.append(SetResult(each.name, found, documents))
    return results


def _devices(model: Model) -> str:
    devices, sizes = model.mesh.devices, model.config.mesh.sizes
    kinds = sorted({device.device_kind for device in devices.flat})
    return f"{devices.size} x {', '.join(kinds)} ({jax.default_backend()}), mesh {sizes}"


def _table(summary: Mapping[str, Any]) -> str:
    """The command's output as text. summary: the content of summary.json."""

    def percent(x: float | None) -> str:
        """A share as a percentage; "-" where there is none, or it is NaN."""
        return f"{x:.2%}" if x is not None and x == x else "-"

    def number(x: float | None, digits: int) -> str:
        """A number with so many digits after the point; "-" where there is none."""
        return f"{x:.{digits}f}" if x is not None else "-"

    rows = [
        [
            name,
            f["documents"],
            f"{f['audio_seconds'] / 3600:.3f}",
            number(f["loss"], 4),
            percent(f["accuracy"]),
            percent(f["wer"]),
            f["substitutions"],
            f["deletions"],
            f["insertions"],
            percent(f["cer"]),
            number(f["real_time_factor"], 4),
        ]
        for name, f in summary["sets"].items()
    ]
    columns = "set|documents|hours|loss|accuracy|WER|substituted|deleted|inserted|CER|RTF"
    notes = [
        f"Texts are compared after the normaliser {summary['evaluated']['normaliser']!r}. RTF: seconds of "
        "scoring and decoding for a second of audio, without reading and compiling; measured on "
        f"{summary['measured_on']}."
    ]
    for what, text in (
        ("cut_off", "hypotheses were cut off, and count as such: raise --train.max-new-tokens"),
        ("without_words", "references have no word and count in neither WER nor CER"),
    ):
        if count := sum(f[what] for f in summary["sets"].values()):
            notes.append(f"{count} {text}.")
    return "\n".join(["", table("Evaluation", columns, rows), "", *notes])


def _draw_gallery(
    results: Sequence[SetResult], data: SpeechData, front_end: FrontEnd | None, most: int, path: Path
) -> None:
    """Draws the documents with the highest word error rates; removes the picture where there are none."""
    path.unlink(missing_ok=True)
    unit, frame_seconds = (front_end.unit, front_end.seconds(1)) if front_end else ((1, 1), 0.01)
    cases = []
    for name, document in most_wrong(results, most):
        key, words = document.decoded.key, document.words
        example = next(e for e in data.validation_examples(name) if e.key == key)
        made = data.validation_document(example)
        title = f"{name}  {key}   WER {words.wrong} / {words.total} = {words.rate:.0%}"
        pieces = made.pieces if isinstance(made, Document) else ()
        features = [piece.owned_features(unit) for piece in pieces]
        cases.append(Case(title, features, document.reference, document.hypothesis, frame_seconds))
    if cases:
        draw_gallery(cases, path)


def scored(
    hypotheses: Sequence[Hypothesis], normaliser: Normaliser, order: Mapping[str, int]
) -> list[ScoredDocument]:
    """The hypotheses with their errors. order: each document's number in the set, by key."""
    decoded = sorted(hypotheses, key=lambda h: order[h.key])
    normalise = make_normaliser(normaliser)
    references, texts = (
        [normalise(h.reference) for h in decoded],
        [normalise(h.hypothesis) for h in decoded],
    )
    errors = errors_of(references, texts), errors_of(references, texts, "characters")
    return [ScoredDocument(*fields) for fields in zip(decoded, references, texts, *errors, strict=True)]


def most_wrong(results: Sequence[SetResult], most: int) -> list[tuple[str, ScoredDocument]]:
    """(set's name, document) of the documents with the highest word error rates; ties by number of errors."""
    wrong = [(r.name, d) for r in results for d in r.documents if d.words.total and d.words.wrong]
    wrong.sort(key=lambda x: (-x[1].words.rate, -x[1].words.wrong, x[0], x[1].decoded.key))
    return wrong[:most]


def document_line(document: ScoredDocument) -> dict[str, Any]:
    """A document's line of SET.jsonl."""
    words = document.words._asdict()
    return {
        **document.decoded._asdict(),
        "wer": document.words.rate,
        "cer": document.characters.rate,
        "words": words.pop("total"),
        **words,
    }


def set_figures(result: SetResult) -> dict[str, Any]:
    """A set's figures, for the table and for summary.json; None if there is nothing to measure."""
    words, characters = (
        summed(getattr(d, unit) for d in result.documents) for unit in ("words", "characters")
    )
    seconds = result.found.audio_seconds
    return {
        "documents": int(result.found.scores.get("documents", 0)),
        "audio_seconds": seconds,
        "loss": result.found.scores.get("loss"),
        "accuracy": result.found.scores.get("accuracy"),
        "wer": words.rate,
        "cer": characters.rate,
        "words": words.total,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
        "without_words": sum(not d.reference for d in result.documents),
        "cut_off": sum(not d.decoded.ended for d in result.documents),
        "seconds": result.found.seconds,
        "real_time_factor": result.found.seconds / seconds if seconds else None,
    }


if __name__ == "__main__":
    with readable_errors():
        main()
