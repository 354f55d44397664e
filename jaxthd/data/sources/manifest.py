"""Manifests: one JSON object a line, an utterance or a conversation, read as turns of text and recordings.

An utterance, as NeMo's speech recognition writes it:
    {"audio_filepath": "a.wav", "text": "one two", "offset": 0.5, "duration": 1.5}
A conversation, as NeMo's speechlm2 writes it; entries of type text may also contain placeholders:
    {"id": "c", "conversations": [{"from": "User", "type": "text", "value": "What is said?"},
        {"from": "User", "type": "audio", "value": "a.wav", "offset": 0.5, "duration": 1.5},
        {"from": "Assistant", "type": "text", "value": "One two."}]}
A list of recordings, with a placeholder for each in the texts (roles as in ShareGPT: human, gpt), or with
the tags of ms-swift, LLaMA-Factory and others (conversations.py):
    {"audio": ["a.wav"], "conversations": [{"from": "human", "value": "{audio} What is said?"}, ...]}
    {"audios": ["a.wav"], "messages": [{"role": "user", "content": "<audio>What is said?"}, ...]}
One recording beside them, which begins the user's first turn if there is no placeholder:
    {"audio_filepath": "a.wav", "offset": 0.5, "messages": [{"role": "user", "content": "What?"}, ...]}
Chat messages, as OpenAI and Hugging Face write them; content may be a string, with or without placeholders:
    {"messages": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"},
        {"type": "text", "text": "What is said?"}]}, {"role": "assistant", "content": "One two."}]}
Who speaks when in a recording, beside its path, for models that take it (speaker_segments: a list of
{"speaker": "a", "start": 0.5, "end": 2.0}, in seconds from where the recording's range begins).
Answers to a prompt, and which of them are preferred: preferences.py. The prompt is one of the above without
its last answer, or the field prompt: a user's text, or messages.
A prompt alone, for answers that are drawn to it: the same without the answers.
"""

import reprlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxthd.config import DataConfig
from jaxthd.data.example import Alternative, Cell, Clip, Example, Turn, question, utterance
from jaxthd.data.sources.columns import Columns
from jaxthd.data.sources.conversations import conversation_turns, own_prompt, refuse_tags
from jaxthd.data.sources.lines import (
    READ,
    Entry,
    Line,
    all_files,
    has_text,
    numbered_lines,
    parse,
    refuse_marked,
    string,
)
from jaxthd.data.sources.preferences import OF_PREFERENCES, PAIR, alternatives_of, history_of, is_preference
from jaxthd.data.sources.recordings import (
    LISTS,
    RANGE,
    Locate,
    clip_of,
    in_folder,
    other_recordings,
    path_of,
    recording_ids,
    recording_of,
    refusal,
    unread_start,
)
from jaxthd.data.sources.source import Files, LineSource
from jaxthd.data.sources.tarred import TarredAudio, counted_tars, require_counted_tars
from jaxthd.errors import UserError
from jaxthd.files.remote_path import as_path


class ManifestSource(LineSource):
    """A manifest of utterances and conversations, in any mixture of the formats above.

    It is one file, or shards written with braces (see expand_braces) and read as one; .gz is decompressed.
    With tarred_audio, recordings are in tar files, named with braces too: one for each shard in order, or
    several that the lines choose by `shard_id`. Otherwise recordings are files, and a relative path is taken
    from the manifest's folder. Only the headers of tar files are read; recordings are not opened.
    One line about preferences is a conversation that ends with the user's turn, and alternatives. An
    utterance becomes a conversation: the system turn is the line's `system_prompt`, if any; the user turn is
    its `context` or else data.prompt; the assistant turn is its text. Consecutive entries of one role become
    one turn, joined by a space. data.audio_placeholder stands for a recording in the prompt and in the texts
    of conversations, not in transcripts.
    Raises FileNotFoundError if there is no such file; UserError if it holds no usable line, if a file is
    empty or damaged, if manifests and tar files do not match, or if braces cannot be expanded.
    Source: NeMo's documentation (ASR and speechlm2 datasets), transformers' (chat templates).
    """

    expected = "one JSON object a line with audio_filepath and text, conversations or messages"

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether a path may be a manifest: any may."""
        return True

    def named(self) -> Files:
        """Returns the manifests, their tar files and NeMo's metadata. Raises as the class says."""
        files, setting = self.existing(), self.setting.field
        tars = all_files(self.setting.tarred_audio, setting) if self.setting.tarred_audio else []
        counted = counted_tars(files[0], tars)
        notes = require_counted_tars(counted, tars, setting)
        left_out = sum(max(0, each.total - each.named) for each in counted)
        return Files(files, tars, [each.metadata for each in counted], left_out, tuple(notes))

    def items(self, named: Files, data: DataConfig) -> Iterator[Line]:
        """Yields the lines. Notes what is wrong with tar files."""
        self._tars = TarredAudio(named.tars, named.items, self.setting.field) if named.tars else None
        yield from super().items(named, data)
        self.read_notes += self._tars.notes if self._tars else []

    def turns_of(self, entry: Entry, item: Line, data: DataConfig) -> tuple[Turn, ...]:
        """Returns the turns of a line. Raises ValueError."""
        file = item.file
        locate = self._tars.locate(entry, file) if self._tars else in_folder(self.folders[file])
        more: dict[str, Any] = {"prompts": self.setting.prompts, "unread": self.unread_recordings}
        return turns_of_entry(entry, locate, data.prompt, data.audio_placeholder, **more)

    def name_of(self, entry: Entry) -> str:
        """Returns the path of the line's recording, or a conversation's id. Raises ValueError."""
        return name_of_entry(entry, prompts=self.setting.prompts)

    def alternatives_of(self, entry: Entry) -> tuple[Alternative, ...]:
        """Returns the answers of a line about preferences; () for most lines. Raises ValueError."""
        return () if OF_PREFERENCES.isdisjoint(entry) else alternatives_of(entry)


