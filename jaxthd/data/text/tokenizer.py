"""Text to token ids and back: UTF-8 bytes, or any tokenizer.json."""

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers

from jaxthd.config import Config
from jaxthd.data.text.special_tokens import SpecialTokens, read_special_tokens
from jaxthd.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
    """What data and evaluation ask of a tokenizer.

    encode takes text: it adds no special tokens of its own and never makes any. encode_marks takes the marks
    of a prompt template, which may be special tokens. decode leaves out ids that stand for no text. Padding
    is told by segment id and supervision by the document's mask: pad_id never decides either, and may equal
    eos_id. eos_ids: all ids that end a text, eos_id first. recording: what is written for a recording:
    audio_id once, and what the checkpoint has around it. vocab_size: rows that a speech model's embedding
    needs; text_vocab_size: a text-only model's, which never sees audio_id.
    """

    pad_id: int
    bos_id: int
    eos_id: int
    eos_ids: tuple[int, ...]
    audio_id: int
    recording: tuple[int, ...]
    vocab_size: int
    text_vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_marks(self, marks: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes after four special ids. Needs no file."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    eos_ids: tuple[int, ...] = (eos_id,)
    audio_id = 3
    recording: tuple[int, ...] = (audio_id,)
    first_byte = 4
    vocab_size = 260
    text_vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return [byte + self.first_byte for byte in text.encode()]

    encode_marks = encode  # no byte is special

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        bytes_ = bytes(i - self.first_byte for i in ids if self.first_byte <= i < self.vocab_size)
        return bytes_.decode(errors="replace")


# Llama and Nemotron; Gemma; Llama 3; GPT-OSS; DeepSeek; the rest. Qwen and GPT-2 begin with what ends a text.
_BOS = (
    "<s>",
    "<bos>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<｜begin▁of▁sentence｜>",
    "[BOS]",
    "<|endoftext|>",
)
_EOS = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
)
_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>")
_UNKNOWN = ("<unk>", "[UNK]", "<|unk|>")
_AUDIO = ("<audio>", "<|audio|>", "<so_embedding>", "<|AUDIO|>", "<|audioplaceholder|>")
_AROUND = {"<so_embedding>": ("<so_start>", "<so_end>")}
"""What a family's processor, not its chat template, writes around the placeholder."""


