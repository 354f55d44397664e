"""Nemotron 3.5 Transcribe: what transformers computes with it, and its folder in and out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxthd.checkpoints.weights import Weights, load_model, named_weights
from jaxthd.config import AdaptConfig, DataConfig, MeshConfig, TrainConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.transcribe import FAMILY
from jaxthd.models.front_ends.log_mel import filters, window
from jaxthd.models.front_ends.transcribe.labels import Labeller, WordTimes
from jaxthd.models.stacks import from_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.parameters import parameter_groups
from jaxthd.steps.aligning import make_aligning_step
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.helpers import assert_same
from tests.hf.published import REFERENCES, assert_identical, change_published, group, tensors
from tests.hf.transcribed import AUDIO, CAPACITY, Transcribed, labelled, reference, write_transcribe

CONFIG = Path(__file__).parents[2] / "configs" / "transcribe.py"
PUBLISHED: dict[str, Any] = json.loads((REFERENCES / "published_configs.json").read_text())["transcribe"]
"""The published model's config.json."""


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Transcribed:
    return Transcribed.of(reference(), write_transcribe(tmp_path_factory.mktemp("transcribe")))


def test_the_extractors_constants_are_rounded_as_there():
    np.testing.assert_array_equal(window(True), reference()["window"])
    np.testing.assert_array_equal(filters(80, True).toarray().T, reference()["filters"])


@pytest.mark.parametrize("number", [0, 1])
def test_features_are_the_extractors_in_float64(family, number):
    """The library's, in float32, are off by up to 3e-5 in quiet bands."""
    (found,) = family.front_end.features(family.samples(number), None)
    want, bands = reference()[f"features.{number}"], 80
    np.testing.assert_allclose(found[: len(want), bands : 2 * bands], want, rtol=0, atol=5e-5)
    assert not found[len(want) :, : 2 * bands].any()
    deviations = (want - want.mean(0, dtype=np.float64)) / (want.std(0, ddof=1, dtype=np.float64) + 1e-5)
    np.testing.assert_allclose(found[: len(want), :bands], deviations, rtol=0, atol=5e-5)


def test_logits_and_gradients_equal_transformers(family):
    """Ragged documents, each alone and all in one buffer; of every tensor that the checkpoint holds."""
    numbers = family.numbers
    alone = [family.run([n]) for n in numbers]
    order = [2, 0, 3, 1]
    packed_loss, packed_logits, packed_gradients = family.run(order)
    for place, n in enumerate(order):
        want = family.arrays[f"logits.{n}"]
        np.testing.assert_allclose(alone[n][1][0], want, rtol=0, atol=2e-5)
        np.testing.assert_allclose(packed_logits[place], want, rtol=0, atol=2e-5)
    np.testing.assert_allclose(packed_loss, family.arrays["loss"], rtol=1e-6)
    want = family.gradients()
    summed = {name: sum(g[name].astype(np.float64) for *_, g in alone) for name in want}
    assert_same({name: packed_gradients[name] for name in want}, want, 1e-4)
    assert_same(summed, want, 1e-4)


def test_speakers_that_the_data_names_take_the_place_of_the_diarizers(family):
    """The reference's own speakers, to a model whose diarizer would say otherwise; some recordings without.
    The segments begin with one that is too short to be heard, and gives the speaker its number."""
    params = family.weights.params
    silent = jax.tree.map(jnp.zeros_like, params["encoder"]["diarizer"])
    weights = family.weights._replace(params={**params, "encoder": {**params["encoder"], "diarizer": silent}})
    silenced = family._replace(weights=weights)
    order = [2, 0, 3, 1]
    for place, n in enumerate(order):
        found = silenced.run(order, named=True)[1][place]
        np.testing.assert_allclose(found, family.arrays[f"logits.{n}"], rtol=0, atol=2e-5)
    assert np.abs(silenced.run([2])[1][0] - family.arrays["logits.2"]).max() > 1e-2


