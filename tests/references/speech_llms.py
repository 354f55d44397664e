"""Writes NAME.npz for each of VARIANTS: tiny random speech LLMs of the transformers library.

    python -m tests.references.speech_llms [--only NAME ...] [--checkpoints FOLDER]

Needs torch and transformers; about a minute. Float32, eval mode. Recordings are those of waves.py, through
the library's own feature extractors; each of them is encoded alone, whatever else its document holds, and a
model is given one document at a time. save_pretrained's checkpoints stay in FOLDER, by name.

    qwen3_asr       windows of 2 s in place of 8
    qwen2_audio     a window of 2 s in place of 30: longer recordings are cut off
    audioflamingo3  windows of 2 s
    qwen2_5_omni    the thinker; windows have 2 s anyway
    qwen3_omni      the thinker; windows of 2 s in place of 8
    voxtral         windows of 2 s
    glmasr          windows of 2 s, rotary positions
    moss            windows of 2 s
    granite_speech  attention in blocks of 2 s in place of 4; needs torchaudio's Python files
    granite_speech_plus  the same; the Q-Former reads other layers too
    NAME_long       the published windows, recordings of 0.3 to 100 s; for the nightly tests

Keys (c is a document's number):
    config              config.json, as save_pretrained writes it
    weight.NAME         every tensor on disk
    seeds.c, seconds.c  its recordings: the arguments of waves.wave
    tokens.c            int64 [tokens], with one placeholder for every audio token
    logits.c            [tokens, vocabulary]; of NAME_long those of the text's tokens alone
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over text behind the last recording
    grad.NAME           gradient of loss, by tensor on disk; not of tables that the library does not train
    marks               of moss: the text of a recording of 0, 1, ... audio tokens, a * for each
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.references.common import Arrays, arguments, summed_loss, write
from tests.references.waves import RATE, wave

PLACEHOLDER, VOCABULARY = 47, 48
MELS = 16
Drawn = tuple[int, tuple[float, ...], int]
"""Prompt tokens, seconds of each recording, text tokens of a document."""
DOCUMENTS: tuple[Drawn, ...] = (
    (3, (0.3,), 5),
    (1, (1.17,), 3),
    (2, (0.71, 2.33), 4),
    (4, (), 6),
    (2, (5.03,), 2),
)
LONG: tuple[Drawn, ...] = ((2, (0.3,), 3), (1, (31.2, 0.9), 4), (2, (100.0,), 5))
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 38,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
WHISPER: dict[str, Any] = {"num_mel_bins": MELS, "num_hidden_layers": 2, "num_attention_heads": 2}
Encoded = Callable[[Any, np.ndarray, int], torch.Tensor]
"""(model, a recording, seconds of a window) -> its audio tokens' embeddings [tokens, dim]."""


@dataclass(frozen=True)
class Variant:
    """kind: of the library's classes. fields: of the config, by seconds of a window. encoded: of a recording
    alone. seconds: of a window, published. more: further arrays. thinker_of: the model_type of the whole that
    the model is the thinker of; "": it is the whole."""

    kind: str
    fields: Callable[[int], dict[str, Any]]
    encoded: Encoded
    seconds: int = 30
    thinker_of: str = ""
    more: Callable[[], Arrays] = dict

    @property
    def has_experts(self) -> bool:
        """Whether the text model has experts, which are computed by the eager way: the others want sizes that
        16 bytes divide."""
        return "num_experts" in self.fields(1)["text_config"]


def qwen3_asr(seconds: int) -> dict[str, Any]:
    audio = {
        "encoder_layers": 2,
        "d_model": 20,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 28,
        "downsample_hidden_size": 6,
        "num_mel_bins": MELS,
        "output_dim": TEXT["hidden_size"],
        "n_window_infer": 100 * seconds,
    }
    return {
        "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 10},
        "audio_config": {"model_type": "qwen3_asr_encoder", **audio},
        "audio_token_id": PLACEHOLDER,
    }


def mels_of(model: Any) -> int:
    """Mel bands of its features."""
    return int(model.config.audio_config.num_mel_bins)


def qwen3_asr_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=mels_of(model))
    options = {"padding": True, "truncation": False, "return_attention_mask": True}
    found = extractor(samples, sampling_rate=RATE, **options)
    return model.get_audio_features(found["input_features"], found["attention_mask"]).pooler_output


def qwen2_audio(seconds: int) -> dict[str, Any]:
    audio = {"encoder_layers": 2, "d_model": 20, "encoder_attention_heads": 2, "encoder_ffn_dim": 28}
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            **audio,
            "num_mel_bins": MELS,
            "max_source_positions": 50 * seconds,
        },
        "audio_token_index": PLACEHOLDER,
    }


