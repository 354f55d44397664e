"""Answers tests/hf/test_transcribe_live.py with transformers itself: it makes folders, reads them, computes.

    python -m tests.references.transcribe_live make FOLDER SETTINGS.json
    python -m tests.references.transcribe_live run FOLDER REQUESTS.npz FOUND.npz

make: a random model with its tokenizers and its processor. SETTINGS has seed and changes, fields of
config.json that differ from FIELDS. run: what the folder's model and processor make of each document alone
(tokens.c, with one placeholder; samples.c; first.c: the first supervised token; without it, no gradient): the
log-probabilities of all tokens at every position, the speakers, and the gradient of the sum of -log p of the
supervised tokens; a greedy answer to each prompt (prompt.p, sound.p). margin: the least distance from another
choice of the experts, and of the diarizer.

Needs torch and transformers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.references.common import Arrays, biased_sigmoid, gradients, watched
from tests.references.transcribe import FIELDS, STACK, calibrate, decisions, on_disk, randomize
from tests.waves import talk

ANSWER = 12
MARKS = ("<s>", "</s>", "<pad>", "<unk>", "<ev:laugh>", "<sty:low>", "<|im_start|>", "<|im_end|>")
SPECIAL = (*MARKS, *(f"<spk:{n}>" for n in range(8)))
AUDIO = "<|audio|>"
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'audio' %}<|audio|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer_of(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """One of bytes, with these special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({x: n for n, x in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The fields with changes below them."""
    both = dict(fields)
    for name, value in changes.items():
        both[name] = merged(both.get(name, {}), value) if isinstance(value, dict) else value
    return both


def make(folder: Path, asked: dict[str, Any]) -> None:
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of((*SPECIAL, AUDIO)), bos_token="<s>", eos_token="<|im_end|>"
    )
    vocabulary = len(words) - 1
    own = {"audio_token_id": vocabulary, "text_config": {"vocab_size": vocabulary}}
    config = transformers.Nemotron3_5TranscribeConfig(
        **merged(merged(FIELDS, own), asked["changes"]), attn_implementation="eager"
    )
    torch.manual_seed(asked["seed"])
    model = transformers.Nemotron3_5TranscribeForConditionalGeneration(config).eval()
    extractor = transformers.NemotronAsrStreamingFeatureExtractor(
        feature_size=config.audio_config.asr_config.num_mel_bins, mel_filters_dtype=asked["filters"]
    )
    pieces = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(()))
    processor = transformers.Nemotron3_5TranscribeProcessor(extractor, words, pieces, TEMPLATE)
    randomize(model)
    calibrate(model, *features_of(processor, talk(1, 960_000, 5).astype(np.float32) / 32768))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if asked["form"] == "published":
        unread = {"llm.mtp.layers.0.norm.weight": torch.ones(3), "llm.lm_head._extra_state": torch.ones(2)}
        stored = {name: torch.from_numpy(x) for name, x in on_disk(dict(model.state_dict())).items()}
        save_file({**stored, **unread}, folder / "model.safetensors", {"format": "pt"})
    if asked["dtype"] != "float32":
        dtype = getattr(torch, asked["dtype"])
        stored = load_file(folder / "model.safetensors")
        wide = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
        cast = {name: x if name.endswith(wide) else x.to(dtype) for name, x in stored.items()}
        save_file(cast, folder / "model.safetensors", {"format": "pt"})


def features_of(processor: Any, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, mask) of a recording."""
    made, _ = processor._process_audio([np.asarray(samples, np.float32)], sampling_rate=16_000)
    return tuple(torch.as_tensor(made[name]) for name in ("input_features", "input_features_mask"))


class Peer:
    """A folder's model and processor. margins: distances from other choices."""

    def __init__(self, folder: Path) -> None:
        self.model, report = transformers.Nemotron3_5TranscribeForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        self.model.eval()
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.margins = watched(self.model, biased_sigmoid)

    def given(self, tokens: list[int], samples: np.ndarray) -> dict[str, torch.Tensor]:
        """The model's inputs, with a placeholder for each audio token."""
        features, mask = features_of(self.processor, samples)
        count, audio = -(-int(mask.sum()) // STACK), self.model.config.audio_token_id
        expanded = [x for token in tokens for x in ([token] * count if token == audio else [token])]
        ids = torch.tensor([expanded])
        return {"input_ids": ids, "input_features": features, "input_features_mask": mask}

    def logits(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**given, use_cache=False).logits[0]

    def speakers(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Who speaks in each encoder frame."""
        count = int((given["input_ids"] == self.model.config.audio_token_id).sum())
        with decisions() as found, torch.no_grad():
            audio = self.model.get_audio_features(given["input_features"], given["input_features_mask"])
        probabilities = audio.speaker_logits.sigmoid().unflatten(1, (-1, STACK)).mean(2)[0, :count]
        self.margins += [*found, float((probabilities - 0.5).abs().min())]
        return probabilities > 0.5

    @torch.no_grad()
    def answer(self, tokens: list[int], samples: np.ndarray) -> tuple[list[int], list[float]]:
        """(a greedy answer, the distance of each token's logit from the next one's)."""
        given, found, gaps = self.given(tokens, samples), [], []
        while len(found) < ANSWER:
            best = self.logits(given)[-1].topk(2)
            found.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            if found[-1] == self.processor.tokenizer.eos_token_id:
                break
            given["input_ids"] = torch.cat([given["input_ids"], best.indices[None, :1]], dim=1)
        return found, gaps


def numbers(asked: Any, name: str) -> list[str]:
    return sorted((k.split(".")[1] for k in asked.files if k.startswith(f"{name}.")), key=int)


def one_by_one(packed: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the matrices of experts by the names that transformers gives them in a folder of its own."""
    for theirs, own in (("gate_and_up_projs", "up_proj"), ("down_projs", "down_proj")):
        for name, x in packed.items():
            if name.endswith(f".experts.{theirs}"):
                for number, matrix in enumerate(x):
                    yield f"{name.removesuffix(theirs)}{number}.{own}.weight", matrix.T


def run(folder: Path, requests: Path, out: Path) -> None:
    peer, asked, found = Peer(folder), np.load(requests), {}
    for c in numbers(asked, "tokens"):
        given = peer.given(asked[f"tokens.{c}"].tolist(), asked[f"samples.{c}"])
        found[f"speakers.{c}"] = peer.speakers(given).numpy()
        has_gradient = f"first.{c}" in asked.files
        with torch.set_grad_enabled(has_gradient):
            log_probs = peer.logits(given).log_softmax(-1)
        if has_gradient:
            supervised = torch.tensor(asked[f"tokens.{c}"].tolist()[int(asked[f"first.{c}"]) :])
            (-log_probs[-len(supervised) - 1 : -1].gather(1, supervised[:, None]).sum()).backward()
        found[f"log_probs.{c}"] = log_probs.detach().numpy()
    if numbers(asked, "first"):
        by_name: Arrays = on_disk(gradients(peer.model))
        found |= {f"grad.{k}": x for k, x in [*by_name.items(), *one_by_one(by_name)]}
    for p in numbers(asked, "prompt"):
        answer, gaps = peer.answer(asked[f"prompt.{p}"].tolist(), asked[f"sound.{p}"])
        found |= {f"answer.{p}": np.asarray(answer), f"gaps.{p}": np.asarray(gaps)}
    np.savez(out, **found, margin=min(peer.margins))


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    if command == "make":
        make(Path(folder), json.loads(Path(rest[0]).read_text()))
    else:
        run(Path(folder), *map(Path, rest))


if __name__ == "__main__":
    main()
