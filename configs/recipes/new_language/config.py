r"""A new language: the base, which knows English alone, learns Spanish, and keeps most of its English.

    jaxthd train configs/recipes/new_language/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/new_language
    jaxthd evaluate runs/recipes/new_language --guard spanish english --contamination

4,000 Spanish utterances are mixed with the base's own, three to one. All parameters train. Word error rates
are measured on 500 utterances of each language, whose voices and texts are not in the training sets.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=("synthetic:spanish", "synthetic"),
        weights=(3.0, 1.0),
        validation_manifest=("spanish=synthetic:spanish", "english=synthetic"),
        # Spanish words are spelled, in about three tokens each; the base's English words are one.
        capacity=640,
    )
    train = replace(base.train, steps=700, learning_rate=1e-3, validate_every=350, checkpoint_every=350)
    return replace(base, data=data, train=train)
