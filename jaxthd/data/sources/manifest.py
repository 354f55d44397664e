"""Manifests: one JSON object a line, an utterance or a conversation, read as turns of text and recordings.

An utterance, as NeMo's speech recognition writes it:
    {"audio_filepath": "a.wav", "text": "one two", "offset": 0.5, "duration": 1.5}
A conversation, as NeMo's speechlm2 writes it; entries of type text may also contain placeholders:
    {"id": "c", "conversations": [{"from": "User", "type": "text", "value": "What is said?"},
        {"from": "User", "type": "audio", "value": "a.wav", "offset": 0.5, "duration": 1.5},
        {"from": "Assistant", "type": "text", "value": "One two."}]}
A list of recordings, with a placeholder for each in the texts (roles as in ShareGPT: human, gpt):
    {"audio": ["a.wav"], "conversations": [{"from": "human", "value": "{audio} What is said?"}, ...]}
Chat messages, as OpenAI and Hugging Face write them; content may be a string, with or without placeholders:
    {"messages": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"},
        {"type": "text", "text": "What is said?"}]}, {"role": "assistant", "content": "One two."}]}
Answers to a prompt, and which of them are preferred: preferences.py. The prompt is one of the above without
its last answer, or the field prompt: a user's text, or messages.
A prompt alone, for answers that are drawn to it: the same without the answers.
"""

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxthd.config import DataConfig
from jaxthd.data.example import Clip, Example, Role, Turn, merge_texts, question, utterance
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.lines import (
    expand_braces,
    has_text,
    json_list,
    json_object,
    numbered_lines,
    own_prompt,
    parse,
    read_examples,
    refuse_marked,
    seconds,
    string,
)
from jaxthd.data.sources.nemo_tars import counted_tars, require_counted_tars
from jaxthd.data.sources.preferences import PAIR, alternatives_of, history_of, is_preference
from jaxthd.data.sources.source import (
    Containers,
    Likeness,
    LineFiles,
    Source,
    SourceSetting,
    counted_files,
)
from jaxthd.data.sources.tarred import TarredAudio, tars_of
from jaxthd.errors import UserError

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


class ManifestSource(Source):
    """A manifest: one file, or shards written with braces. With tarred_audio, recordings are in tar
    files. It reads and raises as read_manifest does.
    """

    def __init__(self, setting: SourceSetting) -> None:
        super().__init__(setting)
        self._read_notes: list[str] = []

    @staticmethod
    def recognises(path: str) -> bool:
        return True

    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        self.containers()
        self._read_notes.clear()
        return read_manifest(
            self.path,
            self.setting.field,
            tarred_audio=self.setting.tarred_audio,
            prompt=data.prompt,
            placeholder=data.audio_placeholder,
            prompts=self.setting.prompts,
            notes=self._read_notes,
        )

    def containers(self) -> Containers:
        setting = self.setting.field
        files = manifests_of(self.path, setting)
        tars = tars_of(self.setting.tarred_audio, setting) if self.setting.tarred_audio else []
        counted = counted_tars(files[0], tars)
        notes = require_counted_tars(counted, tars, setting)
        left_out = sum(max(0, each.total - each.named) for each in counted)
        return counted_files([*files, *tars], left_out, (*notes, *self._read_notes))

    def files(self) -> list[Path]:
        files, tars = self._named()
        return [*files, *tars, *(each.metadata for each in counted_tars(files[0], tars))]

    def digest(self) -> str:
        return LineFiles(*self._named()).digest()

    def extent(self) -> int | None:
        return LineFiles(*self._named()).extent()

    def likeness(self, digest: str, extent: int | None) -> Likeness:
        return LineFiles(*self._named()).likeness(digest, extent)

    def _named(self) -> tuple[list[Path], list[Path]]:
        """The manifests and tar files that the setting names."""
        names = (expand_braces(names) for names in (self.path, self.setting.tarred_audio))
        files, tars = ([Path(name) for name in each if name] for each in names)
        return files, tars


