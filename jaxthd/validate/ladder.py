"""A ladder of buffer sizes: each can be used, and there are not too many."""

import re
from collections.abc import Iterator
from dataclasses import replace

from jaxthd.config import Config, Rung
from jaxthd.objectives.answers import draws_answers
from jaxthd.steps.forward import objective_of
from jaxthd.validate import buffers, mesh
from jaxthd.validate.rules import DeviceFacts, Finding, Group

RULES = Group()

_OF_RUNG = re.compile(rf"\bdata\.({'|'.join(Rung._fields)})\b")


@RULES.rule
def _sizes(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    *lower, top = config.data.ladder
    for number, rung in enumerate(lower):
        if min(rung.capacity, rung.max_documents, rung.audio_capacity + 1) < 1:
            yield Finding(
                f"data.rungs has {_words(rung)}",
                "one slot and one document at least, and 0 mel frames or more",
                "correct CAPACITY MAX_DOCUMENTS AUDIO_CAPACITY of that rung",
            )
        elif not _is_within(rung, top) or rung == top:
            yield Finding(
                f"data.rungs has {_words(rung)} with data.capacity, max_documents and audio_capacity "
                f"{_words(top)}",
                "sizes within these, and at least one smaller, because these decide what is packed",
                "lower that rung, or leave it out",
            )
        elif any(_is_within(rung, earlier) for earlier in lower[:number]):
            yield Finding(
                f"data.rungs has {_words(rung)} behind one that holds as much",
                "the cheapest first: a step takes the first that holds its batch, so this one is never used",
                "put it before the other, or leave it out",
            )


@RULES.rule
def _number(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    found, most = len(config.data.ladder), config.data.most_rungs
    if found > most:
        yield Finding(
            f"data.rungs and data.capacity are {found} sizes with data.most_rungs {most}",
            f"{most} or fewer, because each is a program that is compiled and kept",
            f"leave out {found - most} of data.rungs, or set data.most_rungs to {found}",
        )


@RULES.rule
def _draws(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    try:
        draws = draws_answers(objective_of(config))
    except ValueError:  # another rule says why
        return
    if config.data.rungs and draws:
        yield Finding(
            f"data.rungs is set with train.objective {config.train.objective!r}",
            "one size of buffers, because answers are packed after they are drawn, for all updates of a step",
            "leave out data.rungs",
        )


@RULES.rule
def _on_the_mesh(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Every rung must fit the mesh and data.round_to as the largest does."""
    unchecked = replace(device, platform="cpu")  # the devices are checked with the largest
    rules = Group([*mesh.RULES, *buffers.RULES])
    known = set(rules.findings(config, unchecked))
    for rung in config.data.ladder[:-1]:
        for finding in rules.findings(config.at(rung), unchecked):
            if not finding.is_warning and finding not in known:
                found, expected, change = (_OF_RUNG.sub(r"its \1", text) for text in finding[:3])
                yield Finding(f"for {_words(rung)} of data.rungs, {found}", expected, change)


def _is_within(rung: Rung, other: Rung) -> bool:
    return all(x <= y for x, y in zip(rung, other, strict=True))


def _words(rung: Rung) -> str:
    return f"{rung.capacity} {rung.max_documents} {rung.audio_capacity}"
