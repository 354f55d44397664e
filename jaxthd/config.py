"""Every setting of a run, as frozen dataclasses. configs/*.py return a Config; the command line overrides it.

The docstring under a field is its --help text.
"""

import importlib.util
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxthd.errors import UserError


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
    """Pipeline stages of a rank; more than 1: the interleaved schedule, whose bubble is that much smaller."""
    fsdp: bool = True
    """Spread weight matrices, their gradients and optimizer state over the ranks that all use them (decoder:
    data and context; encoder: all), gathered when used. False: each of these holds them whole, which is
    faster where the model is small."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.data, self.context, self.pipeline, self.tensor)

    @property
    def devices(self) -> int:
        return self.data * self.context * self.pipeline * self.tensor

    @property
    def audio_ranks(self) -> int:
        """Ranks that share a buffer, hence its audio."""
        return self.context * self.pipeline * self.tensor


@dataclass(frozen=True)
class SpecAugmentConfig:
    """Masks over the features of a training document (Park et al., 2019), drawn anew every epoch."""

    freq_masks: int = 0
    """Masks over mel bands."""
    freq_width: int = 27
    """Most mel bands of a mask."""
    time_masks: int = 0
    """Masks over time."""
    time_width: float = 0.05
    """Most of a recording that one mask over time covers, as a fraction."""


class ValidationSet(NamedTuple):
    """is_named: whether its results are told apart by its name: it was given one, or it is one of several."""

    name: str
    path: str
    is_named: bool


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it is packed."""

    manifest: tuple[str, ...] = ("synthetic",)
    """NeMo JSONL manifests, their shards in braces ("manifest_{0..15}.json", "manifest__OP_0..15_CL_.json");
    Lhotse Shar directories; "synthetic": spoken digits and commands, made on first use and cached."""
    tarred_audio: tuple[str, ...] = ()
    """The tar files of each manifest, as NeMo's tarred_audio_filepaths ("audio_{0..15}.tar"), "" for one with
    plain files and for a Shar directory; none: no manifest has any."""
    weights: tuple[float, ...] = ()
    """How often documents of each manifest are drawn, in proportion; none: by their numbers of documents."""
    validation_manifest: str | tuple[str, ...] = "synthetic"
    """Manifest or Shar directory for validation; "" for none. Several are sets with names, NAME=PATH or that
    of the file: the results of each are logged as validation_NAME_loss and so on, the means over all sets as
    validation_loss and so on."""
    validation_tarred_audio: str | tuple[str, ...] = ""
    """Its tar files, or those of each; "" for none."""
    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes, needs no file), the path of a tokenizer.json, or the folder of a checkpoint in
    Hugging Face's format, whose other files then say which tokens are special."""
    template: Literal["plain", "chatml", "chat_template"] = "plain"
    """How turns are written: "plain" (text, end-of-text after an answer), "chatml" (<|im_start|>), or as the
    checkpoint in data.tokenizer has it ("chat_template")."""
    template_options: str = ""
    """Variables of the checkpoint's chat template, a JSON object such as {"enable_thinking": false}."""
    system_prompt: str = ""
    """Turn of the system before every document that brings none of its own; "" for none."""
    prompt: str = "{audio}"
    """The user's turn of a manifest line with text; data.audio_placeholder is where the recording goes."""
    audio_placeholder: str = "{audio}"
    """What stands for a recording in data.prompt and in the texts of conversations."""
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    packing: Literal["first_fit", "best_fit", "padded"] = "first_fit"
    """How documents fill buffers: grain's first-fit or best-fit packer, or "padded": one document a row."""
    rows: int = 1
    """Buffers a step, over all data ranks. Each is a stream of its own: the mesh never changes the data."""
    capacity: int = 2048
    """Token slots of a buffer."""
    max_documents: int = 64
    """Most documents in a buffer; the packer never exceeds it."""
    audio_capacity: int = 16000
    """Mel frames (10 ms) a buffer holds, over all its ranks."""
    packing_bins: int = 8
    """Buffers the packer keeps open at a time: more pack tighter and shuffle more."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this (1: none). It shapes the stream of buffers:
    for compute.context_layout "document", a multiple of 2 * context for every context size of the run."""
    shuffle: bool = True
    """Shuffle the documents anew every epoch."""
    seed: int = 0
    """Seed of the shuffle, of dither and of SpecAugment."""
    workers: int = 2
    """Processes that decode audio and compute features ahead of the step; 0: none, the loader does it."""
    prefetch: int = 2
    """Batches made ahead of the step; 0: none."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """template_options, read. Raises UserError for what is no JSON object."""
        try:
            options = json.loads(self.template_options or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise UserError(
                f"data.template_options {self.template_options!r} is no JSON object; expected one such as "
                '{"enable_thinking": false}: correct data.template_options'
            )
        return options

    @property
    def validation_sets(self) -> tuple[ValidationSet, ...]:
        """validation_manifest, read; names as they were given. A path with a "=" needs a name."""
        given = self.validation_manifest
        manifests = [given] if isinstance(given, str) else given
        manifests = [] if list(manifests) == [""] else manifests
        sets = []
        for manifest in manifests:
            name, mark, path = manifest.partition("=")
            if not mark:
                stem = re.sub(r"[^\w.-]+", "-", Path(manifest).stem)
                name, path = stem.strip("-.") or "validation", manifest
            sets.append(ValidationSet(name, path, bool(mark) or len(manifests) > 1))
        return tuple(sets)


@dataclass(frozen=True)
class EncoderConfig:
    """FastConformer over packed log-mel frames."""

    num_mels: int = 80
    """Mel bands of the features."""
    layers: int = 4
    """Conformer blocks."""
    dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    ffn_dim: int = 512
    """Inner dim of each of the two feed-forward modules."""
    conv_kernel: int = 9
    """Taps of the depthwise convolution; odd."""
    subsampling_channels: int = 64
    """Channels of the stride-2 convolutions."""
    linear_bias: bool = True
    """Biases in attention and feed-forward modules."""
    conv_bias: bool = True
    """Biases in convolution modules."""
    scale_input: bool = True
    """Multiply the subsampled features by sqrt(dim)."""
    chunk_seconds: float = 30.0
    """Longer audio is encoded in pieces of this length. A property of the model, not of the mesh."""

    @property
    def chunk_frames(self) -> int:
        """Most mel frames of an encoder chunk, a joined tail of one frame included."""
        return round(self.chunk_seconds * 100) + 1


@dataclass(frozen=True)
class LLMConfig:
    """Hybrid Mamba2/attention decoder (Nemotron-H, Nemotron-3). Names follow the layers' definitions."""

    pattern: str = "M-M*-"
    """One letter a block: M Mamba2, * attention, - MLP, E mixture of experts. | may say where pipeline
    stages are divided; without any they are divided by cost."""
    vocab_size: int = 260
    """Rows of the embedding and of the head."""
    dim: int = 128
    """Model dim."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    q_heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides q_heads."""
    head_dim: int = 32
    """Dim of an attention head."""
    ffn_dim: int = 512
    """Inner dim of the MLP."""
    mamba_heads: int = 8
    """Mamba2 heads."""
    mamba_head_dim: int = 32
    """Dim of a Mamba2 head."""
    mamba_state: int = 32
    """State size N of a Mamba2 head."""
    mamba_groups: int = 2
    """Groups that share B and C; divides mamba_heads."""
    mamba_conv: int = 4
    """Taps of the causal convolution."""
    mamba_dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Clamp of the time step after softplus."""
    experts: int = 8
    """Routed experts."""
    experts_per_token: int = 2
    """Experts a token is sent to."""
    expert_dim: int = 128
    """Inner dim of a routed expert."""
    shared_expert_dim: int = 256
    """Inner dim of the shared expert."""
    latent_dim: int = 0
    """Dim of the projection around the routed experts; 0 for none."""
    router_scale: float = 1.0
    """Factor on the routed experts' sum."""
    mtp_pattern: str = ""
    """Blocks of a depth of multi-token prediction, such as "*E"; "" for none. It trains beside the next-token
    prediction (train.mtp_loss) and is exported; validation, scoring and generation do without."""
    mtp_depths: int = 1
    """Depths of multi-token prediction: depth k predicts the token k places beyond the next."""
    mtp_shared: bool = True
    """All depths have the same weights (Nemotron-3); else each has its own."""

    @property
    def letters(self) -> str:
        """The blocks: the pattern without its marks."""
        return self.pattern.replace("|", "")

    @property
    def kinds(self) -> str:
        """All kinds of blocks that the model has, by letter."""
        return "".join(sorted(set(self.letters + self.mtp_pattern)))

    @property
    def mtp_modules(self) -> int:
        """Sets of weights for multi-token prediction."""
        return (1 if self.mtp_shared else self.mtp_depths) if self.mtp_pattern else 0


