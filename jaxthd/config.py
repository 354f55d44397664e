"""Every setting of a run, as frozen dataclasses. configs/*.py return a Config; the command line overrides it.

The docstring under a field is its text in --help and in docs/configuration.md.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxthd.errors import UserError

Packing = Literal["first_fit", "best_fit", "best_fit_decreasing", "padded"]


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
        return (self.data, self.context, self.pipeline, self.tensor)

    @property
    def devices(self) -> int:
        return self.data * self.context * self.pipeline * self.tensor

    @property
    def audio_ranks(self) -> int:
        """Ranks that share a buffer, and therefore its audio."""
        return self.context * self.pipeline * self.tensor


@dataclass(frozen=True)
class SpecAugmentConfig:
    """Masks over the features of a training document (Park et al., 2019), drawn anew every epoch."""

    freq_masks: int = 0
    """Number of masks over mel bands."""
    freq_width: int = 27
    """Widest mask, in mel bands."""
    time_masks: int = 0
    """Number of masks over time."""
    time_width: float = 0.05
    """Longest mask over time, as a fraction of the recording."""


@dataclass(frozen=True)
class AugmentConfig:
    """Changes to training recordings, drawn anew every epoch, each by itself: speed, then room, noise and
    low-pass. All are off by default. Validation is never changed."""

    speed: tuple[float, ...] = ()
    """Speeds, one of which is drawn for each recording, such as 0.9 1.0 1.1. The pitch changes with them."""
    room_manifest: str = ""
    """Manifest of rooms' impulse responses ({"audio_filepath": "room.wav"} a line); "" for none."""
    room_probability: float = 0.5
    """Share of the recordings that are heard in one of these rooms."""
    noise_manifest: str = ""
    """Manifest of noises ({"audio_filepath": "noise.wav"} a line, with offset and duration if wanted); ""
    for none."""
    noise_probability: float = 0.5
    """Share of the recordings to which one of these noises is added."""
    noise_snr: tuple[float, float] = (5.0, 20.0)
    """Least and most ratio of signal to noise, in dB; drawn uniformly."""
    low_pass_probability: float = 0.0
    """Share of the recordings that lose what lies above a cut-off, as in a narrow channel."""
    low_pass_hz: tuple[float, float] = (2000.0, 4000.0)
    """Least and most cut-off, in Hz; drawn uniformly."""


@dataclass(frozen=True)
class FilterConfig:
    """Which training items are used. What is dropped is listed in skipped.jsonl, and does not count towards
    data.max_skipped_share. Items without a recording are kept; preferences and prompts have no rates."""

    min_seconds: float = 0.0
    """Shortest: seconds of all recordings of the item."""
    max_seconds: float = 0.0
    """Longest; 0: no bound."""
    min_tokens_per_second: float = 0.0
    """Least: tokens of the answers' texts a second of the recordings."""
    max_tokens_per_second: float = 0.0
    """Most; 0: no bound. A transcript that is too long for its recording seldom belongs to it."""
    min_characters_per_second: float = 0.0
    """Least: characters of the answers' texts a second of the recordings."""
    max_characters_per_second: float = 0.0
    """Most; 0: no bound."""


