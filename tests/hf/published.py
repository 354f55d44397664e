"""The references in tests/references as checkpoints on disk, and the models imported from them.

An archive NAME.npz, which a module of tests/references makes, holds config.json, weights by their names on
disk, documents, logits, loss, and gradients by the same names, all computed by
the library that the family comes from.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxthd.checkpoints.weights import Weights, load_weights, named_weights
from jaxthd.config import (
    AdaptConfig,
    BlockSizes,
    ComputeConfig,
    Config,
    EncoderConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.files.tensor_names import Tensor
from jaxthd.hf.checkpoint import Checkpoint, model_config, open_checkpoint
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.document import AudioPiece, Document, audio_pieces
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.clips import clip_of
from tests.helpers import assert_same
from tests.references.waves import wave

REFERENCES = Path(__file__).parents[1] / "references"
LLMS = ("nemotron_h", "nemotron_h_latent")
QWEN = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
DEEPSEEK = ("deepseek_v3", "moonlight")
SALM = ("salm", "salm_layers", "salm_qformer", "salm_automodel")
LLAMAS = ("llama", "mistral", "qwen2", "granite")
HYBRIDS = (
    "granite_hybrid",
    "kimi_linear",
    "olmo_hybrid",
    "bamba",
    "granite_dense",
    "falcon_h1",
    "falcon_h1_norm",
    "lfm2",
    "olmo_hybrid_rotary",
)
FAMILIES = (*LLMS, *QWEN, *LLAMAS, *HYBRIDS, *DEEPSEEK, "gpt_oss", "nemotron_omni", *SALM)
CAPACITY, AUDIO, BLOCK = 96, 320, 16
BASE = ModelConfig(
    # Used where the checkpoint has no encoder.
    encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=2, ffn_dim=8, subsampling_channels=4),
)
COMPUTE = ComputeConfig(block_sizes=BlockSizes(attention=BLOCK, loss=BLOCK, vocabulary=20, experts=4))


def group(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(f"{prefix}."): v for k, v in arrays.items() if k.startswith(f"{prefix}.")}


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    weights = jax.eval_shape(lambda: Weights(*Blueprint(config).initial_weights()))
    return {name: x.shape for name, x in named_weights(weights).items()}


def arranged(
    tensors: Sequence[Tensor], named: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """jaxthd's arrays made from a checkpoint's tensors, or from gradients of the same names."""
    found = {part.name: np.zeros(shapes[part.name]) for tensor in tensors for part in tensor.slices}
    for tensor in tensors:
        for part, x in zip(tensor.slices, tensor.split(named[tensor.name]), strict=True):
            found[part.name][part.at] = x
    return found


def nested(named: Mapping[str, Any]) -> dict[Any, Any]:
    """Converts dotted names to nested dicts, the form of a module's pure dict."""
    tree: dict[Any, Any] = {}
    for name, x in named.items():
        *above, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = x
    return tree


