"""NeMo's side of bench_peer.py, in an environment that has nemo-toolkit[asr] and not jaxthd."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.speechlm2.data.salm_dataset import SALMDataset
from nemo.collections.speechlm2.models.salm import SALM, replace_placeholders_and_build_targets
from nemo.utils import logging as nemo_logging
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile

from scripts.peer_transformers import TorchPeer
from scripts.peer_work import (
    AT_ONCE,
    AUDIO,
    ENTRIES,
    MODELS,
    NEW_TOKENS,
    PADDING,
    QWEN3,
    Side,
    thousand_tokens,
)

PERCEPTION = "nemo.collections.speechlm2.modules.perception"


def perception(dim: int) -> dict[str, Any]:
    """NeMo's settings of the encoder and what is around it."""
    return {
        "target": f"{PERCEPTION}.AudioPerceptionModule",
        "output_dim": dim,
        "modality_adapter": {"_target_": f"{PERCEPTION}.IdentityConnector", "d_model": 144},
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": 0.0,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": 4,
            "d_model": 144,
            "n_heads": 4,
            "ff_expansion_factor": 4,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": 64,
            "self_attention_model": "rel_pos",
            "att_context_size": [-1, -1],
            "xscaling": True,
            "untie_biases": True,
            "pos_emb_max_len": 20000,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            "dropout": 0.0,
            "dropout_pre_encoder": 0.0,
            "dropout_emb": 0.0,
            "dropout_att": 0.0,
            "use_pytorch_sdpa": True,
        },
    }


def make_peer(folder: Path, model: str) -> None:
    """Writes the weights that all processes start from: a SALM, and the hybrid's LLM beside it."""

    name, settings, _, _ = MODELS[model]
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(ENTRIES)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": f"<{PADDING}>", "unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder / "llm")
    qwen3 = transformers.Qwen3Config(
        **(settings if name == "Qwen3" else QWEN3 | {"hidden_size": settings["hidden_size"]})
    )
    qwen3.save_pretrained(folder / "llm")
    salm = SALM(
        {
            "pretrained_llm": str(folder / "llm"),
            "pretrained_weights": False,
            "audio_locator_tag": f"<{AUDIO}>",
            "prompt_format": "qwen",
            "perception": perception(settings["hidden_size"]),
        }
    )
    salm.save_pretrained(folder / "salm")
    if name != "Qwen3":
        config = transformers.NemotronHConfig(**settings)
        transformers.NemotronHForCausalLM(config).save_pretrained(folder / "hybrid")