class FileTokenizer:
    """A tokenizer.json, with its truncation and padding switched off.

    special: what the checkpoint's other files say about its special tokens; what they leave out is found by
    its usual names. Without a padding token pad_id is eos_id; without an audio placeholder audio_id is an
    extra id past the file's last, and vocab_size counts it.
    Raises FileNotFoundError, or UserError for a file that is no tokenizer, names no start or end of text, or
    is not the one that the other files are about.
    """

    def __init__(self, path: str | Path, special: SpecialTokens | None = None) -> None:
        self.path = Path(path)
        self.special = special or SpecialTokens()
        if not self.path.is_file():
            raise FileNotFoundError(
                f'no tokenizer at {path}; expected "bytes", a tokenizer.json or a folder with one: '
                "correct data.tokenizer"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json that tokenizers can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # else offsets skip spaces; no token is added in either case
        # Ids may have gaps, so the number of tokens would be too small.
        file_size = max(self._tokenizer.get_vocab().values()) + 1
        stated = self.special
        (self.bos_id,) = self._required("start-of-text", _BOS, self._stated("bos_token", stated.bos_id)[:1])
        self.eos_ids = tuple(self._required("end-of-text", _EOS, self._stated("eos_token", *stated.eos_ids)))
        self.eos_id = self.eos_ids[0]
        pad = self._stated("pad_token", stated.pad_id) or self._find(_PAD)
        audio = self._stated("audio_token", stated.audio_id) or self._find(_AUDIO)
        if len(audio) > 1:
            raise UserError(
                f"the files beside {path} say that the audio token is {stated.tokens['audio_token']!r}, its "
                f"id {audio[0]}, and that its id is {audio[1]}: they are of different checkpoints; put those "
                "of one there"
            )
        self.pad_id = pad[0] if pad else self.eos_id
        self.audio_id = audio[0] if audio else file_size
        self.audio_text: str | None = self._tokenizer.id_to_token(self.audio_id)
        """What encode_marks turns into audio_id; None where the file has no such token."""
        self.recording = self._recording()
        self.vocab_size = max(file_size, self.audio_id + 1)
        self.text_vocab_size = file_size
        for name, ids in (
            ("bos_token_id", [self.bos_id]),
            ("eos_token_id", self.eos_ids),
            ("pad_token_id", [self.pad_id]),
        ):
            if max(ids) >= file_size:
                raise UserError(
                    f"the files beside {path} say that {name} is {max(ids)}; it has ids up to "
                    f"{file_size - 1}: they are of different checkpoints; put those of one there"
                )
        added = self._tokenizer.get_added_tokens_decoder()
        # Strange characters become the unknown token too.
        self._special = {i for i, t in added.items() if t.special and t.content not in _UNKNOWN}
        self._special |= {*self.recording, self.bos_id, *self.eos_ids, self.pad_id}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for text that holds a special token: as text it would steer the model."""
        ids = self.encode_marks(text)
        special = self._special & set(ids)
        if special:
            names = sorted(str(self._tokenizer.id_to_token(i)) for i in special)
            raise ValueError(
                f"text {reprlib.repr(text)} holds the special token {', '.join(names)}; remove it from the "
                "text (data.audio_placeholder stands for a recording)"
            )
        return ids

    def encode_marks(self, marks: str) -> list[int]:
        return self._tokenizer.encode(marks, add_special_tokens=False).ids

    def encode_places(self, marks: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of encode_marks, and the characters (from, to) that each stands for."""
        encoding = self._tokenizer.encode(marks, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def is_special(self, token: int) -> bool:
        """Whether text must not contain this token."""
        return token in self._special

    def token_text(self, token: int) -> str:
        """The file's text for a token id; "" for an id that it does not have."""
        return self._tokenizer.id_to_token(token) or ""

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.audio_id], skip_special_tokens=True)

    def _find(self, names: Iterable[str]) -> list[int]:
        """The first of these tokens that the file has; none where it has none of them."""
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return [i for i in ids if i is not None][:1]

    def _stated(self, name: str, *ids: int | None) -> list[int]:
        """What the other files say: the token of that name, then these ids, each once."""
        text = self.special.tokens.get(name)
        named = self._find([text]) if text else []
        if text and not named:
            raise UserError(
                f"the files beside {self.path} say that {name} is {text!r}, which it does not have: they are "
                "of different checkpoints; put those of one there"
            )
        return list(dict.fromkeys(i for i in (*named, *ids) if i is not None))

    def _required(self, what: str, names: tuple[str, ...], stated: list[int]) -> list[int]:
        found = stated or self._find(names)
        if not found:
            raise UserError(
                f"{self.path} has no {what} token: looked for {', '.join(names)}; add one to its added_tokens"
            )
        return found

    def _recording(self) -> tuple[int, ...]:
        around = [self._find([name]) for name in _AROUND.get(self.audio_text or "", ())]
        return (*around[0], self.audio_id, *around[1]) if around and all(around) else (self.audio_id,)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Takes "bytes", the path of a tokenizer.json, or a folder with one, whose other files then say which
    tokens are special. Raises as FileTokenizer and read_special_tokens.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    if path.is_dir():
        return FileTokenizer(path / "tokenizer.json", read_special_tokens(path))
    return FileTokenizer(path)


def needed_vocabulary(config: Config) -> int:
    """Rows that the model's embedding needs for data.tokenizer. Raises as load_tokenizer."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return tokenizer.vocab_size if config.model.encoder else tokenizer.text_vocab_size


class TextStream:
    """Token ids, one at a time -> the text that is certain so far: no partial characters, no lost spaces.

    All texts together are what decode makes of all ids, where later tokens do not change earlier text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text is told up to `_told`; it is decoded from `_from` on, which is where the piece before began.
        self._from = self._told = 0

    def push(self, token: int) -> str:
        """The text that this token makes certain; it is often one token behind."""
        self._ids.append(token)
        piece = self._untold()
        if not piece or piece.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self._from, self._told = self._told, len(self._ids)
        return piece

    def finish(self) -> str:
        """The rest, after the last token."""
        piece = self._untold()
        self._from = self._told = len(self._ids)
        return piece

    def _untold(self) -> str:
        told = self._tokenizer.decode(self._ids[self._from : self._told])
        return self._tokenizer.decode(self._ids[self._from :])[len(told) :]
