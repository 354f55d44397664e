"""The inputs of a run's validation besides the weights (About.measured_by): checkpoints are
ranked by metrics that were measured in the same way.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.files.run_folder import flat

ALWAYS = (
    "data.template",
    "data.template_options",
    "data.system_prompt",
    "data.prompt",
    "data.audio_placeholder",
    "data.columns",
    "data.packing*",  # with train.validation_batches: which documents are read
    "data.rows",
    "data.capacity",
    "data.max_documents",
    "data.audio_capacity",
    "data.round_to",
    "model.encoder",  # None
    "compute.dtype",
    "compute.fp8*",  # compute.fp8_experts, in lines of older runs
    "train.validation_batches",
    "train.validate_ema",
    "train.max_new_tokens",
    "train.normaliser",
)
"""Settings that every metric of validation depends on, by their dotted names."""
BY_REWARD = (
    "rollout.validation_prompts",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.rewards",
    "rollout.reward_options",
)
"""Further ones of validation_reward, which is that of the likeliest answers: their temperature is 0."""
BY_PREFERENCES = ("train.objective", "train.objective_options", "posttraining.reference*")
"""Further ones of validation_preference_loss."""


def measured_by(config: Config, data: SpeechData) -> dict[str, Any]:
    """Returns what the run's validation depends on, as JSON: settings by their dotted names, the contents of
    the sets, and the tokens that end an answer. {} for a run without validation sets."""
    if not data.has_validation:
        return {}
    by = {"reward": BY_REWARD, "preferences": BY_PREFERENCES}.get(config.train.best_by, ())
    encoder = config.model.encoder
    of_encoder = [f"model.encoder.{name}" for name in (encoder.read_with_others if encoder else ())]
    names = (*ALWAYS, *of_encoder, *by)
    fields = {name: value for name, value in flat(asdict(config)).items() if is_any(name, names)}
    return fields | {
        "data.validation_manifest": data.validation_digests,
        "end tokens": list(data.stop_ids),
    }


def by_validation(lines: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """Divides the lines of metrics.jsonl where settings that validation depends on were changed: values of
    validation metrics are compared, and joined in a curve, within a part alone. At least one part."""
    names = (*ALWAYS, *BY_REWARD, *BY_PREFERENCES, "data.validation_*")
    starts = [
        number
        for number, line in enumerate(lines)
        if any(is_any(each.partition(" ")[0], names) for each in line.get("changed", "").split(", "))
    ]
    bounds = [0, *(x for x in starts if x), len(lines)]
    return [lines[first:last] for first, last in pairwise(bounds)]


def is_any(name: str, patterns: Collection[str]) -> bool:
    """Whether the dotted name matches one of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)