def whisper_features(model: Any, samples: Any, seconds: int, **options: Any) -> Any:
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels_of(model), chunk_length=seconds)
    given = {"sampling_rate": RATE, "return_tensors": "pt", "return_attention_mask": True}
    return extractor(samples, **{**given, **options})


def qwen2_audio_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    """As the model's forward pass makes them, which has no function for it."""
    found = whisper_features(model, samples, seconds, padding="max_length")
    tower = model.model.audio_tower
    outputs, tokens = tower._get_feat_extract_output_lengths(found["attention_mask"].sum(-1))
    most = (found["input_features"].shape[-1] - 2) // 2 + 1
    mask = (torch.arange(most)[None] < outputs[:, None]).to(torch.long)
    mask = transformers.masking_utils.create_bidirectional_mask(
        config=tower.config, inputs_embeds=torch.zeros(1, most, 1), attention_mask=mask
    )
    encoded = tower(found["input_features"], attention_mask=mask).last_hidden_state
    return model.model.multi_modal_projector(encoded)[0, : int(tokens)]


def audioflamingo3(seconds: int) -> dict[str, Any]:
    audio = {**WHISPER, "hidden_size": 20, "intermediate_size": 28, "max_source_positions": 50 * seconds}
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {"model_type": "audioflamingo3_encoder", **audio},
        "audio_token_id": PLACEHOLDER,
    }


