"""Each mixer equals the transformers library's NemotronH (tests/references/text_models.py).

The whole model is compared, gradients too, in tests/hf/test_families.py.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import Config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import Buffer, Init
from tests.helpers import CAPACITY, assert_same, row_arrays
from tests.hf.published import (
    BASE,
    BLOCK,
    COMPUTE,
    LLMS,
    arranged,
    group,
    load_reference,
    nested,
    shapes_of,
    write_published,
)


@pytest.mark.parametrize("variant", LLMS)
def test_mixers_equal_transformers(variant, tmp_path):
    """Each layer's mixer gets the input it has in the model; padding holds large values."""
    arrays, folder = load_reference(variant), write_published(variant, tmp_path)
    model = model_config(folder, model=BASE)
    llm, shapes = model.llm, shapes_of(Config(model=model))
    ours = arranged(open_checkpoint(folder).tensors(model, shapes), group(arrays, "weight"), shapes)
    length = len(arrays[f"tokens.{arrays['mixer.document']}"])
    mixers, inputs, done, stacks = {}, {}, Counter(), dict(llm.stacks)
    for i, kind in enumerate(llm.letters):
        layer = group(ours, f"decoder.layers.{stacks[kind]}.mixer")
        named = {name: jnp.asarray(x[done[kind]], jnp.float32) for name, x in layer.items()}
        done[kind] += 1
        build = llm.blocks[kind].build
        abstract = nnx.eval_shape(lambda build=build: build(llm, Init(jax.random.key(0)), COMPUTE))
        graph = nnx.split(abstract, nnx.Param, Buffer)[0]
        buffers = {name: named.pop(name) for name in ("correction_bias",) if name in named}
        mixers[i] = graph, nested(named), buffers
        inputs[i] = np.full((CAPACITY, llm.dim), 30, np.float32)
        inputs[i][:length] = arrays[f"mixer.{i}.input"]

    @jax.jit
    def run(inputs, segments):
        return {i: nnx.merge(*mixer)(inputs[i], segments) for i, mixer in mixers.items()}

    ids, positions = row_arrays([length])
    segments = make_segments(jnp.asarray(ids)[None], jnp.asarray(positions)[None], block=BLOCK, axis=None)
    outputs = run(inputs, segments)
    for i in mixers:
        assert_same(outputs[i][:length], arrays[f"mixer.{i}.output"], 1e-5)
