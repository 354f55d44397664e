"""The recordings that a benchmark is given."""

import argparse

from jaxthd.data.sources.synthetic import synthetic_manifests


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """The option --manifest: a path; without one that of the synthetic speech, which is made on first use."""

    def path(text: str) -> str:
        return str(synthetic_manifests()[0]) if text == "synthetic" else text

    parser.add_argument(
        "--manifest", type=path, default="synthetic", help="recordings; else the synthetic speech"
    )
