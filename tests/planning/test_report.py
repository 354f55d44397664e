"""What the plan says of the ranks that share a buffer's audio."""

from jaxthd.config import Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig
from jaxthd.planning.report import clip_room


def test_a_rank_has_room_for_its_share_and_for_a_whole_chunk():
    encoder = EncoderConfig(chunk_seconds=20.0)
    config = Config(
        mesh=MeshConfig(context=4), data=DataConfig(audio_capacity=4000), model=ModelConfig(encoder=encoder)
    )
    # A chunk may have a frame more than its seconds: a tail of one joins it. Arrays are multiples of 8.
    assert [(seconds, rank, over) for seconds, _, rank, over in clip_room(config)] == [
        ("5", 1000, "+0%"),
        ("10", 1008, "+1%"),
        ("20", 2008, "+101%"),
        ("40", 4000, "+300%"),
    ]
