"""Writes byte_pairs.json: a small vocabulary with merges, and what transformers' Qwen2Tokenizer makes of it.

    python -m tests.references.byte_pairs

Needs transformers; a few seconds. Keys:
    vocab, merges, settings     vocab.json, the lines of merges.txt, tokenizer_config.json
    encoded                     pairs: a text, its ids
"""

import json
import tempfile
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

WORDS = "one two three four five six seven eight nine ten turn on the light it's we've 2024 don't  ok\n"
ADDED = (("<|endoftext|>", True), ("<|im_end|>", True), ("<timestamp>", False))
TEXTS = (
    "one two three",
    "it's 2024, DON'T turn\r\n\n  on   the light ",
    "cafe\u0301 \ufb01ne \u6211\u4eec\u53bb\u5317\u4eac\uff01 \u304d\u307e\u3057\u305f \U0001f399",
    "one<timestamp><timestamp>two<timestamp> x",
    "",
)


def main() -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        [WORDS] * 3,
        trainers.BpeTrainer(vocab_size=297, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = {
        str(len(model["vocab"]) + k): {"content": text, "special": is_special, **flags}
        for k, (text, is_special) in enumerate(ADDED)
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder)
        encoded = [(text, tokenizer(text, add_special_tokens=False).input_ids) for text in TEXTS]
    found = {"vocab": model["vocab"], "merges": merges, "settings": settings, "encoded": encoded}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
