r"""Questions on speech: the base learns to answer written questions on a recording.

    jaxthd train configs/recipes/questions/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/questions
    jaxthd evaluate runs/recipes/questions --guard questions english

Of digits it is asked "first", "last" or "how many"; of a command "do what", "which thing" or "and" (what
follows). The answer is a word or a few, so it is judged by the word error rate too. Without a question the
transcript is expected: one draw in four is the base's own data. (`--contamination` would name most answers:
there are only 39.)
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=("synthetic:questions", "synthetic"),
        weights=(3.0, 1.0),
        validation_manifest=("questions=synthetic:questions", "english=synthetic"),
    )
    train = replace(base.train, steps=450, learning_rate=1e-3, validate_every=225, checkpoint_every=225)
    return replace(base, data=data, train=train)
