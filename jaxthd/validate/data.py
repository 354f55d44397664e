"""Rules about data: manifests, validation sets, prompts, chat templates, SpecAugment."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from jaxthd.config import AugmentConfig, Config
from jaxthd.data.audio.features import SAMPLE_RATE
from jaxthd.data.mixing import wrong_weights
from jaxthd.data.sources.columns import FIELDS, is_column
from jaxthd.errors import UserError
from jaxthd.validate.rules import DeviceFacts, Finding, Group, finding_of

RULES = Group()


@RULES.rule
def _manifests(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    manifests, weights = config.data.manifest, config.data.weights
    if not manifests or "" in manifests:
        change = 'name a manifest in data.manifest, or "synthetic"'
        yield Finding(f"data.manifest is {manifests}", "one path or more, none of them empty", change)
    if wrong := wrong_weights(weights, len(manifests)):
        yield Finding(*wrong)


@RULES.rule
def _columns(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """The columns are not known before the data is read."""
    for setting in config.data.columns:
        if not is_column(setting):
            fields = ", ".join(sorted(FIELDS))
            expected = f"FIELD=COLUMN, with one of the fields {fields}, or NAME= for one to leave out"
            yield Finding(f"data.columns has {setting!r}", expected, "correct data.columns")


@RULES.rule
def _validation_sets(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    sets = config.data.validation_sets
    for name, path, *_ in sets:
        if not path:
            found = f"data.validation_manifest has a set without a path, {name!r}"
            yield Finding(found, "NAME=PATH, or a path", "name a manifest, or remove the set")
        elif not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            yield Finding(
                f"data.validation_manifest has the name {name!r}, of {path}",
                "letters, digits, _, - and dots inside, because metrics and files have the name in theirs",
                "choose another name; a path that holds a = needs NAME= before it too",
            )
        elif name == "skipped":
            expected = "another, because skipped.jsonl lists the skipped documents"
            yield Finding("data.validation_manifest has the name 'skipped'", expected, "choose another name")
    for name, count in Counter(each.name for each in sets).items():
        if count > 1:
            yield Finding(
                f"data.validation_manifest has {count} sets of the name {name!r}",
                "different names",
                "write NAME=PATH for all but one of them",
            )


@RULES.rule
def _speech_without_encoder(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Other manifests are not known before they are read: their documents with recordings are skipped."""
    if config.model.encoder is not None:
        return
    expected = "text alone, because a model without an encoder takes no recordings"
    if any(_is_synthetic(path) for path in config.data.manifest):
        yield Finding(
            'data.manifest has "synthetic", which is speech, with model.encoder None',
            expected,
            "name a manifest of conversations in text in data.manifest, or give the model an encoder",
        )
    if any(_is_synthetic(each.path) for each in config.data.validation_sets):
        yield Finding(
            'data.validation_manifest has "synthetic", which is speech, with model.encoder None',
            expected,
            'name a manifest of conversations in text in data.validation_manifest, or "" for no validation',
        )


def _is_synthetic(path: str) -> bool:
    return path.partition(":")[0] == "synthetic"


