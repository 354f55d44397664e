"""Audio front ends: a folder each. Only their settings are imported here, without jax
(jaxthd/config/front_end.py)."""

from jaxthd.models.front_ends.fastconformer.settings import FastConformer

__all__ = ["FastConformer"]
