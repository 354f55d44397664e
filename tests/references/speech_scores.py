"""Scores tokens, and answers recordings, with a folder of a speech LLM opened by the transformers library.

    python -m tests.references.speech_scores FAMILY FOLDER JOBS.json    # needs torch and transformers

FAMILY: one of speech_llms.VARIANTS. JOBS.json: a list of objects with
    tokens      ids, with one placeholder for every audio token
    audio       the document's recordings: 16-bit WAV files of 16 kHz
    new         how many tokens to answer with, greedily; 0: none

Each recording is encoded alone, as the family's processor divides it, which is told the published settings
but the window of a smaller position table. Prints a JSON list of objects: log_probs, of every token but the
first, given those before; answer, the ids.
"""

import json
import sys
import wave as wave_files
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.references.speech_llms import PLACEHOLDER, VARIANTS, window_seconds
from tests.references.waves import RATE


def samples_of(file: str) -> np.ndarray:
    """The samples in [-1, 1]."""
    with wave_files.open(file) as opened:
        assert (opened.getframerate(), opened.getsampwidth(), opened.getnchannels()) == (RATE, 2, 1)
        return np.frombuffer(opened.readframes(opened.getnframes()), np.int16).astype(np.float32) / 32768


def main() -> None:
    name, folder, jobs = VARIANTS[sys.argv[1]], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    fields = json.loads((folder / "config.json").read_text())
    fields = fields.get("thinker_config", fields)
    placeholder = fields.get("audio_token_id", fields.get("audio_token_index", PLACEHOLDER))
    kind = getattr(transformers, f"{name.kind}ForConditionalGeneration")
    eager = {"attn_implementation": "eager"}
    if name.has_experts:
        eager["experts_implementation"] = "eager"
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **eager)
    wrong = [*info["missing_keys"], *info["unexpected_keys"]]
    assert not wrong, wrong
    model.eval()
    done = []
    with torch.no_grad():
        for job in jobs:
            seconds = window_seconds(fields)
            audio = [name.encoded(model, samples_of(file), seconds) for file in job["audio"]]
            tokens = torch.tensor(job["tokens"])
            is_audio = tokens == placeholder
            embedded = model.get_input_embeddings()(torch.where(is_audio, 0, tokens))
            if audio:
                embedded = embedded.masked_scatter(is_audio[:, None], torch.cat(audio))
            logits = model(inputs_embeds=embedded[None], use_cache=False).logits[0]
            of_next = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            answer: list[int] = []
            for _ in range(job["new"]):
                logits = model(inputs_embeds=embedded[None], use_cache=False).logits[0]
                answer.append(int(logits[-1].argmax()))
                new = model.get_input_embeddings()(torch.tensor(answer[-1:]))
                embedded = torch.cat([embedded, new])
            done.append({"log_probs": of_next.tolist(), "answer": answer})
    print(json.dumps(done))


if __name__ == "__main__":
    main()
