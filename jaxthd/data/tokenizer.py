"""Text to token ids and back: UTF-8 bytes, or any tokenizer.json."""

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers

from jaxthd.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
    """What data and evaluation ask of a tokenizer.

    encode takes text: it adds no special tokens of its own and never makes any. encode_marks takes the marks
    of a prompt template, which may be special tokens. decode leaves out ids that stand for no text. Padding
    is told by segment id and supervision by the document's mask: pad_id never decides either, and may equal
    eos_id.
    """

    pad_id: int
    bos_id: int
    eos_id: int
    audio_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_marks(self, marks: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes after four special ids. Needs no file."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    audio_id = 3
    first_byte = 4
    vocab_size = 260

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


class FileTokenizer:
    """A tokenizer.json, with its truncation and padding switched off.

    Special ids are found by their usual names. Without a padding token pad_id is eos_id; without an audio
    placeholder audio_id is an extra id past the file's last, and vocab_size counts it.
    Raises FileNotFoundError, or UserError for a file that is no tokenizer or names no start or end of text.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
        self.bos_id = self._required("start-of-text", _BOS)
        self.eos_id = self._required("end-of-text", _EOS)
        pad_id, audio_id = self._find(_PAD), self._find(_AUDIO)
        # Ids may have gaps, so the number of tokens would be too small.
        file_size = max(self._tokenizer.get_vocab().values()) + 1
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self.audio_id = file_size if audio_id is None else audio_id
        self.vocab_size = max(file_size, self.audio_id + 1)
        added = self._tokenizer.get_added_tokens_decoder()
        # Strange characters become the unknown token too.
        self._special = {i for i, t in added.items() if t.special and t.content not in _UNKNOWN}
        self._special |= {self.audio_id, self.bos_id, self.eos_id, self.pad_id}

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

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.audio_id], skip_special_tokens=True)

    def _find(self, names: tuple[str, ...]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def _required(self, what: str, names: tuple[str, ...]) -> int:
        found = self._find(names)
        if found is None:
            raise UserError(
                f"{self.path} has no {what} token: looked for {', '.join(names)}; add one to its added_tokens"
            )
        return found


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Takes "bytes", or the path of a tokenizer.json or of a folder with one. Raises as FileTokenizer."""
    if name_or_path == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "tokenizer.json"
    return FileTokenizer(path)