class ValidationSet(NamedTuple):
    """One validation set. is_named: its results carry its name, because it was given one or because there
    are several."""

    name: str
    path: str
    is_named: bool


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it is packed."""

    manifest: tuple[str, ...] = ("synthetic",)
    """NeMo JSONL manifests, with shards in braces ("manifest_{0..15}.json" or
    "manifest__OP_0..15_CL_.json"); Lhotse Shar directories and manifests of cuts (cuts.jsonl.gz); or
    "synthetic": spoken digits and commands, made on first use and cached. Also Hugging Face data sets on
    disk: parquet or arrow files, with shards in braces, or a folder (pip install 'jaxthd[parquet]').
    "synthetic:sums": spoken sums without transcripts, for jaxthd grpo."""
    columns: tuple[str, ...] = ()
    """What columns of parquet and arrow files are called, as FIELD=COLUMN: "audio=speech text=utterance".
    Without this, audio is "audio", text is "text", "sentence", "transcription" or "transcript", and the other
    fields of a manifest's lines have columns of their names. FIELD= leaves a field out."""
    tarred_audio: tuple[str, ...] = ()
    """The tar files of each manifest, as in NeMo's tarred_audio_filepaths ("audio_{0..15}.tar"); "" for a
    manifest with plain files and for a Shar directory. Empty: no manifest has tar files."""
    weights: tuple[float, ...] = ()
    """How often documents of each manifest are drawn, in proportion. Empty: in proportion to their numbers
    of documents."""
    weights_temperature: float = 1.0
    """Weights are raised to the power 1 / this: 1 keeps them, more draws small data sets more often, up to
    all alike. Without data.weights it is applied to the numbers of documents."""
    validation_manifest: str | tuple[str, ...] = "synthetic"
    """Manifest or Shar directory for validation; "" for none. Several sets each have a name: NAME=PATH, or
    the name of the file. The results of each set are logged as validation_NAME_loss and so on, and the
    means over all sets as validation_loss and so on."""
    validation_tarred_audio: str | tuple[str, ...] = ""
    """Tar files of the validation manifest, or of each one; "" for none."""
    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes, needs no file), "synthetic" (a small BPE of the words in the synthetic data), the
    path of a tokenizer.json, or the folder of a checkpoint in Hugging Face's format, whose other files then
    say which tokens are special."""
    template: Literal["plain", "chatml", "chat_template"] = "plain"
    """How turns are written: "plain" (the text, and an end-of-text token after an answer), "chatml"
    (<|im_start|>), or "chat_template" (the template of the checkpoint in data.tokenizer)."""
    template_options: str = ""
    """Variables of the checkpoint's chat template, as a JSON object such as {"enable_thinking": false}."""
    system_prompt: str = ""
    """System turn placed before every document that has none of its own; "" for none."""
    prompt: str = "{audio}"
    """The user's turn for a manifest line that has a text. The recording goes where data.audio_placeholder
    stands."""
    audio_placeholder: str = "{audio}"
    """What stands for a recording in data.prompt and in the texts of conversations."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    packing: Packing = "first_fit"
    """How documents fill buffers: "first_fit" and "best_fit" are grain's packers; "best_fit_decreasing" packs
    windows of about data.packing_bins buffers, the largest documents first, which pads least; "padded" puts
    one document in a row."""
    rows: int = 1
    """Buffers in a step, over all data ranks. Each row is a stream of its own, so the mesh never changes
    the data."""
    capacity: int = 2048
    """Token slots of a buffer."""
    max_documents: int = 64
    """Most documents in a buffer; the packer never exceeds it."""
    audio_capacity: int = 16000
    """Most mel frames (10 ms) of the documents in a buffer. It shapes the stream of buffers. The audio arrays
    are as long as the mesh needs: each rank also has room for the longest encoder chunk."""
    packing_bins: int = 8
    """Buffers that the packer keeps open at a time. More of them pack tighter and shuffle more."""
    max_skipped_share: float = 0.1
    """The run stops where more than this share of the training items cannot be used: unreadable, faulty, or
    larger than a buffer."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this (1: no rounding). It shapes the stream of
    buffers. With compute.context_layout "document" it must be a multiple of 2 * context, for every context
    size that the run will use."""
    shuffle: bool = True
    """Shuffle the documents anew every epoch."""
    seed: int = 0
    """Seed of the shuffle, of dither, of augmentation and of SpecAugment."""
    workers: int = 2
    """Processes that decode audio and compute features before the step needs them; 0: the loader does it."""
    prefetch: int = 2
    """Batches made before the step needs them; 0: none."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """template_options, parsed. Raises UserError where it is not a JSON object."""
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
        """validation_manifest as sets, in the order given. A path that contains "=" needs a name before
        it."""
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
    """Longer audio is encoded in chunks of this length. A property of the model, not of the mesh."""

    @property
    def chunk_frames(self) -> int:
        """Most mel frames of an encoder chunk. A tail of one frame joins the chunk before it."""
        return round(self.chunk_seconds * 100) + 1


@dataclass(frozen=True)
class LLMConfig:
    """The decoder: blocks of Mamba2, attention, MLP, experts in any order (Nemotron-H, Nemotron-3, Qwen3)."""

    pattern: str = "M-M*-"
    """One letter per block: M Mamba2, * attention, - MLP, E mixture of experts. A | marks where pipeline
    stages are divided; without any, they are divided by cost."""
    vocab_size: int = 260
    """Rows of the embedding and of the head."""
    dim: int = 128
    """Model dim."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    q_heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; must divide q_heads."""
    head_dim: int = 32
    """Dim of an attention head."""
    rope_theta: float = 0.0
    """Base of attention's rotary position embedding (Qwen3: 1e6); 0: none (Nemotron-H)."""
    qk_norm: bool = False
    """Whether attention's queries and keys are normalised, each head by itself (Qwen3)."""
    ffn_dim: int = 512
    """Inner dim of the MLP."""
    ffn_form: Literal["relu2", "swiglu"] = "relu2"
    """The MLP's and the experts' form. "relu2": down(relu(up x)^2). "swiglu": down(silu(gate x) * up x)."""
    tied_embedding: bool = False
    """Whether the head is the embedding: one matrix for both."""
    mamba_heads: int = 8
    """Mamba2 heads."""
    mamba_head_dim: int = 32
    """Dim of a Mamba2 head."""
    mamba_state: int = 32
    """State size N of a Mamba2 head."""
    mamba_groups: int = 2
    """Groups of heads that share B and C; must divide mamba_heads."""
    mamba_conv: int = 4
    """Taps of the causal convolution."""
    mamba_dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Lower and upper limit of the time step after softplus."""
    experts: int = 8
    """Routed experts."""
    experts_per_token: int = 2
    """Experts a token is sent to."""
    expert_dim: int = 128
    """Inner dim of a routed expert."""
    shared_expert_dim: int = 256
    """Inner dim of the shared expert; 0: there is none (Qwen3)."""
    latent_dim: int = 0
    """Dim of the latent projection around the routed experts; 0 for none."""
    router: Literal["sigmoid", "softmax"] = "sigmoid"
    """The router's scores: "sigmoid", of each expert by itself, with a correction bias in the choice that
    evens out the load (Nemotron-3); "softmax", over all experts (Qwen3), to be used with train.aux_loss."""
    router_normalised: bool = True
    """Whether the weights of a token's experts are their scores over their sum; otherwise their scores."""
    router_scale: float = 1.0
    """Factor on the sum of the routed experts' outputs."""
    mtp_pattern: str = ""
    """Blocks of one depth of multi-token prediction, such as "*E"; "" for none. It is trained beside
    next-token prediction (train.mtp_loss) and exported; validation, scoring and generation do not use it."""
    mtp_depths: int = 1
    """Depths of multi-token prediction: depth k predicts the token k positions beyond the next."""
    mtp_shared: bool = True
    """All depths share one set of weights (Nemotron-3); otherwise each depth has its own."""

    @property
    def is_gated(self) -> bool:
        """Whether the MLP and the experts have a gate."""
        return self.ffn_form == "swiglu"

    @property
    def ffn_matrices(self) -> int:
        """Matrices of an MLP or of an expert."""
        return 3 if self.is_gated else 2

    @property
    def letters(self) -> str:
        """The letters of the blocks: the pattern without its stage marks."""
        return self.pattern.replace("|", "")

    @property
    def kinds(self) -> str:
        """The letters of all kinds of blocks in the model."""
        return "".join(sorted(set(self.letters + self.mtp_pattern)))

    @property
    def mtp_modules(self) -> int:
        """Number of weight sets for multi-token prediction."""
        return (1 if self.mtp_shared else self.mtp_depths) if self.mtp_pattern else 0


