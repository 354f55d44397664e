"""Assigns places to answers, and admits the next prompts: the host's side of places.py."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxthd.packing.fit import BufferLimits, Fit

LEAST_REFILL = 0.5
"""While answers are decoded, new prompts wait until their answers fill this share of all places, or until one
page has no room for the next."""


class Running(NamedTuple):
    """A place's answer: number `sample` of its group, to prompt number `prompt`, which lies in `page`."""

    prompt: int
    sample: int
    page: int


class Page(NamedTuple):
    """Prompts that take a page of a data rank, and the places that their answers take.

    page: the number of pages where there are none.
    """

    page: int
    prompts: list[int]
    places: dict[int, Running]


class Scheduler:
    """The places of all data ranks. Whole groups are admitted, in the order of the prompts.

    fits: of the prompts; each fits a page. limits: of a page. pages: of each rank.
    """

    def __init__(
        self,
        fits: Sequence[Fit],
        limits: BufferLimits,
        *,
        ranks: int,
        places: int,
        group_size: int,
        pages: int,
    ) -> None:
        self._fits, self._limits, self._group_size, self._pages = fits, limits, group_size, pages
        self._waiting = deque(range(len(fits)))
        self._held: list[dict[int, Running]] = [{} for _ in range(ranks)]
        self._places = places

    @property
    def is_done(self) -> bool:
        """Whether every answer to every prompt has ended."""
        return not self._waiting and not self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether any answer has not ended."""
        return any(self._held)

    def __iter__(self) -> Iterator[tuple[int, int, Running]]:
        """(data rank, place, its answer), of those that have not been released."""
        for rank, held in enumerate(self._held):
            yield from ((rank, place, answer) for place, answer in held.items())

    def release(self, rank: int, place: int) -> None:
        """Frees the place of an answer that has ended."""
        del self._held[rank][place]

    def admit(self) -> list[Page] | None:
        """Gives the next prompts their places: a page for each data rank. None while they should wait."""
        chosen, is_full = self._next_prompts()
        answers = self._group_size * sum(map(len, chosen))
        is_last = sum(map(len, chosen)) == len(self._waiting)
        is_much = answers >= LEAST_REFILL * self._places * len(self._held)
        if not answers or not (is_last or is_full or is_much or not self.is_busy):
            return None
        for _ in range(sum(map(len, chosen))):
            self._waiting.popleft()
        return [self._page(rank, prompts) for rank, prompts in enumerate(chosen)]

    def nothing(self) -> list[Page]:
        """A page without prompts for each data rank."""
        return [Page(self._pages, [], {}) for _ in self._held]

    def _next_prompts(self) -> tuple[list[list[int]], bool]:
        """(the prompts that each data rank can take, whether one has no room for the next in a page).

        The ranks take turns, so that the last prompts are spread over them.
        """
        chosen: list[list[int]] = [[] for _ in self._held]
        takers = [rank for rank in range(len(chosen)) if self._free_page(rank) < self._pages]
        waiting, is_full = iter(self._waiting), False
        prompt = next(waiting, None)
        while takers and prompt is not None:
            rank = takers.pop(0)
            if self._places - len(self._held[rank]) < self._group_size * (len(chosen[rank]) + 1):
                continue
            if not self._fit([*chosen[rank], prompt]):
                is_full = True
                continue
            chosen[rank].append(prompt)
            takers.append(rank)
            prompt = next(waiting, None)
        return chosen, is_full

    def _fit(self, prompts: Sequence[int]) -> bool:
        """Whether these prompts fit one page."""
        fits, limits = [self._fits[number] for number in prompts], self._limits
        return (
            len(fits) <= limits.max_documents
            and sum(fit.slots for fit in fits) <= limits.capacity
            and sum(sum(fit.piece_frames) for fit in fits) <= limits.audio_capacity
            and limits.can_share(fits)
        )

    def _free_page(self, rank: int) -> int:
        """The first page in which no place has its prompt; the number of pages if there is none."""
        used = {answer.page for answer in self._held[rank].values()}
        return next((page for page in range(self._pages) if page not in used), self._pages)

    def _page(self, rank: int, prompts: list[int]) -> Page:
        page = self._free_page(rank) if prompts else self._pages
        free = (place for place in range(self._places) if place not in self._held[rank])
        answers = [Running(prompt, sample, page) for prompt in prompts for sample in range(self._group_size)]
        places = dict(zip(free, answers, strict=False))
        self._held[rank] |= places
        return Page(page, prompts, places)
