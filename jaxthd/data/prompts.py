"""The training items as prompts to answer: an endless stream whose position is the count of items read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from jaxthd.config import Config
from jaxthd.data.example import Example, Turn
from jaxthd.data.mixing import mixing_weights
from jaxthd.data.packer import OnSkip
from jaxthd.data.position import DataSets, Position
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.stream import OnRead, epochs_of, item_refs
from jaxthd.errors import UserError
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits
from jaxthd.parallel.processes import exchange


class Prompt(NamedTuple):
    """An item to answer. example: with the reference as its last turn, if it has one. document: what comes
    before that."""

    example: Example
    document: Document

    @classmethod
    def of(cls, example: Example, documents: SpeechDocuments) -> "Prompt":
        """Raises ValueError with the reason for an item that cannot be used."""
        turns = example.turns if example.is_unanswered else example.turns[:-1]
        return cls(example, documents.prompt(Example(example.key, turns)))

    @property
    def question(self) -> tuple[Turn, ...]:
        """The turns to be answered."""
        return self.example.turns if self.example.is_unanswered else self.example.turns[:-1]

    @property
    def reference(self) -> str | None:
        """The text of the item's answer; None where it has none."""
        if self.example.is_unanswered:
            return None
        return " ".join(str(part) for part in self.example.turns[-1].parts)


def page_limits(config: Config) -> BufferLimits:
    """The limits of the pages of prompts, which are buffers on rollout.mesh (inference/rollouts.py)."""
    return BufferLimits.of(replace(config, mesh=config.rollout_mesh))


class PromptStream:
    """The items of the training sets, mixed by mixing_weights, in a new order every epoch.

    Items that cannot be used, whose prompt fits no page, or whose group of answers could exceed a buffer, are
    reported to on_skip and passed over. Of several processes all take the same prompts: what one of them
    cannot use, none does.
    identity: what the prompts depend on besides data.*, as JSON values.
    The stream does not depend on data.rows, nor on the meshes, but for documents that cannot be assigned to
    their context ranks (packing/fit.py).
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Example]],
        documents: SpeechDocuments,
        config: Config,
        *,
        on_skip: OnSkip,
        on_read: OnRead = lambda row, key: None,
        identity: Mapping[str, Any],
        sets: DataSets | None = None,
    ) -> None:
        data = config.data
        weights = mixing_weights(data, list(map(len, sources)))
        self._sources = sources if weights else [list(chain(*sources))]
        self._documents, self._config = documents, config
        self._on_skip, self._on_read = on_skip, on_read
        seed = data.seed if data.shuffle else None
        sizes = [[len(source)] for source in sources]
        epochs = epochs_of(sizes if weights else [list(chain(*sizes))], seed)
        self._refs = item_refs(epochs, weights, repeat=True)
        self._limits, self._page_limits = BufferLimits.of(config), page_limits(config)
        self._next = 0
        self._identity = {
            "items": list(map(len, self._sources)),
            "weights": weights,
            "shuffle": data.shuffle,
            "seed": data.seed,
            **identity,
        }
        self._position = Position(self._identity, epochs, sets, "prompts")

    def take(self, count: int) -> list[Prompt]:
        """The next prompts that can be used. All processes call it.

        Raises UserError where two epochs hold none.
        """
        found: list[Prompt] = []
        without = 0
        while len(found) < count:
            usable = self._read(count - len(found))
            found += [prompt for prompt in usable if prompt]
            without = 0 if any(usable) else without + len(usable)
            if without > 2 * sum(map(len, self._sources)):
                raise UserError(
                    f"none of {without} items could be used as prompts, in two epochs; expected prompts that "
                    "fit a buffer with a group of answers, and one of rollout.mesh: raise data.capacity, or "
                    "lower rollout.group_size or rollout.mesh.context (skipped.jsonl in the workdir has the "
                    "reasons)"
                )
        return found

    def get_state(self) -> dict[str, Any]:
        """Where the stream goes on; JSON-serialisable."""
        return self._position.state() | {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Raises UserError for a state that was saved for other data."""
        try:
            goes_on = self._position.restore(state)
        except UserError as error:
            saved, now = state["identity"], self._identity
            is_read_anew = saved.get("manifest") == now.get("manifest") and saved["items"] != now["items"]
            why = " Lines without a text, which were skipped before, are prompts now." if is_read_anew else ""
            raise UserError(f"{error}.{why}") from error
        self._next = state["next"] if goes_on else 0

    def _read(self, count: int) -> list[Prompt | None]:
        """The next items as prompts; None for one that cannot be used."""
        refs = [self._refs[number] for number in range(self._next, self._next + count)]
        self._next += count
        for ref in refs:
            self._position.latest[ref.source] = ref.epoch
        examples = [self._sources[ref.source][ref.item] for ref in refs]
        loaded = [self._load(example) for example in examples]
        found: list[Prompt | None] = []
        for example, (prompt, _), whys in zip(
            examples, loaded, zip(*exchange([why for _, why in loaded]), strict=True), strict=True
        ):
            why = next(filter(None, whys), "")
            found.append(None if why else prompt)
            self._on_read(0, example.key)
            if why:
                self._on_skip(example.key, why)
        return found

    def _load(self, example: Example) -> tuple[Prompt | None, str]:
        """(the prompt, why it cannot be used); one of the two."""
        try:
            prompt = Prompt.of(example, self._documents)
        except ValueError as error:
            return None, str(error) or type(error).__name__
        reject_reason = self._reject_reason(prompt.document)
        return (None, reject_reason) if reject_reason else (prompt, "")

    def _reject_reason(self, prompt: Document) -> str:
        """Why the prompt, or a group of the longest answers to it, would not fit; "" if they do."""
        if reject_reason := self._limits.fit(prompt).reject_reason:
            return reject_reason
        if reject_reason := self._page_limits.fit(prompt).reject_reason:
            return f"to draw answers on rollout.mesh, {reject_reason}"
        count, most = self._config.rollout.group_size, self._config.rollout.max_new_tokens
        reject_reason = self._limits.fit(prompt.with_answers([[0] * most] * count)).reject_reason
        return reject_reason and f"with {count} answers of up to {most} tokens, {reject_reason}"
