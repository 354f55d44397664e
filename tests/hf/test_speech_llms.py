"""Speech LLMs: what transformers computes from a recording alone, jaxthd computes packed (tests/references/
speech_llms.py)."""

import numpy as np
import pytest

from jaxthd.convert import export_weights, import_weights
from jaxthd.hf.checkpoint import model_config
from tests.helpers import assert_same
from tests.hf.published import Published, assert_identical, published, tensors, write_published
from tests.hf.speech_folders import as_authors

NAMES = ("qwen3_asr", "qwen2_audio", "voxtral", "glmasr", "granite_speech")
LONG = [pytest.param(f"{name}_long", marks=pytest.mark.nightly) for name in NAMES]


@pytest.fixture(scope="module", params=[*NAMES, *LONG])
def family(request, tmp_path_factory) -> Published:
    return published(request.param, tmp_path_factory.mktemp("published") / request.param)


def test_logits_and_gradients_equal_transformers(family):
    """Recordings of 0.3 s and more, one or two of them or none a document, in one buffer."""
    order = [*family.numbers[1:], 0]
    loss, logits, gradients = family.run(order)
    for place, n in enumerate(order):
        want, tokens = family.arrays[f"logits.{n}"], family.arrays[f"tokens.{n}"]
        found = logits[place] if len(want) == len(tokens) else logits[place][tokens != 47]
        assert_same(found, want, 2e-5)
    np.testing.assert_allclose(loss, family.arrays["loss"], rtol=1e-5)
    want = {name: x for name, x in family.gradients().items() if name in gradients}
    assert {*gradients} == {*want}
    assert_same({name: gradients[name] for name in want}, want, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_the_original_bit_by_bit(name, tmp_path):
    folder = write_published(name, tmp_path / "published")
    import_weights([str(folder)], tmp_path / "imported")
    for like in (None, folder):
        out = tmp_path / f"out-{like is None}"
        export_weights(tmp_path / "imported", out, like=like)
        assert_identical(tensors(out), tensors(folder))


def test_qwen3_asr_in_its_authors_form(tmp_path):
    """The same model; an export like it has its form."""
    plain, authors = (write_published("qwen3_asr", tmp_path / name) for name in ("plain", "authors"))
    as_authors(authors)
    assert model_config(authors) == model_config(plain)
    import_weights([str(authors)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "like", like=authors)
    assert_identical(tensors(tmp_path / "like"), tensors(authors))
    assert model_config(tmp_path / "like") == model_config(plain)
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert_identical(tensors(tmp_path / "out"), tensors(plain))
