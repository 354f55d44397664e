"""Word times: where in its recording each word of a text is said.

    jaxthd align runs/my --manifest dev.jsonl --out times
    jaxthd align runs/my@best --manifest dev.jsonl --out times

The model must have been trained with CTC (train.ctc_loss above 0), or have a head for word times
(Nemotron 3.5 Transcribe): the likeliest alignment of the text with the frames is found exactly. Or its head
tells the times of marks in the text (Qwen3's forced aligner). Recordings are packed and encoded on the
config's mesh; neither changes a word's times. The folder --out receives
    words.jsonl     a line for each recording, in the manifest's order: key; words, each with word, start, end
                    (seconds), score (the likelihood of its letters, tokens or marks, 0 to 1), and
                    speaker where the text has tags (<spk:0>)
    words.ctm       the same as NIST's CTM
    NAME.vtt        captions in which each word has its time, for players; a file for each recording
    speakers.rttm   who speaks when, as NIST's RTTM, where texts have tags of speakers
    skipped.jsonl   what could not be aligned, and why

Several processes align together as they train together (jaxthd.train).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.alignment.aligner import AlignedDocument, aligning_config
from jaxthd.inference.alignment.files import write_word_times
from jaxthd.inference.model import Model
from jaxthd.inference.scorer import in_order
from jaxthd.parallel.mesh import local_rows
from jaxthd.parallel.processes import is_first
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.startup import check, devices_ready
from jaxthd.terminal.arguments import PROCESS_OPTIONS, WEIGHTS, parse_command_line

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "manifest": {"metavar": "FILE", "help": "recordings with their texts, as in data.manifest"},
    "out": {"type": Path, "metavar": "FOLDER", "help": "folder for the word times"},
    **PROCESS_OPTIONS,
}


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("align", argv, OPTIONS, __doc__)
    config, options, weights = line.config, line.options, line.weights()
    line.require("manifest", "out")
    aligning_config(config)
    with devices_ready(config.mesh, options):
        folder = OutputFolder(options.out)
        found = list(align_manifest(config, weights, options.manifest, folder.path))
        if not found:
            raise UserError(
                f"none of the recordings of {options.manifest} could be aligned; {folder / 'skipped.jsonl'} "
                "says why: correct them"
            )
        write_word_times(folder, found)
        words = sum(len(x.words) for x in found)
        print(f"{words:,} words of {len(found):,} recordings, {sum(x.seconds for x in found):,.1f} s")
        print(options.out)


def align_manifest(
    config: Config, weights: Weights | Sequence[str | Path], manifest: str, folder: Path
) -> Iterator[AlignedDocument]:
    """The words of a manifest's recordings one by one, in its order; otherwise as Model.align.

    folder: gets skipped.jsonl, which lists the recordings that cannot be used or aligned, with the reasons.
    """
    own: dict[str, Any] = {"manifest": (manifest,), "weights": ()}
    config = aligning_config(config)
    config = replace(config, data=replace(config.data, validation_manifest=f"aligned={manifest}", **own))
    check(config)
    model = Model(config, weights)
    with closing(SpeechData(model.config, folder, training=False, labels=True)) as data:
        aligner, on_mesh = model.aligner, model.weights
        keys = [example.key for example in data.validation_examples("aligned")]
        with closing(data.validation(local_rows(model.mesh, config.data.rows))) as batches:
            for found in in_order(keys, aligner(on_mesh, batches), data.is_skipped):
                if found.reason:
                    data.skipped.add(manifest, found.key, found.reason)
                else:
                    yield found
        if is_first() and len(data.skipped):
            print(f"{len(data.skipped)} skipped recordings are listed in {data.skipped.path}")


if __name__ == "__main__":
    with readable_errors():
        main()
