"""transformers' side of bench_peer.py: what its side and NeMo's share, and the speech LLMs that it has."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from scripts.peer_process import MATRIX
from scripts.peer_work import AUDIO, FAMILIES, STRETCHES, Recordings, Side


class TorchPeer:
    """A model of torch that trains on batches, "SECONDS ORDER": of the documents of `folder`.

    A class of it makes `model`, and says what a batch is and its loss.
    """

    model: Any

    def __init__(self, folder: Path, seconds: str, order: str) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.folder, self.recordings = folder, Recordings.read(folder)
        self.groups = self.recordings.batches(float(seconds), order)

    def begin(self) -> None:
        """Makes the optimizer and the batches, for a model that is there."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batches = [self.collated(group) for group in self.groups]

    def collated(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The batch of these documents."""
        raise NotImplementedError

    def loss_of(self, batch: dict[str, Any]) -> Any:
        """Its loss, of features that are computed here."""
        raise NotImplementedError

    def calls(self) -> Side:
        square = torch.ones(MATRIX, MATRIX)
        return Side(self.stretch, self.checked, lambda: float((square @ square)[0, 0]), self.gflop)

    def step(self, batch: dict[str, Any]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(batch)
        loss.backward()
        with torch.profiler.record_function("part: update"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return float(loss.detach())

    def stretch(self, number: int) -> tuple[int, float]:
        mine = range(number % STRETCHES, len(self.groups), STRETCHES)
        for i in mine:
            self.step(self.batches[i])
        numbers = [j for i in mine for j in self.groups[i]]
        return (
            sum(self.recordings.slots[j] for j in numbers),
            sum(len(self.recordings.samples[j]) for j in numbers) / 16_000,
        )

    def checked(self) -> list[tuple[float, float]]:
        found = []
        for i in self.recordings.checked():
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss_of(self.collated([i]))
            loss.backward()
            squares = (float(p.grad.square().sum()) for p in self.model.parameters() if p.grad is not None)
            found.append((float(loss.detach()), math.sqrt(sum(squares))))
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def gflop(self) -> float:
        mine = range(0, len(self.groups), STRETCHES)
        with FlopCounterMode(display=False) as counter:
            for i in mine:
                self.loss_of(self.batches[i]).backward()
        tokens = sum(self.recordings.slots[j] for i in mine for j in self.groups[i])
        return counter.get_total_flops() / 1e9 / tokens


Features = Callable[[Any, list[np.ndarray]], dict[str, Any]]
"""(the model's config, recordings) -> what its class is given of them, padded."""


def _whisper(mask: str = "", most: int = 600) -> Features:
    """Windows of 30 s, filled with silence, of the first `most` seconds. mask: its name; "": none."""
    window = 480_000

    def made(config: Any, samples: list[np.ndarray]) -> dict[str, Any]:
        extractor = transformers.WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins)
        heard = [x[: 16_000 * most] for x in samples]
        windows = [x[at : at + window] for x in heard for at in range(0, len(x), window)]
        options = {"sampling_rate": 16_000, "return_tensors": "pt", "return_attention_mask": True}
        found = extractor(windows, **options)
        masks = {mask: found["attention_mask"]} if mask else {}
        return {"input_features": found["input_features"], **masks}

    return made


def _qwen3_asr(config: Any, samples: list[np.ndarray]) -> dict[str, Any]:
    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=config.audio_config.num_mel_bins)
    options = {"padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
    found = extractor(samples, sampling_rate=16_000, **options)
    return {"input_features": found["input_features"], "input_features_mask": found["attention_mask"]}


def _moss(config: Any, samples: list[np.ndarray]) -> dict[str, Any]:
    kind = transformers.MossTranscribeDiarizeFeatureExtractor
    extractor = kind(feature_size=config.audio_config.num_mel_bins)
    return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))


def _granite(config: Any, samples: list[np.ndarray]) -> dict[str, Any]:
    found = transformers.GraniteSpeechFeatureExtractor(n_mels=config.encoder_config.input_dim // 2)(samples)
    return {name: found[name] for name in ("input_features", "input_features_mask")}


FEATURES: dict[str, Features] = {
    "qwen3_asr": _qwen3_asr,
    "qwen2_audio": _whisper("feature_attention_mask", most=30),
    "audioflamingo3": _whisper("input_features_mask"),
    "voxtral": _whisper(),
    "glmasr": _whisper("input_features_mask"),
    "moss": _moss,
    "granite_speech": _granite,
}


def make_family(folder: Path, name: str) -> None:
    """Writes the weights that all processes start from."""
    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder / "published")
    (folder / "family").write_text(name)


class Peer(TorchPeer):
    """A speech LLM of transformers, as its Trainer's step: "SECONDS ORDER"."""

    def __init__(self, folder: Path, way: str) -> None:
        super().__init__(folder, *way.split())
        name = (folder / "family").read_text()
        kind, self.features = FAMILIES[name][0], FEATURES[name]
        made = getattr(transformers, f"{kind}ForConditionalGeneration")
        self.model = made.from_pretrained(folder / "published", attn_implementation="sdpa").train()
        for path, parameter in self.model.named_parameters():
            if "embed_positions" in path:  # the class freezes the table; from_pretrained forgets it
                parameter.requires_grad_(False)
        self.begin()

    def collated(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Samples; tokens, with a placeholder for every audio token, padded on the right."""
        recordings = self.recordings
        most = max(len(recordings.ids[i]) for i in numbers)
        ids, labels = np.zeros((len(numbers), most), int), np.full((len(numbers), most), -100)
        seen = np.zeros((len(numbers), most), int)
        for row, i in enumerate(numbers):
            own = recordings.ids[i]
            ids[row, : len(own)], seen[row, : len(own)] = own, 1
            labels[row, : len(own)] = np.where(recordings.trained[i], own, -100)
        arrays = {"input_ids": ids, "attention_mask": seen, "labels": labels}
        tensors: dict[str, Any] = {name: torch.from_numpy(x) for name, x in arrays.items()}
        return tensors | {"samples": [np.array(recordings.samples[i]) for i in numbers]}

    def loss_of(self, batch: dict[str, Any]) -> Any:
        tokens = {name: x for name, x in batch.items() if name != "samples"}
        features = self.features(self.model.config, batch["samples"])
        assert (tokens["input_ids"] == AUDIO).any()
        return self.model(**tokens, **features, use_cache=False).loss
