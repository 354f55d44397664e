"""Evaluates a model on validation sets: loss, accuracy, word and character error rate, speed.

    jaxthd evaluate runs/my
    jaxthd evaluate runs/my@best --data.validation-manifest clean=clean.jsonl other=other.jsonl
    jaxthd evaluate runs/my --data.validation-manifest new=new.jsonl old=old.jsonl --guard old
    jaxthd evaluate runs/my --contamination
    jaxthd evaluate my.py --weights published_folder --train.normaliser leaderboard

All documents of data.validation_manifest are read. Their last answers are decoded greedily, up to
train.max_new_tokens. The results lie beside the run's weights, by checkpoint and set, in
runs/my/evaluations/2400/clean+other; those of published weights in runs/NAME/evaluations, NAME being the
config file's. The folder receives
    SET.jsonl           for each set: hypotheses, references and errors
    summary.json        the figures of the printed table
    report.html         a page for a browser: all documents, aligned words, spectrograms, players
    error_gallery.png   spectrograms and texts of the documents with the highest word error rates
    skipped.jsonl       every document that was skipped, with the reason
    before_SET.jsonl    for each set of --guard: what the model before training says
    contamination.jsonl with --contamination: documents whose text or recording is in the training data

Several processes evaluate together as they train together (jaxthd.train).
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from jaxthd.checkpoints.weights import Weights, start_weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.data.sources.registry import read_source, training_sources
from jaxthd.errors import UserError, readable_errors
from jaxthd.evaluation.comparison import compare
from jaxthd.evaluation.contamination import Match, contaminated
from jaxthd.evaluation.page import write_page
from jaxthd.evaluation.results import SetResult, document_line, most_wrong, scored_set, set_figures
from jaxthd.evaluation.summary_text import summary_text
from jaxthd.figures.error_gallery import Case, draw_gallery
from jaxthd.files.jsonl import finite
from jaxthd.files.run_folder import EMA, source_of
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.evaluator import Evaluator
from jaxthd.inference.model import Model
from jaxthd.inference.wer import aligned_words, make_normaliser, merges_compounds, summed
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import local_rows
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.planning.sizes import with_answer_length, with_room
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

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "out": {"type": Path, "metavar": "FOLDER", "help": "another folder for the results"},
    "gallery": {
        "type": int,
        "metavar": "N",
        "default": 8,
        "help": "documents in error_gallery.png, 8 by default; 0: no picture",
    },
    "guard": {
        "nargs": "+",
        "metavar": "SET",
        "default": [],
        "help": "validation sets on which the model is compared with the one that its run began with "
        "(train.init_from): what it has forgotten",
    },
    "contamination": {
        "action": "store_true",
        "help": "list the documents whose text or recording is in the training data (data.manifest) too",
    },
    "page-audio": {
        "type": float,
        "metavar": "MB",
        "default": 100.0,
        "help": "recordings in report.html, the worst answers' first, 100 MB by default; further ones are "
        "played from their own files",
    },
    **PROCESS_OPTIONS,
}


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("evaluate", argv, OPTIONS, __doc__)
    weights, options = line.weights(), line.options
    if not weights:
        raise UserError("--weights is missing; expected the workdir of a run, or checkpoints: name them")
    with devices_ready(line.config.mesh, options):
        beside = line.folder / "evaluations"
        names = ("gallery", "guard", "contamination", "page_audio")
        more = {name: getattr(options, name) for name in names}
        evaluate(line.config, weights, options.out, beside=beside, **more)


def evaluate(
    config: Config,
    weights: Sequence[str | Path],
    out: Path | None = None,
    *,
    beside: Path = Path("evaluations"),
    gallery: int = 8,
    guard: Sequence[str] = (),
    contamination: bool = False,
    page_audio: float = 100.0,
) -> dict[str, Any]:
    """Writes the results into a folder and prints their table; returns what summary.json holds.

    weights: as jaxthd.checkpoints.weights.load_weights. out: the folder; None: one of the run's evaluations
    (jaxthd.run.evaluations), or of `beside` for weights that are not those of one run. gallery: most
    documents in error_gallery.png. guard: names of sets on which the model before training is evaluated too.
    contamination: whether documents are looked for in the training data. page_audio: megabytes of recordings
    in report.html.
    Of several processes (jaxthd.run.startup.devices_ready) all call it.
    Raises UserError for a config that cannot work on this machine, and for data or weights that cannot be
    used, and where `out` holds the results of another evaluation.
    """
    if not config.data.validation_sets:
        raise UserError("data.validation_manifest is empty; expected one set or more: name them")
    _require_guarded(config, guard)
    check(config)
    config = with_room(with_answer_length(config.without_idle_mtp))
    is_chosen = out is None
    weights, out, evaluated = _folder(config, weights, out, beside)
    with ExitStack() as stack:
        with RemovedOnFailure(out):
            outputs = OutputFolder(out)
            if is_chosen and holds(out) is None:  # another one at the same time then takes another folder
                outputs.write_text(SUMMARY, json.dumps({"evaluated": evaluated}) + "\n")
            model = Model(config, weights)
            data = stack.enter_context(closing(SpeechData(model.config, out, training=False)))
            evaluator = Evaluator(model.blueprint, model.mesh, data.stop_ids)
            results = _evaluated(
                model, data, evaluator, model.weights, names := [x.name for x in config.data.validation_sets]
            )
            summary = {
                "evaluated": evaluated,
                "measured_on": _devices(model),
                "skipped_documents": len(data.skipped),
                "sets": {result.name: set_figures(result) for result in results},
            }
            for result in results:
                outputs.write_lines(f"{result.name}.jsonl", map(document_line, result.documents))
            if guard:
                before = start_weights(model.blueprint, model.mesh)
                earlier = _evaluated(model, data, evaluator, before, [x for x in names if x in guard])
                for result in earlier:
                    outputs.write_lines(f"before_{result.name}.jsonl", map(document_line, result.documents))
                summary["guard"] = _guarded(earlier, results)
            if contamination:
                matches = _contaminated(model.config, data, names)
                lines = [{"set": name, **x._asdict()} for name, found in matches.items() for x in found]
                outputs.write_lines("contamination.jsonl", lines)
                summary["contamination"] = {x.name: _clean(x, matches[x.name]) for x in results}
            outputs.write_text(SUMMARY, json.dumps(finite(summary), indent=2) + "\n")
        if is_first():
            _draw_gallery(results, data, config, gallery, out / "error_gallery.png")
            _write_page(results, data, config, page_audio, out / "report.html", beside.parent.name)
        print(summary_text(summary))
        if summary["skipped_documents"]:
            print(f"{summary['skipped_documents']} skipped documents are listed in {data.skipped.path}")
        print(out)
    return summary


def _require_guarded(config: Config, guard: Sequence[str]) -> None:
    """Raises UserError where the sets of --guard cannot be compared with the model before training."""
    names = [each.name for each in config.data.validation_sets]
    if unknown := [name for name in guard if name not in names]:
        raise UserError(
            f"--guard names {', '.join(unknown)}; expected names of data.validation_manifest "
            f"({', '.join(names)}): correct it, or name the set there, as in old=old.jsonl"
        )
    if guard and not config.train.init_from:
        raise UserError(
            "--guard compares with the model before training, and this run began with none "
            "(train.init_from is empty): leave --guard out, or give the weights by --train.init-from"
        )
    if guard and not config.train.max_new_tokens:
        raise UserError("--guard compares answers, and train.max_new_tokens is 0; expected 1 or more")


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


def _evaluated(
    model: Model, data: SpeechData, evaluator: Evaluator, weights: Weights, names: Sequence[str]
) -> list[SetResult]:
    """The named sets, evaluated with these weights of the model."""
    config, results = model.config, []
    rows = local_rows(model.mesh, config.data.rows)
    for name in names:
        with closing(data.validation(rows, name)) as batches:
            found = evaluator(weights, batches)
        order = {example.key: n for n, example in enumerate(data.validation_examples(name))}
        results.append(scored_set(name, found, config.train.normaliser, order))
    return results


def _guarded(before: Sequence[SetResult], after: Sequence[SetResult]) -> dict[str, Any]:
    """The comparison of each set with the model before training, for summary.json."""
    now, compared = {result.name: result for result in after}, {}
    for then in before:
        result = now[then.name]
        found = compare(then.errors(), result.errors())
        if found:
            compared[then.name] = {**found.figures(), "judged_by": then.unit}
            measures = result.compared_by()
            for measure, errors in then.compared_by().items():
                if other := compare(errors, measures[measure]):
                    compared[then.name][measure] = other.figures()
    return compared


def _contaminated(config: Config, data: SpeechData, names: Sequence[str]) -> dict[str, list[Match]]:
    """The documents of each set that are in the training data too."""
    normalise = make_normaliser(config.train.normaliser)
    training = [
        read_source(source, config.data, n)[0] for n, source in enumerate(training_sources(config.data))
    ]
    used = {
        name: [x for x in data.validation_examples(name) if not data.is_skipped(x.key, name)]
        for name in names
    }
    return {name: contaminated(used[name], chain(*training), normalise) for name in names}


def _clean(result: SetResult, matches: Sequence[Match]) -> dict[str, Any]:
    """The numbers of a set's documents that are in the training data, and the error rate of the others."""
    keys = {match.key for match in matches}
    left = [
        errors
        for document, errors in zip(result.documents, result.errors(), strict=True)
        if document.decoded.key not in keys
    ]
    kinds = {f"by_{kind}": sum(match.found == kind for match in matches) for kind in ("text", "audio")}
    return {"documents": len(keys), **kinds, "error_rate_of_others": summed(left).rate}


