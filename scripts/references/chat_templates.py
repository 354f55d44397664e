"""Writes tests/references/chat/expected.json: how transformers renders chat templates.

    python scripts/references/chat_templates.py     # with transformers (made with 5.23); a few seconds

For every template and conversation the file holds the ids of the text without and with a generation prompt
("whole", "prompt"), encoded as apply_chat_template encodes them. For a template with generation tags it
also marks the assistant's tokens, which are the supervised ones ("learnt"). A recording is written the way
NemotronH_Omni_Reasoning_V3Processor writes one embedding. The tokenizer beside it is a byte-level BPE,
trained here on a few lines so that text has merges.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "tests" / "references" / "chat"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<so_embedding>",
    "<so_start>",
    "<so_end>",
)
LINES = [
    "What is said in this recording?\n\nIt says: one two three.\n",
    "You listen, and you answer in a sentence.\n",
    "system\nuser\nassistant\nToday: unknown\n\n",
]
RECORDING = {"type": "audio", "audio": ""}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [
        {"role": "user", "content": "What is said?"},
        {"role": "assistant", "content": "It says: one two."},
    ],
    "two": [
        {"role": "system", "content": "You listen.\n"},
        {"role": "user", "content": "  What is this? "},
        {"role": "assistant", "content": "\nA recording — naïve.\n\n"},
        {"role": "user", "content": "And what is said?"},
        {"role": "assistant", "content": "one two three"},
    ],
    "thoughts": [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "<think>\nWhat is it?\n</think>\nIt is."},
        {"role": "user", "content": "Is it so?"},
        {"role": "assistant", "content": "<think>\nSo?\n</think>\nIt is so."},
    ],
    "recordings": [
        {"role": "user", "content": [RECORDING, text(" What is said?")]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [text("And: "), RECORDING, RECORDING]},
        {"role": "assistant", "content": "two three"},
    ],
}
TEMPLATES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "chatml": (("one", "two", "thoughts"), {}),
    "llama3": (("one", "two"), {"date": "1 May"}),
    "thinking": (tuple(CONVERSATIONS), {}),
    "tagged": (("one", "two"), {}),
}
"""Conversations, each with variables of the template."""


def main() -> None:
    file = tokenizers.Tokenizer(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.post_processor = processors.ByteLevel()  # its offsets exclude spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    file.train_from_iterator(LINES * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    file.add_special_tokens(list(SPECIAL))
    file.add_tokens(["<think>", "</think>"])
    file.save(str(FOLDER / "tokenizer.json"), pretty=False)
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=file, **names)
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")

    def encoded(messages: list[dict[str, Any]], source: str, **variables: Any) -> list[int]:
        written = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables)
        written = written.replace("<so_embedding>", "<so_start><so_embedding><so_end>")
        return tokenizer(written, add_special_tokens=False)["input_ids"]

    expected: dict[str, Any] = {}
    for template, (conversations, variables) in TEMPLATES.items():
        source = (FOLDER / f"{template}.jinja").read_text()
        for name in conversations:
            messages = CONVERSATIONS[name]
            found: dict[str, Any] = {"variables": variables, "messages": messages}
            found["whole"] = encoded(messages, source, **variables)
            found["prompt"] = encoded(messages[:-1], source, add_generation_prompt=True, **variables)
            if "endgeneration" in source:
                found["learnt"] = tokenizer.apply_chat_template(
                    messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
                )["assistant_masks"]
            expected[f"{template}/{name}"] = found
    lines = (f'"{name}": {json.dumps(found)}' for name, found in expected.items())
    (FOLDER / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
