r"""Speakers: the base learns to write down who says what.

    jaxthd train configs/recipes/speakers/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/speakers
    jaxthd evaluate runs/recipes/speakers --guard speakers english

In a recording one or two voices speak in turn. The transcript names them: `[S1] move the light [S2] left`.
cpWER judges it: all that a speaker says is joined, and compared under the naming that fits best. One draw in
four is the base's own data, whose transcripts name nobody.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=("synthetic:speakers", "synthetic"),
        weights=(3.0, 1.0),
        validation_manifest=("speakers=synthetic:speakers", "english=synthetic"),
    )
    train = replace(
        base.train, steps=1500, learning_rate=1.5e-3, validate_every=500, checkpoint_every=500, ctc_loss=0.3
    )
    return replace(base, data=data, train=train)
