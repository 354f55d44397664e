"""The data sets of a run as train.py uses them: read, made into documents, packed and laid out."""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from jaxthd.config import AugmentConfig, Config
from jaxthd.data.example import Example
from jaxthd.data.filters import Filter, bounds_of, by_setting
from jaxthd.data.inventory import FILE as INVENTORY
from jaxthd.data.inventory import Inventory, SetCount, require_few_skipped
from jaxthd.data.loader import Loader, make_loader
from jaxthd.data.mixing import mixing_weights
from jaxthd.data.position import DataSets
from jaxthd.data.prompts import Prompt, PromptStream, page_limits
from jaxthd.data.shared_batches import Sharers, find_sharers
from jaxthd.data.skipped import Listed, SkipLog, Skipped, main_reasons
from jaxthd.data.sources.columns import require_columns
from jaxthd.data.sources.noises import AugmentationData, read_augmentation
from jaxthd.data.sources.registry import read_source, training_sources, validation_sources
from jaxthd.data.sources.source import Likeness, Source
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.data.usable import usable_examples
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import tokenizer_digest
from jaxthd.objectives import Objective, make_objective
from jaxthd.objectives.answers import compares_answers, draws_answers, needs_mismatched
from jaxthd.packing.document import Document
from jaxthd.parallel.processes import exchange, is_first, require_same, wait_for_all


