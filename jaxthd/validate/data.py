"""Rules about data: buffers, manifests, validation sets, prompts, chat templates, what is done to audio."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.config.data import HELD_OUT, is_built_in, is_held_out
from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.mixing import wrong_weights
from jaxthd.data.sources.columns import FIELDS, is_column
from jaxthd.validate.rules import DeviceFacts, refusals
from jaxthd.validate.values import leaves

_OF_AUDIO = (
    "model.adapter_dim",
    "data.augment.",
    "data.filter.",
    "data.spec_augment.",
    "train.ctc_loss",
)
"""Settings, or beginnings of their names, that a model without an encoder has no use for."""


def _without_encoder(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Other manifests are not known before they are read: their documents with recordings are skipped."""
    if config.model.encoder is not None:
        return
    plain = {path: value for path, _, value in leaves(Config())}
    for path, _, value in leaves(config):
        if path.startswith(_OF_AUDIO) and value != plain[path]:
            yield Finding(
                f"{path} is {value!r} with model.encoder None",
                f"{plain[path]!r}, because a model without an encoder takes no recordings",
                f"set {path} to {plain[path]!r}, or give model.encoder",
            )
    for name, paths, otherwise in (
        ("manifest", config.data.manifest, "give the model an encoder"),
        ("validation_manifest", [x.path for x in config.data.validation_sets], '"" for no validation'),
    ):
        if any(map(is_built_in, paths)):
            yield Finding(
                f'data.{name} has "synthetic", which is speech, with model.encoder None',
                "text alone, because a model without an encoder takes no recordings",
                f"name a manifest of conversations in text in data.{name}, or {otherwise}",
            )


def _buffers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the sizes of packed buffers."""
    data, encoder = config.data, config.model.encoder
    unit, capacity = data.round_to, data.capacity
    if capacity % unit:
        divisor = math.gcd(unit, capacity)
        yield Finding(
            f"data.round_to is {unit} with data.capacity {capacity}",
            "a divisor of the capacity, because no document can fill the slots beyond its last multiple",
            f"set data.capacity to {multiples(capacity, unit)}, or data.round_to to {divisor}",
        )
    if data.packing != "padded" and data.max_documents > capacity:
        yield Finding(
            f"data.max_documents is {data.max_documents} for a buffer of {capacity} tokens",
            "at most one document for each token: arrays of that size waste memory",
            f"set data.max_documents to {capacity} or less",
            is_warning=True,
        )
    if encoder is None or not data.audio_capacity or encoder.longest is None:
        return
    frames, outputs = encoder.unit
    slots, what = encoder.units(encoder.longest) * outputs, encoder.longest_setting or encoder.title
    for name, has, least, of_what in (
        ("audio_capacity", data.audio_capacity, encoder.longest_taken, "the frames"),
        ("capacity", capacity / outputs * frames, slots, "the tokens"),
    ):
        if getattr(data, name) < least:
            yield Finding(
                f"data.{name} is {getattr(data, name)}: recordings over {encoder.seconds(has)} s do not fit",
                f"{least} or more, {of_what} of the longest piece ({what})",
                f"raise data.{name} if there are such recordings",
                is_warning=True,
            )


def _manifests(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """The columns of manifests are not known before the data is read."""
    manifests, weights = config.data.manifest, config.data.weights
    if not manifests or "" in manifests:
        change = 'name a manifest in data.manifest, or "synthetic"'
        yield Finding(f"data.manifest is {manifests}", "one path or more, none of them empty", change)
    if wrong := wrong_weights(weights, len(manifests)):
        yield Finding(*wrong)
    for setting in config.data.columns:
        if not is_column(setting):
            fields = ", ".join(sorted(FIELDS))
            expected = f"FIELD=COLUMN, with one of the fields {fields}, or NAME= for one to leave out"
            yield Finding(f"data.columns has {setting!r}", expected, "correct data.columns")


def _validation_sets(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the names of validation sets, and that there is one where prompts are drawn from it."""
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
    yield from refusals(lambda: config.data.held_out_share)
    paths, manifests = [each.path for each in sets], config.data.manifest
    if sum(map(is_held_out, paths)) > 1:
        yield Finding(
            f"data.validation_manifest is {config.data.validation_manifest}, with {HELD_OUT} twice",
            "one share that is held out of all training sets",
            f"write {HELD_OUT}:SHARE once",
        )
    is_of_others = sets and all(map(is_built_in, paths)) and not any(map(is_built_in, manifests))
    # A tokenizer of the built-in words is for data that says no others, such as preferences made of it.
    is_of_others = is_of_others and config.data.tokenizer != "synthetic"
    if is_of_others and manifests and config.model.encoder is not None:
        yield Finding(
            f"data.validation_manifest is {paths[0]!r}, built-in English speech, with data.manifest "
            f"{' '.join(manifests)}",
            "validation on data like that of the training",
            f"set data.validation_manifest to a data set of yours, or to {HELD_OUT}, which holds a share of "
            "the training data out",
            is_warning=True,
        )
    if config.rollout.validation_prompts and not sets:
        yield Finding(
            f"rollout.validation_prompts is {config.rollout.validation_prompts} without a validation set",
            "0, or data.validation_manifest",
            "give data.validation_manifest, or set rollout.validation_prompts to 0",
        )


