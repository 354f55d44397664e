"""Which files of jaxthd one utterance enters on its way from its line to the loss."""

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

import jaxthd
from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.data import workers
from jaxthd.data.dataset import SpeechData
from jaxthd.data.workers import serve
from jaxthd.models.blocks import MLP, Attention
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.goodput import TimeAccount
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.supplier import Run
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state
from jaxthd.steps.training import loss_and_gradient
from jaxthd.training import documents

WALK = (
    "data/sources/lines.py",
    "data/sources/manifest.py",
    "data/sources/recordings.py",
    "data/example.py",
    "data/stream.py",
    "data/workers.py",
    "data/speech.py",
    "data/text/prompt.py",
    "data/text/tokenizer.py",
    "data/audio/recordings.py",
    "files/remote_path.py",
    "files/stores.py",
    "data/audio/containers.py",
    "data/audio/decoder.py",
    "models/front_ends/fastconformer/settings.py",
    "models/front_ends/log_mel.py",
    "packing/document.py",
    "data/skipped.py",
    "data/packer.py",
    "packing/fit.py",
    "packing/pack.py",
    "packing/layout.py",
    "packing/batch.py",
    "data/loader.py",
    "data/position.py",
    LOOP := "training/loop.py",
    "training/documents.py",
    "parallel/mesh.py",
)
"""Files that each utterance enters, from its line to the call of the compiled step that computes its loss.

LOOP is entered once, and turns there: so the test does not run it. The pipe to a worker process
(data/child_process.py) is not counted, since the worker runs in a thread here."""
MOST_TO_STEP = 28
MOST_WITH_TRACED = 75
"""The most files with those that trace the step's loss and gradient."""
PACKAGE = Path(jaxthd.__file__).parent


class _Walk:
    """Counts the calls of functions by the file of jaxthd that defines them, in all threads."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.calls[str(path.relative_to(PACKAGE))] += 1


class _WorkerHere:
    """Stands for a worker process (Child): its program runs in a thread, so that its calls are counted."""

    def __init__(self, *program: str, **environment: str) -> None:
        self._pipe, other = Pipe()
        threading.Thread(target=self._run, args=(other,), daemon=True).start()

    @staticmethod
    def _run(pipe: Connection) -> None:
        with suppress(EOFError, OSError):
            serve(pipe)

    def send(self, message: bytes) -> None:
        self._pipe.send_bytes(message)

    def receive(self, seconds: float) -> bytes:
        return self._pipe.recv_bytes()

    def kill(self) -> str:
        self._pipe.close()
        return ""


def _config(folder: Path, utterances: int) -> Config:
    folder.mkdir()
    soundfile.write(folder / "a.wav", np.random.default_rng(0).normal(0, 0.1, 8000), 16_000)
    line = json.dumps({"audio_filepath": "a.wav", "text": "one two", "duration": 0.5}) + "\n"
    (folder / "m.jsonl").write_text(utterances * line)
    encoder = EncoderConfig(num_mels=80, layers=1, dim=16, heads=2, ffn_dim=24, subsampling_channels=4)
    llm = LLMConfig(
        pattern="*-",
        vocab_size=260,
        dim=16,
        blocks={"*": Attention(heads=2, kv_heads=2, head_dim=8), "-": MLP(inner=16)},
    )
    data = {"capacity": 32, "audio_capacity": 400, "max_documents": 4, "rows": 1, "workers": 1}
    return Config(
        model=ModelConfig(encoder=encoder, llm=llm),
        data=DataConfig(manifest=(str(folder / "m.jsonl"),), validation_manifest="", **data),
    )


class _CalledError(Exception):
    """Raised by what stands for the compiled step, so that nothing behind its call is counted."""


def _compiled(*_: Any) -> Any:
    raise _CalledError


def _to_the_step(config: Config, folder: Path, batches: int) -> Batch:
    """Reads the data and calls the compiled step with that many batches; returns the last, on the mesh."""
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    state = abstract_state(blueprint)
    with closing(SpeechData(config, folder)) as data, TimeAccount(folder, time.monotonic()) as account:
        run = Run(config, blueprint, mesh, data, OutputFolder(folder), account)
        with closing(documents.DocumentSupplier(run)) as supplier:
            supplier.begin(state, 0, print)  # it loads the first batch
            for number in range(1, batches + 1):
                with pytest.raises(_CalledError):
                    supplier.step(state, number)
                if number < batches:
                    supplier._on_mesh, supplier._upcoming = supplier._load()
            return supplier._on_mesh


def test_one_utterance_enters_few_files(tmp_path, monkeypatch):
    """The files up to the call of the compiled step are those of WALK.

    Files of the model, the objective and the optimizer are entered when the step is traced, once in a run: no
    utterance enters them. They are counted apart.
    """
    monkeypatch.setattr(workers, "Child", _WorkerHere)
    monkeypatch.setattr(documents, "fitting_step", lambda *_: _compiled)
    calls = []
    for utterances in (24, 48):  # a batch holds two
        walk, folder = _Walk(), tmp_path / str(utterances)
        config = _config(folder, utterances)
        with walk.watched():
            on_mesh = _to_the_step(config, folder, utterances // 2)
        calls.append(walk.calls)
    few, many = calls
    # What 48 lines call as often as 24 is called at the start, not for an utterance.
    entered = {name for name, count in many.items() if count > few[name] and not name.startswith("config/")}
    assert entered | {LOOP} == set(WALK)
    assert len(WALK) <= MOST_TO_STEP

    walk, blueprint = _Walk(), Blueprint(config)
    state = abstract_state(blueprint)
    with walk.watched():
        step = loss_and_gradient(blueprint, make_mesh(config.mesh))
        jax.jit(step).trace(state.params, state.buffers, on_mesh)
    traced = {name for name in walk.calls if not name.startswith("config/")}
    assert len(entered | traced) <= MOST_WITH_TRACED, sorted(entered | traced)


def test_the_architecture_page_walks_the_same_files():
    """In the order of WALK, with one short sentence for each."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^(\d+)\. `jaxthd/([\w/]+\.py)` (.*)$", page, re.M)
    assert [file for _, file, _ in steps] == list(WALK)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(WALK) + 1))
    for _, file, sentence in steps:
        assert sentence.index(".") == len(sentence) - 1 <= 110, file