class SpeechData:
    """The run's data sets as loaders. Unusable items are listed in WORKDIR/skipped.jsonl, or `skip_list`.

    What each set holds is counted and printed (jaxthd.data.inventory), and kept in WORKDIR/inventory.json.

    training: False: data.manifest is not read, and the counts are not kept. preferences: validation sets may
    hold preference lines, as for scores. stop_ids: the tokens that end an answer.
    Raises UserError for prompts that cannot be encoded, for a data set without a usable item, and where more
    than data.max_skipped_share of the items of a set, training or validation, cannot be used.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        *,
        training: bool = True,
        skip_list: str = "skipped.jsonl",
        preferences: bool = False,
        labels: bool = False,
    ) -> None:
        data = config.data
        self._config, self._preferences = config, preferences
        tokenizer = load_tokenizer(data.tokenizer)
        self.stop_ids = PromptTemplate(data, tokenizer).stop_ids
        self._workers: Workers | None = None
        self._prefetch = 2 if data.workers else 0
        self._objective = make_objective(config.train.objective, config.train.objective_options)
        # A policy's forward pass is that of an evaluation: nothing is dithered or masked.
        self._filter = Filter(data.filter, tokenizer)
        self.skipped = SkipLog(workdir / skip_list, writes=is_first())
        is_changed = training and not self._objective.is_policy
        self._augmentation = self._read_augmentation() if is_changed else None
        self._train_documents = SpeechDocuments(
            config,
            tokenizer,
            train=not self._objective.is_policy,
            filtered=True,
            augmentation=self._augmentation and self._augmentation.augmentation,
        )
        self._prompt_documents = SpeechDocuments(config, tokenizer, train=False, filtered=True)
        self._validation_documents = SpeechDocuments(config, tokenizer, train=False, labels=labels)
        self._draws = training and draws_answers(self._objective)
        self._sources = training_sources(data, prompts=self._draws) if training else []
        self._titles = {source.title for source in self._sources}
        self._validation_sources = validation_sources(data, self._sources, prompts=self._draws)
        before = len(self.skipped)
        self._training = self._read(self._sources, self._objective)
        self._items = sum(map(len, self._training)) + len(self.skipped) - before
        self._held_out_preferences: dict[str, list[Example]] = {}
        self._validation = {name: self._read_validation(name) for name in self._validation_sources}
        sources = self._sources or self._validation_sources.values()
        require_columns([source.columns for source in sources])
        all_held_out = chain(self._validation.values(), self._held_out_preferences.values())
        read, held_out = (sum(map(len, x)) for x in (self._training, all_held_out))
        print(f"{read} training and {held_out} validation documents" if training else f"{held_out} documents")
        if training and self.skipped_text():
            print(f"skipped so far: {self.skipped_text()}; listed in {self.skipped.path}")
        self._inventory = self._counted(workdir / INVENTORY if training else None)
        self._is_training = training
        self.require_few_skipped()

    @property
    def has_validation(self) -> bool:
        """Whether the run has a validation set."""
        return bool(self._validation)

    @property
    def validation_digests(self) -> dict[str, str]:
        """Digests of the validation sets' content, by the sets' names."""
        return {name: source.digest() for name, source in self._validation_sources.items()}

    def skipped_text(self, *, this_call: bool = False) -> str:
        """Number of items that the run has skipped, resumptions included, their share and the main reasons.

        this_call: without what earlier calls skipped, which may have been mended since.
        """
        training, held_out = (
            self.skipped.reasons(titles, this_call=this_call)
            for titles in (self._titles, {x.title for x in self._validation_sources.values()} - self._titles)
        )
        parts = []
        if training:
            share = f"{len(training)} of {self._items} training items ({len(training) / self._items:.1%})"
            parts.append(f"{share}: {main_reasons(training)}")
        dropped = self.skipped.reasons(self._titles, this_call=this_call, filtered=True)
        if dropped:
            share = f"{len(dropped):,} of {self._items:,} training items ({len(dropped) / self._items:.1%})"
            parts.append(f"data.filter drops {share}: {by_setting(dropped)}")
        if held_out:
            parts.append(f"{len(held_out)} validation items: {main_reasons(held_out)}")
        return "; ".join(parts)

    def require_few_skipped(self) -> None:
        """Raises UserError where too large a share of a data set cannot be used (data.max_skipped_share)."""
        sets, data = self._inventory.sets, self._config.data
        require_few_skipped(data, sets, self.skipped, is_training=self._is_training)

    def watch(self, say: Callable[[str], None]) -> None:
        """Says what the count of the data sets has brought since. Raises as require_few_skipped()."""
        for line in self._inventory.news():
            say(line)
        self.require_few_skipped()

    def _counted(self, kept: Path | None) -> Inventory:
        """Counts what each data set holds and says it. Process 0 counts, the others wait for it. kept: the
        file of the counts."""
        sets = list(zip(self._sources, self._training, strict=True))
        sets += [(self._validation_sources[name], self._all_held_out(name)) for name in self._validation]
        counts = [
            SetCount(
                source,
                examples,
                self.skipped.count([source.title]),
                len(self.skipped.reasons([source.title], this_call=True, filtered=True)),
                opens_all=source.setting.split == "validation",
                why_dropped=partial(self._filter.why_dropped, rates=not self._draws),
            )
            for source, examples in sets
        ]
        inventory = Inventory(counts, kept)
        if is_first():
            for line in inventory.count():
                print(line)
        wait_for_all()
        for count in counts[: len(self._sources)]:
            if count.filtered and len(count.filtered) == len(count.examples):
                raise UserError(
                    f"data.filter drops all {len(count.examples):,} items of {count.source.title} "
                    f"({count.source.setting.field}): {by_setting(count.filtered)}; the first because "
                    f"{count.filtered[0]}. Widen data.filter"
                )
        return inventory

    def _all_held_out(self, name: str) -> list[Example]:
        return [*self._validation[name], *self._held_out_preferences.get(name, [])]

    def validation_examples(self, name: str) -> Sequence[Example]:
        """The items of a validation set, in its order."""
        return self._validation[name]

    def is_skipped(self, key: str, name: str | None = None) -> bool:
        """Whether an item of a validation set (None: the first) was skipped as unusable."""
        name = name or next(iter(self._validation))
        return self.skipped.has(self._validation_sources[name].title, key)

    def validation_document(self, example: Example) -> Document | Skipped:
        """The document that a validation set's loader packs for this item."""
        return self._validation_documents(example, 0)

    def training(self, rows: Collection[int] | None = None) -> Loader:
        """An endless loader of the training documents: dithered and masked (not those of a policy),
        reshuffled every epoch.

        Data sets are mixed by mixing_weights. rows: see make_loader. A position saved for other documents is
        refused.
        """
        identity = self._identity()
        require_same("what the training documents depend on", identity)
        return self._loader(
            self._training,
            self._train_documents,
            self._sources,
            rows,
            depths=self._config.depths_trained,
            extras=self._objective.extras,
            answers=compares_answers(self._objective),
            mismatched=needs_mismatched(self._objective),
            identity=identity,
            sets=self._data_sets(),
            weights=mixing_weights(self._config.data, list(map(len, self._training))),
        )

    def training_once(self, rows: Collection[int] | None = None) -> Loader:
        """One pass over the training documents of a policy, in their order, as `training` packs them."""
        return self._loader(
            self._training,
            self._train_documents,
            self._sources,
            rows,
            counts_reads=False,
            repeat=False,
            shuffle=False,
            extras=self._objective.extras,
            answers=compares_answers(self._objective),
        )

    def digest(self) -> str:
        """Digest of what the training documents depend on."""
        text = json.dumps([self._identity(), self._config.data.audio_capacity, self._config.data.capacity])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def prompts(self) -> PromptStream:
        """The training items as prompts, which are neither dithered nor masked."""
        require_same("what the prompts depend on", identity := self._identity())
        return PromptStream(
            self._training,
            self._prompt_documents,
            self._config,
            on_skip=(on_skip := self._on_skip(self._sources)),
            on_read=on_skip.read,
            identity=identity,
            sets=self._data_sets(),
        )

    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first items of the first validation set as prompts, without those that a process cannot use."""
        found: list[Prompt] = []
        limits = page_limits(self._config)  # no step trains on them
        for example in chain(*list(self._validation.values())[:1]):
            if len(found) == count:
                break
            with suppress(ValueError):  # the validation itself reports it
                prompt = Prompt.of(example, self._validation_documents)
                found += [prompt] * (not limits.fit(prompt.document).reject_reason)
        everywhere = set.intersection(*map(set, exchange([prompt.example.key for prompt in found])))
        return [prompt for prompt in found if prompt.example.key in everywhere]

    def validation(self, rows: Collection[int] | None = None, name: str | None = None) -> Loader:
        """One pass over a validation set (None: the first), in its order. rows: see make_loader."""
        name = name or next(iter(self._validation))
        examples = self._validation[name]
        answers = any(each.alternatives for each in examples)
        depths = 0 if answers else self._config.depths_drafted_with
        return self._one_pass(examples, name, rows, answers=answers, depths=depths)

    def validation_preferences(
        self, rows: Collection[int] | None = None, name: str | None = None
    ) -> Loader | None:
        """As `validation`, for the answers of a set that the objective compares; None where it has none."""
        name = name or next(iter(self._validation))
        examples, mismatched = self._held_out_preferences.get(name), needs_mismatched(self._objective)
        if not examples:
            return None
        extras = self._objective.extras
        return self._one_pass(examples, name, rows, extras=extras, answers=True, mismatched=mismatched)

    def _one_pass(
        self, examples: Sequence[Example], name: str, rows: Collection[int] | None, **more: Any
    ) -> Loader:
        source, documents = self._validation_sources[name], self._validation_documents
        return self._loader([examples], documents, [source], rows, repeat=False, shuffle=False, **more)

    def _loader(
        self,
        examples: Sequence[Sequence[Example]],
        documents: SpeechDocuments,
        sources: Sequence[Source],
        rows: Collection[int] | None,
        *,
        counts_reads: bool = True,
        **more: Any,
    ) -> Loader:
        """A loader of these sources' examples. counts_reads: whether the items that it reads are counted."""
        listed = self._on_skip(sources)
        sharers = None
        if jax.process_count() > 1:
            sharers = find_sharers(sorted(range(self._config.data.rows) if rows is None else rows))
            more |= {"skipped": self.skipped, "sharers": sharers}
        more |= {"on_skip": listed, "workers": self._pool(sharers), "prefetch": self._prefetch}
        more |= {"on_read": listed.read} if counts_reads else {}
        return make_loader(examples, documents, self._config, rows=rows, **more)

    def _pool(self, sharers: Sharers | None) -> Workers | int:
        """The worker processes of all loaders: they take a second to start, and keep the functions that they
        are sent. A process that loads for others has their share of workers too.
        """
        if self._workers is None and self._config.data.workers:
            self._workers = Workers(self._config.data.workers * (sharers.number if sharers else 1))
        return self._workers or 0

    def close(self) -> None:
        """Ends the worker processes and the count. Close the loaders before."""
        self._inventory.close()
        if self._workers is not None:
            self._workers.close()

    def _read_validation(self, name: str) -> list[Example]:
        """A validation set without its preferences, which are kept apart if the objective compares them."""
        (examples,) = self._read([self._validation_sources[name]], None)
        if self._preferences:
            return examples
        self._held_out_preferences[name] = [each for each in examples if each.alternatives]
        return [each for each in examples if not each.alternatives]

    def _read(self, sources: Sequence[Source], objective: Objective | None) -> list[list[Example]]:
        """The examples of each source. objective: what trains on them; None for validation."""
        found, name = [], self._config.train.objective
        form = {"prompts": self._draws, "audio": self._config.model.encoder is not None}
        for number, source in enumerate(sources):
            examples, skipped = read_source(source, self._config.data, number)
            usable, others = usable_examples(examples, name, objective, **form)
            if objective is not None and self._filter:
                usable, dropped = self._filter.sift(usable, rates=not self._draws)
                others += dropped
            if objective is None and self._preferences:
                usable, others = examples, []
            elif objective is None and compares_answers(self._objective):
                # A run that compares answers is validated on transcripts and on preferences.
                compared, _ = usable_examples(examples, name, self._objective, audio=form["audio"])
                usable += [example for example in compared if example.alternatives]
                keys = {example.key for example in usable}
                others = [item for item in others if item.key not in keys]
            if not usable:
                raise UserError(
                    f"{source.title} ({source.setting.field}) holds nothing that can be used; its first "
                    f"item is {others[0].key}: {others[0].reason}"
                )
            for item in [*skipped, *others]:
                self._on_skip(sources)(item.key, item.reason)
            found.append(usable)
        return found

    def _read_augmentation(self) -> AugmentationData | None:
        """The settings of data.augment; None where they change nothing."""
        if self._config.data.augment == AugmentConfig():
            return None
        read = read_augmentation(self._config.data.augment)
        for manifest, skipped in read.skipped.items():
            for item in skipped:
                self.skipped.add(manifest, *item)
        return read

    def _on_skip(self, sources: Sequence[Source]) -> Listed:
        return Listed(self.skipped, [source.title for source in sources])

    def _data_sets(self) -> DataSets:
        """Returns how a saved position is compared with the training sets."""

        def compare(number: int, digest: str, extent: int | None) -> Likeness:
            return self._sources[number].likeness(digest, extent)

        extents = [source.extent() for source in self._sources]
        return DataSets(compare, extents, self._config.data.accept_changes)

    def _identity(self) -> dict[str, Any]:
        """All that the training documents depend on besides what make_loader adds, as JSON decodes it."""
        data, encoder = self._config.data, self._config.model.encoder
        names = ("template", "system_prompt", "prompt", "audio_placeholder")
        return {
            "manifest": [source.digest() for source in self._sources],
            "tokenizer": tokenizer_digest(data.tokenizer),
            **{name: getattr(data, name) for name in names},
            **({"template_options": data.template_options} if data.template_options else {}),
            **({"columns": list(data.columns)} if data.columns else {}),
            **({"filter": bounds} if (bounds := bounds_of(data.filter)) else {}),
            **({"augment": self._augmentation.identity} if self._augmentation else {}),
            "spec_augment": {
                f"{dim}_{name}": value
                for dim, pair in asdict(data.spec_augment).items()
                for name, value in zip(("masks", "width"), pair, strict=True)
            },
            **(encoder.features_identity if encoder else {}),
        }
