"""Writes tests/references/huggingface: a data set of three recordings, as datasets saves it and as parquet.

    python -m tests.references.huggingface

Needs datasets (made with 5.2.0), not jaxthd. Recordings are tones, which keeps the files small: 0.5 s at
8 kHz, at 16 kHz in two channels, and at 16 kHz by its path alone, which save_to_disk replaces by the bytes
and to_parquet does not. saved/ is from save_to_disk, in two shards, parquet/ from to_parquet; the wav
files lie beside them.
"""

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import soundfile
from datasets import Audio, Dataset, DatasetInfo, Features, Value

OUT = Path(__file__).parent / "huggingface"


def tone(rate: int, channels: int) -> bytes:
    """A WAV file."""
    time = np.arange(rate // 2) / rate
    wave = np.stack([0.3 * np.sin(2 * np.pi * h * time) for h in (440, 660)[:channels]], axis=1)
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV")
    return file.getvalue()


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "parquet").mkdir(parents=True)
    sounds = {"low.wav": tone(8000, 1), "both.wav": tone(16_000, 2), "beside.wav": tone(16_000, 1)}
    for name, data in sounds.items():
        (OUT / name).write_bytes(data)
    os.chdir(OUT)
    rows: list[dict[str, object]] = [{"bytes": data, "path": name} for name, data in sounds.items()]
    rows[2] = {"bytes": None, "path": "beside.wav"}
    audio = Audio(decode=False)
    features = Features({"audio": audio, "transcription": Value("string"), "gender": Value("int8")})
    columns = {"audio": rows, "transcription": ["one", "two", "three"], "gender": [0, 1, 0]}
    # As they are stored: encoding would need torchcodec.
    table = pyarrow.table(columns, schema=features.arrow_schema)
    made = Dataset(table, DatasetInfo(features=features), fingerprint="0")
    made.save_to_disk("saved", num_shards=2)
    made.to_parquet("parquet/train-00000-of-00001.parquet")


if __name__ == "__main__":
    main()
