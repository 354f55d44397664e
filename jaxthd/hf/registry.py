"""The families of checkpoints that jaxthd reads and writes: one table, which import and export share."""

from collections.abc import Sequence

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf import (
    adapter,
    audio_flamingo3,
    bamba,
    deepseek_v3,
    falcon_h1,
    glm_asr,
    gpt_oss,
    granite_speech,
    kimi_linear,
    lfm2,
    llama,
    moss,
    nemotron_h,
    nemotron_omni,
    olmo_hybrid,
    parakeet,
    qwen2_audio,
    qwen3,
    qwen3_5,
    qwen3_aligner,
    qwen3_asr,
    qwen3_next,
    qwen_omni,
    salm,
    transcribe,
    voxtral,
)
from jaxthd.hf.family import ADAPTER, ENCODER, LLM, Family

FAMILIES: tuple[Family, ...] = (
    nemotron_h.FAMILY,
    *qwen3.FAMILIES,
    qwen3_5.FAMILIES[0],  # before Qwen3-Next, whose published models all have experts
    qwen3_next.FAMILY,
    *qwen3_5.FAMILIES[1:],
    deepseek_v3.FAMILY,
    kimi_linear.FAMILY,
    olmo_hybrid.FAMILY,
    gpt_oss.FAMILY,
    *llama.FAMILIES,
    *bamba.FAMILIES,
    falcon_h1.FAMILY,
    lfm2.FAMILY,
    parakeet.FAMILY,
    nemotron_omni.FAMILY,
    salm.FAMILY,
    transcribe.FAMILY,
    *qwen3_aligner.FAMILIES,  # before Qwen3-ASR, whose model_type they have
    *qwen3_asr.FAMILIES,
    qwen2_audio.FAMILY,
    audio_flamingo3.FAMILY,
    *qwen_omni.FAMILIES,
    voxtral.FAMILY,
    glm_asr.FAMILY,
    moss.FAMILY,
    *granite_speech.FAMILIES,
    adapter.FAMILY,
)

PEFT = "peft"
FORMATS = ("parts", PEFT, *dict.fromkeys(family.format for family in FAMILIES))
"""The forms of an export: a folder in a family's format; "parts", a folder for each part of the model; PEFT,
the LoRA alone."""


def formats_help() -> str:
    """FORMATS with what each of them is, a line each."""
    lines = {"parts": "a folder for each part of the model, in the formats below that hold one part"}
    lines[PEFT] = "the low-rank matrices alone, as peft writes them, with the names of the model's family"
    for family in FAMILIES:
        text = f"{family.title}: {family.gives}"
        lines[family.format] = f"{lines[family.format]}; {text}" if family.format in lines else text
    return "\n".join(f"    {name:9} {text}" for name, text in lines.items())


def parts_of(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The model's parts: what the names of each one's arrays begin with."""
    return {"llm": LLM, **({"encoder": ENCODER, "adapter": ADAPTER} if model.encoder else {})}


def export_families(
    model: ModelConfig, format: str | None = None, like: Family | None = None
) -> dict[str, Family]:
    """The families in which an export of the model is written, by folder; "" is the export's own folder.

    format: one of FORMATS. None: a family that holds the whole model, else "parts". like: the family of the
    export's original, which is taken before others.
    Raises UserError where the format cannot hold the model.
    """
    parts = parts_of(model)
    if format is None:
        whole = [f for f in FAMILIES if all(f.holds(name) for names in parts.values() for name in names)]
        whole = _first_alike(whole, like)
        fitting = [family for family in whole if family.by_default and _refusal(family, model) is None]
        if fitting:
            return {"": fitting[0]}
        if like in whole and (why := _refusal(like, model)):
            raise why
    if format is None or format == "parts":
        return {
            part: _first_fitting(
                _first_alike([family for family in FAMILIES if family.covers == names], like), model
            )
            for part, names in parts.items()
        }
    if format not in FORMATS:
        raise UserError(f"the format is {format!r}; expected one of {', '.join(FORMATS)}: choose one of them")
    return {"": _first_fitting(_first_alike([f for f in FAMILIES if f.format == format], like), model)}


def _first_alike(families: Sequence[Family], like: Family | None) -> list[Family]:
    """The families, that of an original first, as its files complete it (Family.opened)."""
    if like is None:
        return list(families)
    others = [x for x in families if (x.format, x.title) != (like.format, like.title)]
    return others if len(others) == len(families) else [like, *others]


def _first_fitting(families: Sequence[Family], model: ModelConfig) -> Family:
    refusals = {family.title: _refusal(family, model) for family in families}
    for family in families:
        if refusals[family.title] is None:
            return family
    raise next(error for error in refusals.values() if error is not None)


def _refusal(family: Family, model: ModelConfig) -> UserError | None:
    """Why the family cannot hold the model; None if it can."""
    if model.encoder is None and not {*family.covers} <= {*LLM}:
        return UserError(
            f"model.encoder is None: a text-only model has nothing for {family.title}; expected an LLM's "
            "format: choose --format llm"
        )
    if family.marks != bool(model.marks.classes):
        return UserError(
            f"model.marks.classes is {model.marks.classes}; expected {'more than ' * family.marks}0 for "
            f"{family.title}: choose another --format"
        )
    try:
        family.fields(model)
    except UserError as error:
        return error
    return None
