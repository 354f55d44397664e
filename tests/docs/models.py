"""The table of docs/models.md: a row a family of checkpoints that jaxthd reads and writes.

What the registry and the front ends know stands there by itself; here is what they do not know.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxthd.config import FrontEnd, ModelConfig
from jaxthd.hf.family import ENCODER, Family
from jaxthd.hf.registry import FAMILIES
from jaxthd.models.front_ends import FastConformer, Transcribe

ROOT = Path(__file__).parents[2]
REFERENCES = ROOT / "tests" / "references"
MODELS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- Written by scripts/write_reference.py: begin -->\n", "<!-- end -->\n"
HEAD = (
    "models",
    "class of the folder",
    "read and written",
    "an export's format",
    "trained",
    "frames a second",
    "audio tokens a second",
    "a piece",
    "context ranks take",
    "served by",
    "compared in",
)
CUTS = {"frames": "any frames", "pieces": "whole pieces", "recordings": "whole recordings"}
RATE, SECONDS = 16000, 30


class Row(NamedTuple):
    """What the registry does not know of a family.

    models: those that people have. reference: the file in tests/references that has a model of the library's.
    compared: the file in tests/ that compares it. front_end: the audio front end; None: that of the
    reference, if it has one, with the published settings in `sizes`.
    """

    models: str
    reference: str
    compared: str = "hf/test_families.py"
    served: str = "transformers, vLLM"
    front_end: FrontEnd | None = None
    sizes: tuple[tuple[str, Any], ...] = ()
    trained: str = "all"


SPEECH, WINDOW = "hf/test_speech_llms.py", (("positions", 1500),)
TABLE = "all but a table of positions"
ROWS = {
    "NemotronHForCausalLM": Row("Nemotron-H, Nemotron Nano 2, Nemotron-3", "nemotron_h"),
    "Qwen3ForCausalLM": Row("Qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": Row("Qwen3 MoE", "qwen3_moe"),
    "Qwen3NextForCausalLM": Row("Qwen3-Next", "qwen3_next"),
    "Qwen3_5ForCausalLM": Row("Qwen3.5, its decoder alone", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": Row("Qwen3.5 MoE, its decoder alone", "qwen3_5_moe"),
    "Qwen3_5ForConditionalGeneration": Row("Qwen3.5", "qwen3_5", "hf/test_qwen3_5.py"),
    "Qwen3_5MoeForConditionalGeneration": Row("Qwen3.5 MoE", "qwen3_5_moe", "hf/test_qwen3_5.py"),
    "DeepseekV3ForCausalLM": Row("DeepSeek-V3, Moonlight", "deepseek_v3"),
    "GptOssForCausalLM": Row("GPT-OSS", "gpt_oss"),
    "LlamaForCausalLM": Row("Llama", "llama"),
    "MistralForCausalLM": Row("Mistral", "mistral"),
    "Qwen2ForCausalLM": Row("Qwen2, Qwen2.5", "qwen2"),
    "GraniteForCausalLM": Row("Granite", "granite"),
    "BambaForCausalLM": Row("Bamba", "bamba", served="transformers, vLLM up to 0.23"),
    "GraniteMoeHybridForCausalLM": Row("Granite 4", "granite_hybrid"),
    "FalconH1ForCausalLM": Row("Falcon-H1", "falcon_h1"),
    "Lfm2ForCausalLM": Row("LFM2", "lfm2"),
    "KimiLinearForCausalLM": Row("Kimi-Linear", "kimi_linear"),
    "OlmoHybridForCausalLM": Row("OLMo Hybrid", "olmo_hybrid"),
    "ParakeetEncoder": Row(
        "Parakeet", "fastconformer", "models/test_fastconformer.py", "transformers", FastConformer()
    ),
    "NemotronH_Omni_Reasoning_V3": Row("Nemotron-Omni", "nemotron_omni", front_end=FastConformer()),
    "NeMo's SALM and SALMAutomodel": Row(
        "Canary-Qwen, and what NeMo 3.0's SALM and SALMAutomodel write",
        "salm",
        "hf/test_salm.py",
        "NeMo, vLLM with NeMo's plugin",
        FastConformer(),
    ),
    "Nemotron3_5TranscribeForConditionalGeneration": Row(
        "Nemotron-3.5-Transcribe",
        "transcribe",
        "hf/test_transcribe.py",
        "transformers, vLLM with NeMo's plugin",
        Transcribe(),
        trained="all but the diarizer",
    ),
    "Qwen3ASRForTokenClassification": Row(
        "Qwen3-ForcedAligner",
        "qwen3_asr",
        "hf/test_qwen3_aligner.py",
        "transformers",
        sizes=(("chunks", 8),),
        trained="nothing: it aligns",
    ),
    "Qwen3ForcedAligner": Row(
        "Qwen3-ForcedAligner in its authors' form",
        "qwen3_asr",
        "hf/test_qwen3_aligner.py",
        "qwen-asr, vLLM",
        sizes=(("chunks", 8),),
        trained="nothing: it aligns",
    ),
    "Qwen3ASRForConditionalGeneration": Row("Qwen3-ASR", "qwen3_asr", SPEECH, sizes=(("chunks", 8),)),
    "qwen3_asr_authors": Row(
        "Qwen3-ASR in its authors' form", "qwen3_asr", SPEECH, "qwen-asr, vLLM", sizes=(("chunks", 8),)
    ),
    "Qwen2AudioForConditionalGeneration": Row(
        "Qwen2-Audio", "qwen2_audio", SPEECH, sizes=WINDOW, trained=TABLE
    ),
    "AudioFlamingo3ForConditionalGeneration": Row(
        "Audio Flamingo 3", "audioflamingo3", SPEECH, sizes=WINDOW, trained=TABLE
    ),
    "Qwen2_5OmniForConditionalGeneration": Row("Qwen2.5-Omni", "qwen2_5_omni", SPEECH),
    "Qwen3OmniMoeForConditionalGeneration": Row("Qwen3-Omni", "qwen3_omni", SPEECH, sizes=(("chunks", 8),)),
    "VoxtralForConditionalGeneration": Row("Voxtral", "voxtral", SPEECH, sizes=WINDOW, trained=TABLE),
    "GlmAsrForConditionalGeneration": Row("GLM-ASR", "glmasr", SPEECH, sizes=WINDOW),
    "MossTranscribeDiarizeForConditionalGeneration": Row(
        "MOSS-Transcribe-Diarize", "moss", SPEECH, "transformers", sizes=WINDOW, trained=TABLE
    ),
    "GraniteSpeechForConditionalGeneration": Row("Granite Speech 3.3, 4.0, 4.1", "granite_speech", SPEECH),
    "GraniteSpeechPlusForConditionalGeneration": Row(
        'Granite Speech 4.1 "plus"', "granite_speech_plus", SPEECH
    ),
}
"""By the family's title, or its format where another one has the title too."""


