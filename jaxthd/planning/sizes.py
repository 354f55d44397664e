"""Derives the sizes of a run that were not given, from the lengths of its documents: of its buffers, and of
the answers that validation decodes.

The run's config.json holds them, so a run that is continued has the same ones.
"""

import math
import sys
import time
from collections.abc import Sequence
from itertools import chain, dropwhile, takewhile
from pathlib import Path

import numpy as np

from jaxthd.config import Config, DataConfig
from jaxthd.config.values import Unset, with_value
from jaxthd.data.example import Example
from jaxthd.data.sources.registry import read_source, validation_sources
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.files.run_folder import holds_a_run, read_config
from jaxthd.objectives.answers import draws_answers
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.planning.lengths import Lengths, draw, first, measure, read_examples, slots_of
from jaxthd.planning.search import SIZES, with_needed, with_recommended_sizes, with_unset
from jaxthd.steps.forward import objective_of

MOST_READ = 10_000
"""Most documents whose lengths decide."""
MOST_SECONDS = 30.0
"""Seconds after which no further recording is opened for its length."""
MOST_PACKED = 4_000
"""Documents that are packed for each size that is tried: thirty sizes take about 3 s."""
AT_A_TIME = 500
_ANSWERS = "train.max_new_tokens"
MARGIN = 1.25
"""Room for documents that were not read, over the longest of those that were."""
ANSWER_MARGIN = 1.25
"""Room of an answer over the longest reference: an answer with a few words too many still ends by itself."""
SLOTS = 64
"""Token slots are a multiple of this, so that meshes of up to 32 context ranks can divide them."""


def with_sizes(config: Config, workdir: Path) -> Config:
    """The config with a number for each of data.capacity, data.max_documents, data.audio_capacity and
    train.max_new_tokens that was not given: that of the run in the workdir, or one that is derived now.

    Process 0 derives and prints them; all processes call it. Where answers to prompts are drawn, where
    batches are padded, and where data cannot be read, buffers keep the defaults.
    """
    if with_unset(config, config.data) is not config:
        (sizes, *_) = exchange(_of_run(workdir) or _derived(config) if is_first() else None)
        config = with_unset(config, DataConfig(**sizes))
    return with_answer_length(config, workdir)


def with_room(config: Config) -> Config:
    """The config whose buffers hold the longest document of its validation sets, where their sizes were not
    given. They are the defaults at least, and where lengths cannot be read. All processes call it."""
    if with_unset(config, config.data) is config:
        return config
    (sizes, *_) = exchange(_room(config) if is_first() else None)
    return with_unset(config, DataConfig(**sizes))


def _room(config: Config) -> dict[str, int]:
    try:
        found = held_out(config)
    except (UserError, OSError):  # reading the data raises it again, if need be
        return _numbers(config.data)
    slots = max((int(slots_of(x, config).max(initial=0)) for x in found), default=0)
    frames = max((int(x.frames.max(initial=0)) for x in found), default=0)
    return _numbers(with_needed(config, (slots, frames), unit=SLOTS).data)


def with_answer_length(config: Config, workdir: Path | None = None) -> Config:
    """The config with a number for train.max_new_tokens, if it was not given: that of the run in the workdir,
    or one with room for the longest answer of the validation sets. All processes call it.

    Warns of a given number that is too small for one of these. Without a validation set that can be read the
    config stays as it is.
    """
    given = config.train.max_new_tokens
    if isinstance(given, Unset) and workdir and holds_a_run(workdir):
        return with_value(config, _ANSWERS, int(read_config(workdir).train.max_new_tokens))
    (longest, *_) = exchange(_longest_answer(config) if is_first() and given else None)
    if not longest:
        return config
    most = math.ceil(ANSWER_MARGIN * longest)
    if not isinstance(given, Unset):
        if given < longest and is_first():
            print(
                f"warning: {_ANSWERS} is {given}, but an answer to validate has {longest} tokens: it would "
                f"be cut off, and count as wrong. Leave {_ANSWERS} out, or set {most}",
                file=sys.stderr,
            )
        return config
    if is_first():
        print(f"{_ANSWERS} {most}: derived from the longest answer to validate, of {longest} tokens")
    return with_value(config, _ANSWERS, most)


def _longest_answer(config: Config) -> int:
    """Most supervised tokens after the last prompt of a document of the validation sets; 0 for none."""
    try:
        template = PromptTemplate(config.data, load_tokenizer(config.data.tokenizer))
        sources = validation_sources(config.data).values()
        documents = chain(*(read_source(source, config.data)[0][:MOST_READ] for source in sources))
        return max((_answer_tokens(template, x) for x in documents), default=0)
    except (UserError, OSError):  # reading the data raises it again, if need be
        return 0


