"""Where a stream of items goes on: whether a saved position belongs to the data as it is now."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxthd.data.sources.source import Likeness
from jaxthd.data.stream import Epochs, Era
from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import BUILT_IN

Compare = Callable[[int, Any, Any], Likeness]
"""(number of a data set, its saved digest, its saved extent) -> how it compares with them now."""
DATA = {"manifest", "items", "weights"}
"""Entries of an identity that may differ where the data has changed and nothing else."""


class DataSets(NamedTuple):
    """The data sets of a stream, as its positions depend on them.

    compare: see Compare. extents: how much content each has, for `compare`; None where it is not known.
    accepts_changes: whether a position that was saved for other data begins a new epoch; else it is refused.
    """

    compare: Compare
    extents: Sequence[int | None] = ()
    accepts_changes: bool = False


class Position:
    """The data part of a stream's saved position, beside the streams' own states.

    identity: what the stream depends on, as JSON values. epochs: the order of each source's items. kind: of
    the items, for messages. sets: None: data sets are compared by the identity alone.
    """

    def __init__(
        self, identity: Mapping[str, Any], epochs: Sequence[Epochs], sets: DataSets | None, kind: str
    ) -> None:
        self._identity, self._epochs, self._kind = identity, epochs, kind
        self._sets = sets or DataSets(lambda number, digest, extent: "other")
        self.latest = [0] * len(epochs)
        """The latest epoch that is read from, of each source."""

    def state(self) -> dict[str, Any]:
        """Returns the entries of a position, JSON-serialisable."""
        return {
            "identity": dict(self._identity),
            "eras": [[[era.first, list(era.sizes)] for era in each.eras] for each in self._epochs],
            "latest": list(self.latest),
            "extents": list(self._sets.extents),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Takes the eras of a saved position. Returns False where a new epoch begins instead.

        Data sets that have grown at their end are read as they were to the end of the epoch under way. Raises
        UserError for a position that was saved for other data.
        """
        was, now = state["identity"], self._identity
        names = {name for name in {**was, **now} if not _is_same(name, was.get(name), now.get(name))}
        likeness: list[Likeness] = ["other"]
        if names <= {"manifest", "items"}:
            likeness = self._likeness(state)
        if "items" in names and "grown" not in likeness:  # the same lines are read as other items
            likeness = ["other"]
        latest = list(state.get("latest", self.latest))
        if "other" not in likeness and (eras := self._eras(state, likeness, latest)):
            for each, own in zip(self._epochs, eras, strict=True):
                each.eras = own
            self.latest[:] = latest
            return True
        if not (self._sets.accepts_changes and names <= DATA):
            hint = "; or, where the data has changed, go on in a new epoch of it (--data.accept-changes)"
            raise UserError(
                f"the saved data position belongs to another stream of {self._kind} "
                f"({differing_identity(was, now)}); restore these, or start a new run from the weights "
                f"(--train.init-from WORKDIR){hint if names <= DATA else ''}"
            )
        first = max(latest) + 1
        for each in self._epochs:
            each.eras = [Era(first, each.sizes)]
        self.latest[:] = [first - 1] * len(self._epochs)
        print(
            f"the data has changed ({differing_identity(was, now)}): epoch {first} begins with all that is "
            f"there now; items that epoch {first - 1} had not reached yet are not read in it"
        )
        return False

    def _likeness(self, state: Mapping[str, Any]) -> list[Likeness]:
        was, now = (x.get("manifest") for x in (state["identity"], self._identity))
        if was is None or now is None or len(was) != len(now):
            return ["same" if was == now else "other"]
        extents = state.get("extents") or [None] * len(was)
        return [
            "same" if digest == now[n] else self._sets.compare(n, digest, extent)
            for n, (digest, extent) in enumerate(zip(was, extents, strict=True))
        ]

    def _eras(
        self, state: Mapping[str, Any], likeness: Sequence[Likeness], latest: Sequence[int]
    ) -> list[list[Era]] | None:
        """Returns the eras of each source; None where the numbers of items are not those of the data."""
        items = state["identity"].get("items")
        items = items if isinstance(items, list) else [items]
        saved = state.get("eras") or [[[0, [n]]] for n in items]
        joined = [sizes for eras in saved for sizes in eras[-1][1]]
        present = [size for each in self._epochs for size in each.sizes]
        if len(joined) < len(present) and sum(joined) == sum(present) and "grown" not in likeness:
            return [[Era(0, each.sizes)] for each in self._epochs]  # an older jaxthd kept the sum alone
        if len(joined) != len(present) or len(likeness) not in (1, len(present)):
            return None
        likeness = list(likeness) * (len(present) if len(likeness) == 1 else 1)
        for kind, before, after in zip(likeness, joined, present, strict=True):
            if after < before or (kind == "same" and after != before):
                return None
        return [
            each.grown(eras, epoch) for each, eras, epoch in zip(self._epochs, saved, latest, strict=True)
        ]


def differing_identity(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Says in what two identities of streams differ; "" if in nothing."""
    return "; ".join(
        _changed(k, was.get(k), now.get(k)) for k in {**was, **now} if not _is_same(k, was.get(k), now.get(k))
    )


def _is_same(name: str, was: Any, now: Any) -> bool:
    """Whether an entry of an identity is the same. An older jaxthd kept a tokenizer's path for its digest."""
    was_path = name == "tokenizer" and isinstance(was, str) and was not in BUILT_IN and len(was) != 64
    return was == now or (was_path and now not in BUILT_IN)


def _changed(name: str, was: Any, now: Any) -> str:
    """Says what of an identity has changed. Digests, which tell a reader nothing, are not shown."""
    if name == "manifest" and was and now and len(was) == len(now):
        numbers = [str(n) for n, (x, y) in enumerate(zip(was, now, strict=True), 1) if x != y]
        return f"manifest: other content in data set {', '.join(numbers)} of {len(now)}"
    if name == "manifest":
        return f"manifest: {len(was or ())} data sets then, {len(now or ())} now"
    return "tokenizer: another one" if name == "tokenizer" else f"{name}: {was!r} then, {now!r} now"
