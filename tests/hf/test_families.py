"""Imported checkpoints compute what the transformers library computes: logits, loss, every gradient."""

import numpy as np
import pytest

from tests.helpers import assert_same
from tests.hf.published import FAMILIES, Published, published


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Published:
    return published(request.param, tmp_path_factory.mktemp("published") / request.param)


def test_logits_and_gradients_equal_transformers(family):
    """Ragged documents, each alone and all in one buffer; of every tensor that the checkpoint holds."""
    numbers = family.numbers
    alone = [family.run([n]) for n in numbers]
    order = [*numbers[1:], 0]
    packed_loss, packed_logits, packed_gradients = family.run(order)
    for place, n in enumerate(order):
        want = family.arrays[f"logits.{n}"]
        assert_same(alone[n][1][0], want, 1e-5)
        assert_same(packed_logits[place], want, 1e-5)
    np.testing.assert_allclose(sum(loss for loss, *_ in alone), family.arrays["loss"], rtol=1e-6)
    np.testing.assert_allclose(packed_loss, family.arrays["loss"], rtol=1e-6)

    want = family.gradients()
    summed = {name: sum(g[name].astype(np.float64) for *_, g in alone) for name in want}
    assert_same({name: packed_gradients[name] for name in want}, want, 1e-4)
    assert_same(summed, want, 1e-4)
