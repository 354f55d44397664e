"""Tiny random speech LLMs of NeMo 3.0, for the modules that make references with it; jaxthd is not needed.

Before Qwen3 the whole model is NeMo's SALM. SALM takes no Nemotron, and SALMAutomodel's needs a GPU: there
NeMo's perception module stands before transformers' NemotronH, in a folder with SALMAutomodel's names. LoRA
is peft's in SALM; beside NemotronH a module here has Automodel's names and computes as it does.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from nemo.collections.speechlm2.models.salm import SALM, replace_placeholders_and_build_targets
from nemo.collections.speechlm2.modules.perception import AudioPerceptionModule
from nemo.collections.speechlm2.parts.encoder_chunking import encode_audio_with_optional_chunking
from nemo.utils import logging as nemo_logging
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.references import text_models
from tests.references.common import gradients, watched

nemo_logging.setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()

PARTS = "nemo.collections.speechlm2.modules.perception"
TAG = "<|audio|>"
VOCABULARY = 48
PAD, BOS, EOS = 3, 1, 2
QWEN3: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 36,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "tie_word_embeddings": True,
}
NEMOTRON: dict[str, Any] = {
    **text_models.NEMOTRON_H,
    "hybrid_override_pattern": "ME*-",
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,
}
LLMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", QWEN3),
    "qwen3_untied": ("Qwen3", QWEN3 | {"tie_word_embeddings": False}),
    "nemotron": ("NemotronH", NEMOTRON),
    "nemotron_dense": ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "M-*M-"}),
}
"""The library's class, without its ending, and the fields of its config."""
ENCODER: dict[str, Any] = {
    "_target_": "nemo.collections.asr.modules.ConformerEncoder",
    "feat_in": 16,
    "feat_out": -1,
    "n_layers": 2,
    "d_model": 20,
    "n_heads": 2,
    "ff_expansion_factor": 2,
    "conv_kernel_size": 9,
    "conv_norm_type": "batch_norm",
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "self_attention_model": "rel_pos",
    "untie_biases": True,
    "xscaling": True,
    "att_context_size": [-1, -1],
    "pos_emb_max_len": 5000,
    **dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0),
}
PREPROCESSOR: dict[str, Any] = {
    "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "sample_rate": 16000,
    "normalize": "per_feature",
    "window_size": 0.025,
    "window_stride": 0.01,
    "window": "hann",
    "features": 16,
    "n_fft": 512,
    "log": True,
    "frame_splicing": 1,
    "dither": 1e-5,
    "pad_to": 0,
}
CONNECTORS: dict[str, dict[str, Any]] = {
    "identity": {"_target_": f"{PARTS}.IdentityConnector"},
    "layers": {
        "_target_": f"{PARTS}.MultiLayerProjectionConnector",
        "target_layer_ids": [-1, 0],
        "include_final_output": True,
    },
    "qformer": {
        "_target_": f"{PARTS}.QformerConnector",
        "target_layer_ids": [0],
        "prompt_size": 3,
        "qformer_num_hidden_layers": 1,
        "encoder_config": {"encoder_attention_heads": 2},
    },
}


def settings(
    llm: str, connector: str, *, encoder: dict[str, Any] | None = None, **changes: Any
) -> tuple[dict[str, Any], Any]:
    """(NeMo's settings of a model, the LLM's config).

    encoder: other settings of the encoder; "modality_adapter" and "preprocessor" of these parts. changes: of
    NeMo's settings.
    """
    kind, fields = LLMS[llm]
    config = getattr(transformers, f"{kind}Config")(**fields, architectures=[f"{kind}ForCausalLM"])
    encoder = dict(encoder or {})
    adapter = CONNECTORS[connector] | encoder.pop("modality_adapter", {})
    preprocessor = PREPROCESSOR | encoder.pop("preprocessor", {})
    encoder = ENCODER | encoder
    dim, llm_dim = encoder["d_model"], fields["hidden_size"]
    if connector == "identity":
        adapter["d_model"] = dim
    elif connector == "layers":
        adapter |= {"input_dim": dim, "output_dim": llm_dim}
    else:
        adapter["encoder_config"] = {**adapter["encoder_config"], "d_model": dim}
        adapter["llm_config"] = {"hidden_size": llm_dim}
    preprocessor["features"] = encoder["feat_in"]
    perception = {
        "target": f"{PARTS}.AudioPerceptionModule",
        "output_dim": llm_dim,
        "modality_adapter": adapter,
        "preprocessor": preprocessor,
        "encoder": encoder,
    }
    nemo = {
        "pretrained_llm": "",
        "pretrained_asr": "nvidia/canary-1b-flash",
        "pretrained_weights": False,
        "audio_locator_tag": TAG,
        "prompt_format": "qwen" if kind == "Qwen3" else "nemotron-nano-v3",
        "freeze_params": [],
        "prevent_freeze_params": [],
        "perception": perception,
        **({} if kind == "Qwen3" else {"use_nemo_automodel": True}),
        **changes,
    }
    return nemo, config


