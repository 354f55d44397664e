"""Qwen3's forced aligner in both of its forms: transformers' (Qwen/Qwen3-ForcedAligner-0.6B-hf) and that of
its authors (Qwen/Qwen3-ForcedAligner-0.6B). It is Qwen3-ASR with a head that tells times at marks
(model.marks) in the place of the one for tokens.

Source: transformers 5.24 (models/qwen3_asr); qwen_asr (core/transformers_backend, inference).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxthd.config import MarksConfig, ModelConfig
from jaxthd.hf.family import Family
from jaxthd.hf.fields import Fields, check_fields, must_be, read_object
from jaxthd.hf.qwen3_asr import AUTHORS, QWEN3_ASR
from jaxthd.hf.reader import Reader
from jaxthd.hf.speech_llm import TIED, SpeechLLM

_CLASS, _TOKEN, _STEP = "Qwen3ASRForTokenClassification", "timestamp_token_id", "timestamp_segment_time"
_MILLISECONDS, _MARK = 80, 151705
"""The library's defaults of _STEP and _TOKEN."""


@dataclass(frozen=True, kw_only=True)
class Aligner(SpeechLLM):
    """A speech LLM whose head tells times.

    classes: (config.json) -> the times that its head tells apart; 0 for another model. class_fields: (that)
    -> the fields that say so, by paths with dots.
    """

    classes: Callable[[Fields], int]
    class_fields: Callable[[int], dict[str, Any]]

    def recognises(self, fields: Fields) -> bool:
        """Whether a config.json is of this form."""
        return super().recognises(fields) and self.classes(fields) > 0

    def configure(self, fields: Fields, model: ModelConfig) -> ModelConfig:
        """The model with the checkpoint's settings."""
        seconds = fields.get(_STEP, _MILLISECONDS) / 1000
        marks = MarksConfig(self.classes(fields), seconds, fields.get(_TOKEN, _MARK))
        return replace(super().configure(fields, model), marks=marks)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """config.json of an export. Raises UserError where the family cannot hold the model."""
        marks, found = model.marks, super().fields(model)
        found |= {_TOKEN: marks.token, _STEP: round(1000 * marks.seconds)}
        for path, value in self.class_fields(marks.classes).items():
            above, _, name = path.rpartition(".")
            (found[above] if above else found)[name] = value
        return found

    def family(self) -> Family:
        """The family of checkpoints."""
        return replace(
            super().family(),
            gives="encoder, adapter, and an LLM whose head tells times at marks",
            opened=_opened,
            marks=True,
            meaningless=lambda model: {TIED},
        )


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The fields with the processor's milliseconds from one time to the next."""
    file = reader.path / "processor_config.json"
    of_processor = {name: x for name, x in read_object(file).items() if name == _STEP}
    check_fields(of_processor, str(file))
    return family, {**of_processor, **fields}, reader


def _labels(fields: Fields) -> int:
    """transformers' form: the classes of a classifier of tokens."""
    if _CLASS not in (fields.get("architectures") or ()):
        return 0
    must_be(fields, {"token_classification_bias": False})
    names = fields.get("id2label")
    return int(fields.get("num_labels") or 2) if names is None else len(names)


def _classify_num(fields: Fields) -> int:
    """The authors' form."""
    thinker = fields.get(AUTHORS.above) or {}
    is_aligner = "forced_aligner" in (thinker.get("model_type") or "")
    return int(thinker.get("classify_num") or 0) if is_aligner else 0


def _text(name: str) -> str:
    return "score.weight" if name == "lm_head.weight" else QWEN3_ASR.names.text(name)


def _aligner(form: SpeechLLM, **own: Any) -> Aligner:
    """The aligner of a form of Qwen3-ASR."""
    return Aligner(**{**vars(form), "ties": False, "data": {"template": "marks"}, **own})


QWEN3_ALIGNER = _aligner(
    QWEN3_ASR,
    format="qwen3_aligner",
    title=_CLASS,
    names=replace(QWEN3_ASR.names, text=_text),
    classes=_labels,
    class_fields=lambda classes: {
        "id2label": {str(k): f"LABEL_{k}" for k in range(classes)},
        "label2id": {f"LABEL_{k}": k for k in range(classes)},
    },
)
ALIGNER_AUTHORS = _aligner(
    AUTHORS,
    format="qwen3_aligner_authors",
    title="Qwen3ForcedAligner",
    inner=(AUTHORS.title, "qwen3_forced_aligner"),
    classes=_classify_num,
    class_fields=lambda classes: {
        "architectures": [AUTHORS.title],
        "thinker_config.classify_num": classes,
    },
)
FAMILIES = (QWEN3_ALIGNER.family(), ALIGNER_AUTHORS.family())
