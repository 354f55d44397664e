"""Audio front ends: a folder each. Only their settings are imported here, without jax
(jaxthd/config/front_end.py)."""

from jaxthd.models.front_ends.fastconformer.settings import FastConformer
from jaxthd.models.front_ends.granite_conformer.settings import GraniteConformer
from jaxthd.models.front_ends.qformer.settings import QFormer
from jaxthd.models.front_ends.qwen3_audio.settings import Qwen3Audio
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.front_ends.whisper.settings import Whisper

__all__ = ["FastConformer", "GraniteConformer", "QFormer", "Qwen3Audio", "Stacked", "Transcribe", "Whisper"]