def on_mesh(family: Transcribed, mesh: MeshConfig, weight: float) -> tuple[Gradient, dict[str, np.ndarray]]:
    """(Gradient of all documents in two rows, its gradients by jaxthd's names). weight: of the CTC loss, for
    which recordings get the reference's labels."""
    encoder = family.front_end
    encoder = replace(encoder, word_times=replace(encoder.word_times, loss=weight))
    model, data = replace(family.config.model, encoder=encoder), DataConfig(max_documents=8)
    config = replace(family.config, mesh=mesh, model=model, data=data, train=TrainConfig(microbatches=2))
    documents = []
    for n in family.numbers:
        document, labels = family.document(n), tuple(family.arrays[f"ctc.labels.{n}"].tolist())
        documents.append(replace(document, pieces=labelled(document.pieces, labels)))
    sizes: dict[str, Any] = {"capacity": CAPACITY, "audio_capacity": AUDIO, "max_documents": 8}
    ranks = {"context": mesh.context, "audio_ranks": mesh.audio_ranks}
    rows = [documents[::2], documents[1::2]]
    packed = [pack_row(row, **sizes, **ranks, front_end=encoder)[0] for row in rows]
    blueprint, devices = Blueprint(config), make_mesh(mesh)
    held = load_model([family.checkpoint.path], blueprint, devices)
    step = jax.jit(loss_and_gradient(blueprint, devices))
    got = step(*held, put_batch(concatenate_rows(packed), devices))
    own = from_stages(jax.device_get(got.gradients), blueprint.stages)
    named = named_weights(Weights(own, {})).items()
    return got, {name: np.asarray(x) for name, x in named if x is not None}


def test_the_head_for_word_times_trains_by_ctc_on_a_mesh_of_all_axes(family):
    """Loss and gradients of both losses are those that torch gives each document alone."""
    weight, arrays = 0.3, family.arrays
    got, gradients = on_mesh(family, MeshConfig(1, 2, 2, 2), weight)
    labels = sum(len(arrays[f"ctc.labels.{n}"]) for n in family.numbers)
    np.testing.assert_allclose(got.objective["label_loss"], arrays["ctc.loss"] / labels, rtol=1e-5)
    supervised = sum(int(family.document(n).supervised.sum()) for n in family.numbers)
    np.testing.assert_allclose(got.loss, arrays["loss"] / supervised, rtol=1e-5)
    text, words = family.gradients(), family.gradients("ctc.grad")
    want = {name: x / supervised + weight * words.get(name, 0) / labels for name, x in text.items()}
    assert_same(gradients, {name: want[name] for name in gradients}, 2e-5)
    assert {name.split(".")[1] for name in want.keys() - gradients.keys()} == {"diarizer"}
    assert all(gradients[name].any() for name in gradients if "word_times" in name)


def log_likelihood(blank_F: np.ndarray, label_FL: np.ndarray, labels: np.ndarray) -> float:
    """log p(labels) by the forward algorithm, state by state, in float64."""
    spelled = [None, *(x for label in labels for x in (label, None))]
    # The first place is before all frames: from there to the first blank or the first label.
    before = np.array([0.0, *[-np.inf] * len(spelled)])
    for blank, label in zip(blank_F.astype(float), label_FL.astype(float), strict=True):
        after = np.full_like(before, -np.inf)
        for state, x in enumerate(spelled):
            came = [before[state], before[state + 1]]
            if x is not None and (state == 1 or spelled[state - 2] != x):
                came.append(before[state - 1])
            after[state + 1] = np.logaddexp.reduce(came) + (blank if x is None else label[state // 2])
        before = after
    return float(np.logaddexp(before[-1], before[-2]))


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(1, 2, 2, 2)], ids=str)
def test_the_heads_scores_are_those_of_torchs_loss(family, mesh):
    """The sum of all alignments of each document, from its own frames and labels in a packed row."""
    encoder = replace(family.front_end, word_times=replace(family.front_end.word_times, loss=1.0))
    model, data = replace(family.config.model, encoder=encoder), DataConfig(max_documents=8)
    config, documents, labels = replace(family.config, mesh=mesh, model=model, data=data), [], []
    for n in family.numbers:
        labels.append(family.arrays[f"ctc.labels.{n}"])
        document = family.document(n)
        documents.append(replace(document, pieces=labelled(document.pieces, tuple(labels[-1].tolist()))))
    sizes: dict[str, Any] = {"capacity": CAPACITY, "audio_capacity": AUDIO, "max_documents": 8}
    ranks: dict[str, Any] = {"context": mesh.context, "audio_ranks": mesh.audio_ranks, "order_seed": None}
    batch = concatenate_rows([pack_row(documents, **sizes, **ranks, front_end=encoder)[0]])
    blueprint, devices = Blueprint(config), make_mesh(mesh)
    held = load_model([family.checkpoint.path], blueprint, devices)
    scores = jax.device_get(jax.jit(make_aligning_step(blueprint, devices))(*held, put_batch(batch, devices)))
    found = []
    splits = None if batch.splits is None else batch.splits[0]
    each = ContextLayout.of(config).document_slots(batch.segment_ids[0], None, splits)
    for slots, own in zip(each, labels, strict=True):
        outputs = batch.audio_slots[0][slots]
        at = (2 * outputs[outputs >= 0][:, None] + np.arange(2)).reshape(-1)
        found.append(log_likelihood(scores.blank[0][at], scores.label[0][at][:, : len(own)], own))
    np.testing.assert_allclose(-sum(found), family.arrays["ctc.loss"], rtol=1e-5)


