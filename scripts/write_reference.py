"""Writes docs/configuration.md, from jaxthd/config/, and docs/metrics.md, from jaxthd/run/metrics.py.

python scripts/write_reference.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.docs.reference import METRICS, REFERENCE, metrics_reference, reference

if __name__ == "__main__":
    for file, text in ((REFERENCE, reference()), (METRICS, metrics_reference())):
        file.write_text(text)
        print(file)
