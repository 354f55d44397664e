"""What is read: manifests, prompts, templates, SpecAugment."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.validate.rules import DeviceFacts, Group, Problem

RULES = Group()


@RULES.rule("data.manifest", "data.tarred_audio", "data.weights")
def _manifests(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    manifests, tars, weights = config.data.manifest, config.data.tarred_audio, config.data.weights
    if not manifests or "" in manifests:
        change = 'name a manifest in data.manifest, or "synthetic"'
        yield Problem(f"data.manifest is {manifests}", "one path or more, none of them empty", change)
    if tars and len(tars) != len(manifests):
        found = f"data.tarred_audio names {len(tars)} sets of tar files for {len(manifests)} manifests"
        expected = 'one for each manifest ("" for plain files), or none'
        yield Problem(found, expected, "correct data.tarred_audio")
    if weights and len(weights) != len(manifests):
        found = f"data.weights has {len(weights)} numbers for {len(manifests)} manifests"
        yield Problem(found, "one for each manifest, or none", "correct data.weights")
    if not all(0 < weight < math.inf for weight in weights):
        change = "leave a manifest that is not to be read out of data.manifest"
        yield Problem(f"data.weights is {weights}", "finite numbers above 0", change)


@RULES.rule("data.validation_manifest")
def _validation_sets(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    sets = config.data.validation_sets
    for name, path, _ in sets:
        if not path:
            found = f"data.validation_manifest has a set without a path, {name!r}"
            yield Problem(found, "NAME=PATH, or a path", "name a manifest, or leave it out")
        elif not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            yield Problem(
                f"data.validation_manifest has the name {name!r}, of {path}",
                "letters, digits, _, - and dots inside, because metrics and files bear it",
                "choose another name; a path that holds a = needs one before it too",
            )
        elif name == "skipped":
            expected = "another, because skipped.jsonl lists the documents left out"
            yield Problem("data.validation_manifest has the name 'skipped'", expected, "choose another name")
    for name, count in Counter(name for name, _, _ in sets).items():
        if count > 1:
            yield Problem(
                f"data.validation_manifest has {count} sets of the name {name!r}",
                "a name of its own for each",
                "write NAME=PATH for all but one of them",
            )


@RULES.rule("data.prompt", "data.audio_placeholder", "data.audio_capacity")
def _prompt(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mark, has_audio = config.data.audio_placeholder, config.data.audio_capacity > 0
    if not mark:
        expected = "what stands for a recording in prompts and conversations"
        yield Problem(
            "data.audio_placeholder is empty", expected, "set data.audio_placeholder to {audio}, say"
        )
        return
    count = config.data.prompt.count(mark)
    found = f"data.prompt {config.data.prompt!r} holds {mark} {count} times"
    if has_audio and count != 1:
        yield Problem(found, "exactly once, for the recording", f"write {mark} once in data.prompt")
    elif count and not has_audio:
        change = f"raise data.audio_capacity, or take {mark} out of data.prompt to train on text alone"
        yield Problem(found, "none, because data.audio_capacity is 0 and no recording fits", change)


@RULES.rule("data.template", "data.template_options", "data.tokenizer")
def _chat_template(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    data = config.data
    if data.template == "chat_template" and data.tokenizer == "bytes":
        yield Problem(
            'data.template is "chat_template" with data.tokenizer "bytes"',
            "the folder of a checkpoint, which brings one",
            "set data.tokenizer to that folder, or data.template to chatml or plain",
        )
    try:
        _ = data.template_variables
    except UserError:
        yield Problem(
            f"data.template_options is {data.template_options!r}",
            'a JSON object such as {"enable_thinking": false}',
            "correct data.template_options",
        )
        return
    if data.template_options and data.template != "chat_template":
        yield Problem(
            f'data.template_options are given with data.template "{data.template}"',
            '"chat_template", which alone reads them',
            "take one of the two back",
        )


@RULES.rule("data.spec_augment", "model.encoder.num_mels")
def _spec_augment(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    masks, mels = config.data.spec_augment, config.model.audio_encoder.num_mels
    if masks.freq_masks and masks.freq_width >= mels:
        yield Problem(
            f"data.spec_augment.freq_width is {masks.freq_width} with {mels} mel bands",
            "less than model.encoder.num_mels, or a mask may leave nothing",
            f"set data.spec_augment.freq_width to {mels // 3}, say",
        )
    if masks.time_masks and masks.time_width >= 1:
        yield Problem(
            f"data.spec_augment.time_width is {masks.time_width}",
            "less than 1, being a fraction of the recording; more may leave nothing",
            "set data.spec_augment.time_width to 0.05",
        )
