"""Writes tests/references/transcribe.npz: a tiny random Nemotron3_5TranscribeForConditionalGeneration.

    python -m tests.references.transcribe [--checkpoints FOLDER]

Needs torch and transformers (made with 2.13 and 5.24); takes about a minute. Float32, eval mode. The model is
given one document at a time, unpadded: a prompt, a recording's frames, a text. All sizes are odd where they
can be; norms and biases are perturbed. Chunks have 20 encoder frames, so that the longest recording has five
of them: the speaker cache is filled, and compressed. Another recording ends with a whole chunk, and one frame
of padding behind it; a third one with a whole encoder frame.

The checkpoint has the form of the published one: names of NeMo, fused q, k and v, experts in one tensor, and
tensors that nobody reads. transformers opens it, and gives the same logits. It stays in FOLDER, by name.

Keys (c is a document's number):
    config              config.json
    weight.NAME         every tensor on disk; those that nobody reads under unread.NAME
    samples             int64 [documents], samples of each recording: tests.waves.talk(c, samples)
    features.c          float32 [frames, bands], as the extractor gives them; of the first two documents
    tokens.c            int64 [tokens], with one placeholder for every encoder frame
    logits.c            [tokens, vocabulary]
    activity.c          bool [encoder frames, speakers]
    words.c             logits of the head for word times, [2 * encoder frames, classes]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over the text tokens after the clip
    grad.NAME           gradient of loss, by tensor on disk
    ctc.loss            sum of CTC losses of the labels ctc.labels.c on words.c
    ctc.grad.NAME       its gradient
    window, filters     the extractor's constants, rounded to bfloat16: [400] and [257, bands], float32
    margin              the least distance from another choice of the experts; of the diarizer ten times that
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.models.nemotron3_diarization import modeling_nemotron3_diarization as diarization

from tests.references import text_models
from tests.references.common import Arrays, arguments, biased_sigmoid, gradients, summed_loss, watched, write
from tests.waves import talk

AUDIO_TOKEN = 48
BANDS, STACK = 80, 8
DOCUMENTS = ((3, 4800, 5), (1, 160 * 160 + 37, 9), (2, 117_003, 4), (4, 41 * 1280, 6))
"""(prompt tokens, samples, text tokens) of each document."""
DIARIZER: dict[str, Any] = {
    "model_type": "nemotron3_diarization",
    "audio_config": {
        "hidden_size": 18,
        "intermediate_size": 13,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_mel_bins": BANDS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    },
    "head_config": {"hidden_size": 7, "num_speakers": 3, "audio_hidden_size": 18},
    "streaming_config": {
        "speaker_cache_length": 13,
        "num_speakers": 3,
        "prediction_score_threshold": 0.2,
        "latest_frames_score_boost": 0.07,
        "strong_boost_rate": 0.5,
        "weak_boost_rate": 1.3,
        "min_positive_scores_rate": 0.6,
    },
    "chunk_length": 20,
    "chunk_left_context": 3,
    "chunk_right_context": 4,
    "fifo_length": 5,
    "speaker_cache_update_period": 9,
}
FIELDS: dict[str, Any] = {
    "audio_config": {
        "asr_config": {
            "hidden_size": 30,
            "intermediate_size": 37,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_mel_bins": BANDS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.4},
        },
        "diarization_config": DIARIZER,
    },
    "text_config": {
        **text_models.NEMOTRON_H,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-M",
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "time_step_min": 1e-30,
    },
    "audio_token_id": AUDIO_TOKEN,
    "word_timestamp_config": {
        "hidden_size": 30,
        "intermediate_size": 11,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "vocab_size": 17,
        "blank_token_id": 16,
        "residual_scale": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.7},
    },
}
UNREAD = {
    "llm.mtp.layers.0.enorm.weight": (32,),
    "perception.preprocessor.featurizer.window": (400,),
    "perception.preprocessor.featurizer.fb": (1, BANDS, 257),
    "perception.encoder.diarization_model.preprocessor.featurizer.window": (400,),
    "perception.encoder.diarization_model.sortformer_modules.hidden_to_spks.weight": (3, 14),
    "perception.encoder.asr_encoder.layers.0.attn.w_qkv._extra_state": (5,),
    "ctc_timestamp.decoder.residual_scale": (1,),
    "ctc_timestamp.tokenizer.model_proto": (9,),
}
"""Tensors of the published checkpoint that nobody reads, and shapes for them."""

_DIARIZER = "perception.encoder.diarization_model."
_NAMES = (
    ("model.audio_tower.asr_encoder.", "perception.encoder.asr_encoder."),
    ("model.audio_tower.diarization_model.model.audio_tower.", f"{_DIARIZER}encoder."),
    ("model.audio_tower.diarization_model.model.proj.", f"{_DIARIZER}sortformer_modules.encoder_proj."),
    (
        "model.audio_tower.diarization_model.model.upsampler.conv.",
        f"{_DIARIZER}sortformer_modules.subpixel_upsample.",
    ),
    (
        "model.audio_tower.diarization_model.classifier.dense.",
        f"{_DIARIZER}sortformer_modules.first_hidden_to_hidden.",
    ),
    (
        "model.audio_tower.diarization_model.classifier.out_proj.",
        f"{_DIARIZER}sortformer_modules.single_hidden_to_spks.",
    ),
    (
        "model.audio_tower.diarization_model.silence_embeds",
        f"{_DIARIZER}sortformer_modules.learnable_sil_emb",
    ),
    ("model.audio_tower.asr_norm.", "perception.encoder.asr_norm."),
    ("model.audio_tower.speaker_norm.", "perception.encoder.diar_norm."),
    ("model.multi_modal_projector.", "perception.proj."),
    ("model.word_timestamp_encoder.upsampler.", "ctc_timestamp.decoder.upsample."),
    ("model.word_timestamp_encoder.", "ctc_timestamp.decoder.transformer."),
    ("word_timestamp_head.", "ctc_timestamp.decoder.decoder_layers.0."),
    ("model.language_model.embeddings.", "llm.model.embed_tokens."),
    ("model.language_model.norm_f.", "llm.model.norm."),
    ("model.language_model.layers.", "llm.model.layers."),
    ("lm_head.", "llm.lm_head."),
    (".embedder.projection.", ".pre_encode.proj."),
    (".input_layer_norm.", ".embed_norm."),
    (".layer_norm.", ".final_norm."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".self_attn.o_proj.", ".attn.out_proj."),
    (".self_attn.", ".attn."),
    (".mlp.fc1.", ".ffn.net.0."),
    (".mlp.fc2.", ".ffn.net.3."),
    *((f".mixer.{x}", f".mixer._fp32_params.{x}") for x in ("A_log", "D", "dt_bias")),
    (".mixer.experts.up_proj", ".mixer.experts.gate_and_up_projs"),
    (".mixer.experts.down_proj", ".mixer.experts.down_projs"),
)
"""Beginnings and parts of names in memory -> those on disk."""


def on_disk(named: dict[str, torch.Tensor]) -> Arrays:
    """The tensors on disk, made of those in memory."""
    found: Arrays = {}
    for name, x in named.items():
        for theirs, disk in _NAMES:
            name = name.replace(theirs, disk)
        array = x.detach().numpy().copy()
        found[name] = array.swapaxes(1, 2).copy() if ".mixer.experts." in name else array
    for name in [name for name in found if name.endswith(".attn.q_proj.weight")]:
        if "llm." not in name:
            parts = [found.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
            found[name.replace("q_proj", "w_qkv")] = np.concatenate(parts)
    return found


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight a value at which an error in its use would show."""
    text_models.randomize(model)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 3 and "experts" not in name:
                x.normal_(0.0, (x[0].numel()) ** -0.5)
            if name.endswith(("out_proj.bias", "silence_embeds")) and "diarization" in name:
                x.normal_(-0.3, 0.5)