@dataclass(frozen=True)
class ModelConfig:
    """The speech LLM: encoder, adapter, decoder. A checkpoint depends on all of it, and on nothing else."""

    encoder: EncoderConfig | None = field(default_factory=EncoderConfig)
    """None: a text-only model, without encoder and adapter. Only a config file can say so."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    adapter_dim: int = 0
    """Inner dim of the RMSNorm-linear-relu^2-linear adapter; 0 for a single linear layer."""

    @property
    def audio_encoder(self) -> EncoderConfig:
        """The encoder, for what cannot do without one. Raises UserError for a text-only model."""
        if self.encoder is None:
            raise UserError(
                "the model is text-only (model.encoder is None); expected one with an encoder for this: give "
                "model.encoder"
            )
        return self.encoder


@dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed: dtypes, exchanges, kernels, memory. No checkpoint depends on any of it."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype. Parameters are float32 (float64 if this is float64)."""
    fp8: tuple[str, ...] = ()
    """Patterns of projections, such as "decoder.layers.*", whose matrix products run in 8-bit numbers,
    forward and backward (pip install 'jaxthd[fp8]'). Routers, routed experts, Mamba2's time steps,
    embedding and head never do."""
    context_exchange: Literal["ring", "all_gather"] = "ring"
    """How attention reaches the keys and values of other context ranks."""
    context_layout: Literal["buffer", "document"] = "buffer"
    """What is divided into 2 * context chunks, of which rank r holds chunks r and 2 * context - 1 - r: the
    whole buffer, or each document by itself (data.round_to must then be a multiple of 2 * context)."""
    sequence_sharded: bool = False
    """Shard norms and residuals over the tensor ranks, 1/tensor of the tokens on each: reduce-scatter and
    all-gather replace all-reduce."""
    expert_parallel: bool = True
    """Shard experts over data and context ranks and send tokens to them; otherwise the experts' weights
    are gathered."""
    expert_capacity: float = 1.5
    """Slots for tokens in one send to another rank, relative to the mean number of tokens. Tokens that do
    not fit go with the next send."""
    attention_backend: str = "xla"
    """What computes the decoder's attention. "xla": blockwise, on every device. "te": Transformer Engine's
    fused kernels; "cudnn": jax's own cuDNN call. Both need an NVIDIA GPU and bfloat16, and a measurement
    as the run starts must admit them. "auto": the first of te, cudnn, xla that is admitted. See jaxthd
    doctor."""
    scan_backend: str = "xla"
    """What computes Mamba2's scan in training and evaluation. "xla": on every device. "pallas": kernels
    for NVIDIA GPUs, for chunks, head dims and states that are powers of two from 16 up; a measurement as
    the run starts must admit them. On a CPU they are interpreted, for tests; they have not yet run on a
    GPU. "auto": "pallas" where it is admitted, else "xla"."""
    kernels_unverified: bool = False
    """Use the attention or scan back-end that was asked for even if the measurement refuses it."""
    attention_block: int = 128
    """Tokens of an attention block. It affects speed only."""
    loss_block: int = 256
    """Supervised positions scored at a time."""
    vocab_block: int = 8192
    """Vocabulary entries scored at a time."""
    expert_block: int = 32
    """Tokens of one expert multiplied at a time."""
    remat_encoder: bool = True
    """Recompute the encoder's blocks in the backward pass instead of keeping their activations."""
    remat_llm: bool = True
    """Recompute the decoder's blocks in the same way."""
    scan_chunk: int = 64
    """Tokens of a scan chunk of Mamba2. It affects speed, never the result."""
    command_buffers: bool = True
    """On GPUs, record kernels, loops and conditionals in CUDA graphs (XLA's command buffers) where XLA
    can."""
    xla_options: tuple[str, ...] = ()
    """Options of XLA for the compiled programs, as NAME=VALUE. They override
    jaxthd/kernels/xla_options.py."""