class Published(NamedTuple):
    """A reference, and the model imported from its checkpoint."""

    arrays: dict[str, np.ndarray]
    checkpoint: Checkpoint
    config: Config
    weights: Weights

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], folder: Path) -> "Published":
        """Imports the checkpoint in `folder`. arrays: the reference's."""
        adapt = open_checkpoint(folder).lora or AdaptConfig()
        adapt = replace(adapt, lora_dropout=0.0)
        config = Config(model=model_config(folder, model=BASE), compute=COMPUTE, adapt=adapt)
        weights = load_weights([folder], Blueprint(config), make_mesh(config.mesh))
        return cls(arrays, open_checkpoint(folder), config, weights)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its documents."""
        return list(range(len(group(self.arrays, "tokens"))))

    def document(self, number: int) -> Document:
        tokens = self.arrays[f"tokens.{number}"].astype(np.int32)
        if f"samples.{number}" in self.arrays:
            return self._of_recording(number, tokens)
        mels = self.arrays.get(f"mels.{number}")
        seconds = self.arrays.get(f"seconds.{number}")
        is_audio = tokens == (47 if mels is not None or seconds is not None else -1)
        supervised = np.arange(len(tokens)) > (np.flatnonzero(is_audio)[-1] if is_audio.any() else 0)
        if seconds is not None:
            return Document(str(number), tokens, is_audio, supervised, self.audio(number))
        chunks = [] if mels is None else [mels]
        assert is_audio.sum() == sum(-(-(len(x)) // 8) for x in chunks)
        return Document(str(number), tokens, is_audio, supervised, tuple(clip_of(chunks)))

    def _of_recording(self, number: int, tokens: np.ndarray) -> Document:
        """Of a reference with recordings, whose tokens have one placeholder, past the vocabulary."""
        samples = (self.arrays[f"samples.{number}"] / 2**15).astype(np.float32)
        front_end, placeholder = self.config.model.audio_encoder, self.config.model.llm.vocab_size
        pieces = audio_pieces(front_end.pieces(len(samples)), front_end.features(samples, None))
        supervised = np.arange(len(tokens)) > np.flatnonzero(tokens == placeholder)[-1]
        return Document.splice(str(number), tokens.tolist(), supervised.tolist(), [pieces], placeholder)

    def audio(self, number: int) -> tuple[AudioPiece, ...]:
        """The pieces of a document's recordings, which waves.py makes."""
        front_end = self.config.model.audio_encoder
        recordings = zip(self.arrays[f"seeds.{number}"], self.arrays[f"seconds.{number}"], strict=True)
        found = []
        for samples in (wave(int(seed), seconds) for seed, seconds in recordings):
            found += audio_pieces(front_end.pieces(len(samples)), front_end.features(samples, None))
        return tuple(found)

    @property
    def sizes(self) -> dict[str, int]:
        """The capacities of a buffer with all documents."""
        if not any(name.startswith("seconds.") for name in self.arrays):
            return {"capacity": CAPACITY, "audio_capacity": AUDIO}
        documents, front_end = map(self.document, self.numbers), self.config.model.audio_encoder
        tokens, frames = zip(*((len(d), front_end.taken(d.pieces)) for d in documents), strict=True)
        return {"capacity": sum(tokens), "audio_capacity": sum(frames)}

    def gradients(self, kind: str = "grad") -> dict[str, np.ndarray]:
        """The library's gradients by jaxthd's names. kind: what their names in the reference begin with."""
        shapes = shapes_of(self.config)
        theirs = group(self.arrays, kind)
        tensors = [
            t._replace(slices=t.slices if t.name in theirs else ())
            for t in self.checkpoint.tensors(self.config.model, shapes)
        ]
        return arranged([t for t in tensors if t.slices], theirs, shapes)

    def run(
        self, numbers: Sequence[int], capacity: int = 0, audio_capacity: int = 0, **how: Any
    ) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
        """Runs the documents in one buffer: (loss, logits of each, gradients by jaxthd's names). capacity,
        audio_capacity: 0 for those of `sizes`. how: of `document`."""
        documents, sizes = [self.document(n, **how) for n in numbers], self.sizes
        has_audio = any(document.pieces for document in documents)
        batch, _ = pack_row(
            documents,
            capacity=capacity or sizes["capacity"],
            audio_capacity=(audio_capacity or sizes["audio_capacity"]) * has_audio,
            front_end=self.config.model.audio_encoder,
            max_documents=8,
            order_seed=None,
        )
        (loss, logits), gradients = _compiled(self.config)(*self.weights, jax.tree.map(jnp.asarray, batch))
        ends = np.cumsum([len(d) for d in documents])
        found = [np.asarray(logits)[end - len(d) : end] for d, end in zip(documents, ends, strict=True)]
        named = named_weights(Weights(gradients, {}))
        return float(loss), found, {name: np.asarray(x) for name, x in named.items()}

    def on_mesh(self, mesh: MeshConfig, adapt: AdaptConfig) -> tuple[float, dict[str, np.ndarray]]:
        """(loss, gradients by jaxthd's names) of all documents in a training step's two microbatches: summed,
        as in the reference. adapt: what is trained."""
        rows, capacity = 2 * mesh.data, 8 * mesh.context * -(-self.sizes["capacity"] // (8 * mesh.context))
        front_end = self.config.model.audio_encoder
        sizes: dict[str, Any] = {"capacity": capacity, "audio_capacity": self.sizes["audio_capacity"]}
        sizes |= {"max_documents": 8, "front_end": front_end, "context": mesh.context}
        sizes |= {"audio_ranks": mesh.audio_ranks}
        documents = [self.document(n) for n in self.numbers]
        packed = [pack_row(documents[row::rows], **sizes)[0] for row in range(rows)]
        config = replace(self.config, mesh=mesh, adapt=adapt, train=TrainConfig(microbatches=2))
        blueprint, devices = Blueprint(config), make_mesh(mesh)
        held = to_stages(jax.device_get((self.weights.params, self.weights.buffers)), blueprint.stages)
        batch = put_batch(concatenate_rows(packed), devices)
        found = jax.jit(loss_and_gradient(blueprint, devices))(*held, batch)
        gradients = from_stages(jax.device_get(found.gradients), blueprint.stages)
        count = sum(float(x.weights.sum()) for x in packed)
        named = named_weights(Weights(gradients, {}))
        return count * float(found.loss), {name: count * np.asarray(x) for name, x in named.items()}


@functools.cache
def _compiled(config: Config) -> Any:
    """A program (params, buffers, batch) -> ((summed loss, logits), gradients), with stored batch statistics,
    on one device."""
    graph = Blueprint(config).graph

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, buffers)
        x_ND, _ = model.embed(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        return -model.target_log_probs(x_ND, batch).sum(), model.hidden(x_ND) @ model.gathered_head().T

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def load_reference(name: str) -> dict[str, np.ndarray]:
    """The arrays of tests/references/NAME.npz."""
    return dict(np.load(REFERENCES / f"{name}.npz"))


def write_published(name: str, folder: Path) -> Path:
    """The reference's checkpoint as a folder; in it, where config.json names the LLM's, that too."""
    arrays = load_reference(name)
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.loads(str(arrays["config"]))
    if "llm" in arrays:
        (folder / "llm").mkdir()
        (folder / "llm" / "config.json").write_text(str(arrays["llm"]))
        fields["pretrained_llm"] = str(folder / "llm")
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(group(arrays, "weight"), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_published(folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Path:
    """Rewrites a checkpoint: change(its settings, its tensors) changes both in place."""
    settings = json.loads((folder / "config.json").read_text())
    change(settings, stored := tensors(folder))
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors in a folder."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def assert_identical(found: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Asserts that two sets of tensors are the same, bit by bit."""
    assert found.keys() == want.keys()
    for name in want:
        assert found[name].dtype == want[name].dtype
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)


def published(name: str, folder: Path) -> Published:
    """The reference, written to `folder` and imported from there."""
    return Published.of(load_reference(name), write_published(name, folder))


def assert_trained_as_published(family: Published, mesh: MeshConfig) -> None:
    """Asserts that a training step on a mesh, with stored batch statistics, has the library's loss and
    gradients."""
    want = family.gradients()
    # BatchNorms keep their statistics, and have no gradient.
    norms = {key for key in want if key.startswith("encoder.blocks.conv.norm.")}
    loss, gradients = family.on_mesh(
        mesh, AdaptConfig(freeze=("encoder.blocks.conv.norm.*",) if norms else ())
    )
    np.testing.assert_allclose(loss, family.arrays["loss"], rtol=1e-5)
    assert {*gradients} == {*want} - norms
    assert_same(gradients, {key: want[key] for key in gradients}, 1e-4)
