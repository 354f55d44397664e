"""The training step of a speech model, features included: jaxthd packed against NeMo's SALM padded.

    python scripts/bench_peer.py --manifest MANIFEST --python-reference PYTHON [--check]

PYTHON has nemo-toolkit[asr] 3.0.0, torch and transformers. MANIFEST may be several; `synthetic` is the speech
of the first run. Takes about 25 minutes a manifest on two idle cores.

Both sides train the same model from the same weights on the same documents, in float32: log-mel features,
encoder, decoder, loss, clipping, AdamW. The models (MODELS) are FastConformer before Qwen3, which is NeMo's
SALM; and FastConformer before Nemotron-H, which SALM does not take on a CPU, so that NeMo's perception module
and transformers' NemotronH make one step. Text is bytes. Padding does not count as tokens.

- peer: batches of so many seconds of padded audio, sorted by length; and in random order. SDPA, fused AdamW,
  samples in memory. Batches of the --compile seconds also run with torch.compile (dynamic shapes).
- jaxthd: what `jaxthd train` does where the config gives the model and the data alone (`defaults`), and with
  the settings of --tuned. Samples are read from WAV files.

Each way is its own process, whose C library keeps freed memory. All run a stretch of batches before the clock
starts. Then the ways alternate, a stretch each, --rounds times; a rate is the median over the stretches.
`peak` is the highest resident memory of the process over what it had before its model was made. The matrix
rate is measured before each stretch. `MFLOP a token` are what the model must compute, without padding and
recomputation; `done` is what torch counts of the peer, padding included. The peak leaves out the workers that
load jaxthd's batches.

--check exits 1 unless losses and gradient norms of CHECKED documents agree to 1e-4, and jaxthd's defaults are
as many times as fast as the peer's fastest way as MODELS says, with at most 1.5 times its memory.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""For glibc (man 3 mallopt)."""
ENTRIES, PADDING, AUDIO = 512, 510, 511
"""The vocabulary; in it the peer's padding and its placeholder of a recording. The rest are bytes."""
QWEN3: dict[str, Any] = {
    "vocab_size": ENTRIES,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": ENTRIES,
    "hybrid_override_pattern": "M-M*-M-M*-",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "time_step_limit": (0.001, math.inf),
}
"""The scan of this class clamps time steps to time_step_min on a CPU, not to the limit."""
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "qwen3": ("Qwen3", QWEN3, 0, 1.3),
    "hybrid": ("NemotronH", NEMOTRON_H, 32, 1.6),
    "qwen3-wide": ("Qwen3", QWEN3 | WIDE | {"intermediate_size": 1536}, 0, 1.3),
    "hybrid-wide": (
        "NemotronH",
        NEMOTRON_H | WIDE | {"intermediate_size": 2048, "mamba_num_heads": 16},
        32,
        1.6,
    ),
}
"""Name -> (class of transformers, its settings, its scan's chunk, jaxthd's least speed as a multiple)."""
CHUNK = 128
"""The scan's chunk of the library's default, which is measured beside the one in MODELS, the fastest here."""
PADDED = (20.0, 40.0, 80.0, 160.0)
"""Seconds of padded audio of the peer's batches."""
CHECKED = 4
"""Documents that are compared, each alone: the first in whose training NeMo's BatchNorm counts no padding.
Its features are a frame longer than they should be, which after a multiple of 8 makes one more output."""
MATRIX = 2048
STRETCHES = 6
"""Parts of a pass over the recordings. Each has batches of all lengths."""
PERCEPTION = "nemo.collections.speechlm2.modules.perception"


class Side(NamedTuple):
    """The calls that a process offers. stretch: (its number) -> (tokens, seconds of audio); trains on one.
    checked: loss and gradient norm of documents, each alone. matrix: one product. gflop: of products, a
    token."""

    stretch: Callable[[int], tuple[int, float]]
    checked: Callable[[], list[tuple[float, float]]]
    matrix: Callable[[], Any]
    gflop: Callable[[], float]


