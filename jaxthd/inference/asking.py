"""Answers to many conversations, of which some cannot be used, and some have recordings that are too long.

Generator.stream refuses all where one is at fault. Here one that cannot be used is skipped, with the reason;
and a recording that does not fit is answered window by window, and the texts are joined by a space.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jaxthd.data.audio.recordings import clip_seconds
from jaxthd.data.audio.windows import in_windows
from jaxthd.data.example import Clip, Example, Samples, Turn
from jaxthd.errors import UserError
from jaxthd.inference.generator import AnswerDelta, Generator
from jaxthd.packing.document import Document

SHORTEST_WINDOW = 1.0
"""Seconds: shorter windows would cut most words."""
AT_ONCE = 4
"""Prompts that are read at once, in batches of the generator: more of them would fill the host's memory."""


def answer_all(
    generator: Generator,
    conversations: Sequence[Example],
    *,
    window: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Iterator[AnswerDelta]:
    """Yields the answers as they are decoded, as Generator.stream does, and goes on where that would refuse.

    The only delta of a conversation that cannot be used has the end "skipped", and the reason.
    window: seconds of the longest recording that is read at once, if less than what the buffers hold. say: is
    told of each recording that is read in windows. settings: as Generator.stream takes them; raises UserError
    for these and the window alone.
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
            found = _documents(generator, conversation, window, say)
        except ValueError as error:
            yield AnswerDelta(number, "", (), "skipped", reason=str(error))
            continue
        joined = _Joined(number, len(found))
        documents += found
        owners += [(joined, number) for number in range(len(found))]
        if len(documents) >= AT_ONCE * generator.batch:
            yield from answered()
    if documents:
        yield from answered()


def _documents(
    generator: Generator, conversation: Example, window: float | None, say: Callable[[str], None]
) -> list[Document]:
    """The conversation as a document, or as one for each window of its recording. Raises UserError where it
    cannot be used."""
    if generator.config.model.encoder is None or not _can_be_divided(conversation):
        return [generator.prompt(conversation)]
    if window is None:  # nearly all fit, and their headers need not be read
        with suppress(UserError):
            return [generator.prompt(conversation)]
    (recording,) = conversation.clips
    seconds = clip_seconds(recording, opened=True)
    if isinstance(seconds, str):
        raise UserError(f"conversation {conversation.key!r}: {seconds}")
    holds = generator.most_seconds(conversation)
    most = min(holds, window or holds)
    if seconds <= most or not most:
        return [generator.prompt(conversation)]
    windows = in_windows(recording, most)
    name = conversation.key.partition(":")[2] or conversation.key
    held = "which is what the buffers hold (data.audio_capacity, data.capacity); " * (most == holds)
    size = f"{len(windows)} windows of up to {most:.1f} s"
    say(f"{name}: {seconds:.1f} s are read in {size}, {held}their texts are joined by a space")
    return [
        generator.prompt(_with_recording(conversation, part, f"{conversation.key}/{n}"))
        for n, part in enumerate(windows, 1)
    ]


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

    number: the conversation's. windows: of its recording. at: the window that is told. held: deltas of the
    windows behind it. is_cut: whether one of those told was cut off. has_text: whether one has text.
    begins: whether nothing of the window that is told has been.
    """

    number: int
    windows: int
    at: int = 0
    held: dict[int, list[AnswerDelta]] = field(default_factory=dict)
    is_cut: bool = False
    has_text: bool = False
    begins: bool = True

    def told(self, window: int, delta: AnswerDelta) -> Iterator[AnswerDelta]:
        """Takes the next delta of a window. Yields the conversation's deltas that are now next."""
        self.held.setdefault(window, []).append(delta)
        while self.held.get(self.at):
            yield self._next(self.held[self.at].pop(0))

    def _next(self, delta: AnswerDelta) -> AnswerDelta:
        """The conversation's delta, of that of its window."""
        text, end = delta.text, delta.end
        if self.windows > 1 and self.begins:
            text = text.lstrip()
            if text:
                text, self.begins, self.has_text = f"{' ' * self.has_text}{text}", False, True
        if delta.end:
            self.at, self.begins = self.at + 1, True
            self.is_cut |= delta.end == "length"
            end = None if self.at < self.windows else "length" if self.is_cut else "stop"
        return delta._replace(number=self.number, text=text, end=end, windows=self.windows)
