"""The contract of a decoder block: its settings, and all that the rest of the program asks of it.

A kind of block is a subclass of Block: one file of jaxthd/models/blocks/, which also has its module; or a
class anywhere that is registered with register_block (docs/extending.md).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.kinds import Kinds


class AttentionSizes(NamedTuple):
    """Sizes of a block's attention on one tensor rank.

    heads: query heads. kv_heads: key and value heads. key_dim, value_dim: of a head. window: tokens that a
    token sees, itself among them; 0: all before it. gathered: numbers of a token that ranks exchange where
    keys are gathered.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    gathered: int

    @property
    def kernel_dim(self) -> int:
        """Dim of a head in fused kernels, which take values of the keys' dim: zeros fill the smaller ones."""
        return max(self.key_dim, self.value_dim)


class ScanSizes(NamedTuple):
    """Sizes of a block's state-space scan on one tensor rank. groups: of heads that share B and C."""

    heads: int
    groups: int
    head_dim: int
    state: int


class PassedSizes(NamedTuple):
    """Bytes on one tensor rank that a context chunk passes on: its map of states, the halo of a
    convolution."""

    state: int
    halo: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """The part of a decoder layer between its norm and its residual sum: settings, and answers about them.

    kind: its name in settings and of its stack of layers: decoder.layers.KIND.
    title: for people. letter: usually in patterns.
    routes: whether it sends tokens to experts; its module has `routed` then (RoutedMixer).
    splits_documents: whether it passes what documents need that context ranks share under the layout "whole".
    rolls_back: whether decoding may give its mixer several tokens of a document at once, and go on after any
    of them (drafting).
    equal_sizes, shared_sizes: settings of which every tensor rank takes an equal part; and of which it does,
    or several ranks share one.
    convolution: the setting with the taps of a causal convolution, whose halo context ranks exchange.
    read_with_others: settings that change what the arrays compute, which runs do change: weights that were
        made with other values are read, and that is said.
    residual_scale: what is added to the residual is multiplied by it.
    """

    title: ClassVar[str]
    letter: ClassVar[str]
    routes: ClassVar[bool] = False
    splits_documents: ClassVar[bool] = False
    rolls_back: ClassVar[bool] = False
    equal_sizes: ClassVar[tuple[str, ...]] = ()
    shared_sizes: ClassVar[tuple[str, ...]] = ()
    convolution: ClassVar[str] = ""
    read_with_others: ClassVar[tuple[str, ...]] = ()
    residual_scale: ClassVar[float] = 1.0
    kind: str = ""
    """The kind's name."""

    @classmethod
    def usual(cls) -> "dict[str, Block]":
        """The settings that letters stand for where a pattern has them and model.llm.blocks does not."""
        return {cls.letter: cls()}

    @property
    def label(self) -> str:
        """The kind as tables of parameters name it."""
        return self.title

    @property
    def norms(self) -> Literal["before", "after", "both"]:
        """Where the layer has RMSNorms: before the block, after it (of what is added to the residual), or
        both."""
        return "before"

    @property
    def stack(self) -> str:
        """The name of the stack of such layers: decoder.layers.STACK."""
        return self.kind

    def build(self, llm: Any, init: Any, compute: Any) -> Any:
        """The module, a jaxthd.models.blocks.Mixer. llm: LLMConfig. init: parallel.params.Init. compute:
        ComputeConfig."""
        raise NotImplementedError

    def cost(self, dim: int) -> float:
        """Multiply-adds a token in its matrices and in what runs along the tokens: pipeline stages are
        divided by it. dim: of the model."""
        raise NotImplementedError

    def faults(self, where: str, dim: int) -> Iterable[Finding]:
        """Faults of the settings. where: their path, such as "model.llm.blocks.M"."""
        return ()

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Settings that the others leave without effect."""
        return ()

    @property
    def experts_to_share(self) -> int:
        """Experts (the setting `experts`) that data and context ranks share; 0: none."""
        return 0

    @property
    def evens_load(self) -> bool:
        """Whether its router has correction biases, which even out the load of experts
        (train.router_bias_rate)."""
        return False

    def passed(self, tensor: int, activation: int) -> PassedSizes | None:
        """Bytes that a context chunk passes on to the next; None: it passes no state.

        tensor: ranks. activation: bytes of a number in compute.dtype.
        """
        return None

    def attention(self, tensor: int) -> AttentionSizes | None:
        """Its attention on one of so many tensor ranks, if it has any."""
        return None

    def scan(self, tensor: int) -> ScanSizes | None:
        """Its state-space scan on one of so many tensor ranks, if it has any."""
        return None

    def recurrence(self, tensor: int, tokens: int, dtype: Any) -> tuple[Any, Any] | None:
        """A function of segments and inputs that computes its recurrence over `tokens` as XLA's code, and the
        inputs' shapes on one of so many tensor ranks, to count what it costs on a GPU; None: it has none, or
        kernels of its own."""
        return None

    def tensors(self) -> Mapping[str, Any]:
        """The usual names of its module's tensors in checkpoints, which families may have otherwise. {}: no
        family has it. A Table of jaxthd/files/tensor_names.py."""
        return {}

    def parameters(self, name: str) -> tuple[str, float]:
        """(the label of the group of one of its module's parameters, the share of it that one token uses).

        name: the module's attribute.
        """
        return self.label, 1.0


class Blocks(dict[str, Block]):
    """Blocks by letter. They cannot be changed, and have a hash, as all settings."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made at once: those of a dict set its items."""
        return Blocks, (dict(self),)

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        raise TypeError("settings cannot be changed; expected dataclasses.replace: make new ones")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


_KINDS: Kinds[Block] = Kinds("the block", "jaxthd.models.blocks")


def register_block(kind: type[Block]) -> None:
    """Makes a kind of block known by its name and letters. Raises ValueError as Kinds.register."""
    _KINDS.register(kind)


def block_kinds() -> dict[str, type[Block]]:
    """All kinds of blocks by name: those of jaxthd, then registered ones."""
    return _KINDS.all()


def usual_blocks() -> dict[str, Block]:
    """The blocks that letters stand for by themselves; the first kind that was registered has a letter."""
    return {
        letter: block for kind in reversed(block_kinds().values()) for letter, block in kind.usual().items()
    }


def letters_and_titles() -> str:
    """ "M (Mamba2), * (attention), ...", for messages."""
    usual = usual_blocks()
    of_kinds = {letter: block for kind in block_kinds().values() for letter, block in kind.usual().items()}
    return ", ".join(f"{letter} ({usual[letter].label})" for letter in of_kinds)


def equal_parts(where: str, whole: str, size: int, part: str, parts: int, why: str) -> Iterator[Finding]:
    """The fault of a setting that is no multiple of another one. where: of both. why: it must be one."""
    if size % parts:
        yield Finding(
            f"{where}.{whole} is {size} with {part} {parts}",
            f"a multiple of {parts}, because {why}",
            f"set {where}.{whole} to {multiples(size, parts)}, or {where}.{part} to a divisor",
        )
