"""The texts of the synthetic data sets, and a tokenizer trained on the words of the default one.

Each of their 56 words is one token. So a document has fewer slots than in bytes, an answer takes fewer steps,
and every target but the end must be heard or guessed: none is spelling.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxthd.files.atomic import write_atomically
from jaxthd.files.user_cache import user_cache

VERSION = 1
"""Increased with every change of the tokenizer, so that an old file is not used for it."""


class Words(NamedTuple):
    """The words of a language's texts. things: with their articles, where these differ. the: before things.
    joint: between commands."""

    digits: list[str]
    single: list[str]
    verbs: list[str]
    things: list[str]
    endings: list[str]
    the: str
    joint: str


ENGLISH = Words(
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    ["stop", "go", "yes", "no", "wait", "help", "left", "right", "up", "down", "back", "again"],
    ["start", "stop", "open", "close", "turn on", "turn off", "find", "move", "check", "bring", "clean"],
    ["music", "door", "window", "light", "radio", "kitchen", "garden", "heater", "camera", "phone"],
    ["now", "please", "again", "for me", "in the morning", "at night", "before lunch", "after six"],
    "the ",
    " then ",
)
SPANISH = Words(
    ["cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"],
    ["para", "sigue", "sí", "no", "espera", "ayuda", "izquierda", "derecha", "arriba", "abajo", "atrás"],
    ["pon", "abre", "cierra", "enciende", "apaga", "busca", "mueve", "mira", "trae", "limpia"],
    ["la música", "la puerta", "la ventana", "la luz", "la radio", "la cocina", "el jardín", "la cámara"],
    ["ahora", "por favor", "otra vez", "para mí", "por la mañana", "de noche", "antes de comer"],
    "",
    " luego ",
)
GERMAN = Words(
    ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    ["halt", "los", "ja", "nein", "warte", "hilfe", "links", "rechts", "hoch", "runter", "zurück"],
    ["öffne", "schließe", "starte", "suche", "bewege", "prüfe", "bringe", "putze", "zeige", "hole"],
    [
        "die Musik",
        "die Tür",
        "das Fenster",
        "das Licht",
        "das Radio",
        "die Küche",
        "den Garten",
        "das Telefon",
    ],
    ["jetzt", "bitte", "noch einmal", "für mich", "am Morgen", "in der Nacht", "vor dem Essen"],
    "",
    " dann ",
)

_CODES = """
alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo
sierra tango uniform victor whiskey xray yankee zulu dash star
"""
_OF_TELEPHONES = """
ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
sixty seventy eighty ninety hundred thousand million billion first second third fourth fifth sixth seventh
eighth ninth tenth eleventh twelfth thirteenth twentieth thirtieth monday tuesday wednesday thursday friday
saturday sunday january february march april may june july august september october december today tomorrow
yesterday hello goodbye yes no press pound plus minus dot slash equals comma colon space dollars percent
hours minutes minute seconds extension number location transfer calling cancelled activated added disabled
enabled removed family friends new old pause record
"""
_ALIKE = """
stephen/steven catherine/katherine philip/phillip erik/eric jon/john marc/mark brian/bryan carl/karl
jeffrey/geoffrey sean/shawn graham/graeme zoe/zoey kris/chris toni/tony matthew/mathew cindy/cyndi
"""
CODES = [*_CODES.split(), "oh", *ENGLISH.digits]
"""Words for letters, digits and two signs."""
TELEPHONE = Words(
    ENGLISH.digits,
    [*CODES, *_OF_TELEPHONES.split()],
    ["call", "dial", "page", "transfer to", "message"],
    [],
    ["now", "please", "on monday", "tomorrow", "after six", "at extension four two"],
    "",
    " and ",
)
NAMES = [pair.split("/") for pair in _ALIKE.split()]
"""Pairs of names that espeak-ng says alike in English: only a list of those to expect tells them apart."""


def draw_text(rng: np.random.Generator, words: Words = ENGLISH) -> str:
    """Draws a text: digit strings (six in ten), single words and commands, with geometric lengths.

    Many texts have a single word: from those a new model first learns to use the audio.
    """
    kind = rng.random()
    if kind < 0.6:
        return " ".join(rng.choice(words.digits, min(rng.geometric(0.35), 20)))
    if kind < 0.75:
        return str(rng.choice(words.single))
    return words.joint.join(_command(rng, words) for _ in range(min(rng.geometric(0.85), 4)))


def draw_sum(rng: np.random.Generator) -> tuple[str, int]:
    """Draws what is said of a sum of two digits, "three plus five", and the sum."""
    first, second = (int(number) for number in rng.integers(0, len(ENGLISH.digits), 2))
    return f"{ENGLISH.digits[first]} plus {ENGLISH.digits[second]}", first + second


def digits_of(number: int) -> str:
    """A number from 0 up in words, digit by digit: "one three" of 13. Each word is a token."""
    return " ".join(ENGLISH.digits[int(digit)] for digit in str(number))


def _command(rng: np.random.Generator, words: Words) -> str:
    command = f"{rng.choice(words.verbs)} {words.the}{rng.choice(words.things)}"
    return f"{command} {rng.choice(words.endings)}" if rng.random() < 0.3 else command


def all_words() -> list[str]:
    """Every word that a text of the default set can hold, sorted."""
    phrases = [
        *ENGLISH.digits,
        *ENGLISH.single,
        *ENGLISH.verbs,
        *ENGLISH.things,
        *ENGLISH.endings,
        "the",
        "then",
    ]
    return sorted({word for phrase in phrases for word in phrase.split()})


def make_tokenizer() -> tokenizers.Tokenizer:
    """Trains a byte-level BPE on the words: special tokens, all bytes, then merges up to whole words.

    Text of other words is encoded too, in smaller tokens. Decoding gives any text back, but for spaces at its
    start.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than the words need: merging ends when each is one token
        special_tokens=["<pad>", "<s>", "</s>", "<audio>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_words(), trainer)
    return tokenizer


def tokenizer_file(cache_dir: str | Path | None = None) -> Path:
    """The path of the tokenizer's tokenizer.json, which is made on first use.

    cache_dir: its folder; default $XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd.
    """
    path = Path(cache_dir or user_cache()) / f"synthetic-tokenizer-{VERSION}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [make_tokenizer().to_str(pretty=True)])
    return path
