"""The group `data` of a NeMo experiment: data sets, prompts, sizes, filters and augmentation."""

import math
from typing import Any

from jaxthd.errors import UserError
from jaxthd.nemo.data_sets import DataSet, data_sets
from jaxthd.nemo.translation import Translation

TRAIN, VALIDATION = "data.train_ds", "data.validation_ds"
TOKENS_A_SECOND = 12.5
SLOTS = 64
"""Token slots are a multiple of this, as those that a run derives."""


def translate_data(found: Translation) -> None:
    """The settings of the data. Raises UserError where train_ds names none."""
    if found.get(f"{TRAIN}.multi_config"):
        raise UserError(
            f"{TRAIN}.multi_config is true: data sets with samplers of their own, and one packer is "
            f"for all; expected one input_cfg: write the groups' entries into {TRAIN}.input_cfg, with weights"
        )
    training = data_sets(found, found.get(TRAIN, {}), TRAIN)
    where = {each.where for each in training}
    key = where.pop() if len(where) == 1 else f"{TRAIN}.input_cfg"
    found.set("data.manifest", tuple(each.manifest for each in training), key)
    if any(each.weight is not None for each in training):
        _weigh(found, training)
    if columns := _one(found, training, "text_field", lambda each: each.columns):
        found.set("data.columns", columns, TRAIN)
    _prompt(found, training)
    _validation(found, training)
    _sizes(found)
    _stream(found)
    _filters(found)
    _augmentation(found)


def _weigh(found: Translation, training: list[DataSet]) -> None:
    """The weights. A set that has none beside others that have one gets an equal share."""
    known = [each.weight for each in training if each.weight is not None]
    if len(known) < len(training):
        key = next(each.where for each in training if each.weight is None)
        found.note(key, "it is drawn by its size in NeMo; here it has the mean weight of the others")
    mean = math.fsum(known) / len(known)
    weights = tuple(round(mean if each.weight is None else each.weight, 6) for each in training)
    found.set("data.weights", weights, f"{TRAIN}.input_cfg")


def _one(found: Translation, sets: list[DataSet], name: str, value: Any) -> Any:
    """The value that all sets have; that of the first where they differ, which is listed as lost."""
    first = value(sets[0])
    for each in sets[1:]:
        if value(each) != first:
            key = f"{each.where}.{name}"
            found.lose(key, value(each), f"there is one for all sets, that of the first: {first!r}")
    return first


def _prompt(found: Translation, training: list[DataSet]) -> None:
    """The user's turn: the context, a space, the recording."""
    tag = str(found.get(f"{TRAIN}.audio_locator_tag", found.get("model.audio_locator_tag", "{audio}")))
    found.set("data.audio_placeholder", tag, "model.audio_locator_tag")
    context = _one(found, training, "tags.context", lambda each: each.tags.get("context"))
    key = f"{training[0].where}.tags.context"
    found.set("data.prompt", tag if context is None else f"{context} {tag}", key)
    if system := _one(found, training, "tags.system_prompt", lambda each: each.tags.get("system_prompt")):
        found.set("data.system_prompt", str(system), f"{training[0].where}.tags.system_prompt")


def _validation(found: Translation, training: list[DataSet]) -> None:
    """The validation sets, each by its name. They have the prompt of training."""
    group = found.get(VALIDATION) or {}
    datasets = group.get("datasets") or {}
    shared = {name: value for name, value in group.items() if name != "datasets"}
    manifests = []
    for name, own in datasets.items():
        sets = data_sets(found, shared | own, f"{VALIDATION}.datasets.{name}")
        for number, each in enumerate(sets):
            label = f"{name}_{number}" if len(sets) > 1 else name
            manifests.append(f"{label}={each.manifest}")
            if each.tags.get("context") != training[0].tags.get("context"):
                found.lose(
                    f"{each.where}.tags.context",
                    each.tags.get("context"),
                    "validation has the prompt of training",
                )
    if not datasets and group:
        manifests = [each.manifest for each in data_sets(found, group, VALIDATION)]
    given: str | tuple[str, ...] = tuple(manifests)
    if len(manifests) < 2:
        given = manifests[0] if manifests else ""
    found.set("data.validation_manifest", given, VALIDATION)


