r"""A new domain with words to boost: the base learns telephone speech, and to use a list of names.

    jaxthd train configs/recipes/telephone/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/telephone
    jaxthd evaluate runs/recipes/telephone --guard lists telephone english --contamination

Names of callers sound like other names (stephen, steven). Half of the draws have a list in the prompt: the
names that are said, and up to three others. A quarter are such recordings without a list, and a quarter are
the base's English. The sets "lists" and "telephone" have the same 500 recordings, so the difference between
them is what a list gives. Voices and texts are not in the training sets.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=("synthetic:telephone-lists", "synthetic:telephone", "synthetic"),
        weights=(2.0, 1.0, 1.0),
        validation_manifest=(
            "lists=synthetic:telephone-lists",
            "telephone=synthetic:telephone",
            "english=synthetic",
        ),
    )
    train = replace(base.train, learning_rate=1e-3)
    return replace(base, data=data, train=train)
