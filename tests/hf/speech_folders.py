"""Folders of speech LLMs with tokenizer and template, as they are published: tiny, from the references."""

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.hf.published import change_published, tensors, write_published

NAMES = (
    *("qwen3_asr", "qwen2_audio", "audioflamingo3", "qwen2_5_omni", "qwen3_omni"),
    *("voxtral", "glmasr", "moss", "granite_speech", "granite_speech_plus"),
)
"""The references that are whole speech LLMs."""
NEVER_TIED = ("qwen2_audio", "audioflamingo3", "voxtral")
"""Those whose class has a head of its own, whatever the settings say."""
ON_DISK = "language_model.model."
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
RECOGNISER = (
    "{% set ns = namespace(system='', audio='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% for c in m.content if c.type == 'text' %}{% set ns.system = ns.system + c.text %}{% endfor %}"
    "{% elif m.content is not string %}{% for c in m.content if c.type == 'audio' %}"
    "{% set ns.audio = ns.audio + '<|audio_start|><|audio_pad|><|audio_end|>' %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{{ '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}"
    "{{ '<|im_start|>user\\n' + ns.audio + '<|im_end|>\\n' }}"
)
"""What the user says beside a recording is left out."""
ANSWERS = (
    "{% for m in messages if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %}{{ '<|im_end|>\\n' }}{% endgeneration %}{% endfor %}"
)
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'audio' %}{{ '<|begin_of_audio|><|pad|><|end_of_audio|>\\n' }}"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SPECIAL: Mapping[str, tuple[str, ...]] = {
    "qwen3_asr": (*CHATML, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    "qwen2_audio": (*CHATML, "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
    "audioflamingo3": (*CHATML, "<sound>"),
    "qwen2_5_omni": (*CHATML, "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
    "qwen3_omni": (*CHATML, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    "glmasr": (
        *("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>"),
    ),
    "moss": (*CHATML, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|audio|>"),
    ),
}
"""Special tokens; the last one stands for audio."""
GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}"
    "{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
FLAMINGO = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'audio' %}{{ '<sound>' }}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
TEMPLATES = {
    "qwen3_asr": RECOGNISER + ANSWERS + ASKS,
    "audioflamingo3": FLAMINGO + ASKS,
    "qwen2_5_omni": FLAMINGO.replace("<sound>", "<|audio_bos|><|AUDIO|><|audio_eos|>") + ASKS,
    **dict.fromkeys(
        ("qwen3_omni", "moss"),
        FLAMINGO.replace("<sound>", "<|audio_start|><|audio_pad|><|audio_end|>") + ASKS,
    ),
    "glmasr": GLM,
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), GRANITE),
}
MARKED = 120
"""Times that the tiny forced aligner tells apart."""
TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
)
ENDS = {
    "qwen3_asr": "<|im_end|>",
    "qwen2_audio": "<|im_end|>",
    **dict.fromkeys(("audioflamingo3", "qwen2_5_omni", "qwen3_omni", "moss"), "<|im_end|>"),
    "glmasr": "<|endoftext|>",
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), "<|end_of_text|>"),
}


def write_tokenizer(folder: Path, special: tuple[str, ...], end: str, added: tuple[str, ...] = ()) -> int:
    """Writes a byte-level tokenizer with these special tokens, and others that are text; returns the size of
    its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens(list(added))
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": special[0]}))
    return made.get_vocab_size()


def write_tekken(folder: Path) -> int:
    """Writes a tekken.json of bytes, of the version that Voxtral's has."""
    tekken: dict[str, Any] = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(TEKKEN),
            "default_num_special_tokens": len(TEKKEN),
            "version": "v7",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
            for i in range(256)
        ],
        "special_tokens": [{"rank": i, "token_str": x, "is_control": True} for i, x in enumerate(TEKKEN)],
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
        "version": 1,
        "type": "Tekken",
    }
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return 256 + len(TEKKEN)


def write_folder(name: str, folder: Path) -> Path:
    """The reference's model with what complete_folder adds."""
    return complete_folder(name, write_published(name, folder))