def turns_of_entry(
    entry: dict[str, Any],
    locate: Locate,
    prompt: str,
    placeholder: str,
    *,
    prompts: bool = False,
    unread: Counter[str] | None = None,
) -> tuple[Turn, ...]:
    """The turns of an entry in any of the formats above.

    prompts: whether entries without an answer are read too, as turns of which the last is the user's:
        utterances without a text, conversations, and the field prompt.
    unread: counts the fields that name recordings beside those that are read. An entry of which no recording
        is read is refused if it has such a field.
    Raises ValueError for an entry that cannot be used.
    """
    refuse_marked(entry)
    is_prompt = prompts and not _is_conversation(entry) and not has_text(entry)
    others: tuple[str, ...] = ()
    if is_prompt or (not OF_PREFERENCES.isdisjoint(entry) and is_preference(entry)):
        turns, others = _prompt(entry, locate, prompt, placeholder)
    elif _is_conversation(entry):
        turns, others = _conversation(entry, locate, placeholder, prompts)
    else:
        has_own = "context" in entry or "system_prompt" in entry
        own, system = own_prompt(entry, prompt, placeholder) if has_own else (prompt, "")
        clip = _recording(entry, locate)
        turns = utterance(clip, string(entry, "text"), own, placeholder, system)
        if has_own or prompt != placeholder:
            for turn in turns[:-1]:
                refuse_tags(turn.parts)
        others = _beside(entry)
    others += other_recordings(entry, READ)
    _note(entry, turns, others, unread)
    return turns


def _note(
    entry: dict[str, Any], turns: tuple[Turn, ...], others: tuple[str, ...], unread: Counter[str] | None
) -> None:
    """Counts fields that name recordings, or times in them, and are not read.

    Raises ValueError where no recording is read.
    """
    is_utterance = not _is_conversation(entry) and "prompt" not in entry and entry.get("audio_filepath")
    clips = [part for turn in turns for part in turn.parts if isinstance(part, Clip)]
    if not is_utterance and not clips:
        if others or (others := recording_ids(entry)):
            raise ValueError(refusal(others))
    elif unread is not None:
        # Tables hold the segments themselves, with the times that they had in a longer recording.
        start = unread_start(entry) if not any(isinstance(clip.member, Cell) for clip in clips) else None
        unread.update((*others, start) if start else others)


def _recording(entry: dict[str, Any], locate: Locate) -> Clip:
    """The recording of an utterance: its audio_filepath, or the one that a list names."""
    if entry.get("audio_filepath") or not (name := _list_of(entry)):
        return clip_of(entry, "audio_filepath", locate)
    item = entry[name][0] if isinstance(entry[name], list) and len(entry[name]) == 1 else entry[name]
    timed = {n: entry[n] for n in RANGE if n in entry}
    clip = None
    if isinstance(item, str | dict):
        clip = recording_of(timed | ({"path": item} if isinstance(item, str) else item), locate)
    if clip is None:
        raise ValueError(
            f"{name} is {reprlib.repr(entry[name])}; expected the path of one recording, or messages"
        )
    return clip


def _list_of(entry: dict[str, Any]) -> str:
    """The first list of recordings that is not empty; "" for none."""
    return next((name for name in LISTS if entry.get(name)), "")


def _beside(entry: dict[str, Any]) -> tuple[str, ...]:
    """The lists that name other recordings than the audio_filepath of an utterance."""
    if entry.keys().isdisjoint(LISTS):
        return ()
    path = entry.get("audio_filepath")
    return tuple(n for n in LISTS if entry.get(n) and path and path_of(entry[n]) != path)


def name_of_entry(entry: dict[str, Any], *, prompts: bool = False) -> str:
    """The name in an item's key: its audio_filepath, or the id of a conversation ("" without one). prompts:
    as in turns_of_entry.
    """
    has_prompt = "audio_filepath" not in entry and ((prompts and "prompt" in entry) or is_preference(entry))
    if not _is_conversation(entry) and not has_prompt:
        return _name_of_utterance(entry)
    name = entry.get("id")
    return "" if name is None else str(name) if isinstance(name, int) else string(entry, "id")


