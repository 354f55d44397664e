"""Nemotron 3.5 Transcribe: what transformers computes with it, and its folder in and out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.convert import export_weights, import_weights
from jaxthd.models.front_ends.log_mel import filters, window
from tests.helpers import assert_same
from tests.hf.published import assert_identical, change_published, group, tensors
from tests.hf.transcribed import Transcribed, reference, write_transcribe


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
