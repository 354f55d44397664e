"""Answers from a model, on the terminal as they come: to recordings, to text, to conversations.

    python -m jaxthd.generate --config configs/cp2.py --weights runs/cp2 --audio a.wav b.wav
    python -m jaxthd.generate --config my.py --weights runs/my --prompt "{audio} What is said?" --audio a.wav
    python -m jaxthd.generate --config my.py --weights runs/my --chat chats.jsonl --out answers.jsonl
    python -m jaxthd.generate --config my.py --weights runs/my

The last is a chat: a line is what you say, /audio FILE puts a recording into what you say next, /new begins
anew, /quit or Ctrl-D ends it, Ctrl-C the answer. Text to standard output, all else to standard error.
"""

import sys
import time
import unicodedata
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxthd.checkpoints.weights import load_model
from jaxthd.config import Config, DataConfig
from jaxthd.data.example import Clip, Example, Turn
from jaxthd.data.sources.manifest import read_chats
from jaxthd.data.text.tokenizer import needed_vocabulary
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.jsonl import append_line
from jaxthd.inference.generator import Answer, Generator, Piece, check_sampling, for_generation, joined
from jaxthd.kernels.choose import with_admitted
from jaxthd.kernels.xla_options import prepare_compiler
from jaxthd.parallel.mesh import make_mesh
from jaxthd.terminal.command_line import parse_command_line, simulate_devices
from jaxthd.validate import DeviceFacts, validate

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {
        "nargs": "+",
        "help": "workdir of a run (@best or @STEP behind it for another than its newest checkpoint), or "
        "Hugging Face folders",
    },
    "audio": {"type": Path, "nargs": "+", "default": [], "help": "recordings, an answer to each"},
    "prompt": {
        "help": "what is said, data.audio_placeholder being where a recording goes (with as many of it as "
        "recordings, one answer to all); by default data.prompt"
    },
    "chat": {"type": Path, "help": "JSONL of conversations, in a manifest's formats, to be answered"},
    "out": {"type": Path, "help": "JSONL that the answers are appended to"},
    "temperature": {"type": float, "default": 0.0, "help": "of the draw; 0, the default, for the likeliest"},
    "top-k": {"type": int, "default": 0, "help": "draw from the k likeliest tokens; 0 for all"},
    "top-p": {
        "type": float,
        "default": 1.0,
        "help": "draw from the likeliest tokens that make up this share",
    },
    "seed": {"type": int, "default": 0, "help": "of the draw"},
    "max-new-tokens": {"type": int, "default": 256, "help": "most tokens of an answer, 256 by default"},
    "batch": {"type": int, "help": "most conversations answered together; by default 8, in a chat 1"},
}