class Recordings(NamedTuple):
    """The documents as the peer takes them: samples, token ids with AUDIO once, which of these are trained,
    and slots of the document in jaxthd."""

    samples: list[np.ndarray]
    ids: list[np.ndarray]
    trained: list[np.ndarray]
    slots: list[int]

    @classmethod
    def read(cls, folder: Path) -> "Recordings":
        arrays = np.load(folder / "documents.npz")
        ends = np.cumsum(arrays["samples"])[:-1], np.cumsum(arrays["lengths"])[:-1]
        return cls(
            np.split(np.load(folder / "audio.npy", mmap_mode="r"), ends[0]),
            np.split(arrays["ids"], ends[1]),
            np.split(arrays["trained"], ends[1]),
            arrays["slots"].tolist(),
        )

    def checked(self) -> list[int]:
        """Numbers of the documents that are compared."""
        return [i for i, x in enumerate(self.samples) if len(x) // 160 % 8][:CHECKED]

    def batches(self, padded: float, order: str) -> list[list[int]]:
        """Numbers of the documents of each batch of so many seconds of padded audio."""
        numbers = sorted(range(len(self.ids)), key=lambda i: len(self.samples[i]))
        if order == "random":
            numbers = np.random.default_rng(0).permutation(len(numbers)).tolist()
        found: list[list[int]] = []
        longest = 0
        for i in numbers:
            more = max(longest, len(self.samples[i]))
            if found and more * (len(found[-1]) + 1) <= 16_000 * padded:
                found[-1].append(i)
                longest = more
            else:
                found.append([i])
                longest = len(self.samples[i])
        return found


def perception(dim: int) -> dict[str, Any]:
    """NeMo's settings of the encoder and what is around it."""
    return {
        "target": f"{PERCEPTION}.AudioPerceptionModule",
        "output_dim": dim,
        "modality_adapter": {"_target_": f"{PERCEPTION}.IdentityConnector", "d_model": 144},
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": 0.0,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": 4,
            "d_model": 144,
            "n_heads": 4,
            "ff_expansion_factor": 4,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": 64,
            "self_attention_model": "rel_pos",
            "att_context_size": [-1, -1],
            "xscaling": True,
            "untie_biases": True,
            "pos_emb_max_len": 20000,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            "dropout": 0.0,
            "dropout_pre_encoder": 0.0,
            "dropout_emb": 0.0,
            "dropout_att": 0.0,
            "use_pytorch_sdpa": True,
        },
    }


def make_peer(folder: Path, model: str) -> None:
    """Writes the weights that all processes start from: a SALM, and the hybrid's LLM beside it."""
    import torch
    import transformers
    from nemo.collections.speechlm2.models.salm import SALM
    from tokenizers import Tokenizer, models, pre_tokenizers

    name, settings, _, _ = MODELS[model]
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(ENTRIES)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": f"<{PADDING}>", "unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder / "llm")
    qwen3 = transformers.Qwen3Config(**(settings if name == "Qwen3" else QWEN3))
    qwen3.save_pretrained(folder / "llm")
    salm = SALM(
        {
            "pretrained_llm": str(folder / "llm"),
            "pretrained_weights": False,
            "audio_locator_tag": f"<{AUDIO}>",
            "prompt_format": "qwen",
            "perception": perception(settings["hidden_size"]),
        }
    )
    salm.save_pretrained(folder / "salm")
    path = folder / "salm" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": qwen3.to_dict()}))
    if name != "Qwen3":
        config = transformers.NemotronHConfig(**settings)
        transformers.NemotronHForCausalLM(config).save_pretrained(folder / "hybrid")


