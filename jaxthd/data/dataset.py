"""The loaders of a run: its data sets read, its documents made, packed and laid out."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.data.example import Example
from jaxthd.data.faults import Fault, SkipLog
from jaxthd.data.pipeline import Loader, RowReport, make_loader, totals
from jaxthd.data.sources.named import Source, training_sources, validation_sources
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.data.workers import Workers
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.parallel.processes import exchange, is_first, require_same


class SynchronizedLoader(Iterator[tuple[Batch, dict[str, Any]]]):
    """A Loader of this process's rows, in step with those of the other processes: next() waits for all.

    The report is over all rows, but for `keys`, which are of this process's. Ends when all have ended; one
    that has no row left gives empty ones until then. With one process it gives what the Loader gives.
    """

    def __init__(self, loader: Loader, skipped: SkipLog) -> None:
        self._loader, self._skipped = loader, skipped

    def __next__(self) -> tuple[Batch, dict[str, Any]]:
        found = next(self._loader, None)
        batch, report = found or self._loader.empty
        told = exchange([found is not None, report["rows"], self._skipped.news()])
        for _, _, news in told:
            for item in news:
                self._skipped.add(*item)
        if not any(goes_on for goes_on, _, _ in told):
            raise StopIteration
        # A row that several processes read counts once.
        rows = {RowReport(*row) for _, rows, _ in told for row in rows}
        return batch, {**report, **totals(rows), "rows": sorted(rows)}

    def __enter__(self) -> "SynchronizedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loader.close()

    def get_state(self) -> dict[str, Any]:
        """The Loader's, of this process's rows; see whole_position."""
        return self._loader.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._loader.set_state(state)

    def keys(self, report: Mapping[str, Any]) -> list[list[str]]:
        """The documents' keys of all rows; the report has those of this process's. All processes call it."""
        rows = self._loader.empty[1]["rows"]
        own = [(row.row, keys) for row, keys in zip(rows, report["keys"], strict=True)]
        return [keys for _, keys in sorted(dict(map(tuple, chain(*exchange(own)))).items())]


def whole_position(position: dict[str, Any]) -> dict[str, Any]:
    """The state of all rows, where each process has that of its own: all processes call it.

    So it does not depend on their number, nor on the mesh: any other may restore it.
    """
    streams = zip(*exchange(position["streams"]), strict=True)
    return position | {"streams": [next(s for s in states if s is not None) for states in streams]}


class SpeechData:
    """The run's data sets as loaders. Faulty lines and recordings go to the skip log.

    training: False leaves data.manifest unread. end_id: the token that ends an answer.
    Raises UserError for prompts that cannot be encoded and for a data set without a usable line.
    """

    def __init__(self, config: Config, workdir: Path, *, training: bool = True) -> None:
        data = config.data
        self._config = config
        tokenizer = load_tokenizer(data.tokenizer)
        self.end_id = PromptTemplate(data, tokenizer).end_id
        # One of each for all loaders: workers take a second to start, and keep what they are sent.
        self._workers = Workers(data.workers) if data.workers else 0
        self._train_documents = SpeechDocuments(config, tokenizer, train=True)
        self._validation_documents = SpeechDocuments(config, tokenizer, train=False)
        self._sources = training_sources(data) if training else []
        self._validation_sources = validation_sources(data)
        self.skipped = SkipLog(workdir / "skipped.jsonl", writes=is_first())
        self._training = self._read(self._sources)
        self._validation = {
            name: self._read([source])[0] for name, source in self._validation_sources.items()
        }
        read, held_out = (sum(map(len, x)) for x in (self._training, self._validation.values()))
        print(f"{read} training and {held_out} validation documents" if training else f"{held_out} documents")

    @property
    def has_validation(self) -> bool:
        return bool(self._validation)

    def validation_examples(self, name: str) -> Sequence[Example]:
        """The lines of a validation set, in its order."""
        return self._validation[name]

    def is_left_out(self, key: str, name: str | None = None) -> bool:
        """Whether a document of a validation set, the first if none is named, was found to be unusable."""
        name = name or next(iter(self._validation))
        return self.skipped.has(self._validation_sources[name].path, key)

    def validation_document(self, example: Example) -> Document | Fault:
        """What a validation set's loader packs for this line."""
        return self._validation_documents(example, 0)

    def training(self, rows: Collection[int] | None = None) -> SynchronizedLoader:
        """Without end, dithered and masked, shuffled anew every epoch, data sets mixed by data.weights.

        rows: see make_loader. Its position is refused for other documents.
        """
        identity = self._identity()
        require_same("what the training documents depend on", identity)
        loader = make_loader(
            self._training,
            self._train_documents,
            self._config,
            rows=rows,
            depths=self._config.depths_trained,
            on_skip=self._on_skip(self._sources),
            identity=identity,
            weights=self._config.data.weights or None,
            workers=self._workers,
            prefetch=self._config.data.prefetch,
        )
        return SynchronizedLoader(loader, self.skipped)

    def validation(self, rows: Collection[int] | None = None, name: str | None = None) -> SynchronizedLoader:
        """One pass over a validation set, the first if none is named, in its order. rows: see make_loader."""
        name = name or next(iter(self._validation))
        loader = make_loader(
            [self._validation[name]],
            self._validation_documents,
            self._config,
            rows=rows,
            repeat=False,
            shuffle=False,
            on_skip=self._on_skip([self._validation_sources[name]]),
            workers=self._workers,
            prefetch=self._config.data.prefetch,
        )
        return SynchronizedLoader(loader, self.skipped)

    def close(self) -> None:
        """Ends the worker processes. Loaders are closed before, by whoever has them."""
        if isinstance(self._workers, Workers):
            self._workers.close()

    def _read(self, sources: Sequence[Source]) -> list[list[Example]]:
        found = []
        for number, source in enumerate(sources):
            examples, faults = source.read(self._config.data, number)
            for fault in faults:
                self._on_skip(sources)(fault.key, fault.reason)
            found.append(examples)
        return found

    def _on_skip(self, sources: Sequence[Source]) -> Callable[[str, str], None]:
        return self.skipped.of([source.path for source in sources])

    def _identity(self) -> dict[str, Any]:
        """What the training documents depend on besides what make_loader adds, as JSON gives it back."""
        data, encoder = self._config.data, self._config.model.audio_encoder
        names = ("tokenizer", "template", "system_prompt", "prompt", "audio_placeholder")
        return {
            "manifest": [source.digest() for source in self._sources],
            **{name: getattr(data, name) for name in names},
            **({"template_options": data.template_options} if data.template_options else {}),
            "spec_augment": asdict(data.spec_augment),
            **({"chunk_seconds": encoder.chunk_seconds, "num_mels": encoder.num_mels} if encoder else {}),
        }