def main(argv: list[str] | None = None) -> None:
    config, _, options = parse_command_line("generate", argv, OPTIONS)
    if options.weights is None:
        raise UserError(
            "--weights is missing; expected the workdir of a run, or Hugging Face folders: name it"
        )
    for name in ("batch", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected 1 or more: correct it")
    check_sampling(options.temperature, options.top_k, options.top_p)
    conversations = _conversations(options, config.data)
    batch = options.batch or (min(len(conversations), 8) if conversations else 1)
    simulate_devices(config.mesh.devices)
    generator = load(config, options.weights, batch=batch, max_new_tokens=options.max_new_tokens)
    settings = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    if conversations:
        start = time.perf_counter()
        answers = _show(generator.stream(conversations, **settings), conversations, options.out)
        _say(_summary(answers, time.perf_counter() - start, generator))
    else:
        _chat(generator, settings, options.out)


def load(
    config: Config, weights: Sequence[str | Path], *, batch: int = 8, max_new_tokens: int = 256
) -> Generator:
    """A Generator on config.mesh. weights: workdirs of runs, Hugging Face folders (jaxthd.checkpoints.weights).

    Raises UserError for what cannot work: the configuration, its tokenizer, the checkpoint.
    """
    vocabulary = needed_vocabulary(config)
    adapted = for_generation(config, batch)
    for warning in validate(adapted, DeviceFacts.of_this_machine(vocabulary)):
        _say(f"warning: {warning}")
    prepare_compiler(config)
    config = with_admitted(config.without_mtp, _say)
    mesh = make_mesh(config.mesh)
    params, buffers = load_model(weights, config, mesh)
    return Generator(config, mesh, params, buffers, batch=batch, max_new_tokens=max_new_tokens)


def generate(
    conversations: Sequence[Example],
    config: Config,
    weights: Sequence[str | Path],
    *,
    batch: int = 8,
    max_new_tokens: int = 256,
    **settings: Any,
) -> list[Answer]:
    """The answers to these conversations, in their order.

    config, weights: as load; settings: as Generator.stream; raises as they do. To ask more than once, load a
    Generator.
    """
    generator = load(config, weights, batch=batch, max_new_tokens=max_new_tokens)
    return generator.generate(conversations, **settings)


# --- what is asked ---


def _conversations(options: Namespace, data: DataConfig) -> list[Example]:
    """None of them for a chat."""
    if options.chat is not None:
        if options.audio or options.prompt is not None:
            raise UserError("--chat is given with --audio or --prompt; expected one or the other: drop one")
        return read_chats(options.chat, prompt=data.prompt, placeholder=data.audio_placeholder)
    if not options.audio and options.prompt is None:
        return []
    prompt = data.prompt if options.prompt is None else options.prompt
    one_each = len(options.audio) > 1 and prompt.count(data.audio_placeholder) < 2
    together = [[path] for path in options.audio] if one_each else [options.audio]
    return [
        Example(f"{number}:{', '.join(map(str, paths))}", (_said(prompt, paths, data.audio_placeholder),))
        for number, paths in enumerate(together, 1)
    ]


def _said(text: str, recordings: Sequence[Path], placeholder: str) -> Turn:
    """The user's turn. Recordings come first where the text has no place for them."""
    if placeholder not in text:
        text = placeholder * len(recordings) + text
    before, *after = text.split(placeholder)
    if len(after) != len(recordings):
        raise UserError(
            f"{len(recordings)} recordings for {len(after)} places ({placeholder}) in {text!r}; expected as "
            "many: correct one of them"
        )
    parts: list[str | Clip] = [before]
    for path, piece in zip(recordings, after, strict=True):
        parts += [Clip(path), piece]
    turn = Turn("user", tuple(part for part in parts if part != ""))
    if not turn.parts:
        raise UserError("nothing is said; expected text or a recording")
    return turn


# --- what is answered ---


def _show(pieces: Iterator[Piece], conversations: Sequence[Example], out: Path | None) -> list[Answer]:
    """Prints the answers in the conversations' order, the first that is not whole as it comes."""
    found: list[list[Piece]] = [[] for _ in conversations]
    answers: list[Answer] = []
    for piece in pieces:
        shown = len(answers)
        found[piece.number].append(piece)
        if piece.number == shown:
            print(_printable(piece.text), end="", flush=True)
        while shown < len(found) and found[shown] and found[shown][-1].end:
            answer = joined(conversations[shown].key, found[shown])
            print(flush=True)
            if out:
                append_line(out, answer._asdict())
            answers.append(answer)
            shown += 1
            if shown < len(found):
                print(_printable("".join(piece.text for piece in found[shown])), end="", flush=True)
    return answers


def _printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def _summary(answers: Sequence[Answer], seconds: float, generator: Generator) -> str:
    tokens, cut = sum(len(a.tokens) for a in answers), sum(a.end == "length" for a in answers)
    return (
        f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s; {generator.compilations} programs "
        "compiled" + f"; cut off at {generator.max_new_tokens} tokens: {cut}" * bool(cut)
    )


def _chat(generator: Generator, settings: dict[str, Any], out: Path | None) -> None:
    """Until the input ends."""
    _say("What you say is a line. /audio FILE: a recording, in what you say next; /new; /quit")
    turns: list[Turn] = []
    recordings: list[Path] = []
    for number, line in enumerate(_lines()):
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/new":
            turns, recordings = [], []
        elif command == "/audio":
            recordings.append(Path(argument.strip()))
        elif line.strip() or recordings:
            try:
                asked = [*turns, _said(line, recordings, generator.config.data.audio_placeholder)]
                recordings = []
                example = Example(f"{number}", tuple(asked))
                answer = _show(_interruptible(generator.stream([example], **settings)), [example], out)
            except UserError as error:
                _say(f"error: {error}")
                continue
            except KeyboardInterrupt:
                answer = []
            if answer and answer[0].text.strip():
                turns = [*asked, Turn("assistant", (answer[0].text,))]
            else:
                _say("(no answer: what you said is forgotten)")


def _lines() -> Iterable[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        yield line.rstrip("\n")


def _interruptible(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Ctrl-C cuts the answer off."""
    try:
        yield from pieces
    except KeyboardInterrupt:
        yield Piece(0, "", (), "length")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with readable_errors():
        main()