def peer_side(folder: Path, way: str) -> Side:
    """A way of NeMo: "SECONDS ORDER [chunk]"."""
    import logging

    import torch
    import transformers
    from nemo.collections.speechlm2.models.salm import SALM, replace_placeholders_and_build_targets
    from nemo.utils import logging as nemo_logging

    transformers.logging.set_verbosity_error()
    nemo_logging.setLevel(logging.ERROR)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds, order, *more = way.split()
    recordings = Recordings.read(folder)
    salm = SALM.from_pretrained(folder / "salm").train()
    salm.log = salm.log_dict = lambda *a, **k: None  # they ask for a trainer
    model: Any = salm
    if (folder / "hybrid").exists():
        chunk = int(more.pop(0))
        config = transformers.NemotronHConfig.from_pretrained(folder / "hybrid", chunk_size=chunk)
        llm = transformers.NemotronHForCausalLM.from_pretrained(folder / "hybrid", config=config).train()
        model = torch.nn.ModuleDict({"perception": salm.perception, "llm": llm})
    if more:
        model.llm = torch.compile(model.llm, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def collated(numbers: Sequence[int]) -> dict[str, Any]:
        """SALM's batch: audio padded on the right, tokens on the left."""
        most = max(len(recordings.samples[i]) for i in numbers)
        longest = max(len(recordings.ids[i]) for i in numbers)
        audio = np.zeros((len(numbers), most), np.float32)
        ids = np.full((len(numbers), longest), PADDING)
        trained = np.zeros((len(numbers), longest), bool)
        for row, i in enumerate(numbers):
            audio[row, : len(recordings.samples[i])] = recordings.samples[i]
            ids[row, -len(recordings.ids[i]) :] = recordings.ids[i]
            trained[row, -len(recordings.ids[i]) :] = recordings.trained[i]
        lengths = [len(recordings.samples[i]) for i in numbers]
        batch = {"audios": audio, "audio_lens": np.array(lengths), "input_ids": ids, "loss_mask": trained}
        return {name: torch.from_numpy(x) for name, x in batch.items()}

    def hybrid_loss(batch: dict[str, Any]) -> Any:
        """The loss, with padding on the right, which the scan needs no mask for."""
        made, lengths = model.perception(
            input_signal=batch["audios"], input_signal_length=batch["audio_lens"]
        )
        ids = batch["input_ids"]
        embeddings, targets, seen = replace_placeholders_and_build_targets(
            input_ids=ids,
            embeds=llm.get_input_embeddings()(ids.where(ids != AUDIO, 0)),
            padding_id=PADDING,
            placeholder_id=AUDIO,
            replacements=[x[:n] for x, n in zip(made, lengths.tolist(), strict=True)],
            target_ids=ids.where(batch["loss_mask"], -100),
        )
        shifts = (~seen).sum(1).tolist()
        embeddings = torch.stack([x.roll(-n, 0) for x, n in zip(embeddings, shifts, strict=True)])
        targets = torch.stack([x.roll(-n, 0) for x, n in zip(targets, shifts, strict=True)])
        logits = model.llm(inputs_embeds=embeddings[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())

    def loss_of(batch: dict[str, Any]) -> Any:
        return salm.training_step(batch, 0)["loss"] if model is salm else hybrid_loss(batch)

    def step(batch: dict[str, Any]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    groups = recordings.batches(float(seconds), order)
    batches = [collated(group) for group in groups]

    def stretch(number: int) -> tuple[int, float]:
        mine = range(number % STRETCHES, len(groups), STRETCHES)
        for i in mine:
            step(batches[i])
        numbers = [j for i in mine for j in groups[i]]
        return (
            sum(recordings.slots[j] for j in numbers),
            sum(len(recordings.samples[j]) for j in numbers) / 16_000,
        )

    def checked() -> list[tuple[float, float]]:
        found = []
        for i in recordings.checked():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(collated([i]))
            loss.backward()
            squares = (float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
            found.append((float(loss.detach()), math.sqrt(sum(squares))))
        optimizer.zero_grad(set_to_none=True)
        return found

    def gflop() -> float:
        from torch.utils.flop_counter import FlopCounterMode

        mine = range(0, len(groups), STRETCHES)
        with FlopCounterMode(display=False) as counter:
            for i in mine:
                loss_of(batches[i]).backward()
        tokens = sum(recordings.slots[j] for i in mine for j in groups[i])
        return counter.get_total_flops() / 1e9 / tokens

    square = torch.ones(MATRIX, MATRIX)
    return Side(stretch, checked, lambda: square @ square, gflop)


def config_of(folder: Path, tuned: str) -> Any:
    """The config of a user who names the model's folders and the data, with these settings over it."""
    from jaxthd.config import Config, DataConfig, ModelConfig
    from jaxthd.hf.checkpoint import model_config
    from scripts.benchmark import changed

    model = model_config(folder / "salm", model=ModelConfig())
    if (folder / "hybrid").exists():
        model = model_config(folder / "hybrid", model=model)
    manifest = (folder / "manifest").read_text()
    data = DataConfig(manifest=(manifest,), validation_manifest=f"all={manifest}", tokenizer="bytes")
    return changed(Config(model=model, data=data), tuned.split(","))


def documents_of(config: Any, folder: Path) -> list[tuple[Any, Any]]:
    """(example, document) of every item of the manifest, without dither."""
    from jaxthd.data.dataset import SpeechData

    with closing(SpeechData(config, folder, training=False)) as data:
        return [(x, data.validation_document(x)) for x in data.validation_examples("all")]


def jaxthd_side(folder: Path, way: str) -> Side:
    """jaxthd with the settings `way` over its defaults."""
    import jax
    import optax

    from jaxthd.checkpoints.weights import Weights, load_weights
    from jaxthd.data.dataset import SpeechData
    from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
    from jaxthd.planning.fitting import fitting_step
    from jaxthd.planning.sizes import with_sizes
    from jaxthd.run.startup import keep_freed_memory, prepared, simulate_devices
    from jaxthd.steps.blueprint import Blueprint
    from jaxthd.steps.state import new_state
    from jaxthd.steps.training import loss_and_gradient

    simulate_devices(1)
    keep_freed_memory()
    work = Path(tempfile.mkdtemp(dir=folder))
    config = prepared(with_sizes(config_of(folder, way), work))
    mesh, blueprint = make_mesh(config.mesh), Blueprint(config)

    def weights() -> Weights:
        """The SALM's weights; where there is a hybrid, its decoder's in their place."""
        from jaxthd.config import ModelConfig
        from jaxthd.hf.checkpoint import model_config

        salm = replace(config, model=model_config(folder / "salm", model=ModelConfig()))
        found = load_weights([folder / "salm"], Blueprint(salm), mesh, partly=False)
        if not (folder / "hybrid").exists():
            return found
        llm = replace(config, model=replace(config.model, encoder=None))
        own = load_weights([folder / "hybrid"], Blueprint(llm), mesh, partly=False)
        audio = [{k: v for k, v in tree.items() if k in ("encoder", "adapter")} for tree in found]
        return Weights(*(a | b for a, b in zip(audio, own, strict=True)))

    state: Any = new_state(weights(), blueprint, mesh)
    data = SpeechData(config, work)
    loader = data.training(local_rows(mesh, config.data.rows))
    batch, report = next(loader)
    on_mesh = put_batch(batch, mesh)
    step = fitting_step(blueprint, mesh, state, on_mesh, lambda line: print(line, file=sys.stderr))
    whole = sum(Recordings.read(folder).slots)

    def stretch(number: int) -> tuple[int, float]:
        """As jaxthd train: the next batch is loaded while the step computes."""
        nonlocal state, on_mesh, report
        tokens, seconds = 0, 0.0
        while tokens < whole / STRETCHES:
            state, metrics = step(state, on_mesh)
            tokens, seconds = tokens + report.real_tokens, seconds + report.audio_seconds
            batch, report = next(loader)
            on_mesh = put_batch(batch, mesh)
            jax.block_until_ready(metrics)
        return tokens, seconds

    def checked() -> list[tuple[float, float]]:
        from scripts.gpu_models import rows_of

        start, found = weights(), []
        documents = documents_of(config, work)
        for i in Recordings.read(folder).checked():
            batch, sizes = rows_of([[documents[i][1]]], config.model)
            alone = replace(config, data=sizes)
            program = jax.jit(loss_and_gradient(Blueprint(alone), mesh))
            loss, gradients, *_ = program(start.params, start.buffers, put_batch(batch, mesh))
            found.append((float(loss), float(optax.tree.norm(gradients))))
        return found

    square = jax.numpy.ones((MATRIX, MATRIX))
    product = jax.jit(lambda x: x @ x)
    return Side(stretch, checked, lambda: product(square).block_until_ready(), lambda: 0.0)


def resident() -> tuple[int, int]:
    """(resident bytes of this process, the most that it ever had)."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def serve(side: str, folder: Path, way: str) -> None:
    """A way's process: does what it is asked for, a line of JSON each."""
    # What libraries print goes elsewhere; answers go where the parent reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if side == "make":
        make_peer(folder, way)
        return
    if side == "peer":
        import nemo.collections.speechlm2.models.salm  # noqa: F401
    else:
        import jaxthd.train  # noqa: F401
    before, _ = resident()
    made = (peer_side if side == "peer" else jaxthd_side)(folder, way)
    for line in sys.stdin:
        what, number = json.loads(line)
        start = time.perf_counter()
        answer: Any
        if what == "stretch":
            rates = []
            for _ in range(3):
                begun = time.perf_counter()
                made.matrix()
                rates.append(2 * MATRIX**3 / (time.perf_counter() - begun))
            start = time.perf_counter()
            done = made.stretch(number)
            answer = [*done, time.perf_counter() - start, max(rates)]
        elif what == "peak":
            answer = resident()[1] - before
        else:
            answer = made.checked() if what == "checked" else made.gflop()
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    """The parent's end of a way's process."""

    def __init__(self, python: str, side: str, folder: Path, way: str) -> None:
        command = [python, __file__, "--side", side, "--folder", str(folder), "--way", way]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        errors = open(folder / f"{side} {way.replace('/', '_')}.log", "w")  # noqa: SIM115
        self.name, self._log = f"{side} {way}", errors.name
        self.popen = subprocess.Popen(command, env=os.environ | KEEPS_MEMORY, stderr=errors, **pipes)

    def ask(self, what: str, number: int = 0) -> Any:
        assert self.popen.stdin
        assert self.popen.stdout
        print(json.dumps([what, number]), file=self.popen.stdin, flush=True)
        line = self.popen.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early: {Path(self._log).read_text()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait()


def write_documents(folder: Path, manifest: str, python: str, model: str) -> float:
    """Makes the weights, and the documents as the peer takes them. Returns GFLOP a token (model_flops, and
    attention and scan over what they must compute), without padding and recomputation."""
    import soundfile

    from jaxthd.data.audio.recordings import load_audio

    (folder / "manifest").write_text(manifest)  # this one is read first, the copy below afterwards
    maker = Process(python, "make", folder, model)
    if maker.popen.wait():
        sys.exit(Path(maker._log).read_text()[-3000:])
    config = config_of(folder, "")
    items = [(x, d) for x, d in documents_of(config, folder) if hasattr(d, "tokens")]
    samples, ids, trained = [], [], []
    for example, document in items:
        clips = [load_audio(c.path, c.offset, c.duration, member=c.member) for c in example.clips]
        starts = np.flatnonzero(np.diff(document.is_audio, prepend=False) & document.is_audio)
        if len(clips) != 1 or len(starts) != 1:
            sys.exit(f"{example.key}: expected one recording a line")
        keeps = ~document.is_audio
        keeps[starts] = True
        samples.append(clips[0])
        ids.append(np.where(document.is_audio, AUDIO, document.tokens)[keeps])
        trained.append(document.supervised[keeps])
    with open(folder / "manifest.jsonl", "w") as lines:
        for number, (example, x) in enumerate(zip((example for example, _ in items), samples, strict=True)):
            path = folder / f"{number}.wav"
            soundfile.write(path, x, 16_000, subtype="FLOAT")
            line = {"audio_filepath": str(path), "duration": len(x) / 16_000, "text": example.text}
            print(json.dumps(line), file=lines)
    (folder / "manifest").write_text(str(folder / "manifest.jsonl"))
    np.save(folder / "audio.npy", np.concatenate(samples))
    np.savez(
        folder / "documents.npz",
        samples=[len(x) for x in samples],
        lengths=[len(x) for x in ids],
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        slots=[len(d) for _, d in items],
    )
    from jaxthd.planning.model_flops import model_flops
    from scripts.gpu_models import attention_and_scan_flops, report_of

    documents = [d for _, d in items]
    flops = model_flops(config)(report_of(documents, config)) + attention_and_scan_flops(config, documents)
    tokens = sum(map(len, documents))
    print(
        f"{len(items):,} documents, {sum(map(len, samples)) / 16_000:,.0f} s of audio, {tokens:,} tokens, "
        f"{sum(d.is_audio.sum() for d in documents) / tokens:.0%} of them audio"
    )
    return flops / tokens / 1e9


def compare(model: str, manifest: str, options: argparse.Namespace) -> list[Any]:
    """Measures a model on a manifest; prints the table and returns the claims."""
    from scripts.benchmark import Claim, show

    _, _, chunk, least = MODELS[model]
    print(f"\n## {model}, {manifest}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        useful = write_documents(folder, manifest, options.python_reference, model)
        scan = f" {chunk}" if chunk else ""
        peers = [f"{seconds:g} sorted{scan}" for seconds in options.padded]
        peers.append(f"{options.padded[len(options.padded) // 2]:g} random{scan}")
        if chunk:
            peers.append(f"{options.padded[len(options.padded) // 2]:g} sorted {CHUNK}")
        peers += [f"{seconds} sorted{scan} compiled" for seconds in options.compile]
        ours = {"defaults": "", **({"tuned": options.tuned} if options.tuned else {})}
        ways = {f"peer {way}": Process(options.python_reference, "peer", folder, way) for way in peers}
        ways |= {f"jaxthd {n}": Process(sys.executable, "jaxthd", folder, way) for n, way in ours.items()}
        checks = [ways[name].ask("checked") for name in ("jaxthd defaults", f"peer {peers[0]}")]
        apart = float(np.abs(np.array(checks[0]) / np.array(checks[1]) - 1).max())
        for process in ways.values():  # warm: programs are compiled, memory is there
            for number in range(STRETCHES if "compiled" in process.name else 2):
                process.ask("stretch", number)
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(options.rounds * STRETCHES):
            for name_of_way, process in ways.items():
                found[name_of_way].append(process.ask("stretch", number))
        rows, rates, peaks = [], {}, {}
        for name_of_way, process in ways.items():
            tokens, seconds, took, matrix = map(np.array, zip(*found[name_of_way], strict=True))
            rates[name_of_way] = float(np.median(tokens / took))
            peaks[name_of_way] = process.ask("peak")
            done = process.ask("gflop") if name_of_way.startswith("peer") else 0.0
            rows.append(
                [
                    name_of_way,
                    f"{rates[name_of_way]:,.0f}",
                    f"{float(np.median(seconds / took)):.1f}",
                    f"{peaks[name_of_way] / 2**20:,.0f}",
                    f"{1e3 * useful:.1f}",
                    f"{1e3 * done:.1f}" if done else "",
                    f"{float(np.median(1e9 * useful * tokens / took / matrix)):.0%}",
                ]
            )
            process.end()
    columns = "way|tokens/s|s of audio/s|peak, MiB|MFLOP a token|done|of matrix rate"
    show(f"{model}: a training step", columns, rows)
    print(f"losses and gradient norms of {CHECKED} documents: {apart:.1e} apart")
    best = max((name for name in rates if name.startswith("peer")), key=lambda name: rates[name])
    print(f"fastest way of the peer: {rates[best]:,.0f} tokens/s, {best}")
    gain, memory = rates["jaxthd defaults"] / rates[best], peaks["jaxthd defaults"] / peaks[best]
    return [
        Claim(f"{model}: losses and gradient norms agree ({apart:.1e}, at most 1e-4)", apart <= 1e-4),
        Claim(f"{model}: {gain:.2f} times as fast as {best} ({least} or more)", gain >= least),
        Claim(f"{model}: {memory:.2f} times the memory of {best} (at most 1.5)", memory <= 1.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", nargs="+", default=["synthetic"], help="recordings with their texts")
    parser.add_argument("--python-reference", default=sys.executable, help="has NeMo")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3", "hybrid"])
    parser.add_argument("--padded", nargs="+", type=float, default=PADDED, help="seconds of a peer's batch")
    parser.add_argument("--compile", nargs="*", type=float, default=[], help="seconds with torch.compile")
    parser.add_argument("--tuned", default="", metavar="NAME=VALUE,...", help="settings of a second way")
    parser.add_argument("--rounds", type=int, default=2, help="passes over the recordings")
    for hidden in ("--side", "--way"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options.folder, options.way)
        return
    from scripts.benchmark import conclude

    python = options.python_reference
    if subprocess.run([python, "-c", "import nemo.collections.speechlm2"], capture_output=True).returncode:
        sys.exit(f"{python} cannot import nemo.collections.speechlm2; name one that can: --python-reference")
    claims = [x for m in options.manifest for model in options.models for x in compare(model, m, options)]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