def _answer_tokens(template: PromptTemplate, example: Example) -> int:
    """Supervised tokens of the last answer; 0 for an example without one, or that cannot be used."""
    if example.alternatives or example.is_unanswered:
        return 0
    try:
        _, supervised = template(example.turns)
    except ValueError:
        return 0
    up_to_end = dropwhile(lambda is_supervised: not is_supervised, reversed(supervised))
    return sum(1 for _ in takewhile(bool, up_to_end))


def _of_run(workdir: Path) -> dict[str, int] | None:
    """The sizes of the run in the workdir; None without one."""
    return _numbers(read_config(workdir).data) if holds_a_run(workdir) else None


def _derived(config: Config) -> dict[str, int]:
    """The sizes of buffers for the lengths of the config's documents."""
    if draws_answers(objective_of(config)) or config.data.packing == "padded":
        return _numbers(config.data)
    try:
        return _for_data(config)
    except (UserError, OSError) as error:  # reading the data raises it again, if need be
        why = str(error).splitlines()[0]
        print(f"{_text(config.data)}: the defaults, since lengths of documents cannot be read: {why}")
        return _numbers(config.data)


def _for_data(config: Config) -> dict[str, int]:
    """The sizes that jaxthd plan recommends, raised for what a sample lacks and validation brings."""
    ends = time.monotonic() + MOST_SECONDS
    sources = read_examples(config, MOST_READ, say=lambda line: None)
    found = [_measured(examples, config, ends) for examples in sources]
    stream = draw(found, config.data, least=MOST_PACKED)
    count = sum(len(lengths.tokens) for lengths in found)
    is_all = sum(map(len, sources)) < MOST_READ and time.monotonic() < ends
    best = with_recommended_sizes(first(stream, MOST_PACKED), config)
    needed = needed_sizes(config, found, held_out(config, ends), is_all=is_all)
    sizes = with_unset(config, with_needed(best, needed, unit=SLOTS).data).data
    print(f"{_text(sizes)}: derived from the lengths of {count:,} documents (jaxthd plan compares sizes)")
    return _numbers(sizes)


_DEFAULTS = (DataConfig().capacity, DataConfig().audio_capacity)


def _measured(examples: Sequence[Example], config: Config, ends: float) -> Lengths:
    """The lengths of the examples, or of the first of them where the time is over."""
    parts = [measure(examples[:AT_A_TIME], config)[0]]
    for start in range(AT_A_TIME, len(examples), AT_A_TIME):
        if time.monotonic() > ends:
            break
        parts.append(measure(examples[start : start + AT_A_TIME], config)[0])
    tokens, frames, seconds = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return Lengths(tokens, frames, seconds, list(chain(*(part.pieces for part in parts))))


def needed_sizes(
    config: Config, found: Sequence[Lengths], validated: Sequence[Lengths], *, is_all: bool
) -> tuple[int, int]:
    """(token slots, audio frames) that a buffer must have for the longest documents, but for what the
    defaults do not hold.

    found, validated: lengths of the documents of training and validation sets. is_all: whether `found` are
    all of them; else there is room for longer ones.
    """
    sets = [*((x, 1.0 if is_all else MARGIN) for x in found), *((x, 1.0) for x in validated)]
    slots, frames = 0, 0
    for lengths, room in sets:
        longest = (math.ceil(room * x.max(initial=0)) for x in (slots_of(lengths, config), lengths.frames))
        # The defaults held it, so it must not be skipped; what they did not hold is the search's affair.
        of_set = (min(x, most) for x, most in zip(longest, _DEFAULTS, strict=True))
        slots, frames = (max(pair) for pair in zip((slots, frames), of_set, strict=True))
    return slots, frames


def held_out(config: Config, ends: float | None = None) -> list[Lengths]:
    """The lengths of the validation sets' documents.

    ends: when to stop opening recordings, of time.monotonic(); None: after MOST_SECONDS.
    """
    ends = time.monotonic() + MOST_SECONDS if ends is None else ends
    sources = validation_sources(config.data).values()
    read = (read_source(source, config.data)[0] for source in sources)
    return [_measured(examples[:MOST_READ], config, ends) for examples in read]


def _numbers(data: DataConfig) -> dict[str, int]:
    """The sizes as numbers, no longer unset."""
    return {name: int(getattr(data, name)) for name in SIZES}


def _text(data: DataConfig) -> str:
    return ", ".join(f"data.{name} {getattr(data, name):,}" for name in SIZES)
