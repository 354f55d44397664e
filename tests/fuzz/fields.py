"""Lines and rows that name a recording in any field, as other programs write them."""

from typing import Any

import numpy as np

FIELDS = (
    *("audio", "audios", "audio_filepath", "sound", "sounds", "Audio", "AUDIO_FILEPATH", "audioFilepath"),
    *("audio_path", "audio_file", "audio_file_path", "audio_url", "audio_0", "audio-file", "input_audio"),
    *(
        "wav",
        "wavs",
        "wav_path",
        "wav.scp",
        "src_wav",
        "mp3",
        "flac_path",
        "waveform",
        "speech",
        "speech_path",
    ),
    *(
        "path",
        "file",
        "file_name",
        "filename",
        "filepath",
        "url",
        "uri",
        "media",
        "media_path",
        "clip",
        "clips",
    ),
    *("recording", "recordings", "recording_path", "voice", "voice_file", "utterance", "source", "sources"),
    *("video", "videos", "ref_audio", "prompt_audio", "extra", "custom", "metadata", "zq", "x", "音声"),
)
"""Names of fields that hold recordings, and others that may."""
NAMES = (
    "s16.wav",
    "s24.flac",
    "vorbis.ogg",
    "layer3.mp3",
    "./s16.wav",
    "gone.wav",
    "far/away.M4A",
    "a b.Wav",
)
"""Names of recordings, some of them there."""


def named(rng: np.random.Generator, name: str) -> tuple[str, Any]:
    """(field, value) in which that file is named: as a text, in an object, or in a list of either."""
    inner: Any = name
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        inside = str(rng.choice(["path", "url", "audio", "audio_filepath", "wav", "file", "source"]))
        inner = {inside: inner}
    if rng.random() < 0.3:
        inner = [inner]
    return str(rng.choice(FIELDS)), inner


def line_with_recording(rng: np.random.Generator) -> dict[str, Any]:
    """An utterance, or a conversation of any form, that names one recording in any place."""
    name, asks = str(rng.choice(NAMES)), rng.choice(["What is said?", "<audio>What?", "{audio}"])
    field, value = named(rng, name)
    if rng.random() < 0.3:
        return {"text": "one two", "duration": 0.5, field: value} if field != "text" else {"audio": value}
    form = rng.integers(5)
    content: Any = str(asks)
    beside: dict[str, Any] = {}
    if form == 0:
        beside = {field: value}
    elif form == 1:
        content = [
            {"type": str(rng.choice(["audio", "audio_url", "input_audio"])), field: value},
            {"text": "?"},
        ]
    elif form == 2:
        content = [{"type": "text", "text": "What?"}, {field: value}]
    message = {"role": "user", "content": content}
    if form == 3:
        message |= {field: value}
    if form == 4:
        beside = {str(rng.choice(["meta", "extra_info", "custom", "data"])): {field: value}}
    if rng.random() < 0.5:
        answer = {"role": "assistant", "content": "Yes."}
        return {"messages": [message, answer], **beside}
    turn = {"from": "human", "value": message.pop("content")} | {
        k: v for k, v in message.items() if k != "role"
    }
    return {"conversations": [turn, {"from": "gpt", "value": "Yes."}], **beside}
