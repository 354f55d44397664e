r"""DPO against insertions: the half-trained base learns not to write words that nobody said.

    jaxthd preferences runs/recipes/base@450 --manifest synthetic --out runs/recipes/insertions.jsonl \
        --by insertions --items 2000 --max-new-tokens 24
    jaxthd train configs/recipes/dpo_insertions/config.py --train.init-from runs/recipes/base@450 \
        --workdir runs/recipes/dpo_insertions
    jaxthd evaluate runs/recipes/dpo_insertions --guard english --contamination

Of 8 answers to a recording, the one with the most inserted words is rejected. The transcript is chosen
(`data.columns`), since the answer with the fewest may have words left out.
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    dpo = load_config(Path(__file__).parents[2] / "dpo.py")
    data = replace(
        base.data,
        manifest=("../../../runs/recipes/insertions.jsonl",),
        columns=("chosen=text",),
        max_documents=dpo.data.max_documents,
    )
    return replace(base, data=data, train=replace(dpo.train, before=(), init_from=()))
