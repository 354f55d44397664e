"""Writes tests/references/text_only: a tiny random NemotronHForCausalLM and its scores of documents.

    python -m tests.references.text_only [--out FOLDER]     # needs torch and transformers; about 5 s

The sizes are odd: heads of 24, one key and value head, 4 groups, 6 experts of which each token uses 3. The
two halves of the pattern are equal, so two pipeline stages can form a ring. FOLDER/text_only holds

    config.json, model.safetensors, tokenizer.json, tokenizer_config.json     as transformers writes them
    documents.jsonl     text conversations of ragged lengths, in the format that jaxthd reads
    expected.json       for every document: "tokens", its ids, encoded by transformers; "log_probs",
                        log p(tokens[t + 1] | tokens[: t + 1]) over all t, the document alone, unpadded

Float32, eval mode. Seeds are tried until every choice of experts has a margin of MARGIN (see text_models.py).
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.references.common import arguments, biased_sigmoid, watched
from tests.references.text_models import randomize

MARGIN = 1e-4
ALPHABET = "abcdefghijklmnopqrstuvwxyz ?."
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SENTENCES = (
    "what is said?",
    "it says one two three.",
    "the quick brown fox jumps over the lazy dog.",
    "a text model needs no ears.",
)
FIELDS: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 24,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "intermediate_size": 36,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 10,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 14,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,  # the library's CPU scan clamps dt to it
}


def conversations() -> list[list[dict[str, str]]]:
    """Ragged: an answer alone, short ones, several turns, and one longer than two context chunks."""

    def turns(*texts: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        first = len(texts) % 2  # the last turn is the assistant's
        return [{"role": roles[(first + n) % 2], "content": text} for n, text in enumerate(texts)]

    question, answer, fox, ears = SENTENCES
    return [
        turns(answer),
        turns(question, "a"),
        turns(question, answer, question, fox),
        turns(fox, " ".join([fox, ears, answer] * 2)),
        turns(ears),
        turns(question, " ".join([ears] * 3), "why?", "it has no encoder.", question, "nothing."),
    ]


def write_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """A BPE of characters whose ids fill the vocabulary."""
    file = tokenizers.Tokenizer(models.BPE())
    file.pre_tokenizer = pre_tokenizers.Metaspace()
    file.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=FIELDS["vocab_size"],
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=[*ALPHABET.replace(" ", "▁")],
        show_progress=False,
    )
    file.train_from_iterator(SENTENCES * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=file, **SPECIAL)
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids as data.template "plain" makes them: bos, the turns' texts, an eos after each answer."""
    tokens = [tokenizer.bos_token_id]
    for turn in messages:
        tokens += tokenizer(turn["content"], add_special_tokens=False)["input_ids"]
        tokens += [tokenizer.eos_token_id] * (turn["role"] == "assistant")
    return tokens


def log_probs(model: Any, tokens: list[int]) -> list[float]:
    """The log-probabilities of all tokens but the first."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return [round(x, 7) for x in found.tolist()]


def main() -> None:
    options = arguments(__doc__)
    folder = options.out / "text_only"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    assert len(tokenizer) == FIELDS["vocab_size"], len(tokenizer)
    documents = conversations()
    tokens = [encode(tokenizer, messages) for messages in documents]
    config = transformers.NemotronHConfig(
        **FIELDS,
        attn_implementation="eager",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    seed, margin = options.seed - 1, 0.0
    while margin < MARGIN:
        seed += 1
        torch.manual_seed(seed)
        model = transformers.NemotronHForCausalLM(config).eval()
        randomize(model)
        margins = watched(model, biased_sigmoid)
        found = [log_probs(model, ids) for ids in tokens]
        margin = min(margins)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = [json.dumps({"id": str(n), "messages": messages}) for n, messages in enumerate(documents)]
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    expected = [{"tokens": ids, "log_probs": values} for ids, values in zip(tokens, found, strict=True)]
    (folder / "expected.json").write_text("[\n" + ",\n".join(map(json.dumps, expected)) + "\n]\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: seed {seed}, margin {margin:.1e}, {sum(map(len, tokens))} tokens, {size} bytes")


if __name__ == "__main__":
    main()
