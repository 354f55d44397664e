"""The loaders of a run: its manifests read, its documents made, packed and laid out."""

import hashlib
from pathlib import Path

from jaxthd.config import Config
from jaxthd.data.manifest import Utterance, read_manifest
from jaxthd.data.pipeline import Loader, make_loader
from jaxthd.data.speech import SkipLog, SpeechDocuments
from jaxthd.data.synthetic import synthetic_manifests
from jaxthd.data.tokenizer import load_tokenizer


class SpeechData:
    """The run's manifests as loaders. Faulty lines and recordings go to the skip log."""

    def __init__(self, config: Config, workdir: Path) -> None:
        self._manifest, self._validation_manifest = config.data.manifest[0], config.data.validation_manifest
        if "synthetic" in (self._manifest, self._validation_manifest):
            made = synthetic_manifests()
            if self._manifest == "synthetic":
                self._manifest = str(made[0])
            if self._validation_manifest == "synthetic":
                self._validation_manifest = str(made[1])
        self._config = config
        self.skipped = SkipLog(workdir / "skipped.jsonl")
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._training = self._read(self._manifest, "data.manifest")
        self._validation = (
            self._read(self._validation_manifest, "data.validation_manifest")
            if self._validation_manifest
            else []
        )
        print(f"{len(self._training)} training and {len(self._validation)} validation utterances")

    @property
    def has_validation(self) -> bool:
        return bool(self._validation)

    def training(self) -> Loader:
        """Without end, dithered, shuffled anew every epoch. Its position is refused for other documents."""
        on_skip = self.skipped.of(self._manifest)
        documents = SpeechDocuments(self._config, self._tokenizer, on_skip, train=True)
        encoder = self._config.model.encoder
        lines = [(u.key, u.text, u.offset, u.duration) for u in self._training]
        identity = {
            "manifest": hashlib.blake2b(repr(lines).encode(), digest_size=8).hexdigest(),
            "tokenizer": self._config.data.tokenizer,
            "prompt": self._config.data.prompt,
            "chunk_seconds": encoder.chunk_seconds,
            "num_mels": encoder.num_mels,
        }
        return make_loader(self._training, documents, self._config, on_skip=on_skip, identity=identity)

    def validation(self) -> Loader:
        """One pass over the validation set, in the manifest's order."""
        on_skip = self.skipped.of(self._validation_manifest)
        documents = SpeechDocuments(self._config, self._tokenizer, on_skip, train=False)
        return make_loader(
            self._validation, documents, self._config, repeat=False, shuffle=False, on_skip=on_skip
        )

    def _read(self, manifest: str, setting: str) -> list[Utterance]:
        utterances, faults = read_manifest(manifest, setting)
        for fault in faults:
            self.skipped.of(manifest)(fault.key, fault.reason)
        return utterances
