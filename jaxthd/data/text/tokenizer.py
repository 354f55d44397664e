"""Text to token ids and back: UTF-8 bytes, or any tokenizer.json."""

import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxthd.config import Config
from jaxthd.data.text.byte_pairs import read_tokenizer
from jaxthd.data.text.mistral import FILE as TEKKEN
from jaxthd.data.text.mistral import TekkenTokenizer
from jaxthd.data.text.special_tokens import SpecialTokens, read_special_tokens
from jaxthd.data.text.synthetic import tokenizer_file
from jaxthd.errors import UserError
from jaxthd.files.paths import home_path
from jaxthd.files.tokenizer_files import has_byte_pairs


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers.

    encode takes text: it never returns special tokens. encode_marks takes the marks of a prompt template,
    which may be special tokens. decode skips ids that stand for no text.
    Segment ids mark padding and the document's mask marks supervision. pad_id decides neither and may equal
    eos_id. eos_ids: all ids that end a text, eos_id first. recording: the ids written for a recording:
    audio_id once, and the checkpoint's tokens around it. vocab_size: rows for all ids; text_vocab_size: rows
    for a model that never looks audio_id up, which may lie past them.
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
    """A tokenizer of UTF-8 bytes, with ids after four special ones. It needs no file."""

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
        """Returns an id for each byte of the text in UTF-8."""
        return [byte + self.first_byte for byte in text.encode()]

    encode_marks = encode  # no byte is special

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        bytes_ = bytes(i - self.first_byte for i in ids if self.first_byte <= i < self.vocab_size)
        return bytes_.decode(errors="replace")


# Llama and Nemotron; Gemma; Llama 3; GPT-OSS; DeepSeek; others. Qwen and GPT-2 begin a text with the token
# that ends one.
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
_AUDIO = ("<audio>", "<|audio|>", "<so_embedding>", "<|AUDIO|>", "<|audioplaceholder|>", "<|audio_pad|>")
_TAG = re.compile(r"<(spk:\d+|(ev|sty):[^<>]*|asr_text)>", re.IGNORECASE)
"""Special tokens that transcripts hold: of a speaker whose turn begins, of an event, of a style; and the mark
before Qwen3-ASR's."""
_AROUND = {"<so_embedding>": ("<so_start>", "<so_end>")}
"""Tokens that a family's processor, not its chat template, writes around the placeholder."""