def _devices(model: Model) -> str:
    devices, sizes = model.mesh.devices, model.config.mesh.sizes
    kinds = sorted({device.device_kind for device in devices.flat})
    return f"{devices.size} x {', '.join(kinds)} ({jax.default_backend()}), mesh {sizes}"


def _write_page(
    results: Sequence[SetResult], data: SpeechData, config: Config, megabytes: float, path: Path, name: str
) -> None:
    """Writes report.html; removes it where no answer was decoded. name: the model's."""
    path.unlink(missing_ok=True)
    if any(result.documents for result in results):
        examples = {r.name: {x.key: x for x in data.validation_examples(r.name)} for r in results}
        write_page(
            path,
            f"Evaluation of {name}" if name else "Evaluation",
            results,
            examples,
            compounds=merges_compounds(config.train.normaliser),
            audio_bytes=int(megabytes * 1e6),
        )


def _draw_gallery(
    results: Sequence[SetResult], data: SpeechData, config: Config, most: int, path: Path
) -> None:
    """Draws the documents with the highest word error rates; removes the picture where there are none."""
    path.unlink(missing_ok=True)
    front_end = config.model.encoder
    unit, frame_seconds = (front_end.unit, front_end.seconds(1)) if front_end else ((1, 1), 0.01)
    cases, compounds = [], merges_compounds(config.train.normaliser)
    for name, document in most_wrong(results, most):
        key, words = document.decoded.key, document.words
        example = next(e for e in data.validation_examples(name) if e.key == key)
        made = data.validation_document(example)
        title = f"{name}  {key}   WER {words.wrong} / {words.total} = {words.rate:.0%}"
        pieces = made.pieces if isinstance(made, Document) else ()
        features = [piece.owned_features(unit) for piece in pieces]
        pairs = aligned_words(document.reference, document.hypothesis, compounds=compounds)
        cases.append(Case(title, features, pairs, frame_seconds))
    if cases:
        draw_gallery(cases, path)


if __name__ == "__main__":
    with readable_errors():
        main()