def test_labels_are_the_words_pieces_and_fit_the_frames(tmp_path):
    def encoded(text: str) -> list[int]:
        return [x for word in text.split() for x in pieces.encode(f" {word}").ids]

    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "bb": 1, "?": 2}, "?"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    (tmp_path / "alignment_tokenizer").mkdir()
    pieces.save(str(tmp_path / "alignment_tokenizer" / "tokenizer.json"))
    words = WordTimes(classes=4, blank=3, loss=0.1, most_labels=5)
    labeller = Labeller(str(tmp_path), words)
    assert list(labeller("<spk:0>a bb\u2014a <SPK:1> a", 9)) == encoded("a bb a a") == [0, 1, 0, 0]
    assert list(labeller("a a", 2)) == [0, 0]
    assert not labeller("a a", 1), "a blank between two of the same"
    assert not labeller("a bb a bb a bb", 9), "more than most_labels"
    assert not labeller("<spk:0>", 9)
    with pytest.raises(UserError, match="ids up to 2; expected fewer than the head's 2 classes"):
        Labeller(str(tmp_path), replace(words, classes=2))
    with pytest.raises(UserError, match="tokenizer of the head for word times"):
        Labeller(str(tmp_path / "alignment_tokenizer"), words)


@pytest.mark.parametrize("form", ["columns", "each"])
def test_export_of_an_import_is_identical_and_holds_what_is_not_read(tmp_path, form):
    """Of a folder as it is published, and as transformers saves a new model: a tensor for each expert."""

    def divide(settings, stored):
        if form == "columns":
            return
        for name in [name for name in stored if ".experts." in name]:
            part = "up" if "gate_and_up" in name else "down"
            for expert, matrix in enumerate(stored.pop(name)):
                head = name.rpartition(".")[0]
                stored[f"{head}.{expert}.{part}_proj.weight"] = np.ascontiguousarray(matrix.T)

    folder = change_published(write_transcribe(tmp_path / "there"), divide)
    import_weights([str(folder)], tmp_path / "here")
    export_weights(tmp_path / "here", tmp_path / "back", like=folder)
    assert_identical(tensors(tmp_path / "back"), tensors(folder))
    if form == "columns":
        export_weights(tmp_path / "here", tmp_path / "new")
        own = set(tensors(folder)) - {f"{name}" for name in group(reference(), "unread")}
        assert_identical(tensors(tmp_path / "new"), {name: tensors(folder)[name] for name in own})


def test_the_config_is_that_of_the_published_model():
    """Its size is that of transformers' model on the device "meta". Its settings are written back."""
    config = load_config(CONFIG)
    model = config.model
    assert FAMILY.configure(PUBLISHED, model) == model
    written = {**FAMILY.fields(model), "audio_token_id": PUBLISHED["audio_token_id"]}
    assert FAMILY.configure(written, model) == model
    groups = parameter_groups(replace(config, adapt=AdaptConfig()))
    assert sum(group.parameters for group in groups) == 32_361_750_159
    assert sum(group.parameters for group in groups if group.part == "encoder") == 730_116_504 + 50_252_983


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published settings but for one."""
    settings = json.loads(json.dumps(PUBLISHED))
    *folders, name = path.split(".")
    inner = settings
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return settings


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("audio_config.asr_config.hidden_act", "relu", "hidden_act.*gelu"),
        ("audio_config.asr_config.num_key_value_heads", 5, "num_key_value_heads.*10"),
        ("audio_config.diarization_config.audio_config.num_mel_bins", 80, "num_mel_bins.*128"),
        ("audio_config.diarization_config.streaming_config.num_speakers", 4, "num_speakers.*8"),
        ("word_timestamp_config.hidden_size", 640, "hidden_size.*1280"),
    ],
)
def test_settings_that_no_model_here_has_are_refused(path: str, value: Any, said: str):
    with pytest.raises(UserError, match=said):
        FAMILY.configure(changed(path, value), load_config(CONFIG).model)