Locate = Callable[[str], Clip]
"""(name) -> where the recording lies. Raises ValueError with the reason if there is no such recording."""


def read_manifest(
    path: str | Path,
    setting: str = "data.manifest",
    *,
    tarred_audio: str = "",
    prompt: str = "{audio}",
    placeholder: str = "{audio}",
    prompts: bool = False,
    notes: list[str] | None = None,
) -> tuple[list[Example], list[Skipped]]:
    """Reads a manifest of utterances and conversations, in any mixture of the formats above.

    path: one file, or shards written with braces (see expand_braces) and read as one; .gz is decompressed.
    tarred_audio: the tar files with the recordings, also with braces: one for each shard in order, or several
    that the lines choose by `shard_id`. Without it, recordings are files, and a relative path is taken from
    the manifest's folder. Only the headers of tar files are read; recordings are not opened.
    Every line that is not blank becomes an Example or a Skipped, in order. One about preferences is a
    conversation that ends with the user's turn, and alternatives. An utterance becomes a
    conversation: the system turn is the line's `system_prompt`, if any; the user turn is the line's `context`
    or else `prompt`; the assistant turn is the line's text. Consecutive entries of one role become one turn,
    joined by a space.
    setting: the name of the setting that gave the path, for messages.
    placeholder: stands for a recording in the prompt and in the texts of conversations, not in transcripts.
    prompts: whether lines without an answer are read too, as examples whose last turn is the user's:
        utterances without a text, conversations, and the field prompt.
    notes: a list that gets what a user should know of the tar files, such as members that no line names.
    Raises FileNotFoundError if there is no such file; UserError if it holds no usable line, if a file is
    empty or damaged, if manifests and tar files do not match, or if braces cannot be expanded.
    Source: NeMo's documentation (ASR and speechlm2 datasets), transformers' (chat templates).
    """
    files = manifests_of(str(path), setting)
    tars = TarredAudio(tarred_audio, files, setting) if tarred_audio else None

    def turns(entry: dict[str, Any], file: int) -> tuple[Turn, ...]:
        locate = tars.locate(entry, file) if tars else in_folder(files[file].parent)
        return turns_of_entry(entry, locate, prompt, placeholder, prompts=prompts)

    read = read_examples(
        files,
        partial(name_of_entry, prompts=prompts),
        turns,
        alternatives_of,
        title=f"{path} ({setting})",
        expected="one JSON object a line with audio_filepath and text, conversations or messages",
    )
    if notes is not None and tars:
        notes += tars.notes
    return read


def manifests_of(path: str, setting: str) -> list[Path]:
    """The files of a manifest, which may be named with braces. Raises FileNotFoundError if one is missing."""
    files = [Path(name) for name in expand_braces(path)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"no manifest at {file}; expected a JSONL file of utterances or conversations: "
                f"correct {setting}"
            )
    return files


def turns_of_entry(
    entry: dict[str, Any], locate: Locate, prompt: str, placeholder: str, *, prompts: bool = False
) -> tuple[Turn, ...]:
    """The turns of an entry in any of the formats above. prompts: as in read_manifest.

    Raises ValueError for an entry that cannot be used.
    """
    refuse_marked(entry)
    is_prompt = prompts and not _is_conversation(entry) and not has_text(entry)
    if is_prompt or is_preference(entry):
        return _prompt(entry, locate, prompt, placeholder)
    if _is_conversation(entry):
        return _conversation(entry, locate, placeholder, prompts)
    own, system = own_prompt(entry, prompt, placeholder)
    clip = clip_of(entry, "audio_filepath", locate)
    return utterance(clip, string(entry, "text"), own, placeholder, system)


def in_folder(folder: Path) -> Locate:
    """Recordings are files, by paths from the folder."""
    return lambda name: Clip(folder / name)  # an absolute name replaces the folder