def models_table() -> str:
    """The lines of the table. Raises KeyError for a family without a row."""
    rows = [HEAD, ("---",) * len(HEAD)]
    titles: set[str] = set()
    for family in FAMILIES:
        if family.format == "adapter":  # a part of a model in a format of jaxthd's own
            continue
        row = ROWS[family.format if family.title in titles else family.title]
        titles.add(family.title)
        rows.append(_cells(family, row))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(family: Family, row: Row) -> tuple[str, ...]:
    title = family.title if " " in family.title else f"`{family.title}`"
    about = (row.models, title, family.gives, f"`{family.format}`", row.trained)
    return (*about, *_audio(front_end_of(family, row)), row.served, f"`tests/{row.compared}`")


def front_end_of(family: Family, row: Row) -> FrontEnd | None:
    """The front end of the family's published models."""
    if row.front_end is not None or ENCODER[0] not in family.covers:
        return row.front_end
    with np.load(REFERENCES / f"{row.reference}.npz") as arrays:
        fields = json.loads(str(arrays["config"]))
    first = next(f for f in FAMILIES if fields["model_type"] in f.model_types)
    return replace(first.configure(fields, ModelConfig()).audio_encoder, **dict(row.sizes))


def _audio(front_end: FrontEnd | None) -> tuple[str, ...]:
    if front_end is None:
        return ("",) * 4
    rate, tokens = RATE / front_end.frame_samples, sum(x.tokens for x in front_end.pieces(SECONDS * RATE))
    longest = front_end.longest
    piece = "a recording" if longest is None else f"{round(longest / rate, 1):g} s"
    return f"{rate:g}", f"{tokens / SECONDS:g}", piece, CUTS[front_end.divisible]


def written() -> str:
    """The text of docs/models.md, with the present table in the place of the table."""
    before, _, rest = MODELS.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{models_table()}\n{END}{rest.partition(END)[2]}"
