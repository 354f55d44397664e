"""Undamaged lines of manifests and of cuts."""

from typing import Any

UTTERANCE = {"audio_filepath": "s16.wav", "text": "one two", "duration": 0.5, "offset": 0.1, "lang": "en"}
CUT = {
    "id": "s16",
    "start": 0.1,
    "duration": 0.5,
    "channel": 0,
    "supervisions": [
        {"id": "s", "start": 0.2, "duration": 0.3, "channel": 0, "text": "two"},
        {"id": "t", "start": 0.0, "duration": 0.2, "channel": 0, "text": "one"},
    ],
    "recording": {"sources": [{"type": "shar", "channels": [0], "source": ""}], "channel_ids": [0]},
    "custom": {"context": "What is said?", "system_prompt": "Be brief."},
    "type": "MonoCut",
}
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "id": "nemo",
        "conversations": [
            {"from": "System", "value": "Be brief.", "type": "text"},
            {"from": "User", "value": "s16.wav", "type": "audio", "duration": 0.5, "offset": 0.0},
            {"from": "User", "value": "What is said?", "type": "text"},
            {"from": "Assistant", "value": "One two.", "type": "text"},
        ],
    },
    {
        "audio": ["f32.wav", {"audio_filepath": "s24.flac", "offset": 0.2, "duration": 0.3}],
        "conversations": [
            {"from": "human", "value": "{audio} or {audio}?"},
            {"from": "gpt", "value": "The first."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "audio", "path": "vorbis.ogg"}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": "Three."},
        ]
    },
    {
        "audios": ["s16.wav", {"url": "s24.flac"}],
        "messages": [
            {"role": "user", "content": "<audio> or <audio>?"},
            {"role": "assistant", "content": "Both."},
        ],
    },
    {
        "audio_filepath": "s16.wav",
        "offset": 0.1,
        "messages": [
            {"role": "user", "content": [{"text": "What?"}]},
            {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "s24.flac"}}]},
            {"role": "assistant", "content": "Three."},
        ],
    },
]

HEARD = {"audio_filepath": "s16.wav", "duration": 0.5}
PREFERENCES: list[dict[str, Any]] = [
    HEARD | {"chosen": "one two", "rejected": "won too", "text": "one two", "context": "What is said?"},
    HEARD | {"completion": "one two", "label": True},
    {
        "audio": ["f32.wav"],
        "prompt": [{"role": "user", "content": "{audio} Is it?"}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
    },
    {
        "id": "implicit",
        "chosen": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}],
        "rejected": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "No."}],
    },
]
