"""The command line that the scripts in this folder share."""

import argparse
from pathlib import Path


def arguments(doc: str | None) -> argparse.Namespace:
    """Parses the options. out: the folder for references. checkpoints: where save_pretrained's folders are
    kept, or None. seed: the first seed to try.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "tests" / "references")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
