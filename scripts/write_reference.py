"""Writes docs/configuration.md, from jaxthd/config/, docs/metrics.md, from jaxthd/run/metrics.py, and the
tables of docs/coming_from_nemo.md, from jaxthd/nemo/keys.toml; and the
table in docs/models.md, from jaxthd/hf/registry.py.

python scripts/write_reference.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.docs.models import MODELS, written
from tests.docs.reference import METRICS, NEMO, REFERENCE, metrics_reference, nemo_page, reference

if __name__ == "__main__":
    texts = {
        REFERENCE: reference(),
        METRICS: metrics_reference(),
        NEMO: nemo_page(NEMO.read_text()),
        MODELS: written(),
    }
    for file, text in texts.items():
        file.write_text(text)
        print(file)
