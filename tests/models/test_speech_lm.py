import jax
import pytest

from jaxthd.config import LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import Attention
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.parallel.params import Init


def test_a_vocabulary_that_its_ranks_cannot_share_is_refused():
    llm = LLMConfig(
        pattern="*", vocab_size=30, dim=8, blocks={"*": Attention(heads=4, kv_heads=4, head_dim=2)}
    )
    init = Init(jax.random.key(0), mesh=MeshConfig(pipeline=2, tensor=2))
    with pytest.raises(ValueError, match="vocab_size is 30, expected a multiple of 4"):
        SpeechLM(ModelConfig(encoder=None, llm=llm), init)