class Peer(TorchPeer):
    """A way of NeMo, "SECONDS ORDER [chunk] [compiled]": SALM; or its perception module before a hybrid."""

    def __init__(self, folder: Path, way: str) -> None:
        seconds, order, *more = way.split()
        super().__init__(folder, seconds, order)
        nemo_logging.setLevel(logging.ERROR)
        self.salm = SALM.from_pretrained(folder / "salm").train()
        self.salm.log = self.salm.log_dict = lambda *a, **k: None  # they ask for a trainer
        self.model: Any = self.salm
        if (folder / "hybrid").exists():
            config = transformers.NemotronHConfig.from_pretrained(
                folder / "hybrid", chunk_size=int(more.pop(0))
            )
            llm = transformers.NemotronHForCausalLM.from_pretrained(folder / "hybrid", config=config).train()
            self.model = torch.nn.ModuleDict({"perception": self.salm.perception, "llm": llm})
        self.llm = self.model.llm  # generation and embeddings, not compiled
        if more:
            self.model.llm = torch.compile(self.model.llm, dynamic=True)
        self.begin()

    def calls(self) -> Side:
        return super().calls()._replace(profile=self.profile, answers=self.answers, load=self.load)

    def collated(self, numbers: Sequence[int]) -> dict[str, Any]:
        """SALM's batch: audio padded on the right, tokens on the left."""

        recordings = self.recordings
        most = max(len(recordings.samples[i]) for i in numbers)
        longest = max(len(recordings.ids[i]) for i in numbers)
        audio = np.zeros((len(numbers), most), np.float32)
        ids = np.full((len(numbers), longest), PADDING)
        trained = np.zeros((len(numbers), longest), bool)
        for row, i in enumerate(numbers):
            audio[row, : len(recordings.samples[i])] = recordings.samples[i]
            ids[row, -len(recordings.ids[i]) :] = recordings.ids[i]
            trained[row, -len(recordings.ids[i]) :] = recordings.trained[i]
        lengths = [len(recordings.samples[i]) for i in numbers]
        batch = {"audios": audio, "audio_lens": np.array(lengths), "input_ids": ids, "loss_mask": trained}
        return {name: torch.from_numpy(x) for name, x in batch.items()}

    def embedded(self, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        """(embeddings, targets, which are no padding) of the hybrid's documents, padded on the left."""

        made, lengths = self.model.perception(
            input_signal=batch["audios"], input_signal_length=batch["audio_lens"]
        )
        ids = batch["input_ids"]
        return replace_placeholders_and_build_targets(
            input_ids=ids,
            embeds=self.llm.get_input_embeddings()(ids.where(ids != AUDIO, 0)),
            padding_id=PADDING,
            placeholder_id=AUDIO,
            replacements=[x[:n] for x, n in zip(made, lengths.tolist(), strict=True)],
            target_ids=ids.where(batch["loss_mask"], -100),
        )

    def loss_of(self, batch: dict[str, Any]) -> Any:
        """SALM's loss. The hybrid's has padding on the right, which the scan needs no mask for."""

        if self.model is self.salm:
            return self.salm.training_step(batch, 0)["loss"]
        embeddings, targets, seen = self.embedded(batch)
        shifts = (~seen).sum(1).tolist()
        embeddings = torch.stack([x.roll(-n, 0) for x, n in zip(embeddings, shifts, strict=True)])
        targets = torch.stack([x.roll(-n, 0) for x, n in zip(targets, shifts, strict=True)])
        logits = self.model.llm(inputs_embeds=embeddings[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())

    def profile(self) -> dict[str, float]:
        """By torch's profiler. A backward operation belongs to the part whose forward operation has its
        sequence number."""

        with self.named_parts(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            tokens, _ = self.stretch(0)
        events = profiled.events()
        part_of_sequence = {}
        for event in events:
            if event.sequence_nr >= 0 and (part := _enclosing_part(event)):
                part_of_sequence[event.sequence_nr] = part
        milliseconds: dict[str, float] = defaultdict(float)
        for event in events:
            part = _enclosing_part(event) or _part_of_forward(event, part_of_sequence)
            milliseconds[part] += event.self_cpu_time_total / 1e3
        return thousand_tokens(milliseconds, tokens)

    @contextmanager
    def named_parts(self) -> Iterator[None]:
        """While it is open, the forward passes of modules are named after the parts of jaxthd's profile."""

        handles, opened = [], []

        def hooks(part: str) -> tuple[Callable[..., None], Callable[..., None]]:
            def begin(*_: Any) -> None:
                opened.append(torch.profiler.record_function(f"part: {part}"))
                opened[-1].__enter__()

            def end(*_: Any) -> None:
                opened.pop().__exit__(None, None, None)

            return begin, end

        for name, module in self.model.named_modules():
            if part := peer_part(name, type(module).__name__):
                begin, end = hooks(part)
                handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def answers(self) -> list[list[int]]:

        numbers, found = self.recordings.answered(), []
        settings = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=PADDING
        )
        self.model.eval()
        with torch.inference_mode():
            for start in range(0, len(numbers), AT_ONCE):
                group = numbers[start : start + AT_ONCE]
                batch = self.prompts(group)
                if self.model is self.salm:
                    names = {"prompts": "input_ids", "audios": "audios", "audio_lens": "audio_lens"}
                    given = {name: batch[of] for name, of in names.items()}
                    answers = self.salm.generate(**given, generation_config=settings)
                else:
                    answers = self.hybrid_answers(batch)
                found += answers.tolist()
        self.model.train()
        return found

    def hybrid_answers(self, batch: dict[str, Any]) -> Any:
        """Greedy answers by the LLM and its cache: its `generate` takes no embeddings."""
        embeddings, _, seen = self.embedded(batch)
        given, tokens, cache = {"inputs_embeds": embeddings}, [], None
        for _ in range(NEW_TOKENS):
            made = self.llm(**given, attention_mask=seen, past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            tokens.append(made.logits[:, -1:].argmax(-1))
            given, seen = {"input_ids": tokens[-1]}, torch.nn.functional.pad(seen, (0, 1), value=True)
        return torch.cat(tokens, dim=1)

    def prompts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The batch of these documents up to what is trained."""
        ids, trained = self.recordings.ids, self.recordings.trained
        cut = [ids[i][: int(trained[i].argmax())] for i in numbers]
        longest = max(map(len, cut))

        batch = self.collated(numbers)
        padded = np.full((len(cut), longest), PADDING)
        for row, prompt in enumerate(cut):
            padded[row, -len(prompt) :] = prompt
        no = torch.zeros(len(cut), longest, dtype=torch.bool)
        return batch | {"input_ids": torch.from_numpy(padded), "loss_mask": no}

    def load(self) -> int:
        """By the data loader of SALM (Lhotse, batches of similar lengths), with the features of its model."""

        cuts = {"type": "nemo", "manifest_filepath": (self.folder / "manifest").read_text()}
        conversations = {
            "type": "lhotse_as_conversation",
            "input_cfg": [cuts],
            "audio_locator_tag": f"<{AUDIO}>",
            "tags": {"context": "<3>"},
        }
        settings = {
            "sample_rate": 16000,
            "prompt_format": "qwen",
            "token_equivalent_duration": 0.08,
            "use_multimodal_sampling": True,
            "input_cfg": [conversations],
            "batch_tokens": 1024,
            "use_bucketing": True,
            "num_buckets": 10,
            "num_cuts_for_bins_estimate": 500,
            "shuffle": True,
            "num_workers": 0,
            "seed": 0,
            "shard_seed": 0,
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        tokenizer = AutoTokenizer(str(self.folder / "llm"))
        loader = get_lhotse_dataloader_from_config(
            OmegaConf.create(settings),
            global_rank=0,
            world_size=1,
            dataset=SALMDataset(tokenizer),
            tokenizer=tokenizer,
        )
        documents = 0
        with torch.no_grad():
            for batch in loader:
                self.salm.perception.preprocessor(input_signal=batch["audios"], length=batch["audio_lens"])
                documents += len(batch["audio_lens"])
        torch.set_num_threads(threads)
        return documents


def peer_part(name: str, kind: str) -> str:
    """The part of jaxthd's profile that a module of the peer belongs to; "" for one inside another's part.

    name: of the module, such as perception.encoder.layers.0.conv. kind: its class.
    """
    parts = {
        "perception.preprocessor": "features",
        "perception.encoder": "encoder",
        "perception.encoder.pre_encode": "subsampling",
    }
    if name in parts:
        return parts[name]
    last = name.rpartition(".")[2]
    if name.startswith("perception.encoder.layers."):
        of_encoder = {"self_attn": "encoder attention", "conv": "encoder convolution"}
        of_encoder |= dict.fromkeys(("feed_forward1", "feed_forward2"), "encoder MLP")
        return of_encoder.get(last, "") if name.count(".") == 4 else ""
    if last in ("self_attn", "mlp", "mixer") and ".layers." in name:
        kinds = {"Mamba2": "Mamba2", "Attention": "attention", "MLP": "MLP"}
        return next(part for word, part in kinds.items() if word in kind)
    return "decoder" if kind in ("Qwen3Model", "NemotronHModel") else ""


def _part_of_forward(event: Any, part_of_sequence: Mapping[int, str]) -> str:
    """The part of the forward operation whose gradient an event belongs to; "other" for none."""
    while event is not None:
        if event.sequence_nr in part_of_sequence:
            return part_of_sequence[event.sequence_nr]
        event = event.cpu_parent
    return "other"


def _enclosing_part(event: Any) -> str:
    """The innermost part that a profiled event runs in; "" for none."""
    while event is not None:
        if event.name.startswith("part: "):
            return event.name.removeprefix("part: ")
        event = event.cpu_parent
    return ""