def audioflamingo3_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    """As AudioFlamingo3Processor divides a recording, of which it takes 600 s."""
    found = whisper_features(model, windows_of(samples, seconds)[: 600 // seconds], seconds)
    return model.get_audio_features(found["input_features"], found["attention_mask"]).pooler_output


def windows_of(samples: np.ndarray, seconds: int) -> list[np.ndarray]:
    size = RATE * seconds
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def voxtral(seconds: int) -> dict[str, Any]:
    audio = {**WHISPER, "hidden_size": 20, "intermediate_size": 80, "max_source_positions": 50 * seconds}
    return {
        "text_config": {"model_type": "llama", **TEXT, "head_dim": 10},
        "audio_config": {"model_type": "voxtral_encoder", **audio},
        "audio_token_id": PLACEHOLDER,
    }


def voxtral_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    """As VoxtralProcessor divides a recording."""
    mels = mels_of(model)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    padded = {"padding": True, "truncation": False, "pad_to_multiple_of": RATE * seconds}
    found = extractor(samples, sampling_rate=RATE, return_tensors="pt", **padded)["input_features"]
    windows = found.reshape(mels, -1, 100 * seconds).transpose(0, 1)
    return model.get_audio_features(windows).pooler_output


def glmasr(seconds: int) -> dict[str, Any]:
    audio = {**WHISPER, "hidden_size": 20, "intermediate_size": 80, "max_position_embeddings": 50 * seconds}
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {"model_type": "glmasr_encoder", **audio},
        "audio_token_id": PLACEHOLDER,
    }


def glmasr_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    """As GlmAsrProcessor divides a recording, of which it takes 655 s."""
    found = whisper_features(model, windows_of(samples, seconds)[: 655 // seconds], seconds)
    return model.get_audio_features(found["input_features"], found["attention_mask"]).pooler_output


def moss(seconds: int) -> dict[str, Any]:
    audio = {**WHISPER, "hidden_size": 20, "intermediate_size": 28, "max_source_positions": 50 * seconds}
    return {
        "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 10},
        "audio_config": {"model_type": "moss_transcribe_diarize_audio", **audio},
        "audio_token_id": PLACEHOLDER,
    }


def moss_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    kind = transformers.MossTranscribeDiarizeFeatureExtractor
    extractor = kind(feature_size=mels_of(model), chunk_length=seconds)
    found = extractor(samples, sampling_rate=RATE, return_tensors="pt")
    masks = found["input_features_mask"], found["padding_mask"]
    return model.model.get_audio_features(found["input_features"], *masks).pooler_output


def moss_marks() -> Arrays:
    """By its processor, which needs no more of itself for it."""
    kind = transformers.MossTranscribeDiarizeProcessor
    own = SimpleNamespace(audio_token="*", audio_tokens_per_second=12.5, time_marker_every_seconds=2)
    texts = [kind.replace_audio_token(own, {"num_audio_tokens": [n]}, 0) for n in range(160)]
    return {"marks": np.array(texts)}


def granite_speech(seconds: int) -> dict[str, Any]:
    """seconds: of an attention block."""
    encoder = {
        "input_dim": 2 * MELS,
        "num_layers": 3,
        "hidden_dim": 20,
        "num_heads": 2,
        "dim_head": 6,
        "feedforward_mult": 2,
        "output_dim": 7,
        "context_size": 50 * seconds,
        "max_pos_emb": 50 * seconds + 12,
        "conv_kernel_size": 15,
        "dropout": 0.0,
    }
    projector = {
        "hidden_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 36,
        "encoder_hidden_size": 20,
        "cross_attention_frequency": 2,
    }
    multipliers = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 1.7,
    }
    return {
        "text_config": {"model_type": "granite", **TEXT, **multipliers},
        "encoder_config": {"model_type": "granite_speech_encoder", **encoder},
        "projector_config": {"model_type": "blip_2_qformer", **projector},
        "audio_token_index": PLACEHOLDER,
        "has_lora_adapter": False,
    }


def granite_speech_plus(seconds: int) -> dict[str, Any]:
    fields = granite_speech(seconds)
    encoder, projector = fields["encoder_config"], fields["projector_config"]
    encoder |= {"model_type": "granite_speech_plus_encoder", "num_layers": 4, "cat_hidden_layers": [2, 0, 3]}
    projector["encoder_hidden_size"] = 4 * encoder["hidden_dim"]
    return fields


def granite_speech_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    config = model.config
    extractor = transformers.GraniteSpeechFeatureExtractor(
        n_mels=config.encoder_config.input_dim // 2,
        projector_window_size=config.window_size,
        projector_downsample_rate=config.downsample_rate,
    )
    found = extractor(samples)
    encoded = model.get_audio_features(found["input_features"]).pooler_output[0]
    assert len(encoded) == found["audio_embed_sizes"][0]
    return encoded


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
}
AXES = {"mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e3}


def qwen2_5_omni(seconds: int) -> dict[str, Any]:
    """Windows have their published 2 s."""
    audio = {"encoder_layers": 2, "d_model": 20, "encoder_attention_heads": 2, "encoder_ffn_dim": 28}
    return {
        "text_config": {**TEXT, "rope_parameters": AXES, "tie_word_embeddings": False},
        "audio_config": {**audio, "num_mel_bins": MELS, "output_dim": TEXT["hidden_size"]},
        "vision_config": VISION,
        "audio_token_index": PLACEHOLDER,
    }


def qwen2_5_omni_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    found = whisper_features(model, samples, 300, padding="max_length")
    encoded = model.get_audio_features(found["input_features"], found["attention_mask"])
    return encoded.pooler_output


def qwen3_omni(seconds: int) -> dict[str, Any]:
    experts = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "norm_topk_prob": True,
        "head_dim": 10,
    }
    return {
        "text_config": {**TEXT, **experts, "rope_parameters": {**AXES, "mrope_section": [2, 2, 1]}},
        "audio_config": qwen3_asr(seconds)["audio_config"] | {"model_type": "qwen3_omni_moe_audio_encoder"},
        "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
        "audio_token_id": PLACEHOLDER,
    }


def qwen3_omni_encoded(model: Any, samples: np.ndarray, seconds: int) -> torch.Tensor:
    found = whisper_features(model, samples, 300, padding=True, truncation=False)
    encoded = model.get_audio_features(found["input_features"], found["attention_mask"])
    return encoded.pooler_output


VARIANTS = {
    "qwen3_asr": Variant("Qwen3ASR", qwen3_asr, qwen3_asr_encoded, seconds=8),
    "qwen2_audio": Variant("Qwen2Audio", qwen2_audio, qwen2_audio_encoded),
    "audioflamingo3": Variant("AudioFlamingo3", audioflamingo3, audioflamingo3_encoded),
    "qwen2_5_omni": Variant(
        "Qwen2_5OmniThinker", qwen2_5_omni, qwen2_5_omni_encoded, thinker_of="qwen2_5_omni"
    ),
    "qwen3_omni": Variant(
        "Qwen3OmniMoeThinker", qwen3_omni, qwen3_omni_encoded, seconds=8, thinker_of="qwen3_omni_moe"
    ),
    "voxtral": Variant("Voxtral", voxtral, voxtral_encoded),
    "glmasr": Variant("GlmAsr", glmasr, glmasr_encoded),
    "moss": Variant("MossTranscribeDiarize", moss, moss_encoded, more=moss_marks),
    "granite_speech": Variant("GraniteSpeech", granite_speech, granite_speech_encoded, seconds=4),
    "granite_speech_plus": Variant(
        "GraniteSpeechPlus", granite_speech_plus, granite_speech_encoded, seconds=4
    ),
}


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight a value at which an error in its use would show."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1:
                x.normal_(1.0 if "norm" in name.split(".")[-2] and name.endswith("weight") else 0.0, 0.3)
            elif "embed" in name or name.endswith("query"):
                x.normal_(0.0, 0.5)
            else:
                x.normal_(0.0, (x.numel() / len(x)) ** -0.5)
        for name, x in model.named_buffers():
            if name.endswith("running_var"):
                x.uniform_(0.5, 2.0)
            elif name.endswith("running_mean"):
                x.normal_(0.0, 0.3)


def on_disk(model: torch.nn.Module, folder: Path) -> Arrays:
    """The model's tensors by their names on disk."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save(name: str, fields: dict[str, Any], seed: int, folder: Path) -> tuple[Any, Arrays]:
    """Saves a model of these fields with random weights; returns it, and its tensors by name."""
    variant = VARIANTS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{variant.kind}Config")(**fields)
    config._attn_implementation = "eager"
    kind = getattr(transformers, f"{variant.kind}ForConditionalGeneration")
    eager = {"attn_implementation": "eager"}
    if variant.has_experts:
        eager["experts_implementation"] = "eager"
    model = kind._from_config(config, **eager).eval()
    randomize(model)
    weights = on_disk(model, folder)
    if variant.thinker_of:
        written = json.loads((folder / "config.json").read_text())
        top = {"architectures": [kind.__name__.replace("Thinker", "")], "model_type": variant.thinker_of}
        (folder / "config.json").write_text(json.dumps({**top, "thinker_config": written}, indent=2))
        weights = {f"thinker.{name}": x for name, x in weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model, weights


def gradients(model: torch.nn.Module, folder: Path) -> Arrays:
    """The gradients by the tensors' names on disk; without those of tables that are not trained."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for x in holder.buffers():
            if x.is_floating_point():
                x.fill_(torch.nan)
        for (_, p), (_, of) in zip(holder.named_parameters(), model.named_parameters(), strict=True):
            p.copy_(torch.full_like(p, torch.nan) if of.grad is None else of.grad)
    return {k: x for k, x in on_disk(holder, folder).items() if x.ndim and not np.isnan(x).any()}


def window_seconds(fields: dict[str, Any]) -> int:
    """Seconds of Whisper's window, by its position table."""
    audio = fields.get("audio_config", {})
    return (audio.get("max_source_positions") or audio.get("max_position_embeddings") or 1500) // 50


def reference(name: str, seed: int, folder: Path) -> Arrays:
    """All arrays of one archive. folder: where the checkpoint is saved."""
    short = name.removesuffix("_long")
    variant, is_long = VARIANTS[short], name != short
    seconds = variant.seconds if is_long else 2
    model, weights = save(short, variant.fields(seconds), seed, folder)
    out: Arrays = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    documents = LONG if is_long else DOCUMENTS
    return out | computed(short, model, folder, seconds, documents, is_long) | variant.more()


def computed(
    name: str, model: Any, folder: Path, seconds: int, documents: Sequence[Drawn], is_long: bool
) -> Arrays:
    """What a saved model makes of documents. seconds: of a window. is_long: whether logits are kept of the
    text's tokens alone."""
    variant, out = VARIANTS[name], Arrays()
    prefix = "thinker." if variant.thinker_of else ""
    loss, number = torch.zeros(()), 0
    for c, (prompt, recordings, text) in enumerate(documents):
        seeds = np.arange(number, number + len(recordings))
        number += len(recordings)
        audio = [variant.encoded(model, wave(s, x), seconds) for s, x in zip(seeds, recordings, strict=True)]
        parts = [torch.randint(PLACEHOLDER, (prompt,))]
        for each in audio:
            parts += [torch.full((len(each),), PLACEHOLDER), torch.randint(PLACEHOLDER, (1,))]
        tokens = torch.cat([*parts, torch.randint(PLACEHOLDER, (text,))])
        is_audio = tokens == PLACEHOLDER
        first = int(is_audio.nonzero().max()) + 1 if audio else 1
        embedded = model.get_input_embeddings()(torch.where(is_audio, 0, tokens))
        if audio:
            embedded = embedded.masked_scatter(is_audio[:, None], torch.cat(audio))
        logits = model(inputs_embeds=embedded[None], use_cache=False).logits[0]
        loss = loss + summed_loss(logits, tokens, first)
        kept = logits[~is_audio] if is_long else logits
        out |= {f"tokens.{c}": tokens.numpy(), f"logits.{c}": kept.detach().numpy()}
        out |= {f"seeds.{c}": seeds, f"seconds.{c}": np.asarray(recordings, np.float64)}
    loss.backward()
    found = gradients(model, folder.with_name(f"{folder.name}_gradients"))
    out |= {f"grad.{prefix}{k}": v for k, v in found.items()}
    return out | {"loss": loss.detach().numpy()}


def main() -> None:
    options = arguments(__doc__)
    for name in options.only or [n for short in VARIANTS for n in (short, f"{short}_long")]:
        write(name, options, lambda seed, folder, name=name: reference(name, seed, folder))  # type: ignore[misc]


if __name__ == "__main__":
    main()
