"""The settings of the mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of devices."""

    data: int = 1
    """Ranks that take different buffers."""
    context: int = 1
    """Ranks that share the tokens of a buffer."""
    pipeline: int = 1
    """Ranks that take different layers."""
    tensor: int = 1
    """Ranks that share the width of a layer."""
    stages_per_rank: int = 1
    """Pipeline stages of a rank. More than 1 selects the interleaved schedule, whose bubble is smaller by
    about that factor."""
    fsdp: bool = True
    """Shard weight matrices, their gradients and their optimizer state over all ranks that use the same
    ones (decoder: data and context; encoder: all ranks), and gather the weights when they are used. False:
    each rank holds them whole, which is faster where the model is small."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(data, context, pipeline, tensor)."""
        return (self.data, self.context, self.pipeline, self.tensor)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.data * self.context * self.pipeline * self.tensor

    @property
    def audio_ranks(self) -> int:
        """Ranks that share a buffer, and therefore its audio."""
        return self.context * self.pipeline * self.tensor
