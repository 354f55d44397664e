"""The settings that a checkpoint of the model depends on: encoder, LLM, adapter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxthd.config.block import Block, Blocks, letters_and_titles, usual_blocks
from jaxthd.config.front_end import FrontEnd, default_front_end
from jaxthd.config.values import Index
from jaxthd.errors import UserError


@dataclass(frozen=True)
class LLMConfig:
    """The decoder: blocks of any kinds in any order; docs/backbones.md has the families' patterns."""

    pattern: str = "M-M*-"
    """One letter per block. A | marks where pipeline stages are divided; without any, they are divided by
    cost."""
    vocab_size: int = 260
    """Rows of the embedding and of the head."""
    dim: int = 128
    """Model dim."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    norm_zero_centred: bool = False
    """Whether the weights of RMSNorms are stored as their difference from 1 (Qwen3-Next): those of the
    blocks, of attention's queries and keys, the final one, and those of multi-token prediction."""
    tied_embedding: bool = False
    """Whether the head is the embedding: one matrix for both."""
    embedding_multiplier: float = 1.0
    """Factor on the decoder's input, embeddings of text and audio alike (Granite)."""
    residual_multiplier: float = 1.0
    """Factor on what each block adds to the residual (Granite)."""
    logits_scaling: float = 1.0
    """Divisor of the logits (Granite)."""
    mtp_pattern: str = ""
    """Blocks of one depth of multi-token prediction, such as "*E"; "" for none. It is trained beside
    next-token prediction (train.mtp_loss) and exported. Decoding can draft with it
    (compute.num_speculative_tokens); nothing else uses it."""
    mtp_depths: int = 1
    """Depths of multi-token prediction: depth k predicts the token k positions beyond the next."""
    mtp_shared: bool = True
    """All depths share one set of weights (Nemotron-3); otherwise each depth has its own."""

    blocks: dict[str, Block] = field(default_factory=dict)
    """The settings of each kind of block, by the letter that it has in the patterns. Letters that are used
    and not given here are M Mamba2, D gated delta rule, * attention, W attention in a window, L latent
    attention, - MLP, E mixture of experts, with their default settings."""

    def __post_init__(self) -> None:
        """Completes the blocks with those that letters stand for by themselves. Where another pattern has
        replaced one, blocks that it does not have go."""
        usual, kept = usual_blocks(), self.blocks
        if isinstance(kept, Blocks):
            kept = {x: y for x, y in kept.items() if x in self.kinds}
        missing = {x: _like(usual[x], self.blocks) for x in self.kinds if x in usual and x not in kept}
        object.__setattr__(self, "blocks", Blocks(sorted((kept | missing).items())))

    @property
    def letters(self) -> str:
        """The letters of the blocks: the pattern without its stage marks."""
        return self.pattern.replace("|", "")

    @property
    def kinds(self) -> str:
        """The letters of all kinds of blocks in the model."""
        return "".join(sorted(set(self.letters + self.mtp_pattern)))

    @property
    def stacks(self) -> tuple[tuple[str, str], ...]:
        """(letter, name of the stack of its layers: decoder.layers.NAME) of each kind of block, by letter.
        Further letters of a kind have a number behind the name, those of the decoder before those of
        multi-token prediction alone."""
        names: dict[str, str] = {}
        for letter in sorted(self.kinds, key=lambda x: (x not in self.letters, x)):
            if letter not in self.blocks:
                continue
            stack = self.blocks[letter].stack
            same = sum(self.blocks[x].stack == stack for x in names)
            names[letter] = f"{stack}_{same + 1}" if same else stack
        return tuple(sorted(names.items()))

    @property
    def each_block(self) -> Iterator[tuple[str, Block]]:
        """(path of its settings, block) of every kind of block in the model."""
        return ((f"model.llm.blocks.{x}", self.blocks[x]) for x in self.kinds if x in self.blocks)

    def require_blocks(self) -> None:
        """Raises ValueError for a letter of a pattern that no block has."""
        if unknown := sorted(set(self.kinds) - set(self.blocks)):
            raise ValueError(
                f"model.llm.pattern has {', '.join(unknown)}; expected letters of model.llm.blocks, or of "
                f"{letters_and_titles()}: correct it, or give the block"
            )

    @property
    def window(self) -> int | None:
        """Tokens that attention in windows sees; None if no block has a window. Raises ValueError for
        several."""
        sizes = (block.attention(1) for _, block in self.each_block)
        found = {each.window for each in sizes if each and each.window}
        if len(found) > 1:
            raise ValueError(
                f"attention has windows of {sorted(found)}; expected one size: give all "
                "blocks with a window the same"
            )
        return next(iter(found), None)

    def routed_layers(self, letters: str) -> int:
        """Layers among these that send tokens to experts."""
        return sum(self.blocks[x].routes for x in letters)

    @property
    def mtp_modules(self) -> int:
        """Number of weight sets for multi-token prediction."""
        return (1 if self.mtp_shared else self.mtp_depths) if self.mtp_pattern else 0

    def with_settings(self, letters: str, **settings: Any) -> "LLMConfig":
        """The decoder with these settings in its blocks of these letters."""
        new = {x: replace(self.blocks[x], **settings) for x in letters}
        return replace(self, blocks={**self.blocks, **new})

    def without_mtp(self) -> "LLMConfig":
        """The decoder without multi-token prediction, and without blocks that nothing else has."""
        blocks = {x: block for x, block in self.blocks.items() if x in self.letters}
        return replace(self, mtp_pattern="", blocks=blocks)