def _name_of_utterance(entry: dict[str, Any]) -> str:
    if entry.get("audio_filepath"):
        return string(entry, "audio_filepath")
    if name := _list_of(entry):
        return string({name: path_of(entry[name]) or ""}, name)
    if others := other_recordings(entry, READ):
        raise ValueError(f"audio_filepath is missing: {refusal(others)}")
    return string(entry, "audio_filepath")


def _is_conversation(entry: dict[str, Any]) -> bool:
    return "conversations" in entry or "messages" in entry


def read_chats(
    path: str | Path,
    *,
    prompt: str = "{audio}",
    placeholder: str = "{audio}",
    columns: tuple[str, ...] = (),
) -> list[Example]:
    """Reads conversations to answer, in the formats of a manifest. Each must end with a user turn.

    An utterance needs no text; if it has one, the text is ignored. prompt, placeholder, columns: data.prompt,
    data.audio_placeholder and data.columns.
    Raises FileNotFoundError if there is no such file, and UserError if a line cannot be used, or the file.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected a JSONL file of conversations: correct --chat")
    chats, locate, names = [], in_folder(path.parent), Columns(columns)
    for line in numbered_lines([path]):
        try:
            entry = names.rename(parse(line.text))
            if _is_conversation(entry):
                turns, others = conversation_turns(entry, locate, placeholder)
            else:
                turns, others = _question(entry, locate, prompt, placeholder), ()
            _note(entry, turns, others + other_recordings(entry, READ), None)
            _require_question(turns)
            chats.append(Example(f"{line.number}:{name_of_entry(entry)}", turns))
        except ValueError as error:
            raise UserError(f"{path}, line {line.number}: {error}; correct the line") from error
    return chats


def _require_question(turns: tuple[Turn, ...]) -> None:
    if not turns or turns[-1].role != "user":
        found = f"the {turns[-1].role}'s" if turns else "none, data.prompt being empty"
        raise ValueError(f"the last turn is {found}; expected the user's, to be answered")


def _question(entry: dict[str, Any], locate: Locate, prompt: str, placeholder: str) -> tuple[Turn, ...]:
    """The turns of an utterance that is to be answered."""
    own, system = own_prompt(entry, prompt, placeholder)
    turns = question(_recording(entry, locate), own, placeholder, system)
    for turn in turns:
        refuse_tags(turn.parts)
    return turns


def _prompt(
    entry: dict[str, Any], locate: Locate, prompt: str, placeholder: str
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """The turns before the answers of a preference line, or of a prompt, and fields of messages that name
    recordings and are not read. prompt: the user's turn of an utterance."""
    chats = [name for name in ("prompt", "conversations", "messages") if entry.get(name) is not None]
    histories = [h for h in (history_of(entry, name) for name in (*PAIR, "completion")) if h]
    if len(chats) > 1 or (chats and histories):
        other = chats[1] if chats[1:] else "messages before the answer"
        raise ValueError(f"{chats[0]} and {other} are given; expected one of them, as the prompt")
    others: tuple[str, ...] = ()
    if chats and chats != ["prompt"]:
        turns, others = conversation_turns(entry, locate, placeholder)
    elif not chats and not histories:
        if entry.get("audio_filepath") is None and not _list_of(entry):
            unread = other_recordings(entry, READ)
            why = f", and {refusal(unread)}" if unread else f"; found {reprlib.repr(sorted(entry))}"
            raise ValueError(f"prompt is missing{why}")
        turns, others = _question(entry, locate, prompt, placeholder), _beside(entry)
    else:
        prompts = [entry["prompt"]] if chats else histories
        (turns, others), *same = (
            conversation_turns(_with_messages(entry, each), locate, placeholder) for each in prompts
        )
        if any(other != turns for other, _ in same):
            raise ValueError("the messages before chosen and rejected differ; expected one prompt")
    _require_question(turns)
    return turns, others


def _with_messages(entry: dict[str, Any], prompt: Any) -> dict[str, Any]:
    """A conversation of a prompt, which is the user's text or messages, and the entry's recordings."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_speakers = isinstance(messages, list) and any("from" in m for m in messages if isinstance(m, dict))
    others = {name: value for name, value in entry.items() if name not in ("conversations", "messages")}
    return {"conversations" if has_speakers else "messages": messages, **others}


def _conversation(
    entry: dict[str, Any], locate: Locate, placeholder: str, prompts: bool
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    turns, others = conversation_turns(entry, locate, placeholder)
    if prompts and turns[-1].role == "user":
        return turns, others
    if all(turn.role != "assistant" for turn in turns):
        raise ValueError("no turn of the assistant; expected one, because nothing else is supervised")
    if turns[-1].role != "assistant":
        raise ValueError(
            f"the last turn is the {turns[-1].role}'s; expected the assistant's, which is supervised"
        )
    return turns, others
