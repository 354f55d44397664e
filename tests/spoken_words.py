"""A tokenizer of the words w000, w001, ..., and recordings of noise whose transcripts are such words."""

import json
from pathlib import Path

import numpy as np
import soundfile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxthd.files.jsonl import write_lines

MARKS = {"pad_token": "w003", "unk_token": "w000", "bos_token": "w001", "eos_token": "w002"}


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(vocabulary)}, unk_token="w000"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece()
    words.add_special_tokens(sorted(MARKS.values()))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(MARKS))


def write_manifest(folder: Path, vocabulary: int, recordings: int = 12) -> Path:
    """Its path. The recordings' lengths are no multiples of 80 ms."""
    rng, lines = np.random.default_rng(0), []
    for number in range(recordings):
        seconds, path = 0.31 + 0.17 * number, folder / f"{number}.wav"
        soundfile.write(path, rng.normal(0, 0.1, round(16000 * seconds)), 16000)
        text = " ".join(f"w{i:03}" for i in rng.integers(4, vocabulary, 1 + number % 4))
        lines.append({"audio_filepath": str(path), "duration": round(seconds, 3), "text": text})
    write_lines(folder / "spoken.jsonl", lines)
    return folder / "spoken.jsonl"
