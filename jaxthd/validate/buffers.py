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
def _audio_holds_a_chunk(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    frames, encoder = config.data.audio_capacity, config.model.encoder
    if encoder is None or not frames:
        return
    longest = -(-encoder.chunk_frames // SUBSAMPLING) * SUBSAMPLING
    if frames < longest:
        yield Finding(
            f"data.audio_capacity is {frames}: recordings over {frames / 100} s are skipped",
            f"{longest} or more, an encoder chunk of {encoder.chunk_seconds} s (model.encoder.chunk_seconds)",
            "raise data.audio_capacity if there are such recordings",
            is_warning=True,
        )


@RULES.rule
def _tokens_hold_a_chunk(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    capacity, encoder = config.data.capacity, config.model.encoder
    if encoder is None or not config.data.audio_capacity:
        return
    slots = -(-encoder.chunk_frames // SUBSAMPLING)
    if capacity < slots:
        yield Finding(
            f"data.capacity is {capacity}: recordings over {capacity * SUBSAMPLING / 100} s are skipped",
            f"{slots} or more, the tokens of {encoder.chunk_seconds} s (model.encoder.chunk_seconds)",
            "raise data.capacity if there are such recordings",
            is_warning=True,
        )
