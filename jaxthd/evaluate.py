"""Evaluates a model on validation sets: loss, accuracy, word and character error rate, speed.

    python -m jaxthd.evaluate --config configs/cp2.py --weights runs/cp2
    python -m jaxthd.evaluate --config my.py --weights runs/my@best --train.normaliser english \\
        --data.validation-manifest clean=clean.jsonl other=other.jsonl

Weights: the workdir of a run (newest checkpoint; @best or @STEP: another), or published checkpoints, as
train.init_from takes them. All documents of data.validation_manifest are read, and their last answers decoded
greedily, up to train.max_new_tokens. The folder --out (default runs/NAME/evaluation, NAME being the config
file's) receives
    SET.jsonl       of each set: what was decoded, next to what it should be, and its errors
    summary.json    the figures of the table that is printed
    worst.png       spectrograms and texts of the documents with the highest word error rates
    skipped.jsonl   every document skipped, with the reason

Several processes evaluate together as they train together (jaxthd.train).
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxthd.checkpoints.weights import load_model
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError, readable_errors
from jaxthd.figures.error_gallery import Case, draw_worst
from jaxthd.files.jsonl import finite, write_lines
from jaxthd.inference.evaluator import Evaluation, Evaluator, Hypothesis
from jaxthd.inference.wer import Errors, errors_of, make_normaliser, summed
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import local_rows, make_mesh
from jaxthd.parallel.processes import is_first
from jaxthd.run.workdir import write_atomically
from jaxthd.terminal.command_line import PROCESS_OPTIONS, parse_command_line, ready
from jaxthd.terminal.tables import table

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {
        "nargs": "+",
        "help": "the workdir of a run, or published checkpoints (as train.init_from)",
    },
    "out": {"type": Path, "help": "folder for the results (default runs/NAME/evaluation)"},
    "worst": {"type": int, "default": 8, "help": "documents in the picture of the worst, 8 by default"},
    **PROCESS_OPTIONS,
}


class Heard(NamedTuple):
    """A document of a set. said, heard: its texts, normalised. words, characters: their errors."""

    hypothesis: Hypothesis
    said: str
    heard: str
    words: Errors
    characters: Errors


class SetResult(NamedTuple):
    """Of a set: what the evaluator found, and its documents in the set's order."""

    name: str
    found: Evaluation
    documents: list[Heard]


def main(argv: list[str] | None = None) -> None:
    config, path, options = parse_command_line("evaluate", argv, OPTIONS)
    if not options.weights:
        raise UserError("--weights is missing; expected the workdir of a run, or checkpoints: name them")
    if not config.data.validation_sets:
        raise UserError("data.validation_manifest is empty; expected one set or more: name them")
    with ready(config, options) as config:
        evaluate(
            config, options.weights, options.out or Path("runs") / path.stem / "evaluation", options.worst
        )


def evaluate(config: Config, weights: Sequence[str | Path], out: Path, worst: int = 8) -> dict[str, Any]:
    """Writes the results into the folder `out` and prints their table; returns what summary.json holds.

    weights: as jaxthd.checkpoints.weights.load_weights. The config is taken as validated. worst: most cases of the
    picture. Of several processes all call it.
    Raises UserError for data or weights that cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    config, mesh = config.without_mtp, make_mesh(config.mesh)
    with closing(SpeechData(config, out, training=False)) as data:
        state = load_model(weights, config, mesh)
        evaluator = Evaluator(config, mesh, data.end_id)
        rows = local_rows(mesh, config.data.rows)
        results = []
        for each in config.data.validation_sets:
            with closing(data.validation(rows, each.name)) as batches:
                found = evaluator(state, batches)
            order = {example.key: n for n, example in enumerate(data.validation_examples(each.name))}
            results.append(SetResult(each.name, found, _compared(config, found.hypotheses, order)))
        summary = {
            "weights": [str(source) for source in weights],
            "normaliser": config.train.normaliser,
            "measured_on": _devices(config, mesh),
            "skipped_documents": len(data.skipped),
            "sets": {result.name: _figures(result) for result in results},
        }
        if is_first():
            for result in results:
                write_lines(out / f"{result.name}.jsonl", map(_line, result.documents))
            write_atomically(out / "summary.json", json.dumps(finite(summary), indent=2) + "\n")
            cases = _worst(results, data, worst)
            (out / "worst.png").unlink(missing_ok=True)
            if cases:
                draw_worst(cases, out / "worst.png")
            print(_table(summary))
            if summary["skipped_documents"]:
                print(f"{summary['skipped_documents']} documents skipped are listed in {data.skipped.path}")
    return summary


def _compared(config: Config, found: Sequence[Hypothesis], order: dict[str, int]) -> list[Heard]:
    found = sorted(found, key=lambda h: order[h.key])
    normalise = make_normaliser(config.train.normaliser)
    said, heard = ([normalise(h.reference) for h in found], [normalise(h.hypothesis) for h in found])
    errors = errors_of(said, heard), errors_of(said, heard, "characters")
    return [Heard(*fields) for fields in zip(found, said, heard, *errors, strict=True)]


def _figures(result: SetResult) -> dict[str, Any]:
    """What the table and summary.json say of a set; None where there is nothing to measure."""
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
        "without_words": sum(not d.said for d in result.documents),
        "cut_off": sum(not d.hypothesis.ended for d in result.documents),
        "seconds": result.found.seconds,
        "real_time_factor": result.found.seconds / seconds if seconds else None,
    }


def _line(document: Heard) -> dict[str, Any]:
    of_words = document.words._asdict()
    return {
        **document.hypothesis._asdict(),
        "wer": document.words.rate,
        "cer": document.characters.rate,
        "words": of_words.pop("total"),
        **of_words,
    }


def _devices(config: Config, mesh: Mesh) -> str:
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    return f"{mesh.devices.size} x {', '.join(kinds)} ({jax.default_backend()}), mesh {config.mesh.sizes}"


def _table(summary: dict[str, Any]) -> str:
    def percent(x: float | None) -> str:
        return f"{x:.2%}" if x is not None and x == x else "-"

    def number(x: float | None, digits: int) -> str:
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
        f"Texts by the normaliser {summary['normaliser']!r}. RTF: seconds of scoring and decoding for a "
        f"second of audio, without reading and compiling; {summary['measured_on']}."
    ]
    for what, text in (
        ("cut_off", "answers were cut off at train.max_new_tokens"),
        ("without_words", "references are without a word and count in neither WER nor CER"),
    ):
        if count := sum(f[what] for f in summary["sets"].values()):
            notes.append(f"{count} {text}.")
    return "\n".join(["", table("Evaluation", columns, rows), "", *notes])


def _worst(results: Sequence[SetResult], data: SpeechData, most: int) -> list[Case]:
    """The documents with the highest word error rates, of equals those with more errors."""
    wrong = [(r.name, d) for r in results for d in r.documents if d.words.total and d.words.wrong]
    wrong.sort(key=lambda x: (-x[1].words.rate, -x[1].words.wrong, x[0], x[1].hypothesis.key))
    cases = []
    for name, document in wrong[:most]:
        key, words = document.hypothesis.key, document.words
        example = next(e for e in data.validation_examples(name) if e.key == key)
        made = data.validation_document(example)
        title = f"{name}  {key}   WER {words.wrong} / {words.total} = {words.rate:.0%}"
        chunks = made.chunks if isinstance(made, Document) else ()
        cases.append(Case(title, chunks, document.said, document.heard))
    return cases


if __name__ == "__main__":
    with readable_errors():
        main()