def _sizes(found: Translation) -> None:
    """Token slots of a buffer, of a batch that NeMo bounds by its tokens or by its seconds."""
    is_multimodal = bool(found.get(f"{TRAIN}.use_multimodal_sampling"))
    name = "batch_tokens" if is_multimodal else "batch_duration"
    size = found.get(f"{TRAIN}.{name}")
    if size is None:
        return
    tokens = float(size) if is_multimodal else float(size) * TOKENS_A_SECOND
    found.set("data.capacity", math.ceil(tokens / SLOTS) * SLOTS, f"{TRAIN}.{name}")
    if not is_multimodal:
        why = (
            f"{size} s of audio are {tokens:g} slots; texts come on top, so fewer recordings fit than in NeMo"
        )
        found.note(f"{TRAIN}.{name}", why)


def _stream(found: Translation) -> None:
    """The order and the workers."""
    shuffle = bool(found.get(f"{TRAIN}.shuffle", False))
    found.set("data.shuffle", shuffle, f"{TRAIN}.shuffle")
    found.set("data.workers", int(found.get(f"{TRAIN}.num_workers", 0)), f"{TRAIN}.num_workers")
    seed = found.get(f"{TRAIN}.seed", 0)
    if not isinstance(seed, int):
        found.note(f"{TRAIN}.seed", f"{seed!r} is another number in each run of NeMo's; here it is 0")
        seed = 0
    for setting in ("data.seed", "train.seed"):
        found.set(setting, seed, f"{TRAIN}.seed")


def _filters(found: Translation) -> None:
    """Bounds of seconds and of tokens a second; 0 stands for none."""
    for setting, low, high in (
        ("data.filter.seconds", "min_duration", "max_duration"),
        ("data.filter.tokens_per_second", "min_tps", "max_tps"),
    ):
        keys = (f"{TRAIN}.{low}", f"{TRAIN}.{high}")
        least, most = (found.get(key) for key in keys)
        if isinstance(most, list):
            found.lose(keys[1], most, "one bound for all, and not one a bucket")
            most = None
        bounds = (max(float(least or 0), 0.0), 0.0 if most is None or math.isinf(most) else float(most))
        if any(bounds):
            found.set(setting, bounds, *keys)


def _augmentation(found: Translation) -> None:
    """Noises, rooms, speeds and narrow channels."""
    shares: dict[str, float] = {}
    if noise := found.get(f"{TRAIN}.noise_path"):
        path = noise.get("manifest_filepath") if isinstance(noise, dict) else noise
        if not isinstance(path, str) or str(path).endswith((".yaml", ".gz")):
            found.lose(f"{TRAIN}.noise_path", noise, "noises are lines of a NeMo manifest")
        else:
            found.set("data.augment.noise_manifest", found.path(path), f"{TRAIN}.noise_path")
            snr = _pair(found.get(f"{TRAIN}.noise_snr", (10.0, 20.0)), f"{TRAIN}.noise_snr")
            found.set("data.augment.noise_snr", snr, f"{TRAIN}.noise_snr")
            shares["noise"] = float(found.get(f"{TRAIN}.noise_mix_prob", 0.5))
    if found.get(f"{TRAIN}.perturb_speed"):
        found.set("data.augment.speed", (0.9, 1.0, 1.1), f"{TRAIN}.perturb_speed")
    if found.get(f"{TRAIN}.rir_enabled"):
        if path := found.get(f"{TRAIN}.rir_path"):
            found.set("data.augment.room_manifest", found.path(path), f"{TRAIN}.rir_path")
            shares["room"] = float(found.get(f"{TRAIN}.rir_prob", 0.5))
            why = 'it needs a line {"audio_filepath": "room.wav"} a room; NeMo has recordings of Lhotse'
            found.note(f"{TRAIN}.rir_path", why)
        else:
            found.lose(f"{TRAIN}.rir_enabled", True, "rooms are recordings of a manifest, and not made up")
    if found.get(f"{TRAIN}.lowpass_enabled"):
        key = f"{TRAIN}.lowpass_frequencies_interval"
        found.set("data.augment.low_pass_hz", _pair(found.get(key, (3500.0, 8000.0)), key), key)
        shares["low_pass"] = float(found.get(f"{TRAIN}.lowpass_prob", 0.5))
    if shares:
        keys = (f"{TRAIN}.{name}" for name in ("noise_mix_prob", "rir_prob", "lowpass_prob"))
        found.set("data.augment.shares", tuple(f"{name}={share:g}" for name, share in shares.items()), *keys)


def _pair(value: Any, key: str) -> tuple[float, float]:
    """Two numbers. Raises UserError for anything else."""
    try:
        low, high = (float(x) for x in value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} is {value!r}; expected two numbers, such as [5, 20]: correct it") from error
    return low, high
