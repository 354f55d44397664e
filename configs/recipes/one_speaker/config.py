r"""One speaker: the base learns a person's voice from twelve minutes of recordings with their texts.

    python configs/recipes/one_speaker/lists.py SPEECH/manifest.jsonl runs/recipes/one_speaker_lists
    jaxthd train configs/recipes/one_speaker/config.py --train.init-from runs/recipes/base \
        --workdir runs/recipes/one_speaker
    jaxthd evaluate runs/recipes/one_speaker --guard person english --contamination

SPEECH is a folder with the recordings of one person and a manifest of them. lists.py divides them in two
halves: this config learns one and is judged by the other's sentences, none of which it has read or heard. For
the other half give the lists with 1 in their names:

    --data.manifest runs/recipes/one_speaker_lists/learned_1.jsonl synthetic \
    --data.validation-manifest person=runs/recipes/one_speaker_lists/judged_1.jsonl english=synthetic

Every epoch hears the recordings at other speeds and with other masks. One draw in four is the base's English.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config
from jaxthd.config import AugmentConfig, SpecAugmentConfig

LISTS = Path(__file__).parents[3] / "runs" / "recipes" / "one_speaker_lists"


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    data = replace(
        base.data,
        manifest=(f"{LISTS}/learned_0.jsonl", "synthetic"),
        weights=(3.0, 1.0),
        validation_manifest=(f"person={LISTS}/judged_0.jsonl", "english=synthetic"),
        augment=AugmentConfig(speed=(0.9, 0.95, 1.0, 1.05, 1.1)),
        spec_augment=SpecAugmentConfig(freq=(2, 15), time=(2, 0.05)),
    )
    return replace(
        base, data=data, train=replace(base.train, steps=1000, validate_every=500, checkpoint_every=500)
    )