def calibrate(model: Any, features: torch.Tensor, mask: torch.Tensor) -> None:
    """Changes the diarizer so that voices come and go, which with random weights hardly happens: its
    embedding does not see the mean frame, and its logits vary around 0. Most frames of the head for word
    times are blank, as of one that is trained."""
    diarizer = model.model.audio_tower.diarization_model
    out, projection = diarizer.classifier.out_proj, diarizer.model.audio_tower.embedder.projection.weight
    with torch.no_grad():
        mean = features[0, : mask.sum() // STACK * STACK].reshape(-1, STACK * features.shape[2]).mean(0)
        projection.sub_(torch.outer(projection @ mean, mean) / mean.square().sum())
        logits = model.get_audio_features(features, mask).speaker_logits[0]
        scale = 1.5 / logits.std(0)
        out.bias.sub_(logits.mean(0)).mul_(scale)
        out.weight.mul_(scale[:, None])
        model.word_timestamp_head.bias[model.config.word_timestamp_config.blank_token_id] += 4


@contextmanager
def decisions() -> Iterator[list[float]]:
    """A list of the diarizer's distances from another choice: in its top-k, and of probabilities from 0.5."""
    margins: list[float] = []
    topk, scores = torch.topk, diarization.Nemotron3DiarizationSpeakerCache._get_frame_scores

    def watched_topk(x: torch.Tensor, k: int, *args: Any, **options: Any) -> Any:
        ranked = x.detach().movedim(options.get("dim", -1), -1).sort(-1, descending=True).values
        if k < ranked.shape[-1]:
            gap = ranked[..., k - 1] - ranked[..., k]
            margins.extend(gap[gap.isfinite()].tolist())
        return topk(x, k, *args, **options)

    def watched_scores(self: Any, probs: torch.Tensor) -> torch.Tensor:
        margins.append(float((probs - 0.5).abs().min()))
        found = scores(self, probs)
        margins.append(float(found[found.isfinite()].abs().min()) if found.isfinite().any() else np.inf)
        return found

    with (
        mock.patch.object(torch, "topk", watched_topk),
        mock.patch.object(diarization.Nemotron3DiarizationSpeakerCache, "_get_frame_scores", watched_scores),
    ):
        yield margins


def features_of(extractor: Any, number: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, mask) of a recording, as the processor gives them."""
    wave = torch.from_numpy(talk(number, samples).astype(np.float32) / 32768)
    made = extractor([wave.numpy()], sampling_rate=16_000, return_tensors="pt")
    padding = -made["input_features"].shape[1] % STACK
    features = torch.nn.functional.pad(made["input_features"], (0, 0, 0, padding))
    return features, torch.nn.functional.pad(made["attention_mask"], (0, padding))


def save(model: Any, folder: Path) -> tuple[Arrays, Arrays]:
    """Writes the checkpoint in the published form; returns (its tensors, those that nobody reads)."""
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    weights = on_disk(dict(model.state_dict()))
    rng = np.random.default_rng(7)
    unread = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in UNREAD.items()}
    unread["ctc_timestamp.tokenizer.model_proto"] = np.arange(9, dtype=np.uint8)
    save_file({**weights, **unread}, folder / "model.safetensors", metadata={"format": "pt"})
    return weights, unread


def reference(seed: int, folder: Path) -> Arrays:
    """All arrays of the archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    config = transformers.Nemotron3_5TranscribeConfig(**FIELDS, attn_implementation="eager")
    model = transformers.Nemotron3_5TranscribeForConditionalGeneration(config).eval()
    extractor = transformers.NemotronAsrStreamingFeatureExtractor(
        feature_size=BANDS, mel_filters_dtype="bfloat16"
    )
    randomize(model)
    calibrate(model, *features_of(extractor, 2, DOCUMENTS[2][1]))
    weights, unread = save(model, folder)
    again, report = transformers.Nemotron3_5TranscribeForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    margins = watched(model, biased_sigmoid)
    out: Arrays = {"config": np.asarray(json.dumps(json.loads((folder / "config.json").read_text())))}
    out |= {f"weight.{k}": v for k, v in weights.items()} | {f"unread.{k}": v for k, v in unread.items()}
    out["samples"] = np.asarray([samples for _, samples, _ in DOCUMENTS])
    loss, ctc_loss, distances = torch.zeros(()), torch.zeros((), dtype=torch.float64), []
    for c, (prompt, samples, text) in enumerate(DOCUMENTS):
        features, mask = features_of(extractor, c, samples)
        frames, audio_tokens = int(mask.sum()), -(-(samples // 160) // STACK)
        words = torch.randint(AUDIO_TOKEN, (prompt + text,))
        tokens = torch.cat([words[:prompt], torch.full((audio_tokens,), AUDIO_TOKEN), words[prompt:]])
        with decisions() as found:
            audio = model.get_audio_features(features, mask)
            given = {"input_ids": tokens[None], "input_features": features, "input_features_mask": mask}
            logits = model(**given, use_cache=False).logits[0]
        assert torch.equal(logits, again.eval()(**given, use_cache=False).logits[0])
        probabilities = audio.speaker_logits.sigmoid().unflatten(1, (-1, STACK)).mean(2)[0, :audio_tokens]
        distances += [*found, float((probabilities.detach() - 0.5).abs().min())]
        heard = model.get_word_timestamp_logits(audio.asr_last_hidden_state, mask)[0, : 2 * audio_tokens]
        labels = torch.randint(16, (min(5 + c, audio_tokens),))
        ctc_loss = ctc_loss + torch.nn.functional.ctc_loss(
            heard.double().log_softmax(-1)[:, None],  # in float32 its sums over paths round too much
            labels[None],
            [len(heard)],
            [len(labels)],
            blank=16,
            reduction="sum",
        )
        loss = loss + summed_loss(logits, tokens, prompt + audio_tokens)
        out |= {f"features.{c}": features[0, :frames].numpy()} if c < 2 else {}
        out |= {
            f"tokens.{c}": tokens.numpy(),
            f"logits.{c}": logits.detach().numpy(),
            f"activity.{c}": (probabilities > 0.5).numpy(),
            f"words.{c}": heard.detach().numpy(),
            f"ctc.labels.{c}": labels.numpy(),
        }
    for prefix, total in (("", loss), ("ctc.", ctc_loss)):
        model.zero_grad()
        total.backward()
        found = on_disk(gradients(model))
        out |= {f"{prefix}grad.{k}": v for k, v in found.items() if v.any() or not prefix}
    dtype = torch.bfloat16
    window = torch.hann_window(400, periodic=False).to(dtype).float().numpy()
    filters = extractor.mel_filters.to(dtype).float().numpy().T
    out |= {"window": window, "filters": filters, "ctc.loss": ctc_loss.detach().numpy()}
    margin = min([*margins, *(10 * x for x in distances)])
    return out | {"loss": loss.detach().numpy(), "margin": np.asarray(margin)}


def main() -> None:
    write("transcribe", arguments(__doc__), reference)


if __name__ == "__main__":
    main()