def write_llm(folder: Path, config: Any) -> None:
    """The folder that pretrained_llm names: the LLM's config.json, a tokenizer of words w000, w001, ..."""
    words = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(config.vocab_size)}, unk_token="w000"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece()
    named = {
        "pad_token": f"w{PAD:03}",
        "unk_token": "w000",
        "bos_token": f"w{BOS:03}",
        "eos_token": f"w{EOS:03}",
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    config.save_pretrained(folder)


class LowRank(torch.nn.Linear):
    """A projection with LoRA, computed and named as Automodel's LinearLoRA."""

    def __init__(self, of: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.lora_A = torch.nn.Linear(of.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, of.out_features, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x) * self.scale)


class Automodel(torch.nn.Module):
    """NeMo's perception module before transformers' NemotronH, with SALMAutomodel's settings."""

    def __init__(self, nemo: dict[str, Any], llm: Path) -> None:
        """llm: the folder of the LLM's config.json."""
        super().__init__()
        self.cfg = nemo
        config = transformers.AutoConfig.from_pretrained(llm, attn_implementation="eager")
        self.llm = transformers.NemotronHForCausalLM(config)
        self.perception = AudioPerceptionModule(DictConfig(nemo["perception"]))
        if lora := nemo.get("lora"):
            for name, module in list(self.llm.named_modules()):
                if name.rpartition(".")[2] in lora["target_modules"] and isinstance(module, torch.nn.Linear):
                    parent = self.llm.get_submodule(name.rpartition(".")[0])
                    low = LowRank(module, lora["dim"], lora["alpha"] / lora["dim"])
                    setattr(parent, name.rpartition(".")[2], low)

    @property
    def embed_tokens(self) -> Any:
        return self.llm.get_input_embeddings()

    def forward(self, embeddings: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.llm(inputs_embeds=embeddings, use_cache=False).logits}


def on_disk(name: str) -> str:
    """SALMAutomodel's name of one of Automodel's parameters and buffers; experts are named one by one."""
    if name.startswith("perception."):
        return name
    name = name.removeprefix("llm.").replace("model.embeddings.", "model.embed_tokens.")
    name = name.replace("model.norm_f.", "model.norm.")
    return "llm." + re.sub(r"\.mixer\.(A_log|D|dt_bias)$", r".mixer._fp32_params.\1", name)


def packed(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by SALMAutomodel's names, the experts of a layer as two: (expert, in, out)."""
    found = {}
    for name, x in named.items():
        name = on_disk(name)
        if name.endswith(".experts.up_proj"):
            name, x = name.replace("up_proj", "gate_and_up_projs"), x.transpose(1, 2)
        elif name.endswith(".experts.down_proj"):
            name, x = name.replace("down_proj", "down_projs"), x.transpose(1, 2)
        found[name] = x.detach().clone().contiguous()
    return found


class Peer:
    """A speech LLM of NeMo, in evaluation mode, and what it computes for documents by themselves."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(True)  # peft freezes the LLM
        self.chunk = model.cfg.get("encoder_chunk_size_seconds", None)
        self.is_salm = isinstance(model, SALM)
        self.margins = watched(model, text_models.biased_sigmoid)

    @classmethod
    def make(cls, folder: Path, nemo: dict[str, Any], llm: Any, seed: int) -> "Peer":
        """A random model. llm: its LLM's config. folder: for what pretrained_llm names."""
        torch.manual_seed(seed)
        write_llm(folder / "llm", llm)
        nemo = {**nemo, "pretrained_llm": str(folder / "llm")}
        peer = cls(Automodel(nemo, folder / "llm") if nemo.get("use_nemo_automodel") else SALM(nemo))
        peer.randomize()
        return peer

    @classmethod
    def open(cls, folder: Path) -> "Peer":
        """The model in a folder. SALM opens it as NeMo does; of the other all tensors must be there."""
        fields = json.loads((folder / "config.json").read_text())
        if not fields.get("use_nemo_automodel"):
            return cls(SALM.from_pretrained(str(folder)))
        own = folder / "llm_backbone"
        model = Automodel(fields, own if own.exists() else Path(fields["pretrained_llm"]))
        found = {k: x for f in folder.glob("*.safetensors") for k, x in load_file(f).items()}
        state = model.state_dict()
        names = dict(zip(packed(state), state, strict=True))
        turned = {
            names[k]: x.transpose(1, 2) if ".experts." in k and k.endswith("_projs") else x
            for k, x in found.items()
            if k in names
        }
        lost = {names[k] for k in names if k not in found and "featurizer" not in k}
        assert not lost, lost
        model.load_state_dict(state | turned)
        return cls(model)

    def randomize(self) -> None:
        """Gives every weight a value at which an error in its use would show, of few digits."""
        if not self.is_salm:
            text_models.randomize(self.model.llm)
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                is_done = name.startswith("llm.") and not self.is_salm and "lora" not in name
                if "featurizer" in name:
                    continue
                if name.endswith("num_batches_tracked"):
                    x.fill_(7)
                elif is_done:
                    pass
                elif name.endswith("running_var"):
                    x.uniform_(0.5, 2.0)
                elif x.ndim == 1:
                    is_scale = ("norm" in name.lower() or "proj.0" in name) and name.endswith("weight")
                    x.normal_(1.0 if is_scale else 0.0, 0.3)
                else:
                    wide = "embed" in name or "bias_" in name or "layer_" in name
                    x.normal_(0.0, 0.5 if wide else (x.numel() / len(x)) ** -0.5)
                if x.is_floating_point():
                    x.copy_(torch.round(x * 2**9) / 2**9)

    def save(self, folder: Path) -> None:
        """As NeMo does, with further tensors that the model does not have."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_salm:
            self.model.save_pretrained(folder)
            return
        fields = {"model_type": "nemo_speechlm", **self.model.cfg}
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        more = {
            "llm.mtp.layers.0.eh_proj.weight": torch.randn(4, 3),
            "llm.lm_head._extra_state": torch.randn(2),
        }
        save_file(packed(self.model.state_dict()) | more, folder / "model.safetensors", {"format": "pt"})

    def logits(self, tokens: Sequence[int], recordings: Sequence[np.ndarray]) -> torch.Tensor:
        """[positions, vocabulary] of a document; each audio tag among the tokens is as many positions as the
        recording has embeddings."""
        embeddings, _, mask = self.embedded(tokens, recordings)
        if self.is_salm:
            return self.model(embeddings, attention_mask=mask)["logits"][0]
        return self.model(embeddings)["logits"][0]

    def embedded(self, tokens: Sequence[int], recordings: Sequence[np.ndarray]) -> Any:
        """(embeddings, positions of text, mask)."""
        audios: list[torch.Tensor] = []
        if recordings:
            longest = max(map(len, recordings))
            padded = np.stack([np.pad(x, (0, longest - len(x))) for x in recordings])
            audios = encode_audio_with_optional_chunking(
                self.model.perception,
                torch.from_numpy(padded),
                torch.tensor([len(x) for x in recordings]),
                chunk_size_seconds=self.chunk,
                sampling_rate=16000,
            )
        ids = torch.tensor(tokens)[None]
        return replace_placeholders_and_build_targets(
            input_ids=ids,
            embeds=self.model.embed_tokens(torch.where(ids == self.tag, 0, ids)),
            padding_id=-1,
            placeholder_id=self.tag,
            replacements=audios,
            target_ids=ids.clone(),
        )

    @property
    def tag(self) -> int:
        """The id of the audio tag, which lies past the vocabulary."""
        return self.model.audio_locator_tag_id if self.is_salm else self.model.llm.config.vocab_size

    def gradients(self) -> dict[str, np.ndarray]:
        """By the names on disk; zeros where a parameter has none."""
        named = gradients(self.model)
        if not self.is_salm:
            named = packed(named)
        tied = [k for k in named if k.endswith("lm_head.weight")]
        if tied and "embed_tokens.weight" not in named and "llm.model.embed_tokens.weight" not in named:
            named["embed_tokens.weight"] = named.pop(tied[0])
        return {k: x.numpy() for k, x in named.items()}

    def answer(
        self, tokens: Sequence[int], recordings: Sequence[np.ndarray], count: int
    ) -> tuple[list[int], list[float]]:
        """(tokens of a greedy answer, how far the likeliest is before the next at each step)."""
        answer: list[int] = []
        margins: list[float] = []
        with torch.no_grad():
            while len(answer) < count and answer[-1:] != [EOS]:
                best = self.logits([*tokens, *answer], recordings)[-1].log_softmax(-1).topk(2)
                answer.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
        return answer, margins
