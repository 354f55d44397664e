"""Audio front ends: a folder each. Only their settings are imported here, without jax
(jaxthd/config/front_end.py)."""

from jaxthd.models.front_ends.fastconformer.settings import FastConformer
from jaxthd.models.front_ends.qformer.settings import QFormer
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.front_ends.transcribe.settings import Transcribe

__all__ = ["FastConformer", "QFormer", "Stacked", "Transcribe"]