def _prompts(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks what prompts are written with."""
    data = config.data
    mark, has_audio = data.audio_placeholder, data.audio_capacity > 0
    count = data.prompt.count(mark)
    found = f"data.prompt {data.prompt!r} holds {mark} {count} times"
    if not mark:
        expected = "a text, which stands for a recording in prompts and conversations"
        change = "set data.audio_placeholder to {audio}, for example"
        yield Finding("data.audio_placeholder is empty", expected, change)
    elif config.model.encoder is not None and has_audio and count != 1:
        yield Finding(found, "exactly once, for the recording", f"write {mark} once in data.prompt")
    elif config.model.encoder is not None and count and not has_audio:
        change = f"raise data.audio_capacity, or take {mark} out of data.prompt to train on text alone"
        yield Finding(found, "none, because no recording fits into data.audio_capacity 0", change)
    if data.template == "chat_template" and data.tokenizer == "bytes":
        yield Finding(
            'data.template is "chat_template" with data.tokenizer "bytes"',
            "the folder of a checkpoint that has a chat template",
            "set data.tokenizer to that folder, or data.template to chatml or plain",
        )
    wrong = list(refusals(lambda: data.template_variables))
    yield from wrong
    if data.template_options and data.template != "chat_template" and not wrong:
        yield Finding(
            f'data.template_options are given with data.template "{data.template}"',
            '"chat_template", which alone reads them',
            'set data.template to "chat_template", or data.template_options to ""',
        )


def _audio(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """What is done to recordings, and which are used."""
    data, encoder = config.data, config.model.encoder
    for name in ("seconds", "tokens_per_second", "characters_per_second"):
        least, most = getattr(data.filter, name)
        if not 0 <= least < math.inf or not 0 <= most < math.inf or 0 < most < least:
            yield Finding(
                f"data.filter.{name} is ({least:g}, {most:g})",
                "two numbers from 0 on, the most above the least or 0, because no item is used otherwise",
                f"set data.filter.{name} to the least and the most",
            )
    if encoder is None:
        return
    augment, masks, bands = data.augment, data.spec_augment, encoder.bands
    if any(not 0.5 <= speed <= 2 for speed in augment.speed):
        found = f"data.augment.speed is {augment.speed}"
        yield Finding(found, "speeds from 0.5 to 2", "set it to 0.9 1.0 1.1, for example")
    if not -100 <= augment.noise_snr[0] <= augment.noise_snr[1] <= 100:
        found = f"data.augment.noise_snr is {augment.noise_snr}"
        yield Finding(found, "the least dB, then the most, within -100 to 100", "set it to 5 20, for example")
    if not 100 <= augment.low_pass_hz[0] <= augment.low_pass_hz[1] < SAMPLE_RATE / 2:
        found = f"data.augment.low_pass_hz is {augment.low_pass_hz}"
        change = "set it to 2000 4000, for example"
        yield Finding(found, "the least Hz, then the most, from 100 to below 8000", change)
    wrong = list(refusals(lambda: augment.probabilities))
    yield from wrong
    for change, share in {} if wrong else augment.probabilities.items():
        if not 0 <= share <= 1:
            found = f"data.augment.shares has {change}={share:g}"
            yield Finding(found, "0 to 1, a share of the recordings", "correct data.augment.shares")
    for name, (count, width), are_sizes, expected in (
        ("freq", masks.freq, masks.freq[1] >= 1, "mel bands of the widest, 1 or more"),
        ("time", masks.time, 0 <= masks.time[1] < 1, "the longest, a share from 0 to below 1"),
    ):
        if count < 0 or not are_sizes:
            found = f"data.spec_augment.{name} is ({count}, {width:g})"
            yield Finding(found, f"the number of masks, and {expected}", f"correct data.spec_augment.{name}")
    count, width = masks.freq
    if count > 0 and not bands:
        found = f"data.spec_augment.freq is ({count}, {width}) with the front end {encoder.title}"
        expected = "0 masks over bands, because the numbers of its frames are no bands of a spectrum"
        yield Finding(found, expected, f"set data.spec_augment.freq to 0 {width}")
    elif count > 0 and width >= bands:
        yield Finding(
            f"data.spec_augment.freq is ({count}, {width}) with {bands} bands",
            "fewer bands than the features have, because a mask could cover every band",
            f"set data.spec_augment.freq to {count} {bands // 3}, for example",
        )


RULES = (_buffers, _manifests, _validation_sets, _without_encoder, _prompts, _audio)
