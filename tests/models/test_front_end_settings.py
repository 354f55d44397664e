"""What the front ends of speech LLMs say of settings that cannot work, and the tokens that they make."""

import re
from dataclasses import replace

import numpy as np
import pytest

from jaxthd.config import FrontEnd
from jaxthd.models.front_ends import GraniteConformer, Qwen3Audio, Whisper
from jaxthd.models.front_ends.whisper.module import sines_of

RATE = 16_000
QWEN2_AUDIO = Whisper(join="mean", joined=2, silence="hidden", windows=1)
QWEN2_5_OMNI = Whisper(
    join="mean", joined=2, silence="absent", whole_features=True, stored_positions=False, positions=100
)
VOXTRAL = Whisper(tail="window", whole_features=True)
GLM_ASR = Whisper(windows=21)


@pytest.mark.parametrize(
    ("front_end", "changes", "said"),
    [
        (VOXTRAL, {"heads": 5}, "model_dim is 128 with heads 5"),
        (VOXTRAL, {"positions": 1502}, "positions is 1502 with joined 4"),
        (QWEN2_AUDIO, {"whole_features": True}, 'whole_features is True with silence "hidden"'),
        (QWEN2_AUDIO, {}, r"windows is 1: of a recording 30 s are heard"),
        (GLM_ASR, {}, r"windows is 21: of a recording 630 s are heard"),
        (GLM_ASR, {"mel_bands": 500}, "mel_bands"),
        (QWEN2_5_OMNI, {"whole_features": False}, 'whole_features is False with silence "absent"'),
        (Qwen3Audio(), {"heads": 5}, "dim"),
        (GraniteConformer(), {"conv_kernel": 8}, "expected an odd number"),
        (GraniteConformer(), {"query_heads": 5}, "query_dim is 128 with query_heads 5"),
    ],
)
def test_what_cannot_work_is_told(front_end: FrontEnd, changes: dict[str, object], said: str):
    findings = [str(x) for x in replace(front_end, **changes).faults("model.encoder")]
    assert any(re.search(said, text) for text in findings), findings


@pytest.mark.parametrize("front_end", [VOXTRAL, QWEN2_5_OMNI, Qwen3Audio(), GraniteConformer()])
def test_what_can_work_is_not_complained_of(front_end: FrontEnd):
    assert not [*front_end.faults("model.encoder")]


@pytest.mark.parametrize(
    ("front_end", "tokens"),
    [
        # By the formulas of the published processors, of 0.3, 1, 8.01, 30, 31 and 100 s.
        (QWEN2_AUDIO, (7, 25, 200, 750, 750, 750)),
        (VOXTRAL, (375, 375, 375, 375, 750, 1500)),
        (GLM_ASR, (3, 12, 100, 375, 387, 1250)),
        (Qwen3Audio(), (7, 13, 105, 390, 403, 1300)),
        (Qwen3Audio(filled=False), (4, 13, 105, 390, 403, 1300)),
        (QWEN2_5_OMNI, (7, 25, 200, 750, 775, 2500)),
        (GraniteConformer(), (3, 12, 81, 300, 312, 1002)),
    ],
)
def test_tokens_of_a_recording(front_end: FrontEnd, tokens: tuple[int, ...]):
    found = []
    for seconds in (0.3, 1.0, 8.01, 30.0, 31.0, 100.0):
        found.append(sum(piece.tokens for piece in front_end.pieces(round(RATE * seconds))))
    assert tuple(found) == tokens


@pytest.mark.parametrize("dim", [2, 15])
def test_a_stored_table_of_positions_may_have_any_dim(dim: int):
    """The library adds a stored table of any dim; ours begins as sines, as many as the dim has."""
    table = np.asarray(sines_of(replace(VOXTRAL, model_dim=dim, heads=1, positions=50)))
    assert table.shape == (50, dim)
    assert np.ptp(table, axis=0).all()
    with pytest.raises(ValueError, match="expected an even number"):
        sines_of(replace(QWEN2_5_OMNI, model_dim=dim))
