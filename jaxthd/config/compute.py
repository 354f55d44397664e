"""The settings of how the model is computed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxthd.config.values import DERIVED, Index


@dataclass(frozen=True)
class BlockSizes:
    """Numbers of items that are computed at a time, powers of two that suit the machine. They change the
    speed and the order of sums, never what is computed. No setting: tests and benchmarks give others."""

    attention: int = 64
    """Keys of an attention block, which has half as many queries."""
    loss: int = 256
    """Supervised positions that are scored at a time."""
    vocabulary: int = 8192
    """Vocabulary entries that are scored at a time."""
    experts: int = 32
    """Tokens of one expert that are multiplied at a time, unless expert_rounds."""
    expert_rounds: bool = False
    """Multiply all experts in one product, each with its share of the tokens and a quarter more, as often as
    the most loaded expert needs."""
    expert_slots: float = 1.5
    """Slots for tokens in one send to another rank, relative to the mean number of tokens. Tokens that do not
    fit go with the next send."""
    scan: int = 64
    """Tokens of a scan chunk of Mamba2 and of the gated delta rule."""
    front_end: int = 128
    """Outputs of a front end's convolutions that are computed at a time."""


SMALL_BLOCKS = BlockSizes()
"""Block sizes of CPUs, whose caches are small."""
LARGE_BLOCKS = BlockSizes(attention=256, loss=1024, experts=128, scan=128)
"""Block sizes of bfloat16, in which only accelerators are fast: they take large products."""


@dataclass(frozen=True)
class ComputeConfig:
    """Settings of the computation: dtypes, exchanges, kernels, memory. No checkpoint depends on them."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype. Parameters are float32 (float64 if this is float64)."""
    fp8: tuple[str, ...] = ()
    """Patterns of projections, such as "decoder.layers.*", whose matrix products run in 8-bit numbers,
    forward and backward (pip install 'jaxthd[fp8]'). "experts" stands for the routed experts, which no other
    pattern matches. Routers, time steps of recurrent layers, embedding and head never do."""
    context_exchange: Literal["ring", "all_gather"] = "ring"
    """The exchange by which attention reaches other context ranks' keys and values. Among pipeline stages
    they are gathered, whatever this says."""
    context_layout: Literal["auto", "buffer", "whole"] = "buffer"
    """The unit divided into 2 * context chunks, of which rank r holds chunks r and 2 * context - 1 - r: the
    whole buffer, or only documents that must be. "whole" keeps a document on one rank where it fits its share
    of the buffer.
    "auto": a training run chooses by the lengths of its documents, and keeps the choice in its workdir; other
    commands, and objectives that compare answers, use "buffer"."""
    context_splits: Index = 8
    """Under the layout "whole": the most documents of a buffer that are divided. Others that could not stay
    whole go into the next buffer. 0: none, so mixers exchange nothing, and a document that is longer than a
    rank's share of the buffer is skipped and listed."""
    sequence_sharded: bool = False
    """Shard norms and residuals over the tensor ranks, 1/tensor of the tokens on each: reduce-scatter and
    all-gather replace all-reduce."""
    attention_backend: str = "auto"
    """The back-end of the decoder's attention. "xla": blockwise, on every device; no kernels are used for the
    encoder's attention and Mamba2's scan either, which else have their own on GPUs where they are admitted.
    "te": Transformer Engine's fused kernels; "cudnn": jax's own cuDNN call. Both need an NVIDIA GPU and
    bfloat16. "pallas": kernels of our own, for windows, shared prompts and decoding too.
    All are for NVIDIA GPUs, and a measurement as the run starts must admit them. "auto": on
    GPUs the first of te, cudnn, pallas, xla that is admitted; xla elsewhere. See jaxthd doctor --kernels."""
    encoder_attention: Annotated[Literal["auto", "blocks", "pallas"], DERIVED] = "auto"
    """The form of the encoder's attention. "blocks": a block after the other, and none without an allowed
    pair; dense in rows of up to 41 s. "pallas": kernels for NVIDIA GPUs; a measurement as the run starts must
    admit them. On a CPU they are interpreted, for tests. "auto": pallas on GPUs where it is admitted, else
    blocks."""
    scan_backend: Annotated[str, DERIVED] = "auto"
    """The back-end of Mamba2's scan in training and evaluation. "xla": on every device. "pallas": kernels
    for NVIDIA GPUs, for chunks, head dims and states that are powers of two from 16 up; a measurement as
    the run starts must admit them. On a CPU they are interpreted, for tests. "auto": on GPUs
    "pallas" where it is admitted, else "xla"."""
    remat: Literal["auto", "none", "selective", "layers", "full"] = "auto"
    """Activations that the backward pass computes again, instead of keeping them since the forward pass.
    "none": all are kept. "selective": those that are cheap; results of matrix products, of attention and of
    scans are kept. "layers": those inside a layer; its input is kept. "full": those inside a repeat of the
    decoder's pattern, inside a block of the encoder and inside what is before its blocks. "auto": jaxthd
    train takes the first of none, selective and full whose compiled step fits into the devices' memory (on
    one CPU device, none with unroll_layers before these, for models of up to 16 layers of each kind); other
    commands take full."""
    num_speculative_tokens: Index = 0
    """Tokens that decoding drafts at a time, by the first depth of multi-token prediction
    (model.llm.mtp_pattern), and checks in one pass of the decoder: generation, validation and rollouts. What
    is decoded, drawn at a temperature too, stays the same. 0: none are drafted."""
    unroll_layers: bool = False
    """Write layers out one after the other in place of a loop over them. Compilation then grows with their
    number, but nothing is copied into the loop's stacks and out of them, and on GPUs the step is one CUDA
    graph. On one CPU device answers are drawn so in any case, by models of up to 16 layers of each kind."""
    block_sizes: Annotated[BlockSizes | None, DERIVED] = None
    """None: those that `blocks` derives."""
    xla_options: tuple[str, ...] = ()
    """Options of XLA for the compiled programs, as NAME=VALUE. They override
    jaxthd/kernels/xla_options.py. With xla_gpu_enable_command_buffer= no CUDA graphs are recorded."""

    @property
    def blocks(self) -> BlockSizes:
        """The block sizes of a run: block_sizes, or those that follow from dtype."""
        return self.block_sizes or (LARGE_BLOCKS if self.dtype == "bfloat16" else SMALL_BLOCKS)

    @property
    def fp8_projections(self) -> tuple[str, ...]:
        """The patterns of fp8, without the experts."""
        return tuple(pattern for pattern in self.fp8 if pattern != "experts")

    @property
    def fp8_experts(self) -> bool:
        """Whether routed experts are multiplied with their tokens in 8-bit numbers."""
        return "experts" in self.fp8

    @property
    def layout(self) -> Literal["buffer", "whole"]:
        """context_layout; "buffer" where nothing has decided on "auto"."""
        return "buffer" if self.context_layout == "auto" else self.context_layout
