"""A chat on the terminal. Answers go to standard output, everything else to standard error."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxthd.data.example import Clip, Example, Turn, user_turn
from jaxthd.errors import UserError
from jaxthd.files.jsonl import append_line
from jaxthd.files.paths import home_path
from jaxthd.inference.generator import Answer, AnswerDelta, Generator, whole_answer
from jaxthd.terminal.tables import printable

HELP = """\
A line is what you say.
/audio FILE   a recording for what you say next
/reset        starts over: what was said is forgotten
/help         these lines
/quit         ends the chat, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(generator: Generator, settings: dict[str, Any], out: Path | None) -> None:
    """Answers lines of standard input until it ends.

    settings: keyword arguments of Generator.stream. out: JSONL to which the answers are appended.
    """
    say(HELP)
    turns: list[Turn] = []
    recordings: list[Path] = []
    for number, line in enumerate(_lines()):
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            say(HELP)
        elif command in ("/reset", "/new"):
            turns, recordings = [], []
        elif command == "/audio":
            _add_recording(recordings, argument.strip())
        elif re.fullmatch(r"/[a-z]+", command):
            say(f"error: there is no command {command}; /help lists them")
        elif line.strip() or recordings:
            try:
                asked = [*turns, user_turn(line, recordings, generator.config.data.audio_placeholder)]
                recordings = []
                example = Example(f"{number}", tuple(asked))
                deltas = _interruptible(generator.stream([example], **settings))
                answer = show_answers(deltas, [example], out)
            except UserError as error:
                say(f"error: {error}")
                continue
            except KeyboardInterrupt:
                answer = []
            if answer and answer[0].text.strip():
                turns = [*asked, Turn("assistant", (answer[0].text,))]
            else:
                say(f"(no answer, since {_why_none(answer)}; what you said is forgotten)")


def _add_recording(recordings: list[Path], name: str) -> None:
    path = home_path(name)
    if path.is_file():
        recordings.append(path)
        say(f"({len(recordings)} recording{'s' * (len(recordings) > 1)} for what you say next)")
    else:
        say(f"error: no file {name!r}; expected a recording: /audio FILE")


def _why_none(answers: Sequence[Answer]) -> str:
    if not answers or answers[0].end == "interrupted":
        return "you ended it"
    answer = answers[0]
    if not answer.tokens:
        return "the model ended it at once"
    return f"its {len(answer.tokens)} tokens are no text"


def show_answers(
    deltas: Iterator[AnswerDelta],
    conversations: Sequence[Example],
    out: Path | None,
    *,
    named: bool = False,
    as_json: bool = False,
) -> list[Answer]:
    """Prints the answers in the conversations' order, streaming the first unfinished one.

    out: JSONL to which finished answers are appended. named: each begins with the name of its conversation;
    then, what is no whole answer is marked. as_json: prints the lines that `out` gets, and nothing else.
    """
    found: list[list[AnswerDelta]] = [[] for _ in conversations]
    answers: list[Answer] = []
    for delta in deltas:
        shown = len(answers)
        found[delta.number].append(delta)
        if delta.number == shown and not as_json:
            _begin(conversations[shown], named=named and len(found[shown]) == 1)
            print(printable(delta.text), end="", flush=True)
        while shown < len(found) and found[shown] and found[shown][-1].end:
            answer = whole_answer(conversations[shown].key, found[shown])
            line = answer_line(answer, conversations[shown])
            if as_json or named or answer.end != "skipped":
                print(json.dumps(line) if as_json else _mark(answer) if named else "", flush=True)
            if out:
                append_line(out, line)
            answers.append(answer)
            shown += 1
            if shown < len(found) and found[shown] and not as_json:
                _begin(conversations[shown], named=named)
                print(printable("".join(delta.text for delta in found[shown])), end="", flush=True)
    return answers


def answer_line(answer: Answer, conversation: Example) -> dict[str, Any]:
    """An answer as JSON: its key, the recordings of its conversation, text, tokens, and how it ended."""
    recordings = [
        str(part.path) for turn in conversation.turns for part in turn.parts if isinstance(part, Clip)
    ]
    return {"key": answer.key, "audio": recordings, **answer._asdict()}


def _begin(conversation: Example, *, named: bool) -> None:
    if named:
        print(f"{printable(conversation.key.partition(':')[2] or conversation.key)}: ", end="")


def _mark(answer: Answer) -> str:
    """The line that is printed after a named answer."""
    if answer.end == "skipped":
        return "[skipped]"
    if answer.end == "length":
        return (
            f" [cut off at {len(answer.tokens)} tokens]" if answer.windows == 1 else " [cut off in a window]"
        )
    return "" if answer.text.strip() else "[empty]"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        yield line.rstrip("\n")


def _interruptible(deltas: Iterator[AnswerDelta]) -> Iterator[AnswerDelta]:
    """Yields the deltas. Ctrl-C ends the answer as if it were cut off."""
    try:
        yield from deltas
    except KeyboardInterrupt:
        yield AnswerDelta(0, "", (), "interrupted")