def complete_folder(name: str, folder: Path) -> Path:
    """Gives a model more tokens, a tokenizer and, where the published folder has one, a template."""
    if name == "voxtral":
        size, audio = write_tekken(folder), TEKKEN.index("[AUDIO]")
    else:
        added = ("<asr_text>", "<timestamp>") if name == "qwen3_asr" else ()
        size = write_tokenizer(folder, SPECIAL[name], ENDS[name], added)
        audio = 256 + len(SPECIAL[name]) - 1
    if name in TEMPLATES:
        (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    rng = np.random.default_rng(0)
    size = -(-size // 8) * 8  # tensor and pipeline ranks share the vocabulary

    def change(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        """Gives the vocabulary its size, and audio its token."""
        settings = settings.get("thinker_config", settings)
        settings["text_config"]["vocab_size"] = size
        token = "audio_token_index" if "audio_token_index" in settings else "audio_token_id"
        settings[token] = audio
        for where in (settings, settings["text_config"]):
            for field in ("eos_token_id", "bos_token_id", "pad_token_id"):
                where.pop(field, None)
        for key, x in tensors.items():
            if key.endswith(("embed_tokens.weight", "lm_head.weight")):
                more = rng.normal(0, x.std(), (size - len(x), x.shape[1]))
                tensors[key] = np.concatenate([x, more]).astype(np.float32)

    return change_published(folder, change)


def write_aligner(folder: Path) -> Path:
    """Qwen3's forced aligner: Qwen3-ASR's folder with a random head that tells MARKED classes."""
    write_folder("qwen3_asr", folder)
    rng = np.random.default_rng(5)

    def change(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        """Changes the head."""
        settings["architectures"] = ["Qwen3ASRForTokenClassification"]
        settings["id2label"] = {str(k): f"LABEL_{k}" for k in range(MARKED)}
        settings["label2id"] = {f"LABEL_{k}": k for k in range(MARKED)}
        settings["timestamp_token_id"] = mark = 256 + len(SPECIAL["qwen3_asr"]) + 1
        dim = settings["text_config"]["hidden_size"]
        embedding = tensors["model.language_model.embed_tokens.weight"]
        # Else all marks tell the same.
        embedding[mark] *= 0.01
        embedding[:256] *= 4
        for name, x in tensors.items():
            x *= 6 if name.endswith("q_norm.weight") else 1
        tensors.pop("lm_head.weight", None)
        tensors["score.weight"] = rng.normal(0, 1, (MARKED, dim)).astype(np.float32)

    (folder / "processor_config.json").write_text(json.dumps({"timestamp_segment_time": 50}))
    return change_published(folder, change)


def aligner_as_authors(folder: Path) -> Path:
    """Turns a folder of the forced aligner in transformers' form into its authors', in place."""

    def change(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        """Names the head's classes and its tensor as they do."""
        settings["architectures"] = ["Qwen3ASRForConditionalGeneration"]
        settings |= {"timestamp_token_id": mark, "timestamp_segment_time": 50}
        thinker = settings["thinker_config"]
        thinker |= {"model_type": "qwen3_forced_aligner", "classify_num": len(thinker.pop("id2label"))}
        del thinker["label2id"]
        tensors["thinker.lm_head.weight"] = tensors.pop("thinker.score.weight")

    mark = json.loads((folder / "config.json").read_text())["timestamp_token_id"]
    (folder / "processor_config.json").unlink()
    as_byte_pairs(folder)
    return change_published(as_authors(folder), change)


def as_byte_pairs(folder: Path) -> None:
    """Writes a folder's tokenizer as vocab.json and merges.txt, in the place of tokenizer.json."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    stored = json.loads(file.read_text())
    (folder / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {str(token.pop("id")): token for token in stored["added_tokens"]}
    fields = json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    settings.write_text(json.dumps(fields | {"added_tokens_decoder": added}))
    file.unlink()


def as_authors(folder: Path) -> Path:
    """Turns a folder of Qwen3-ASR in transformers' form into its authors', in place."""

    def change(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        """Moves settings below thinker_config, and renames tensors."""
        for name in ("initializer_range", "timestamp_token_id", "token_classification_bias"):
            settings.pop(name, None)
        inner = {
            name: settings.pop(name) for name in [*settings] if name not in ("architectures", "model_type")
        }
        axes = {"rope_type": "default", "type": "default", "mrope_section": [2, 2, 1]}
        theta = inner["text_config"].pop("rope_parameters")["rope_theta"]
        inner["text_config"] |= {
            "rope_theta": theta,
            "rope_scaling": {**axes, "interleaved": True, "mrope_interleaved": True},
        }
        settings["thinker_config"] = inner
        for name in [*tensors]:
            new = name.replace("model.language_model.", "model.", 1)
            new = new.replace("model.audio_tower.", "audio_tower.", 1)
            new = new.replace("model.multi_modal_projector.linear_", "audio_tower.proj", 1)
            tensors[f"thinker.{new}"] = tensors.pop(name)

    if (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(RECOGNISER + ASKS)
    return change_published(folder, change)


def add_adapter(folder: Path, prefix: str) -> Path:
    """Puts LoRA beside a folder of Granite Speech, as peft does; a folder with its sums is merged(folder).

    prefix: of the decoder's names in the adapter's file.
    """
    rng, low_rank = np.random.default_rng(1), {}
    for name, x in sorted(tensors(folder).items()):
        if name.endswith(("q_proj.weight", "v_proj.weight")) and name.startswith(ON_DISK):
            module = f"base_model.model.{prefix}{name.removeprefix(ON_DISK).removesuffix('.weight')}"
            for side, shape in (("A", (3, x.shape[1])), ("B", (x.shape[0], 3))):
                low_rank[f"{module}.lora_{side}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    save_file(low_rank, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**lora, "use_dora": False, "revision": None}))
    return change_config(folder, has_lora_adapter=True)


def merged(folder: Path, out: Path) -> Path:
    """A copy of a folder with an adapter whose projections are the sums."""
    shutil.copytree(folder, out)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (out / name).unlink()
    stored, low_rank = tensors(out), load_file(folder / "adapter_model.safetensors")
    for name, b in low_rank.items():
        if ".lora_B." in name:
            a = low_rank[name.replace(".lora_B.", ".lora_A.")].astype(np.float64)
            plain = name.replace(".lora_B", "").removeprefix("base_model.model.")
            plain = plain.replace("model.language_model.", ON_DISK) if plain.startswith("model.") else plain
            stored[plain] = (stored[plain] + 5 / 3 * b.astype(np.float64) @ a).astype(np.float32)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return change_config(out, has_lora_adapter=False)


def change_config(folder: Path, **changes: Any) -> Path:
    """Rewrites fields of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder
