"""Which files of jaxthd one utterance enters on its way from its line to the loss."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import soundfile

import jaxthd
from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.data import workers
from jaxthd.data.dataset import SpeechData
from jaxthd.data.workers import serve
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state
from jaxthd.steps.training import loss_and_gradient

MOST_TO_BATCH = 24
"""Files that each utterance enters on its way from its line to the batch."""
MOST_TO_LOSS = 75
"""The same and the files that trace the step, whose program no further utterance enters."""
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
    llm = LLMConfig(pattern="*-", vocab_size=260, dim=16, q_heads=2, kv_heads=2, head_dim=8, ffn_dim=16)
    data = {"capacity": 32, "audio_capacity": 400, "max_documents": 4, "rows": 1, "workers": 1}
    return Config(
        model=ModelConfig(encoder=encoder, llm=llm),
        data=DataConfig(manifest=(str(folder / "m.jsonl"),), validation_manifest="", **data),
    )


def _to_batches(config: Config, folder: Path, batches: int) -> Any:
    """Reads the data and that many batches; returns the last."""
    with closing(SpeechData(config, folder)) as data, data.training() as loader:
        for _ in range(batches):
            batch, _ = next(loader)
    return batch


def test_one_utterance_enters_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "Child", _WorkerHere)
    calls = []
    for utterances in (24, 48):  # a batch holds two
        walk, folder = _Walk(), tmp_path / str(utterances)
        config = _config(folder, utterances)
        with walk.watched():
            batch = _to_batches(config, folder, utterances // 2)
        calls.append(walk.calls)
    few, many = calls
    # What 48 lines call as often as 24 is called at the start, not for an utterance.
    host = {name for name, count in many.items() if count > few[name] and not name.startswith("config/")}
    walk, blueprint = _Walk(), Blueprint(config)
    with walk.watched():
        on_mesh = put_batch(batch, mesh := make_mesh(config.mesh))
        jax.jit(loss_and_gradient(blueprint, mesh)).trace(*_parameters(blueprint), on_mesh)
    step = {name for name in walk.calls if not name.startswith("config/")}
    assert len(host) <= MOST_TO_BATCH, sorted(host)
    assert len(host | step) <= MOST_TO_LOSS, sorted(host | step)


def _parameters(blueprint: Blueprint) -> tuple[Any, Any]:
    """The shapes of the parameters and of the buffers."""
    state = abstract_state(blueprint)
    return state.params, state.buffers
