"""Answers tests/hf/test_salm_live.py with NeMo itself: it makes folders, reads them, and computes.

    python -m tests.references.salm_live make FOLDER SETTINGS.json
    python -m tests.references.salm_live run FOLDER REQUESTS.npz FOUND.npz
    python -m tests.references.salm_live check FOLDER

make: a random model; SETTINGS has llm, connector, seed, encoder and changes, as nemo_models.settings takes
them, and dtype, in which it is stored. run: of each document alone (tokens.c, samples.c.0, samples.c.1, ...;
first.c: the first supervised token) the log-probabilities of all tokens at every position, and the gradient
of the sum of -log p of the supervised tokens; a greedy answer to each prompt (prompt.p, sounds.p). check:
what NeMo's vLLM plugin asks of a folder.

Needs nemo-toolkit[asr] 3.0 and peft.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from nemo.collections.speechlm2.vllm.salm.config import _AUDIO_PLACEHOLDER, NeMoSpeechLMConfig
from safetensors.torch import load_file, save_file

from tests.references.nemo_models import Peer, settings

ANSWER = 12
_FLOAT32 = ("A_log", "dt_bias", ".D", "e_score_correction_bias", "running_mean", "running_var")


def make(folder: Path, asked: dict[str, Any]) -> None:
    """NeMo's to_hf.py casts all weights but those of Automodel that stay float32."""
    dtype = getattr(torch, asked.pop("dtype", "float32"))
    seed = asked.pop("seed")
    nemo, llm = settings(asked["llm"], asked["connector"], encoder=asked["encoder"], **asked["changes"])
    Peer.make(folder, nemo, llm, seed).save(folder)
    if dtype != torch.float32:
        stored = load_file(folder / "model.safetensors")
        cast = {k: x if k.endswith(_FLOAT32) or x.ndim == 0 else x.to(dtype) for k, x in stored.items()}
        save_file(cast, folder / "model.safetensors", {"format": "pt"})


def recordings(asked: Any, name: str) -> list[np.ndarray]:
    found = sorted(k for k in asked.files if k.startswith(f"{name}."))
    return [np.float32(asked[k]) for k in found]


def run(folder: Path, requests: Path, out: Path) -> None:
    peer, asked, found = Peer.open(folder), np.load(requests), {}
    numbers = sorted(int(k.split(".")[1]) for k in asked.files if k.startswith("tokens."))
    for c in numbers:
        tokens = asked[f"tokens.{c}"].tolist()
        sounds = recordings(asked, f"samples.{c}")
        log_probs = peer.logits(tokens, sounds).log_softmax(-1)
        supervised = torch.tensor(tokens[asked[f"first.{c}"] :])
        nll = -log_probs[-len(supervised) - 1 : -1].gather(1, supervised[:, None]).sum()
        nll.backward()
        found[f"log_probs.{c}"] = log_probs.detach().numpy()
    found |= {f"grad.{k}": x for k, x in peer.gradients().items()}
    for p in sorted(int(k.split(".")[1]) for k in asked.files if k.startswith("prompt.")):
        answer, gaps = peer.answer(asked[f"prompt.{p}"].tolist(), recordings(asked, f"sounds.{p}"), ANSWER)
        found |= {f"answer.{p}": np.asarray(answer), f"gaps.{p}": np.asarray(gaps)}
    np.savez(out, **found)


def check(folder: Path) -> None:
    """Raises where the plugin would refuse the folder, or would lack something."""
    fields = json.loads((folder / "config.json").read_text())
    config = NeMoSpeechLMConfig(**fields)
    assert config.llm_architectures in (["Qwen3ForCausalLM"], ["NemotronHForCausalLM"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert _AUDIO_PLACEHOLDER in tokenizer.get_vocab()
    assert tokenizer.convert_tokens_to_ids(_AUDIO_PLACEHOLDER) < config.text_config.vocab_size
    written = tokenizer.apply_chat_template([{"role": "user", "content": "w005 <|audio|>"}], tokenize=False)
    assert "w005 <|audio|>" in written
    generation = transformers.GenerationConfig.from_pretrained(folder)
    print(json.dumps({"eos": generation.eos_token_id, "is_hybrid": config.is_hybrid}))


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    if command == "make":
        return make(Path(folder), json.loads(Path(rest[0]).read_text()))
    if command == "run":
        return run(Path(folder), *map(Path, rest))
    return check(Path(folder))


if __name__ == "__main__":
    main()