class FileTokenizer:
    """A tokenizer.json, or what stands for it (byte_pairs.py), with its truncation and padding switched off.

    special: the special tokens given by the checkpoint's other files. Those that the files do not give are
    found by their usual names. Without a padding token, pad_id is eos_id; without one for the start of a
    text, bos_id is the one that the files give for its end. Without an audio placeholder, audio_id is an
    extra id after the file's last, and vocab_size counts it.
    Raises FileNotFoundError; UserError for a file that is no tokenizer, that has no token for start or end of
    text, or that does not match the other files.
    """

    def __init__(self, path: str | Path, special: SpecialTokens | None = None) -> None:
        self.path = Path(path)
        self.special = special or SpecialTokens()
        if not self.path.is_file() and not has_byte_pairs(self.path.parent):
            raise FileNotFoundError(
                f'no tokenizer at {path}; expected "bytes", a tokenizer.json or a folder with one: '
                "correct data.tokenizer"
            )
        try:
            self._tokenizer = read_tokenizer(self.path)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json that tokenizers can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # otherwise offsets skip spaces; either way no token is added
        # Ids may have gaps, so the number of tokens may be too small.
        known = set(self._tokenizer.get_vocab().values())
        file_size = max(known) + 1
        stated = self.special
        ends = self._stated("eos_token", *stated.eos_ids)
        starts = self._stated("bos_token", stated.bos_id) or self._find(_BOS) or ends
        (self.bos_id,) = self._required("start-of-text", _BOS, starts[:1])
        self.eos_ids = tuple(self._required("end-of-text", _EOS, ends))
        self.eos_id = self.eos_ids[0]
        audio = self._stated("audio_token", stated.audio_id) or self._find(_AUDIO)
        # GLM-ASR's placeholder is called <|pad|>.
        pad = self._stated("pad_token", stated.pad_id) or [i for i in self._find(_PAD) if i not in audio]
        if len(audio) > 1:
            raise UserError(
                f"the files beside {path} say that the audio token is {stated.tokens['audio_token']!r}, its "
                f"id {audio[0]}, and that its id is {audio[1]}: they are of different checkpoints; put those "
                "of one there"
            )
        self.pad_id = pad[0] if pad else self.eos_id
        self.audio_id = audio[0] if audio else file_size
        self.audio_text: str | None = self._tokenizer.id_to_token(self.audio_id)
        """The text that encode_marks turns into audio_id; None if the file has no such token."""
        self.recording = self._recording()
        self.vocab_size = max(file_size, self.audio_id + 1)
        self.text_vocab_size = max(known - {self.audio_id}) + 1
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
        # The unknown token is not listed: characters outside the vocabulary become it.
        tags = {i for i, t in added.items() if _TAG.fullmatch(t.content)}
        self._special = {i for i, t in added.items() if t.special and t.content not in _UNKNOWN} - tags
        self._untold = {i for i, t in added.items() if t.special} - tags
        self._special |= {*self.recording, self.bos_id, *self.eos_ids, self.pad_id}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for text that contains a special token, which could steer the model; tags of
        speakers, events and styles are text."""
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
        """Returns the ids of marks and text, special tokens among them."""
        return self._tokenizer.encode(marks, add_special_tokens=False).ids

    def encode_spans(self, marks: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of encode_marks, and the span of characters (start, end) of each."""
        encoding = self._tokenizer.encode(marks, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def is_special(self, token: int) -> bool:
        """Whether text must not contain this token."""
        return token in self._special

    def token_text(self, token: int) -> str:
        """The file's text for a token id; "" for an id that it does not have."""
        return self._tokenizer.id_to_token(token) or ""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, without special tokens that are no tags."""
        told = [i for i in ids if i != self.audio_id and i not in self._untold]
        return self._tokenizer.decode(told, skip_special_tokens=False)

    def _find(self, names: Iterable[str]) -> list[int]:
        """[id] of the first of these tokens that the file has; [] if it has none of them."""
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return [i for i in ids if i is not None][:1]

    def _stated(self, name: str, *ids: int | None) -> list[int]:
        """The ids that the other files give: of the token with that name, then `ids`; each once."""
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
    """Loads a tokenizer: "bytes", "synthetic", the path of a tokenizer.json or a tekken.json, or a folder
    with one of them.

    The other files of a folder say which tokens are special. Raises as FileTokenizer, TekkenTokenizer and
    read_special_tokens do.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    if name_or_path == "synthetic":
        return FileTokenizer(tokenizer_file())
    path = home_path(name_or_path)
    tekken = path / TEKKEN if path.is_dir() and not (path / "tokenizer.json").exists() else path
    if tekken.name == TEKKEN and tekken.is_file():
        return TekkenTokenizer(tekken)
    if path.is_dir():
        return FileTokenizer(path / "tokenizer.json", read_special_tokens(path))
    return FileTokenizer(path)


def needed_vocabulary(config: Config) -> int:
    """Rows that the model's embedding needs for data.tokenizer. Raises as load_tokenizer does.

    A recording's vectors replace the embedding of its placeholder. So the placeholder needs a row only where
    they are added to it, and for the CTC loss, whose blank it is.
    """
    tokenizer, encoder = load_tokenizer(config.data.tokenizer), config.model.encoder
    needs_placeholder = encoder is not None and (encoder.adds or config.train.ctc_loss > 0)
    return tokenizer.vocab_size if needs_placeholder else tokenizer.text_vocab_size


class TextStream:
    """Decodes token ids one at a time into text without partial characters or lost spaces.

    All returned texts together equal decode of all ids, if later tokens do not change earlier text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # The text of tokens before `_told` has been returned. Decoding starts at `_from`, where the text
        # returned last begins.
        self._from = self._told = 0

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now certain, often one token behind."""
        self._ids.append(token)
        piece = self._untold()
        if not piece or piece.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self._from, self._told = self._told, len(self._ids)
        return piece

    def finish(self) -> str:
        """Returns the remaining text after the last token."""
        piece = self._untold()
        self._from = self._told = len(self._ids)
        return piece

    def _untold(self) -> str:
        told = self._tokenizer.decode(self._ids[self._from : self._told])
        return self._tokenizer.decode(self._ids[self._from :])[len(told) :]