def name_of_entry(entry: dict[str, Any], *, prompts: bool = False) -> str:
    """The name in an item's key: its audio_filepath, or the id of a conversation ("" without one). prompts:
    as in read_manifest.
    """
    has_prompt = "audio_filepath" not in entry and ((prompts and "prompt" in entry) or is_preference(entry))
    if not _is_conversation(entry) and not has_prompt:
        return string(entry, "audio_filepath")
    name = entry.get("id")
    return "" if name is None else str(name) if isinstance(name, int) else string(entry, "id")


def _is_conversation(entry: dict[str, Any]) -> bool:
    return "conversations" in entry or "messages" in entry


def read_chats(path: str | Path, *, prompt: str = "{audio}", placeholder: str = "{audio}") -> list[Example]:
    """Reads conversations to answer, in the formats of a manifest. Each must end with a user turn.

    An utterance needs no text; if it has one, the text is ignored. prompt, placeholder: as in read_manifest.
    Raises FileNotFoundError if there is no such file, and UserError if a line cannot be used, or the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected a JSONL file of conversations: correct --chat")
    chats, locate = [], in_folder(path.parent)
    for line_number, _, _, line in numbered_lines([path]):
        try:
            entry = parse(line)
            if _is_conversation(entry):
                turns = _turns(entry, locate, placeholder)
            else:
                own, system = own_prompt(entry, prompt, placeholder)
                turns = question(clip_of(entry, "audio_filepath", locate), own, placeholder, system)
            _require_question(turns)
            chats.append(Example(f"{line_number}:{name_of_entry(entry)}", turns))
        except ValueError as error:
            raise UserError(f"{path}, line {line_number}: {error}; correct the line") from error
    return chats


def _require_question(turns: tuple[Turn, ...]) -> None:
    if not turns or turns[-1].role != "user":
        found = f"the {turns[-1].role}'s" if turns else "none, data.prompt being empty"
        raise ValueError(f"the last turn is {found}; expected the user's, to be answered")


def _prompt(entry: dict[str, Any], locate: Locate, prompt: str, placeholder: str) -> tuple[Turn, ...]:
    """The turns before the answers of a preference line, or of a prompt. prompt: the user's turn of an
    utterance."""
    given = [n for n in ("prompt", "conversations", "messages", "audio_filepath") if entry.get(n) is not None]
    histories = [h for h in (history_of(entry, name) for name in (*PAIR, "completion")) if h]
    if len(given) > 1 or (given and histories):
        other = given[1] if given[1:] else "messages before the answer"
        raise ValueError(f"{given[0]} and {other} are given; expected one of them, as the prompt")
    if given == ["audio_filepath"]:
        own, system = own_prompt(entry, prompt, placeholder)
        turns = question(clip_of(entry, "audio_filepath", locate), own, placeholder, system)
    elif given and given != ["prompt"]:
        turns = _turns(entry, locate, placeholder)
    else:
        prompts = [entry["prompt"]] if given else histories
        if not prompts:
            raise ValueError(f"prompt is missing; found {reprlib.repr(sorted(entry))}")
        turns, *others = (_turns(_with_messages(entry, each), locate, placeholder) for each in prompts)
        if any(other != turns for other in others):
            raise ValueError("the messages before chosen and rejected differ; expected one prompt")
    _require_question(turns)
    return turns


def _with_messages(entry: dict[str, Any], prompt: Any) -> dict[str, Any]:
    """A conversation of a prompt, which is the user's text or messages, and the entry's recordings."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_speakers = isinstance(messages, list) and any("from" in m for m in messages if isinstance(m, dict))
    listed: dict[str, Any] = {name: entry[name] for name in ("audio", "sound") if name in entry}
    return {"conversations" if has_speakers else "messages": messages, **listed}


def _conversation(entry: dict[str, Any], locate: Locate, placeholder: str, prompts: bool) -> tuple[Turn, ...]:
    turns = _turns(entry, locate, placeholder)
    if prompts and turns[-1].role == "user":
        return turns
    if all(turn.role != "assistant" for turn in turns):
        raise ValueError("no turn of the assistant; expected one, because nothing else is supervised")
    if turns[-1].role != "assistant":
        raise ValueError(
            f"the last turn is the {turns[-1].role}'s; expected the assistant's, which is supervised"
        )
    return turns