@RULES.rule
def _prompt(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    mark, has_audio = config.data.audio_placeholder, config.data.audio_capacity > 0
    if not mark:
        expected = "a text, which stands for a recording in prompts and conversations"
        change = "set data.audio_placeholder to {audio}, for example"
        yield Finding("data.audio_placeholder is empty", expected, change)
        return
    if config.model.encoder is None:
        return
    count = config.data.prompt.count(mark)
    found = f"data.prompt {config.data.prompt!r} holds {mark} {count} times"
    if has_audio and count != 1:
        yield Finding(found, "exactly once, for the recording", f"write {mark} once in data.prompt")
    elif count and not has_audio:
        change = f"raise data.audio_capacity, or take {mark} out of data.prompt to train on text alone"
        yield Finding(found, "none, because no recording fits into data.audio_capacity 0", change)


@RULES.rule
def _chat_template(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    data = config.data
    if data.template == "chat_template" and data.tokenizer == "bytes":
        yield Finding(
            'data.template is "chat_template" with data.tokenizer "bytes"',
            "the folder of a checkpoint that has a chat template",
            "set data.tokenizer to that folder, or data.template to chatml or plain",
        )
    try:
        _ = data.template_variables
    except UserError:
        yield Finding(
            f"data.template_options is {data.template_options!r}",
            'a JSON object such as {"enable_thinking": false}',
            "correct data.template_options",
        )
        return
    if data.template_options and data.template != "chat_template":
        yield Finding(
            f'data.template_options are given with data.template "{data.template}"',
            '"chat_template", which alone reads them',
            'set data.template to "chat_template", or data.template_options to ""',
        )


@RULES.rule
def _filter(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    for name in ("seconds", "tokens_per_second", "characters_per_second"):
        least, most = getattr(config.data.filter, name)
        if not 0 <= least < math.inf or not 0 <= most < math.inf or 0 < most < least:
            yield Finding(
                f"data.filter.{name} is ({least:g}, {most:g})",
                "two numbers from 0 on, the most above the least or 0, because no item is used otherwise",
                f"set data.filter.{name} to the least and the most",
            )
        if config.model.encoder is None and (least > 0 or most > 0):
            yield Finding(
                f"data.filter bounds {name} with model.encoder None",
                "no bounds, because a model without an encoder takes no recordings",
                f"set data.filter.{name} to 0 0",
            )


@RULES.rule
def _augment(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    augment = config.data.augment
    if config.model.encoder is None and augment != AugmentConfig():
        expected = "the defaults, because a model without an encoder takes no recordings"
        yield Finding("data.augment is set with model.encoder None", expected, "take data.augment out")
        return
    if any(not 0.5 <= speed <= 2 for speed in augment.speed):
        found = f"data.augment.speed is {augment.speed}"
        yield Finding(found, "speeds from 0.5 to 2", "set it to 0.9 1.0 1.1, for example")
    least, most = augment.noise_snr
    if not -100 <= least <= most <= 100:
        found = f"data.augment.noise_snr is {augment.noise_snr}"
        yield Finding(found, "the least dB, then the most, within -100 to 100", "set it to 5 20, for example")
    least, most = augment.low_pass_hz
    if not 100 <= least <= most < SAMPLE_RATE / 2:
        found, change = (
            f"data.augment.low_pass_hz is {augment.low_pass_hz}",
            "set it to 2000 4000, for example",
        )
        yield Finding(found, "the least Hz, then the most, from 100 to below 8000", change)
    try:
        shares = augment.probabilities
    except UserError as error:
        yield finding_of(error)
        return
    for change, share in shares.items():
        if not 0 <= share <= 1:
            found = f"data.augment.shares has {change}={share:g}"
            yield Finding(found, "0 to 1, a share of the recordings", "correct data.augment.shares")


@RULES.rule
def _spec_augment(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    masks, encoder = config.data.spec_augment, config.model.encoder
    for name, (count, width), are_sizes, expected in (
        ("freq", masks.freq, masks.freq[1] >= 1, "mel bands of the widest, 1 or more"),
        ("time", masks.time, 0 <= masks.time[1] < 1, "the longest, a share from 0 to below 1"),
    ):
        found = f"data.spec_augment.{name} is ({count}, {width:g})"
        if count < 0 or not are_sizes:
            expected = f"the number of masks, and {expected}"
            yield Finding(found, expected, f"correct data.spec_augment.{name}")
        elif count and encoder is None:
            yield Finding(
                f"{found} with model.encoder None",
                "0 masks, because a model without an encoder has no features to mask",
                f"set data.spec_augment.{name} to 0 {width:g}",
            )
    if encoder is not None and masks.freq[0] and masks.freq[1] >= encoder.num_mels:
        count, width = masks.freq
        yield Finding(
            f"data.spec_augment.freq is ({count}, {width}) with {encoder.num_mels} mel bands",
            "fewer bands than model.encoder.num_mels, because a mask could cover every band",
            f"set data.spec_augment.freq to {count} {encoder.num_mels // 3}, for example",
        )