@dataclass(frozen=True)
class AdaptConfig:
    """Which parts of the model train, and how fast. The parts are encoder, adapter and LLM (all the rest).

    Patterns match names, and * matches anything: jaxthd describe runs/my --names lists the names.
    """

    freeze: tuple[str, ...] = ()
    """Patterns of parameters that do not train, such as "encoder.*" or "decoder.layers.mamba.*". Frozen
    BatchNorms of the encoder keep their running statistics and normalise by them; frozen routers keep the
    correction biases of their experts."""
    unfreeze: tuple[str, ...] = ()
    """Patterns of parameters that train nevertheless, such as "decoder.*.norm.weight" beside LoRA."""
    lora_rank: int = 0
    """Rank of the low-rank matrices (LoRA) added to projections; 0 for none. They train, whatever freeze
    says; everything else in a part that has LoRA is frozen."""
    lora_alpha: float = 16.0
    """The product of the low-rank matrices is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("decoder.layers.*",)
    """Patterns of the projections that get LoRA, such as "*.q". Routers and routed experts never do."""
    lora_dropout: float = 0.0
    """Share of the features that do not enter the low-rank matrices of the decoder's projections in a
    training step. The draws are the same on every mesh; encoder and adapter have none."""
    dora: bool = False
    """Also train the magnitude of each column of the projections that get LoRA (DoRA)."""
    encoder_lr_factor: float = 1.0
    """Factor on the encoder's learning rate."""
    adapter_lr_factor: float = 1.0
    """Factor on the adapter's learning rate."""
    llm_lr_factor: float = 1.0
    """Factor on the LLM's learning rate."""


