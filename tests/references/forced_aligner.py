"""Writes forced_aligner.json: words and their times by transformers' Qwen3 forced aligner.

    python -m tests.references.forced_aligner FOLDER MANIFEST [--out FILE]

Needs torch and transformers; ten seconds. FOLDER: of tests/hf/speech_folders.py (write_aligner). MANIFEST:
JSON lines with audio_filepath (16-bit WAV files of 16 kHz beside it) and text. Float32, eval mode, a document
at a time. Without --out it prints the objects:

    documents   of each line: words, of the text as the processor divides it; tokens; classes, of the marks,
                the likeliest; margin, the least difference of a mark's two likeliest logits; times, of each
                word in seconds: (begin, end)
    repaired    pairs: classes of 1 s, and what the processor makes of them, in milliseconds
    divided     pairs: a text, and its words
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_asr import processing_qwen3_asr as processing

from tests.references.speech_llms import qwen3_asr_encoded
from tests.references.speech_scores import samples_of

TEXTS = (
    "Turn on the light, please!",
    "it's half-past two; (well) 3.30 o'clock",
    "\u6211\u4eec2024\u5e74\u53bb\u5317\u4eac\uff0cok\u5417",
    "\u79c1\u306f\u5b66\u6821\u306b \u884c\u304d\u307e\u3057\u305f\u3002\u30c6\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u00dcber dem Fluss \u2013 na\u00efve caf\u00e9s \u20ac5",
    "\U00020001\U0002f801x \u0915\u094d\u0937",
    " ... \u2014 ",
)


def divided(text: str) -> list[str]:
    """The words of a text whose language is not told."""
    words: list[str] = transformers.Qwen3ASRProcessor.split_words_for_alignment(None, text)
    return words


def documents(folder: Path, manifest: Path) -> list[dict[str, Any]]:
    """What the model tells of each line of the manifest."""
    loaded = transformers.Qwen3ASRForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    wrong = [*info["missing_keys"], *info["unexpected_keys"]]
    assert not wrong, wrong
    model.eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    mark, step = model.config.timestamp_token_id, json.loads((folder / "processor_config.json").read_text())
    found = []
    for line in map(json.loads, manifest.read_text().splitlines()):
        samples = samples_of(str(manifest.parent / line["audio_filepath"]))
        words = divided(line["text"])
        with torch.no_grad():
            audio = qwen3_asr_encoded(model.model, samples, 8)
            text = "".join(f"{word}<timestamp><timestamp>" for word in words)
            around = "<|audio_start|>" + "<|audio_pad|>" * len(audio) + f"<|audio_end|>{text}"
            tokens = torch.tensor(tokenizer(around, add_special_tokens=False).input_ids)
            embedded = model.get_input_embeddings()(tokens)
            is_audio = tokens == model.config.audio_token_id
            embedded = embedded.masked_scatter(is_audio[:, None], audio)
            logits = model(inputs_embeds=embedded[None], use_cache=False).logits[0, tokens == mark]
        best = logits.topk(2).values
        classes = logits.argmax(-1)
        raw = (classes.float() * step["timestamp_segment_time"]).numpy()
        times = np.reshape(processing._fix_timestamps(raw), (-1, 2)) / 1000
        found.append(
            {
                "words": words,
                "tokens": tokens.tolist(),
                "classes": classes.tolist(),
                "margin": float((best[:, 0] - best[:, 1]).min()),
                "times": times.tolist(),
            }
        )
    return found


def repaired(rng: np.random.Generator) -> list[tuple[list[int], list[int]]]:
    """Rising classes of which some are others, and what becomes of them in milliseconds of classes of 1 s."""
    found = []
    for number in range(60):
        size = int(rng.integers(1, 30))
        classes = np.sort(rng.integers(0, 60, size))
        wrong = rng.random(size) < (0.1, 0.4, 0.9)[number % 3]
        classes = np.where(wrong, rng.integers(0, 60, size), classes)
        found.append((classes.tolist(), processing._fix_timestamps(1000.0 * classes)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    made = {
        "documents": documents(options.folder, options.manifest),
        "repaired": repaired(np.random.default_rng(0)),
        "divided": [(text, divided(text)) for text in TEXTS],
    }
    if options.out:
        options.out.write_text(json.dumps(made) + "\n")
    else:
        print(json.dumps(made))


if __name__ == "__main__":
    main()
