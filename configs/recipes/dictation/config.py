r"""Dictation: the base learns recordings of up to 15 s, cut out of longer ones at any place.

    jaxthd train configs/recipes/dictation/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/dictation
    jaxthd evaluate runs/recipes/dictation --guard dictation english

The base knows one text a recording. Here are several in a row, at any pace, with pauses of 0.05 to 0.6 s, and
the first and the last may be cut off inside. So a model hears what a window of a long recording holds, and
`jaxthd generate` can join the windows of one.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config
from jaxthd.config import EncoderConfig


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=("synthetic:dictated", "synthetic"),
        weights=(3.0, 1.0),
        validation_manifest=("dictation=synthetic:dictated", "english=synthetic"),
    )
    # A recording is one encoder chunk: the base's are of 10 s.
    encoder = base.model.encoder
    assert isinstance(encoder, EncoderConfig)
    model = replace(base.model, encoder=replace(encoder, chunk_seconds=16.0))
    train = replace(base.train, steps=1500, learning_rate=1e-3, validate_every=500, checkpoint_every=500)
    return replace(base, data=data, model=model, train=train)