@dataclass(frozen=True)
class PostTrainingConfig:
    """Objectives that compare answers to one prompt: preferences (DPO, KTO) and rewards (GRPO)."""

    share_prompts: bool = True
    """Whether answers to one prompt share its token slots. If not, each has a copy of the prompt; its
    recordings are encoded once in either case."""
    reference: Literal["auto", "copy", "cached"] = "auto"
    """Where the reference policy is: "copy": a copy of the first weights in the compute dtype, of what
    trains; "auto": the same, but with LoRA the base weights, if reference_every is 0; "cached": nowhere. It
    scores all training documents before the first step, and WORKDIR/reference keeps the
    log-probabilities."""
    reference_every: int = 0
    """Steps after which the policy becomes the reference; 0: never."""


@dataclass(frozen=True)
class RolloutConfig:
    """What jaxthd grpo draws, rewards and trains on in each step."""

    mesh: MeshConfig | None = None
    """The mesh on which answers are drawn, over as many devices as `mesh` has; None: that one. The weights
    are copied to it in each step, in the compute dtype. The command line makes one of what it gives, with the
    defaults for the rest."""
    prompts: int = 16
    """Prompts of a step."""
    group_size: int = 8
    """Answers drawn to each prompt."""
    answers_at_once: int = 64
    """Answers that are decoded together, over all data ranks. An ended one makes room for the next group."""
    tokens_at_once: int = 8
    """Tokens that are decoded before the host looks for answers that have ended."""
    max_new_tokens: int = 64
    """Most tokens of an answer, its end token included."""
    temperature: float = 1.0
    """Of the softmax that answers are drawn from, and whose log-probabilities train."""
    top_k: int = 0
    """Answers are drawn from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Answers are drawn from the likeliest tokens that together have this share of the probability."""
    rewards: tuple[str, ...] = ("wer",)
    """Reward functions, as NAME or NAME=WEIGHT. NAME is "wer", "cer", "insertions", "exact", "format",
    "length", "overlong", "equals", or the dotted path of a Python function: "my_rewards.politeness"."""
    reward_options: tuple[str, ...] = ()
    """Settings of reward functions, as NAME.SETTING=VALUE."""
    reward_folders: tuple[str, ...] = ()
    """Folders where the modules of reward functions are looked for, after the installed ones and the working
    directory. A config file that names such a function adds its own folder."""
    reward_seconds: float = 10.0
    """Longest time that a reward function may take for the answers to one prompt."""
    reward_workers: int = 1
    """Processes that compute rewards."""
    max_failed_rewards: float = 0.1
    """The run stops where the rewards of more than this share of the last 100 groups could not be computed.
    Such groups are not trained on."""
    leave_one_out: bool = False
    """Whether an answer's advantage is over the mean reward of the group's other answers, in place of all."""
    normalise_advantages: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    dynamic_sampling: int = 1
    """Most times that a step draws prompts anew in place of groups whose rewards are all equal; such groups
    teach nothing. 1: it draws once, and they stay."""
    epochs: int = 1
    """How often a step trains on what it drew."""
    updates: int = 1
    """Updates in each of these, each from the same number of prompts. The number of buffers does not matter:
    an update adds up the gradients of as many as its answers fill."""
    validation_prompts: int = 0
    """Prompts of the first validation set that are answered and rewarded at each validation: once by the
    likeliest tokens, and by a group of drawn answers, for pass@1 and pass@k (k is group_size). 0: none."""
    max_logprob_difference: float = 0.0
    """The run stops where the log-probability of a token differs by more than this between drawing and
    training; 0: by more than the compute dtype explains."""