@dataclass(frozen=True)
class ModelConfig:
    """The speech LLM: encoder, adapter, decoder. A checkpoint depends on all of it, and on nothing else."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    llm: LLMConfig = field(default_factory=LLMConfig)
    adapter_dim: int = 0
    """Inner dim of the RMSNorm-linear-relu^2-linear adapter; 0 for a single linear layer."""


@dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed: numbers, exchanges, kernels, memory. A checkpoint depends on none of it."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype. Parameters are float32 (float64 when this is float64)."""
    fp8: tuple[str, ...] = ()
    """Patterns of projections, such as "decoder.layers.*", whose matrix products, forward and backward, are
    of 8-bit numbers (pip install 'jaxthd[fp8]'). Never routers, routed experts, Mamba2's time steps,
    embedding and head."""
    context_exchange: Literal["ring", "all_gather"] = "ring"
    """How attention reaches the other context ranks' keys and values."""
    context_layout: Literal["buffer", "document"] = "buffer"
    """What is cut into 2 * context chunks, of which rank r holds chunks r and 2 * context - 1 - r: the whole
    buffer, or each document by itself (data.round_to then is a multiple of 2 * context)."""
    sequence_sharded: bool = False
    """Norms and residuals on 1/tensor of the tokens: reduce-scatter and all-gather in place of all-reduce."""
    expert_parallel: bool = True
    """Experts cut over data and context ranks, tokens sent to them; else experts' weights are gathered."""
    expert_capacity: float = 1.5
    """Places for tokens in a send to another rank, over the mean number; the rest goes with the next send."""
    attention_backend: Literal["xla", "te", "cudnn", "auto"] = "xla"
    """What computes the decoder's attention. "xla": blockwise, everywhere; on NVIDIA GPUs in bfloat16, if a
    measurement as the run starts admits it, "te": Transformer Engine's fused kernels, or "cudnn": jax's own;
    "auto": the first of te, cudnn, xla that is admitted. See python -m jaxthd.doctor."""
    scan_backend: Literal["xla", "pallas", "auto"] = "xla"
    """What computes Mamba2's scan in training and evaluation. "xla": everywhere; "pallas": kernels for NVIDIA
    GPUs, for chunks, head dims and states that are powers of two from 16 up, if a measurement as the run
    starts admits them (on a CPU they are interpreted, for tests); not yet run on a GPU. "auto": "pallas"
    where it is admitted, else "xla"."""
    kernels_unverified: bool = False
    """Use the attention or scan back-end that was asked for although the measurement refuses it."""
    attention_block: int = 128
    """Tokens of an attention block: speed only."""
    loss_block: int = 256
    """Supervised positions scored at a time."""
    vocab_block: int = 8192
    """Vocabulary entries scored at a time."""
    expert_block: int = 32
    """Tokens of one expert multiplied at a time."""
    remat_encoder: bool = True
    """Recompute the encoder's blocks in the backward pass instead of keeping their activations."""
    remat_llm: bool = True
    """The same for the decoder's blocks."""
    scan_chunk: int = 64
    """Tokens of a chunk of Mamba2's scan: speed only, never the result."""
    command_buffers: bool = True
    """On GPUs kernels, loops and conditionals are recorded in CUDA graphs (command buffers) where XLA can."""
    xla_options: tuple[str, ...] = ()
    """Options of XLA for the compiled programs, NAME=VALUE, over those of jaxthd/kernels/xla_options.py."""


