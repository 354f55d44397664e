"""Packed buffers: their sizes, and their shares on the ranks."""

import math
from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.validate.rules import DeviceFacts, Finding, Group, multiples

RULES = Group()


@RULES.rule
def _round_to(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    unit, capacity = config.data.round_to, config.data.capacity
    if capacity % unit:
        divisor = math.gcd(unit, capacity)
        yield Finding(
            f"data.round_to is {unit} with data.capacity {capacity}",
            "a divisor of the capacity, because no document can fill the slots beyond its last multiple",
            f"set data.capacity to {multiples(capacity, unit)}, or data.round_to to {divisor}",
        )


@RULES.rule
def _max_documents(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    data = config.data
    if data.packing != "padded" and data.max_documents > data.capacity:
        yield Finding(
            f"data.max_documents is {data.max_documents} for a buffer of {data.capacity} tokens",
            "at most one document for each token: arrays of that size waste memory",
            f"set data.max_documents to {data.capacity} or less",
            is_warning=True,
        )


@RULES.rule
def _holds_a_chunk(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    data, encoder = config.data, config.model.encoder
    if encoder is None or not data.audio_capacity:
        return
    slots = -(-encoder.chunk_frames // SUBSAMPLING)
    for name, seconds, least, what in (
        ("audio_capacity", data.audio_capacity / 100, slots * SUBSAMPLING, "an encoder chunk"),
        ("capacity", data.capacity * SUBSAMPLING / 100, slots, "the tokens"),
    ):
        if getattr(data, name) < least:
            yield Finding(
                f"data.{name} is {getattr(data, name)}: recordings over {seconds} s are skipped",
                f"{least} or more, {what} of {encoder.chunk_seconds} s (model.encoder.chunk_seconds)",
                f"raise data.{name} if there are such recordings",
                is_warning=True,
            )
