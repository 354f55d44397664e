"""Tells which of jaxthd's requirements are installed: the packages that it always needs, and its extras."""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

PACKAGE = "jaxthd"
PURPOSES = {
    "cuda12": "NVIDIA GPUs, with CUDA 12",
    "cuda13": "NVIDIA GPUs, with CUDA 13",
    "te": "Transformer Engine's attention on NVIDIA GPUs (compute.attention_backend te)",
    "parquet": "data sets in parquet and arrow files",
    "stores": "data sets and workdirs by URL (s3, gs, az, http)",
    "fp8": "matrix products in FP8 (compute.fp8)",
    "mistral": "Mistral's tokenizer and turns, of Voxtral's folders (tekken.json)",
    "wandb": "Weights & Biases (train.trackers wandb)",
    "mlflow": "MLflow (train.trackers mlflow)",
    "demo": "synthetic speech, as of configs/first_run.py",
    "docs": "the pages of docs/ as a site",
    "test": "the tests",
}
"""The extras, each with what it is for."""


def unmet(extra: str = "", distribution: str = PACKAGE) -> list[str]:
    """The requirements of a distribution, or of one of its extras, that are not installed as they should be.

    Each is said with what is there instead. Empty where all is well.
    """
    found = []
    for requirement in _requirements(distribution, extra):
        try:
            there = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            found.append(f"{requirement.name} is {there}, expected {requirement.specifier}")
        for inner in sorted(requirement.extras):
            found += unmet(inner, requirement.name)
    return list(dict.fromkeys(found))


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    """The requirements that hold on this machine: what the extra adds, or all without an extra."""
    for requirement in _all_requirements(distribution):
        holds = [not requirement.marker or requirement.marker.evaluate({"extra": x}) for x in ("", extra)]
        if holds[1] and (not extra or not holds[0]):
            yield requirement


@cache
def _all_requirements(distribution: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return []
