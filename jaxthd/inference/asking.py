"""Answers to many conversations, of which some cannot be used, and some have recordings that are too long.

Generator.stream refuses all where one is at fault. Here one that cannot be used is skipped, with the reason;
and a recording that is too long is answered window by window, and the texts are joined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxthd.data.audio.recordings import clip_seconds, load_audio
from jaxthd.data.audio.windows import in_windows
from jaxthd.data.example import Clip, Example, Samples, Turn
from jaxthd.data.inventory import TrainedOn
from jaxthd.data.text.joining import MOST_WORDS, WORD, joined
from jaxthd.errors import UserError
from jaxthd.inference.generator import AnswerDelta, Generator
from jaxthd.packing.document import Document

SHORTEST_WINDOW = 1.0
"""Seconds: shorter windows would cut most words."""
AT_ONCE = 4
"""Prompts that are read at once, in batches of the generator: more of them would fill the host's memory."""


class _Part(NamedTuple):
    """seconds: of a window. overlap: of these, those that the window before hears too."""

    seconds: float = 0.0
    overlap: float = 0.0


def answer_all(
    generator: Generator,
    conversations: Sequence[Example],
    *,
    window: float | None = None,
    trained_on: TrainedOn | None = None,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Iterator[AnswerDelta]:
    """Yields the answers as they are decoded, as Generator.stream does, and goes on where that would refuse.

    The only delta of a conversation that cannot be used has the end "skipped", and the reason.
    window: seconds of the longest recording that is read at once, if less than what the buffers hold.
    trained_on: where no window is given, a recording that is longer than all of these is read in windows of
    their usual length. say: is told of each recording that is read in windows. settings: as Generator.stream
    takes them; raises UserError for these and the window alone.
    """
    if window is not None and not window >= SHORTEST_WINDOW:
        raise UserError(f"window is {window} s; expected {SHORTEST_WINDOW} s or more: correct it")
    documents: list[Document] = []
    owners: list[tuple[_Joined, int]] = []

    def answered() -> Iterator[AnswerDelta]:
        """Yields the answers to the documents, and forgets these."""
        for delta in generator.stream(documents, **settings):
            joined, number = owners[delta.number]
            yield from joined.told(number, delta)
        documents.clear()
        owners.clear()

    for number, conversation in enumerate(conversations):
        try:
            parts, prompts = _prompts(generator, conversation, window, trained_on, say)
        except ValueError as error:
            yield AnswerDelta(number, "", (), "skipped", reason=str(error))
            continue
        joined = _Joined(number, parts)
        for part, document in enumerate(prompts):
            documents.append(document)
            owners.append((joined, part))
            if len(documents) >= AT_ONCE * generator.batch:
                yield from answered()
    if documents:
        yield from answered()


def _prompts(
    generator: Generator,
    conversation: Example,
    window: float | None,
    trained_on: TrainedOn | None,
    say: Callable[[str], None],
) -> tuple[tuple[_Part, ...], Iterable[Document]]:
    """(Its windows, their documents, made one by one). A conversation that is answered as a whole is one
    window. Raises UserError where it cannot be used.
    """
    if generator.config.model.encoder is None or not _can_be_divided(conversation):
        return (_Part(),), [generator.prompt(conversation)]
    (recording,) = conversation.clips
    if window is None and trained_on is None:  # nearly all fit, and their headers need not be read
        with suppress(UserError):
            return (_Part(),), [generator.prompt(conversation)]
    seconds = clip_seconds(recording, opened=True)
    if isinstance(seconds, str):
        raise UserError(f"conversation {conversation.key!r}: {seconds}")
    holds = generator.most_seconds(conversation)
    longest, usual = (window, window) if window else trained_on or (holds, holds)
    if seconds <= min(holds, longest) or not holds:
        return (_Part(),), [generator.prompt(conversation)]
    most = min(holds, usual)
    windows = in_windows(recording, most)
    name = conversation.key.partition(":")[2] or conversation.key
    why = {} if window else {usual: "the median of what it was trained on; "}
    why[holds] = "which is what the buffers hold (data.audio_capacity, data.capacity); "
    size = f"{len(windows)} windows of up to {most:.1f} s"
    say(f"{name}: {seconds:.1f} s are read in {size}, {why.get(most, '')}their texts are joined")
    questions = [
        _with_recording(conversation, part.recording, f"{conversation.key}/{n}")
        for n, part in enumerate(windows, 1)
    ]
    for part in windows:
        if isinstance(clip := part.recording, Clip):
            try:  # a recording that ends too early is found before any of it is answered
                load_audio(clip.path, clip.offset, clip.duration, member=clip.member, channels=clip.channels)
            except ValueError as error:
                raise UserError(f"conversation {conversation.key!r}: {error}") from error
    return tuple(_Part(part.seconds, part.overlap) for part in windows), map(generator.prompt, questions)


def _can_be_divided(conversation: Example) -> bool:
    """Whether each window of its recording can be asked by itself: there is one, and one turn of the user."""
    turns = [turn for turn in conversation.turns if turn.role != "system"]
    return len(turns) == 1 and turns[0].role == "user" and len(conversation.clips) == 1


def _with_recording(conversation: Example, recording: Clip | Samples, key: str) -> Example:
    """The conversation with another recording in place of its own."""
    turns = tuple(
        Turn(turn.role, tuple(part if isinstance(part, str) else recording for part in turn.parts))
        for turn in conversation.turns
    )
    return replace(conversation, key=key, turns=turns)


@dataclass
class _Joined:
    """The answer to a conversation, whose windows are answered beside each other and told one by one.

    number: the conversation's. parts: the windows of its recording. at: the window that is told. held: deltas
    of the windows behind it. is_cut: whether one of those told was cut off. has_text: whether one has text.
    begins: whether nothing of the window is told yet. text: of the window that is told, as far as it is not
    told yet. left: the end of the text before it, where it overlaps the window before; rate: the characters
    that this one told in a second.
    """

    number: int
    parts: tuple[_Part, ...]
    at: int = 0
    held: dict[int, list[AnswerDelta]] = field(default_factory=dict)
    is_cut: bool = False
    has_text: bool = False
    begins: bool = True
    text: str = ""
    left: str = ""
    rate: float = 0.0

    @property
    def windows(self) -> int:
        """Their number."""
        return len(self.parts)

    def told(self, window: int, delta: AnswerDelta) -> Iterator[AnswerDelta]:
        """Takes the next delta of a window. Yields the conversation's deltas that are now next."""
        self.held.setdefault(window, []).append(delta)
        while self.held.get(self.at):
            yield self._next(self.held[self.at].pop(0))

    def _next(self, delta: AnswerDelta) -> AnswerDelta:
        """The conversation's delta, of that of its window."""
        text, end = delta.text, delta.end
        if self.windows > 1:
            text = self._text(delta)
        if delta.end:
            self.at, self.begins = self.at + 1, True
            self.is_cut |= delta.end == "length"
            end = None if self.at < self.windows else "length" if self.is_cut else "stop"
        return delta._replace(number=self.number, text=text, end=end, windows=self.windows)

    def _text(self, delta: AnswerDelta) -> str:
        """The part of a window's text that is told now: all at its end, where it overlaps another."""
        seconds, shared = self.parts[self.at]
        behind = self.at + 1 < self.windows and self.parts[self.at + 1].overlap > 0
        self.text += delta.text
        if (shared or behind) and not delta.end:
            return ""
        text, self.text = self.text, ""
        rate = len(text.strip()) / seconds
        if shared:
            text, self.left = joined(self.left, text, shared=shared, rates=(self.rate, rate)), ""
        elif self.begins:
            text = text.lstrip()
            text = f"{' ' * self.has_text}{text}" if text else text
        if behind:
            self.rate = rate
            text, self.left = _divided(text)
        self.begins &= not text
        self.has_text |= bool(text or self.left)
        return text


def _divided(text: str) -> tuple[str, str]:
    """(The text without its last words, these): those that a window that overlaps may change."""
    words = list(WORD.finditer(text))
    at = words[-MOST_WORDS].start() if len(words) > MOST_WORDS else 0
    return text[:at], text[at:]