@dataclass(frozen=True)
class TrainConfig:
    """Optimization, validation and checkpoints."""

    objective: str = "sft"
    """What is trained for: "sft" (cross-entropy over the supervised tokens), "dpo" (pairs of a chosen and a
    rejected answer), "kto" (answers that are desired or not), "grpo" (answers drawn from the model, with
    rewards), or the name of an objective that was registered (jaxthd.register_objective)."""
    objective_options: tuple[str, ...] = ()
    """Settings of the objective, as NAME=VALUE."""
    init_from: tuple[str, ...] = ()
    """Weights that a new run starts from: Hugging Face folders, .nemo archives, and workdirs of runs (the
    newest checkpoint, or another with @best or @STEP; its averaged parameters with @ema, @best+ema or
    @STEP+ema). Each source gives what it holds, and a later one replaces what an earlier one gave. The rest
    of the model is randomly initialised."""
    before: tuple[str, ...] = ()
    """Commands of jaxthd that a new run needs to be done, such as "train first_run.py". They are started
    before it in the config file's folder, and should find nothing to do where they were done before."""
    steps: int = 200
    """Optimizer steps of the run."""
    optimizer: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """How gradients become updates. "muon" is for weight matrices, with AdamW for the rest."""
    optimizer_options: tuple[str, ...] = ()
    """Settings of the optimizer, as NAME=VALUE."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    """How the learning rate goes on after the warm-up: down to min_learning_rate at the last step in a cosine
    or in a line; constant; or constant and down in a line in the last decay_steps."""
    warmup_steps: int = 20
    """Steps of linear warm-up, before the schedule."""
    decay_steps: int = 20
    """Steps at the end in which "warmup_stable_decay" lowers the learning rate."""
    min_learning_rate: float = 1e-5
    """Learning rate at the last step, but for the schedule "constant"."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    weight_decay: float = 0.01
    """Decoupled weight decay. It applies to weight matrices, not to biases, norms and per-head scalars."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the trained parameters, which the run keeps beside them
    (RUN@ema); lower in the first steps. 0: none is kept."""
    validate_ema: bool = False
    """Validate the averaged parameters, in place of those that train."""
    router_bias_rate: float = 1e-3
    """Change of an expert's correction bias in a step: up where the expert gets fewer tokens than the
    average, down where it gets more."""
    aux_loss: float = 0.0
    """Weight of the auxiliary loss that balances the experts' load; 0 for none."""
    mtp_loss: float = 0.1
    """Weight of the loss of multi-token prediction, which is the mean over its depths; 0: it is not
    computed. It is used where model.llm.mtp_pattern is set."""
    ctc_loss: float = 0.0
    """Weight of an auxiliary CTC loss on the encoder; 0: it is not computed. A document needs an encoder
    frame (80 ms) for each supervised token; the metric ctc_uncovered says how many have fewer."""
    ctc_max_labels: int = 128
    """Most supervised tokens of a document that the CTC loss covers. It sizes arrays: tokens of a buffer, and
    documents of a buffer, times this."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to this norm."""
    microbatches: int = 1
    """Microbatches into which a step's rows are divided, computed one after the other (gradient
    accumulation)."""
    max_skipped_steps: int = 10
    """The run stops after this many steps in a row whose update was skipped because loss or gradient was
    not finite."""
    max_seconds: float = 0.0
    """The command stops after this many seconds, saves, and may be started again: for queues with a time
    limit. 0: never."""
    seed: int = 0
    """Seed of the initial parameters."""
    validate_every: int = 50
    """Steps between validations; 0 for none."""
    validation_batches: int = 8
    """Most batches that a validation reads."""
    max_new_tokens: int = 160
    """Most tokens that validation decodes for a document, to measure the word error rate; 0: it decodes
    none."""
    normaliser: Literal["basic", "english", "none"] = "basic"
    """How texts are normalised before their words are compared. "basic" and "english" are Whisper's:
    "basic" leaves lower case, no punctuation and nothing in brackets (marks that spell vowels stay);
    "english" also unifies numbers, spellings and contractions. "none": not at all."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept, besides the one with the best validation."""
    best_by: Literal["wer", "reward", "preferences"] = "wer"
    """What the best checkpoint is best by: "wer": the lowest validation_wer, or validation_loss where nothing
    is decoded; "reward": the highest validation_reward (jaxthd grpo with rollout.validation_prompts);
    "preferences": the lowest validation_preference_loss (validation sets with preferences)."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """What gets the metrics besides metrics.jsonl: "tensorboard" (files in WORKDIR/tensorboard), "wandb"
    (pip install 'jaxthd[wandb]'), "mlflow" (pip install 'jaxthd[mlflow]'). One that fails never stops a
    run."""
    profile: str = ""
    """Steps that are profiled, as FIRST:LAST, such as "10:13"; the trace, in WORKDIR/tensorboard, is opened
    by TensorBoard (pip install tensorboard xprof). "": none. The first step of a command compiles."""
    draw_last_batch: bool = False
    """Draw the documents of the last batch as a picture: buffers, ranks, audio, padding."""

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """First and last step of `profile`. Raises UserError where it is not FIRST:LAST."""
        if not self.profile:
            return None
        first, colon, last = self.profile.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UserError(
                f"train.profile is {self.profile!r}; expected FIRST:LAST, two steps from 1 on: set it to "
                '"10:13", for example'
            )
        return int(first), int(last)


@dataclass(frozen=True)
class Config:
    """One run."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    posttraining: PostTrainingConfig = field(default_factory=PostTrainingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def depths_trained(self) -> int:
        """Depths of multi-token prediction that a training step computes."""
        return self.model.llm.mtp_depths if self.model.llm.mtp_pattern and self.train.mtp_loss else 0

    @property
    def rollout_mesh(self) -> MeshConfig:
        """The mesh on which answers are drawn."""
        return self.rollout.mesh or self.mesh

    @property
    def updates_of_a_step(self) -> int:
        """Optimizer updates of a training step: more than 1 only for jaxthd grpo."""
        return self.rollout.epochs * self.rollout.updates

    @property
    def without_mtp(self) -> "Config":
        """This config without multi-token prediction, for work that needs only the next token. The
        parameters of multi-token prediction are then not read from a checkpoint."""
        return replace(self, model=replace(self.model, llm=replace(self.model.llm, mtp_pattern="")))