def _like(usual: Block, others: Mapping[str, Block]) -> Block:
    """The block that a letter stands for by itself; with the settings of another block of its kind, if there
    is one, but for those in which the letters of the kind differ (attention in a window and other)."""
    alike = next((block for block in others.values() if type(block) is type(usual)), None)
    if alike is None:
        return usual
    of_letters = [vars(block) for block in type(usual).usual().values()]
    differing = [name for name in vars(usual) if len({repr(x[name]) for x in of_letters}) > 1]
    return replace(alike, **{name: getattr(usual, name) for name in differing})


@dataclass(frozen=True)
class MarksConfig:
    """A head that tells times in place of tokens: of each mark in a text, when it is said (Qwen3's forced
    aligner). Each word has two marks, its begin and its end."""

    classes: Index = 0
    """Times that the head tells apart: its rows. 0: it tells tokens, as a language model's does."""
    seconds: float = 0.08
    """Seconds from one time to the next; the first is 0."""
    token: Index = 151705
    """Id of the mark."""


TEXT_ONLY = "a text-only model, which takes no recordings (model.encoder is None)"


@dataclass(frozen=True)
class ModelConfig:
    """The speech LLM: encoder, adapter, decoder. A checkpoint depends on all of it, and on nothing else."""

    encoder: FrontEnd | None = field(default_factory=default_front_end)
    """The audio front end. None: a text-only model, without it and the adapter. Only a config file can say
    so."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    adapter_dim: Index = 0
    """Inner dim of the adapter; 0 for a single linear layer."""
    adapter_bias: bool = False
    """Whether the adapter's linear layers have biases (Canary-Qwen), with "relu2" the last one alone."""
    adapter_form: Literal["relu2", "gelu", "silu"] = "relu2"
    """Form of an adapter with an inner dim: "relu2", which is RMSNorm, linear, relu^2, linear
    (Nemotron-Omni); "gelu", which is linear, GELU, linear (Qwen3-ASR, Voxtral); or "silu", which is linear,
    SiLU, linear, LayerNorm (MOSS-Transcribe-Diarize)."""
    marks: MarksConfig = field(default_factory=MarksConfig)

    def require_tokens(self) -> None:
        """Raises UserError for a model whose head tells times at marks: it trains, scores and generates
        nothing."""
        if self.marks.classes:
            raise UserError(
                f"the model's head tells {self.marks.classes:,} times at marks in a text "
                "(model.marks.classes), and no tokens; expected a model with a head for tokens: choose "
                "another one, or find words in time with this one: jaxthd align"
            )

    @property
    def audio_encoder(self) -> FrontEnd:
        """The encoder, for what cannot do without one. Raises UserError for a text-only model."""
        if self.encoder is None:
            raise UserError(
                "the model is text-only (model.encoder is None); expected one with an encoder for this: give "
                "model.encoder"
            )
        return self.encoder