@dataclass(frozen=True)
class AdaptConfig:
    """What of the model is trained, and how fast. A part is encoder, adapter or LLM (all the rest).

    Patterns are of names, * standing for anything: python -m jaxthd.describe --names lists these.
    """

    freeze: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are, such as "encoder.*" or "decoder.layers.mamba.*". Encoder
    BatchNorms that are frozen keep their running statistics and normalise by them; frozen routers keep their
    experts' correction biases."""
    unfreeze: tuple[str, ...] = ()
    """Patterns of parameters that train all the same, such as "decoder.*.norm.weight" beside LoRA."""
    lora_rank: int = 0
    """Rank of the low-rank matrices (LoRA) beside projections; 0 for none. They train, whatever freeze says;
    all else in a part that has some is frozen."""
    lora_alpha: float = 16.0
    """The product of the low-rank matrices is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("decoder.layers.*",)
    """Patterns of the projections that get them, such as "*.q". Routers and routed experts never do."""
    encoder_lr_factor: float = 1.0
    """The encoder's learning rate, over the scheduled one."""
    adapter_lr_factor: float = 1.0
    """The adapter's."""
    llm_lr_factor: float = 1.0
    """The LLM's."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimization."""

    init_from: tuple[str, ...] = ()
    """Weights that a new run starts from: Hugging Face folders, .nemo archives, workdirs of runs (newest
    checkpoint; @best or @STEP: another). Each gives what it holds, a later one replaces what an earlier one
    gave; the rest of the model is drawn at random."""
    steps: int = 200
    """Optimizer steps of the run."""
    learning_rate: float = 1e-3
    """Peak learning rate (AdamW)."""
    warmup_steps: int = 20
    """Steps of linear warm-up; a cosine to min_learning_rate follows."""
    min_learning_rate: float = 1e-5
    """Learning rate at the last step."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    weight_decay: float = 0.01
    """AdamW weight decay, on weight matrices; not on biases, norms and per-head scalars."""
    router_bias_rate: float = 1e-3
    """A step's change of the experts' correction biases, up where fewer tokens come than on average."""
    aux_loss: float = 0.0
    """Weight of the auxiliary loss that evens out the experts' load; 0 for none."""
    mtp_loss: float = 0.1
    """Weight of multi-token prediction's loss, the mean over its depths, where model.llm.mtp_pattern has any;
    0: it is not computed."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    microbatches: int = 1
    """Parts into which a step's rows are cut, computed one after the other (gradient accumulation)."""
    max_skipped_steps: int = 10
    """Steps in a row whose update may be skipped, loss or gradient not being finite, before the run stops."""
    seed: int = 0
    """Seed of the initial parameters."""
    validate_every: int = 50
    """Steps between validations; 0 for none."""
    validation_batches: int = 8
    """Most batches a validation reads."""
    max_new_tokens: int = 160
    """Most tokens that validation decodes for a document, for the word error rate; 0: it decodes none."""
    normaliser: Literal["basic", "english", "none"] = "basic"
    """What is done to texts before their words are compared: Whisper's normalisers, "basic" (lower case, no
    punctuation, nothing in brackets; marks that spell vowels stay) or "english" (numbers, spellings and
    contractions too); or "none"."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints kept; the one with the best validation is kept too."""
    tensorboard: bool = True
    """Write the metrics as TensorBoard files too."""
    draw_last_batch: bool = False
    """Draw the documents of the last batch as a picture: buffers, ranks, audio, padding."""