def _turns(entry: dict[str, Any], locate: Locate, placeholder: str) -> tuple[Turn, ...]:
    messages, listed = list(_messages(entry, locate, placeholder)), _listed(entry, locate)
    placeholders = sum(part is None for _, parts in messages for part in parts)
    if placeholders != len(listed):
        raise ValueError(
            f"{placeholders} audio placeholders ({placeholder}) but {len(listed)} clips listed in audio; "
            "expected one clip for each placeholder"
        )
    clips = iter(listed)
    turns = []
    for role, group in groupby(messages, lambda message: message[0]):
        turn_parts: list[str | Clip] = []
        for _, parts in group:
            turn_parts += [
                *([" "] if turn_parts else []),
                *(next(clips) if part is None else part for part in parts),
            ]
        turns.append(Turn(role, merge_texts(turn_parts)))
    answers = (turn for turn in turns if turn.role == "assistant")
    if any(isinstance(part, Clip) for turn in answers for part in turn.parts):
        raise ValueError("a recording in a turn of the assistant; expected text alone")
    return tuple(turns)


def _messages(
    entry: dict[str, Any], locate: Locate, placeholder: str
) -> Iterator[tuple[Role, list[str | Clip | None]]]:
    """Yields (role, parts) of each entry. A part None stands for the next recording of the entry's list."""
    nemo = "conversations" in entry
    field, speaker = ("conversations", "from") if nemo else ("messages", "role")
    for count, item in enumerate(json_list(entry[field], field), start=1):
        try:
            message = json_object(item, "it")
            role = _ROLES.get(string(message, speaker).lower())
            if role is None:
                found = reprlib.repr(message[speaker])
                raise ValueError(f"unknown role {found}; expected system, user or assistant (human, gpt)")
            contents = _nemo_contents(message) if nemo else _chat_contents(message)
            parts = [part for content in contents for part in _parts(content, locate, placeholder)]
            if all(isinstance(part, str) and not part.strip() for part in parts):
                raise ValueError(f"an empty turn ({role}); expected text or a recording")
        except ValueError as error:
            raise ValueError(f"{field} {count}: {error}") from error
        yield role, parts


def _nemo_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    value = string(message, "value")
    return [{**message, "type": message.get("type", "text"), "path": value, "text": value}]


def _chat_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [json_object(item, "an item of content") for item in json_list(content, "content")]


def _parts(content: dict[str, Any], locate: Locate, placeholder: str) -> list[str | Clip | None]:
    if content.get("type") == "text":
        before, *after = string(content, "text").split(placeholder)
        return [before, *(part for piece in after for part in (None, piece))]
    if content.get("type") == "audio":
        path = _path_field(content)
        return [clip_of(content, path, locate) if path else None]
    raise ValueError(f"type is {reprlib.repr(content.get('type'))}; expected text or audio")


def _listed(entry: dict[str, Any], locate: Locate) -> list[Clip]:
    """The recordings of the field "audio", or "sound" as NeMo's ShareGPT reader calls it."""
    listed = entry.get("audio", entry.get("sound"))
    items = listed if isinstance(listed, list) else [] if listed is None else [listed]
    clips = []
    for item in items:
        named = {"path": item} if isinstance(item, str) else json_object(item, "an entry of audio")
        clips.append(clip_of(named, _path_field(named) or "path", locate))
    return clips


def _path_field(entry: dict[str, Any]) -> str | None:
    return next((name for name in ("path", "audio_filepath", "audio") if name in entry), None)


def clip_of(entry: dict[str, Any], name: str, locate: Locate) -> Clip:
    """The recording that a field names, with the entry's offset and duration. Raises ValueError."""
    path = string(entry, name)
    if not path:
        raise ValueError(f"{name} is empty; expected the path of a recording")
    duration = seconds(entry, "duration")
    if duration == 0:
        raise ValueError("duration is 0; expected more than 0 seconds, or no duration to read the whole file")
    return replace(locate(path), offset=seconds(entry, "offset") or 0.0, duration=duration)
