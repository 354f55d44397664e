"""Answers from a model to recordings, text and conversations; without any of these, a chat.

    jaxthd generate runs/my --audio a.wav b.wav
    jaxthd generate runs/my@best --audio a.wav --prompt "{audio} What is said?"
    jaxthd generate runs/my --chat chats.jsonl --out answers.jsonl
    jaxthd generate runs/my
    jaxthd generate published_folder --prompt "What is two and two?"

The fourth command starts a chat: you type a line at a time, and /help lists what else you can do. Answers go
to standard output as they come, everything else to standard error. Several answers begin with the names of
their recordings or conversations; those that are empty or cut off say so. --json writes a JSON object for
each instead.

A recording that is longer than --window, than any that the run was trained on, or than data.audio_capacity
and data.capacity hold, is read in windows, many at a time. They are cut in pauses; where there is none, they
overlap by 2 s, and what both hear is told once. What cannot be used is skipped and listed at the end, with
exit status 1.
"""

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import clip_seconds
from jaxthd.data.example import Example, Turn, user_turn
from jaxthd.data.inventory import trained_on
from jaxthd.data.sources.manifest import read_chats
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.jsonl import read_lines
from jaxthd.inference.alignment.aligner import aligning_config
from jaxthd.inference.alignment.files import write_word_times
from jaxthd.inference.asking import answer_all
from jaxthd.inference.chat import chat, say, show_answers
from jaxthd.inference.generator import Answer, Generator, check_sampling
from jaxthd.inference.model import Model, load, why_skipped
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.run.outputs import OutputFolder
from jaxthd.terminal.arguments import SAMPLING, WEIGHTS, parse_command_line

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "audio": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "default": [],
        "help": "recordings, each of which gets an answer",
    },
    "prompt": {
        "help": "text of the user's turn, by default data.prompt; data.audio_placeholder in it stands for a "
        "recording. With as many placeholders as recordings, one answer to all of them"
    },
    "window": {
        "type": float,
        "metavar": "SECONDS",
        "help": "seconds of the longest recording that is read at once; by default a recording is read in "
        "windows if the run was trained on none that is as long, or data.audio_capacity and data.capacity do "
        "not hold it",
    },
    "chat": {"type": Path, "help": "JSONL of conversations to answer, in the formats of a manifest"},
    "out": {"type": Path, "metavar": "FILE", "help": "JSONL file that the answers are appended to"},
    "word-times": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "folder for when each word of an answer is said, of a model that was trained with CTC: the "
        "files of jaxthd align",
    },
    "json": {"action": "store_true", "help": "write a JSON object for each answer, when it is whole"},
    **SAMPLING,
    "max-new-tokens": {"type": int, "default": 256, "help": "most tokens of an answer, 256 by default"},
    "batch": {"type": int, "help": "most conversations answered together; by default 8, in a chat 1"},
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("generate", argv, OPTIONS, __doc__)
    config, options, weights = line.config, line.options, line.weights()
    _check(options, weights)
    if options.word_times:
        aligning_config(config)
    line.require_least(batch=1, max_new_tokens=1)
    check_sampling(options.temperature, options.top_k, options.top_p)
    conversations = _conversations(options, config.data)
    batch = options.batch or (min(len(conversations), 8) if conversations else 1)
    settings = line.sampling()
    with _receiving(options.out):
        model = load(weights, config, batch=batch, max_new_tokens=options.max_new_tokens)
        generator = model.generator
        if not conversations:
            chat(generator, settings, options.out)
            return
        start = time.perf_counter()
        answers = show_answers(
            answer_all(
                generator,
                conversations,
                window=options.window,
                trained_on=trained_on(line.path) if line.run else None,
                say=say,
                **settings,
            ),
            conversations,
            options.out,
            named=len(conversations) > 1,
            as_json=options.json,
        )
        heard = _seconds_heard(conversations, answers)
        say(_summary(answers, time.perf_counter() - start, heard, generator))
        if options.word_times:
            _write_word_times(model, conversations, answers, options.word_times)
        if why := why_skipped(answers):
            raise UserError(why)