@dataclass(frozen=True)
class Config:
    """One run."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def depths_trained(self) -> int:
        """Depths of multi-token prediction that a training step computes."""
        return self.model.llm.mtp_depths if self.model.llm.mtp_pattern and self.train.mtp_loss else 0

    @property
    def without_mtp(self) -> "Config":
        """For what needs the next token only; a checkpoint's other parameters are not read then."""
        return replace(self, model=replace(self.model, llm=replace(self.model.llm, mtp_pattern="")))


def load_config(path: str | Path) -> Config:
    """The Config that the Python file at `path` describes: what its function config() returns.

    The file runs as a module of its own, anew at every call; nothing is added to sys.path. One that varies
    its neighbour loads that: replace(load_config(Path(__file__).with_name("cp2.py")), mesh=MeshConfig()).
    Raises FileNotFoundError without such a file; UserError for a file that is no Python, defines no
    config(), or whose config() returns something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no config at {path}; expected a Python file with a function config() -> Config, "
            "such as configs/cp2.py: correct the path"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; expected a name that ends in .py: rename it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, "config", None)
    if not callable(make):
        raise UserError(f"{path} defines no function config(); expected one that returns a Config: add it")
    config = make()
    if not isinstance(config, Config):
        raise UserError(
            f"config() in {path} returns {type(config).__name__}; expected jaxthd.config.Config: return that"
        )
    return config
