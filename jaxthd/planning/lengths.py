"""The lengths of a data set's documents, from manifests and the headers of recordings."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxthd.config import AugmentConfig, Config, DataConfig
from jaxthd.config.front_end import SAMPLE_RATE, units_taken
from jaxthd.data.audio.augment import drawn_speed
from jaxthd.data.audio.recordings import MIN_SAMPLES, AudioError, recording_length
from jaxthd.data.example import Clip, Example, Samples
from jaxthd.data.filters import Filter
from jaxthd.data.mismatched import WithMismatched
from jaxthd.data.mixing import mixing_weights
from jaxthd.data.sources.columns import require_columns
from jaxthd.data.sources.registry import read_source, training_sources
from jaxthd.data.speech import augmented_key
from jaxthd.data.text.prompt import PromptTemplate, mark_ids
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.data.usable import usable_examples
from jaxthd.errors import UserError
from jaxthd.objectives import make_objective
from jaxthd.objectives.answers import draws_answers, needs_mismatched
from jaxthd.packing.document import segment_lengths

MOST_READ = 100_000
"""Most documents whose lengths are measured; a larger data set is sampled with a seed."""
LEAST_DRAWN = 20_000
"""Fewest documents of a stream to pack. A stream is whole epochs, each in another order."""


class Lengths(NamedTuple):
    """Documents as the packer sees them, one entry each.

    tokens: audio slots included; with answers, those of all segments (posttraining.share_prompts).
    frames: audio frames that the document takes in a buffer. seconds: of audio. pieces: frames that each
    piece of audio takes in the buffer, in whole units.
    """

    tokens: Int[np.ndarray, " n"]
    frames: Int[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]
    pieces: list[list[int]]


def read_examples(
    config: Config, most: int | None = None, say: Callable[[str], None] = print
) -> list[list[Example]]:
    """The usable examples of each training data set, or a sample if there are more than `most`.

    most: None for MOST_READ.

    Raises UserError without a manifest, if data.weights has another length, and as reading the data does.
    """
    data, sources, most = config.data, [], most or MOST_READ
    if not data.manifest or len(data.weights) not in (0, len(data.manifest)):
        raise UserError(
            f"{len(data.manifest)} manifests and {len(data.weights)} weights; expected one manifest or more, "
            "and no weights or one for each: correct data.manifest or data.weights"
        )
    objective = make_objective(config.train.objective, config.train.objective_options)
    draws = draws_answers(objective)
    read = training_sources(data, prompts=draws)
    for number, source in enumerate(read):
        examples, skipped = read_source(source, data, number)
        usable, others = usable_examples(examples, config.train.objective, objective, prompts=draws)
        skips = f"{len(skipped) + len(others):,} lines skipped"
        say(f"{source.title}: {len(usable):,} documents, {skips}")
        sources.append(usable)
    require_columns([source.columns for source in read])
    if needs_mismatched(objective):
        sources = _with_mismatched(sources, config)
    total = sum(map(len, sources))
    if total <= most:
        return sources
    say(f"measured: a random sample of {most:,} of {total:,} documents (seed {data.seed})")
    rng = np.random.default_rng(data.seed)
    return [
        [x[i] for i in rng.choice(len(x), math.ceil(most * len(x) / total), replace=False)] for x in sources
    ]


def _with_mismatched(sources: list[list[Example]], config: Config) -> list[list[Example]]:
    """The examples with answers of others, as in the first epoch."""
    data, sizes = config.data, list(map(len, sources))
    together = sources if mixing_weights(data, sizes) else [list(chain(*sources))]
    mixed = [WithMismatched(examples, data.seed) for examples in together]
    changed = chain(*([each.of_epoch(i, 0) for i in range(len(each))] for each in mixed))
    return [list(islice(changed, size)) for size in sizes]


def measure(examples: Sequence[Example], config: Config) -> tuple[Lengths, int]:
    """Returns (lengths of the documents that the loader makes of `examples`, number of unusable examples).

    A duration that the manifest rounds up may give one encoder frame too many; all else is exact. A text-only
    model cannot use examples with recordings. The speed of recordings (data.augment) is that of the first
    epoch; as in training, none is changed where that makes the document too large.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    template, kept = PromptTemplate(config.data, tokenizer), Filter(config.data.filter, tokenizer)
    template.check_prompts(config.data)
    encoder, share_prompts = config.model.encoder, config.posttraining.share_prompts
    objective = make_objective(config.train.objective, config.train.objective_options)
    augment = AugmentConfig() if objective.is_policy else config.data.augment
    unit = encoder.unit if encoder else (1, 1)
    clips = [clip for example in examples for clip in example.clips]
    with ThreadPoolExecutor(16) as threads:
        samples = iter(list(threads.map(clip_samples, clips)))
    rows: list[tuple[int, float, list[int]]] = []
    for example in examples:
        found = [next(samples) for _ in example.clips]
        try:
            prompt, answers = _written(template, example)
        except ValueError:
            continue
        if any(n < MIN_SAMPLES for n in found) or (found and not encoder):
            continue
        if kept.why_dropped(example, sum(found) / SAMPLE_RATE):
            continue
        for heard in dict.fromkeys((_played(example, found, augment, config.data.seed), tuple(found))):
            made_of = [list(encoder.pieces(n)) for n in heard] if encoder else []
            pieces = list(chain(*made_of))
            frames = [units_taken(x.frames, x.first + x.tokens, unit) * unit[0] for x in pieces]
            tokens_of = [sum(piece.tokens for piece in made) for made in made_of]
            marks = mark_ids(encoder, tokenizer, tokens_of) if encoder else []
            of_audio = sum(tokens_of) + sum(len(ids) for clip in marks for _, ids in clip)
            segments = segment_lengths(prompt - len(found) + of_audio, answers, share_prompts)
            if _fits(segments, sum(frames), config):
                break
        seconds = encoder.seconds(sum(n // encoder.frame_samples for n in heard)) if encoder else 0.0
        rows.append((sum(segments), seconds, frames))
    tokens, times, taken = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    total_frames = np.array([sum(c) for c in taken], int)
    lengths = Lengths(np.array(tokens, int), total_frames, np.array(times, float), taken)
    return lengths, len(examples) - len(rows)


def _played(example: Example, samples: Sequence[int], augment: AugmentConfig, seed: int) -> tuple[int, ...]:
    """Samples of an example's recordings at the speeds of the first epoch."""
    keys = [augmented_key(example.key, number) for number in range(len(samples))]
    faster = [round(n / drawn_speed(augment, seed, 0, key)) for n, key in zip(samples, keys, strict=True)]
    return tuple(new if new >= MIN_SAMPLES else n for n, new in zip(samples, faster, strict=True))


def _fits(segments: Sequence[int], frames: int, config: Config) -> bool:
    data = config.data
    slots = sum(-(-n // data.round_to) * data.round_to for n in segments)
    return slots <= data.capacity and len(segments) <= data.max_documents and frames <= data.audio_capacity


def _written(template: PromptTemplate, example: Example) -> tuple[int, list[int]]:
    """Tokens of the prompt and of each answer; of all turns and none, where there are no alternatives."""
    if not example.alternatives:
        return len(template(example.turns)[0]), []
    texts = [alternative.text for alternative in example.alternatives]
    prompt, answers = template.answers(example.turns, texts)
    return len(prompt), [len(ids) for ids, _ in answers]


def clip_samples(clip: Clip | Samples) -> int:
    """Samples at 16 kHz of a recording, from the manifest or the file; 0 for an unreadable file."""
    if clip.duration is not None:
        return round(clip.duration * SAMPLE_RATE)
    assert isinstance(clip, Clip)
    try:
        length = recording_length(clip.path, clip.member)
    except AudioError:
        return 0
    return max(round((length.frames - round(clip.offset * length.rate)) * SAMPLE_RATE / length.rate), 0)


def draw(sources: Sequence[Lengths], data: DataConfig, *, least: int | None = None) -> Lengths:
    """A stream of documents to pack, in a random order like the loader's, seeded by data.seed.

    Without mixing_weights: whole epochs of all sources, at least `least` documents (None: LEAST_DRAWN). With
    weights: the same number of documents, drawn from the sources in that proportion.
    Raises UserError for a source without documents, and as mixing_weights does.
    """
    rng, sizes = np.random.default_rng(data.seed), [len(source.pieces) for source in sources]
    weights = mixing_weights(data, sizes)
    if not all(sizes):
        raise UserError(f"the manifests give {sizes} usable documents; expected at least one of each")
    count = math.ceil((least or LEAST_DRAWN) / sum(sizes)) * sum(sizes)
    if not weights:
        sizes, weights = [sum(sizes)], [1.0]
    source_of = rng.choice(len(sizes), count, p=np.array(weights) / sum(weights))
    drawn, first = np.zeros(count, int), 0
    for source, size in enumerate(sizes):
        at = np.flatnonzero(source_of == source)
        epochs = [rng.permutation(size) for _ in range(0, len(at), size)]
        drawn[at] = first + np.array(list(chain(*epochs)), int)[: len(at)]
        first += size
    tokens, frames, seconds = (np.concatenate([s[i] for s in sources])[drawn] for i in range(3))
    chunks = list(chain(*(source.pieces for source in sources)))
    return Lengths(tokens, frames, seconds, [chunks[i] for i in drawn])


def first(stream: Lengths, count: int) -> Lengths:
    """The first `count` documents of a stream."""
    tokens, frames, seconds, chunks = stream
    return Lengths(tokens[:count], frames[:count], seconds[:count], chunks[:count])


def slots_of(lengths: Lengths, config: Config) -> Int[np.ndarray, " n"]:
    """Token slots that each document takes, data.round_to's padding included."""
    return -(-lengths.tokens // config.data.round_to) * config.data.round_to