@contextmanager
def _receiving(out: Path | None) -> Iterator[None]:
    """Inside, the file can be appended to. If it is new, and no answer is in it after a failure, it goes."""
    if out is None:
        yield
        return
    with RemovedOnFailure(out, unless=lambda: any(x["end"] != "skipped" for x in read_lines(out))):
        out.parent.mkdir(parents=True, exist_ok=True)  # now, not when the first answer has been computed
        yield


def _check(options: Namespace, weights: Sequence[str]) -> None:
    if options.word_times and not (options.audio or options.chat):
        raise UserError(
            "--word-times is given without recordings; expected --audio or --chat with it: add one"
        )
    if options.json and not (options.audio or options.prompt is not None or options.chat):
        raise UserError("--json is given for a chat; expected --audio, --prompt or --chat with it: add one")
    if not weights:
        raise UserError(
            "--weights is missing; expected the workdir of a run, or Hugging Face folders: name it"
        )


def _conversations(options: Namespace, data: DataConfig) -> list[Example]:
    """The conversations that the options ask for; none for a chat."""
    if options.chat is not None:
        if options.audio or options.prompt is not None:
            raise UserError("--chat is given with --audio or --prompt; expected one or the other: drop one")
        form = {"prompt": data.prompt, "placeholder": data.audio_placeholder}
        return read_chats(options.chat, columns=data.columns, **form)
    if not options.audio and options.prompt is None:
        return []
    prompt = data.prompt if options.prompt is None else options.prompt
    one_each = len(options.audio) > 1 and prompt.count(data.audio_placeholder) < 2
    together = [[path] for path in options.audio] if one_each else [options.audio]
    return [
        Example(f"{number}:{', '.join(map(str, paths))}", (user_turn(prompt, paths, data.audio_placeholder),))
        for number, paths in enumerate(together, 1)
    ]


def _write_word_times(
    model: Model, conversations: Sequence[Example], answers: Sequence[Answer], folder: Path
) -> None:
    """Writes when the words of the answers are said, and says which recordings have no such times."""
    told = [
        replace(asked, turns=(*asked.turns, Turn("assistant", (answer.text,))))
        for asked, answer in zip(conversations, answers, strict=True)
        if answer.windows == 1 and answer.text.strip() and answer.end != "skipped"
    ]
    found = model.align(told) if told else []
    for aligned in found:
        if aligned.reason:
            say(f"{aligned.key}: its words have no times: {aligned.reason}")
    for answer in answers:
        if answer.windows > 1:
            say(f"{answer.key}: its words have no times: it was read in {answer.windows} windows")
    timed = [aligned for aligned in found if not aligned.reason]
    write_word_times(OutputFolder(folder), timed)
    say(f"{sum(len(x.words) for x in timed)} words in time: {folder}")


def _seconds_heard(conversations: Sequence[Example], answers: Sequence[Answer]) -> float:
    """Seconds of all recordings that were answered."""
    answered = (x for x, answer in zip(conversations, answers, strict=True) if answer.end != "skipped")
    each = (clip_seconds(clip, opened=True) for x in answered for clip in x.clips)
    return sum((seconds for seconds in each if not isinstance(seconds, str)), 0.0)


def _summary(answers: Sequence[Answer], seconds: float, heard: float, generator: Generator) -> str:
    """heard: seconds of recordings. RTFx: these over the seconds that the answers took, programs included."""
    tokens, cut = sum(len(a.tokens) for a in answers), sum(a.end == "length" for a in answers)
    answered, drafted = sum(a.end != "skipped" for a in answers), generator.drafted
    return (
        f"{answered} answers, {tokens} tokens in {seconds:.1f} s"
        + f", of {heard:.1f} s of recordings (RTFx {heard / seconds:.1f})" * bool(heard)
        + f"; {drafted.accepted} of {drafted.tokens} drafted tokens were accepted" * bool(drafted.tokens)
        + f"; {generator.programs.text()}"
        + f"; cut off at {generator.max_new_tokens} tokens: {cut}" * bool(cut)
    )


if __name__ == "__main__":
    with readable_errors():
        main()
