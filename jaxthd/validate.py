"""What a configuration must satisfy: checked first, before data is read or a weight exists.

`validate` is one pure function of (configuration, facts about the machine). Its rules are small functions of
the two, registered with the fields they read; a rule is left out where one of its fields is faulty in itself,
so that one mistake is reported once.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import jax

from jaxthd.adapt import (
    fp8_projections,
    matches,
    no_projections,
    parameter_names,
    projections,
    trained,
    unmatched,
)
from jaxthd.config import Config, MeshConfig
from jaxthd.data.features import mel_filterbank
from jaxthd.data.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.kernels import attention_problem
from jaxthd.machine import numbers
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.attention import te
from jaxthd.ops.attention.pieces import unfit_for_fused
from jaxthd.ops.fp8 import is_installed
from jaxthd.ops.scan import CAPABILITY_LEAST
from jaxthd.ops.scan_pallas import why_unfit
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.experts import expert_cut
from jaxthd.parallel.schedule import make_schedule
from jaxthd.parallel.stages import Stages
from jaxthd.state import abstract_model


class ConfigError(UserError):
    """A configuration that cannot work. The message lists everything that is wrong with it."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a run depends on besides its configuration.

    platform: jax's name of the backend: "cpu", "gpu", ... devices: how many there are. kind: their name.
    compute_capability: of an NVIDIA GPU, such as "9.0"; None where unknown.
    x64: whether jax's 64-bit mode is on.
    vocabulary: ids of the tokenizer; None where unknown (that of "bytes" is known).
    """

    platform: str
    devices: int
    kind: str
    compute_capability: str | None = None
    x64: bool = False
    vocabulary: int | None = None

    @classmethod
    def of_this_machine(cls, vocabulary: int | None = None) -> "DeviceFacts":
        """Asks jax, which starts its backend: simulated CPU devices must have been set up before."""
        first = jax.devices()[0]
        return cls(
            platform=first.platform,
            devices=jax.device_count(),
            kind=first.device_kind,
            compute_capability=getattr(first, "compute_capability", None),
            x64=bool(jax.config.read("jax_enable_x64")),
            vocabulary=vocabulary,
        )


class Problem(NamedTuple):
    """What was found, what was expected, what to change; an error unless is_warning."""

    found: str
    expected: str
    change: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}: {self.change}"


class Rule(NamedTuple):
    reads: tuple[str, ...]
    check: Callable[[Config, DeviceFacts], Iterable[Problem]]


RULES: list[Rule] = []
"""Every rule about more than one value, or about the machine."""


class BadKernel(NamedTuple):
    """A kernel that was measured to be wrong, and where."""

    backend: str
    compute_capability: str
    fault: str


KNOWN_BAD_KERNELS = tuple(BadKernel("te", capability, fault) for capability, fault in te.BAD.items())
"""An error on that architecture, a warning on a GPU whose architecture is unknown."""

_MINIMUM: dict[str, float] = {
    "data.audio_capacity": 0,
    "data.workers": 0,
    "data.prefetch": 0,
    "data.spec_augment.freq_masks": 0,
    "data.spec_augment.time_masks": 0,
    "data.seed": 0,
    "model.encoder.chunk_seconds": 0.02,
    "model.expert_capacity": 0.1,
    "model.llm.latent_dim": 0,
    "model.adapter_dim": 0,
    "adapt.lora_rank": 0,
    "train.warmup_steps": 0,
    "train.seed": 0,
    "train.validate_every": 0,
    "train.max_new_tokens": 0,
}
"""Least value of a number, where it is not 1 for an integer and 0 for a real number."""


def validate(config: Config, device: DeviceFacts) -> list[str]:
    """Warnings about a configuration that can work. Raises ConfigError listing every reason why it cannot."""
    found = problems(config, device)
    errors = [str(p) for p in found if not p.is_warning]
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError(f"the configuration cannot work ({len(errors)} to correct):{lines}")
    return [str(p) for p in found]


def problems(config: Config, device: DeviceFacts) -> list[Problem]:
    """Everything wrong or doubtful about the configuration: faulty values first, then by rule."""
    faulty = {path: problem for path, hint, value in _leaves(config) for problem in _fault(path, hint, value)}

    def is_faulty(read: str) -> bool:
        return any(f"{read}.".startswith(f"{bad}.") or bad.startswith(f"{read}.") for bad in faulty)

    sound = [rule for rule in RULES if not any(map(is_faulty, rule.reads))]
    return [*faulty.values(), *(problem for rule in sound for problem in rule.check(config, device))]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, annotated type, value) of every setting."""
    for name, hint in get_type_hints(type(node)).items():
        value = getattr(node, name)
        if is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def _fault(path: str, hint: Any, value: Any) -> Iterator[Problem]:
    if not _has_type(value, hint):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        name = hint.__name__ if isinstance(hint, type) else str(hint)
        expected = f"one of {', '.join(map(repr, choices))}" if choices else f"a value of type {name}"
        yield Problem(f"{path} is {value!r}", expected, f"correct {path}")
    elif hint in (int, float):
        least = _MINIMUM.get(path, 1 if hint is int else 0)
        if not least <= value < math.inf:
            yield Problem(f"{path} is {value}", f"{least} or more, and finite", f"correct {path}")


def _has_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_has_type(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(value)
        return len(value) == len(hints) and all(map(_has_type, value, hints))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)


def _rule(*reads: str) -> Callable[..., Any]:
    """Registers a rule. reads: paths of the fields (or groups of fields) whose values it takes as sound."""

    def register(check: Callable[[Config, DeviceFacts], Iterable[Problem]]) -> Callable[..., Any]:
        RULES.append(Rule(reads, check))
        return check

    return register


def _multiples(value: int, unit: int) -> str:
    """The multiples of unit next to value, 0 left out: "8 or 16"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


# --- the mesh and the machine ---


@_rule("mesh.data", "mesh.context", "mesh.pipeline", "mesh.tensor")
def _devices(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    need = config.mesh.devices
    if device.platform == "cpu":  # simulated: as many as the mesh asks for
        return
    found = f"{device.devices} devices ({device.kind}) for a mesh of {need}"
    if device.devices < need:
        yield Problem(found, "one device for each place on the mesh", "lower mesh.data or mesh.context")
    elif device.devices > need:
        change = (
            f"raise mesh.data or mesh.context, or ignore this if the other {device.devices - need} may idle"
        )
        yield Problem(found, "all devices in use", change, is_warning=True)


@_rule("mesh.data", "data.rows")
def _rows_over_data(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    rows, ranks = config.data.rows, config.mesh.data
    if rows % ranks:
        yield Problem(
            f"data.rows is {rows} with mesh.data {ranks}",
            f"a multiple of {ranks}, because every data rank takes as many buffers",
            f"set data.rows to {_multiples(rows, ranks)}",
        )


@_rule("mesh.context", "data.capacity")
def _capacity_over_context(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    capacity, unit = config.data.capacity, 2 * config.mesh.context
    if unit > 2 and capacity % unit:
        yield Problem(
            f"data.capacity is {capacity} with mesh.context {config.mesh.context}",
            f"a multiple of 2 * context = {unit}, because every context rank holds two equal chunks",
            f"set data.capacity to {_multiples(capacity, unit)}",
        )


@_rule("mesh.context", "data.capacity", "model.context_layout", "model.llm")
def _chunk_holds_convolution(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm, unit, whole = config.model.llm, 2 * config.mesh.context, config.model.context_layout == "buffer"
    reach, chunk = llm.mamba_conv - 1, config.data.capacity // unit
    if whole and unit > 2 and "M" in llm.kinds and chunk < reach:
        yield Problem(
            f"a context chunk, data.capacity / (2 * context), holds {chunk} tokens",
            f"{reach} or more, because Mamba2's convolution of {llm.mamba_conv} taps looks that far back",
            f"set data.capacity to {unit * reach} or more, or lower mesh.context",
        )


@_rule("mesh.context", "data.round_to", "model.context_layout")
def _documents_over_context(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    rounded, unit = config.data.round_to, 2 * config.mesh.context
    if config.model.context_layout == "document" and unit > 2 and rounded % unit:
        yield Problem(
            f'data.round_to is {rounded} with model.context_layout "document" and mesh.context {unit // 2}',
            f"a multiple of 2 * context = {unit}, because every document is cut into so many chunks",
            f"set data.round_to to {math.lcm(rounded, unit)}; it shapes the stream of buffers, so choose one "
            "for all context sizes that the run may continue on",
        )


@_rule("mesh.context", "mesh.tensor", "model.context_layout", "model.llm")
def _mamba_heads_over_context(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mesh, llm = config.mesh, config.model.llm
    heads, ranks = llm.mamba_heads, mesh.tensor * mesh.context
    if (
        config.model.context_layout == "document"
        and "M" in llm.kinds
        and heads % mesh.tensor == 0
        and heads % ranks
    ):
        yield Problem(
            f"model.llm.mamba_heads is {heads} for {mesh.context} context and {mesh.tensor} tensor ranks",
            f'a multiple of {ranks}: under model.context_layout "document" these ranks share the heads',
            f"set mesh.context to {_divisors(heads // mesh.tensor, mesh.context)}, or model.llm.mamba_heads "
            f"to {_multiples(heads, ranks)}, or model.context_layout to buffer",
        )


# --- what tensor and pipeline ranks share ---


@_rule("mesh.tensor", "model.llm")
def _width_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm, ranks = config.model.llm, config.mesh.tensor
    for letter, name in (
        ("*", "q_heads"),
        ("M", "mamba_heads"),
        ("-", "ffn_dim"),
        ("E", "expert_dim"),
        ("E", "shared_expert_dim"),
    ):
        size = getattr(llm, name)
        if letter in llm.kinds and size % ranks:
            yield Problem(
                f"mesh.tensor is {ranks} with model.llm.{name} {size}",
                f"a divisor of {size}, because every rank takes as many",
                f"set mesh.tensor to {_divisors(size, ranks)}, or model.llm.{name} to "
                f"{_multiples(size, ranks)}",
            )
    for letter, name in (("*", "kv_heads"), ("M", "mamba_groups")):
        size = getattr(llm, name)
        if letter in llm.kinds and size % ranks and ranks % size:
            yield Problem(
                f"mesh.tensor is {ranks} with model.llm.{name} {size}",
                f"a divisor or a multiple of {size}: as many to every rank, or one to as many ranks",
                f"set mesh.tensor to {_divisors(size, ranks)} or {size * (ranks // size + 1)}",
            )


def _divisors(size: int, at_most: int) -> str:
    """Those of size up to at_most: "1, 2 or 4"."""
    found = [str(n) for n in range(1, at_most + 1) if size % n == 0]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


@_rule("mesh.pipeline", "mesh.tensor", "model.llm.vocab_size")
def _vocabulary_over_ranks(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    entries, ranks = config.model.llm.vocab_size, config.mesh.pipeline * config.mesh.tensor
    if entries % ranks:
        yield Problem(
            f"model.llm.vocab_size is {entries} with {ranks} pipeline and tensor ranks",
            f"a multiple of {ranks}, because these share the vocabulary's work",
            f"set model.llm.vocab_size to {entries + -entries % ranks} (entries beyond the tokenizer's are "
            "not used), or change mesh.pipeline or mesh.tensor",
        )


@_rule("mesh", "model.llm.pattern", "model.context_exchange")
def _pipeline(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mesh, llm = config.mesh, config.model.llm
    if mesh.pipeline == 1 and mesh.stages_per_rank > 1:
        found = f"mesh.stages_per_rank is {mesh.stages_per_rank} with mesh.pipeline 1"
        change = "set mesh.stages_per_rank to 1, or raise mesh.pipeline"
        yield Problem(found, "1: there is no pipeline", change)
        return
    if set(llm.pattern) - set("M*-E|"):
        return
    try:
        stages = Stages.of(llm, mesh)
    except ValueError as error:
        count = mesh.pipeline * mesh.stages_per_rank
        change = f"put {count - 1} marks into model.llm.pattern, or none, or lower mesh.pipeline"
        yield Problem(str(error), f"{count} stages of a layer or more", change)
        return
    if mesh.context > 1 and config.model.context_exchange == "ring" and not stages.are_equal:
        yield Problem(
            f"model.context_exchange is 'ring' with stages that differ ({' | '.join(stages.patterns)})",
            "stages of one pattern, because every rank takes part in each send of a ring",
            "set model.context_exchange to 'all_gather', or divide model.llm.pattern evenly",
        )


@_rule("mesh", "data.rows", "train.microbatches")
def _bubble(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mesh, microbatches = config.mesh, config.train.microbatches
    if mesh.pipeline > 1:
        bubble = make_schedule(microbatches, mesh.pipeline, mesh.stages_per_rank).bubble
        if bubble > 0.5:
            yield Problem(
                f"train.microbatches is {microbatches} on {mesh.pipeline} pipeline ranks: they idle "
                f"{bubble:.0%} of the time",
                f"{2 * mesh.pipeline} microbatches or more, say",
                "raise train.microbatches (and data.rows, a multiple of mesh.data times it)",
                is_warning=True,
            )
        elif mesh.stages_per_rank > 1 and microbatches % mesh.pipeline:
            yield Problem(
                f"train.microbatches is {microbatches} on {mesh.pipeline} ranks of {mesh.stages_per_rank} "
                "stages",
                f"a multiple of {mesh.pipeline}: the interleaved schedule works on groups of as many",
                f"set train.microbatches to {_multiples(microbatches, mesh.pipeline)}",
                is_warning=True,
            )


@_rule("mesh", "data.rows", "data.capacity", "train.microbatches", "model.sequence_sharded")
def _tokens_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    data, mesh = config.data, config.mesh
    tokens = data.rows // mesh.data // config.train.microbatches * data.capacity // mesh.context
    if config.model.sequence_sharded and tokens % mesh.tensor:
        unit = mesh.context * mesh.tensor
        yield Problem(
            f"model.sequence_sharded with {tokens} tokens of a microbatch for {mesh.tensor} tensor ranks",
            f"a multiple of {mesh.tensor}, because each takes as many",
            f"set data.capacity to {_multiples(data.capacity, math.lcm(unit, 2 * mesh.context))}",
        )


@_rule("mesh", "model.llm", "model.expert_parallel")
def _experts_over_ranks(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm, ranks = config.model.llm, config.mesh.data * config.mesh.context
    if "E" in llm.kinds and config.model.expert_parallel and ranks > 1 and llm.experts % ranks:
        cut = expert_cut(llm.experts, config.mesh)
        yield Problem(
            f"model.llm.experts is {llm.experts} for {ranks} data and context ranks",
            f"a multiple of {ranks}: experts are cut over the axes {cut.axes if cut else '()'} only, the "
            "others gather their weights",
            "change mesh.data or mesh.context, or set model.expert_parallel to False",
            is_warning=True,
        )


# --- buffers ---


@_rule("data.round_to", "data.capacity")
def _round_to(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    unit, capacity = config.data.round_to, config.data.capacity
    if capacity % unit:
        divisor = math.gcd(unit, capacity)
        yield Problem(
            f"data.round_to is {unit} with data.capacity {capacity}",
            "a divisor of the capacity, or its last slots can never be filled",
            f"set data.capacity to {_multiples(capacity, unit)}, or data.round_to to {divisor}",
        )


@_rule("data.max_documents", "data.capacity", "data.packing")
def _max_documents(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    data = config.data
    if data.packing != "padded" and data.max_documents > data.capacity:
        yield Problem(
            f"data.max_documents is {data.max_documents} for a buffer of {data.capacity} tokens",
            "no more documents than tokens; what is sized by the bound is wasted",
            f"set data.max_documents to {data.capacity} or less",
            is_warning=True,
        )


@_rule("mesh", "data.audio_capacity", "model.encoder.chunk_seconds")
def _audio_over_ranks(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    frames, ranks, encoder = config.data.audio_capacity, config.mesh.audio_ranks, config.model.encoder
    longest = -(-encoder.chunk_frames // SUBSAMPLING) * SUBSAMPLING
    unit, share = SUBSAMPLING * ranks, frames // ranks // SUBSAMPLING * SUBSAMPLING
    if not frames:
        return
    if share < longest:
        seconds = (share - 1) / 100
        shorter = f", or model.encoder.chunk_seconds to {seconds} or less" if seconds >= 0.02 else ""
        yield Problem(
            f"data.audio_capacity {frames} gives each of {ranks} audio ranks {share} mel frames",
            f"{longest} or more, an encoder chunk of chunk_seconds {encoder.chunk_seconds} and a tail",
            f"set data.audio_capacity to {ranks * longest} or more{shorter}",
        )
    elif frames % unit:
        yield Problem(
            f"data.audio_capacity is {frames} for {ranks} audio ranks",
            f"a multiple of {SUBSAMPLING} * {ranks} = {unit}, because each holds whole encoder frames",
            f"set data.audio_capacity to {_multiples(frames, unit)}",
        )


@_rule("data.capacity", "data.audio_capacity", "model.encoder.chunk_seconds")
def _tokens_hold_a_chunk(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    capacity, encoder = config.data.capacity, config.model.encoder
    slots = -(-encoder.chunk_frames // SUBSAMPLING)
    if config.data.audio_capacity and capacity < slots:
        yield Problem(
            f"data.capacity is {capacity}: recordings over {capacity * SUBSAMPLING / 100} s are left out",
            f"{slots} or more, the tokens of {encoder.chunk_seconds} s (model.encoder.chunk_seconds)",
            "raise data.capacity if there are such recordings",
            is_warning=True,
        )


# --- what is read ---


@_rule("data.manifest", "data.tarred_audio", "data.weights")
def _manifests(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    manifests, tars, weights = config.data.manifest, config.data.tarred_audio, config.data.weights
    if not manifests or "" in manifests:
        change = 'name a manifest in data.manifest, or "synthetic"'
        yield Problem(f"data.manifest is {manifests}", "one path or more, none of them empty", change)
    if tars and len(tars) != len(manifests):
        found = f"data.tarred_audio names {len(tars)} sets of tar files for {len(manifests)} manifests"
        expected = 'one for each manifest ("" for plain files), or none'
        yield Problem(found, expected, "correct data.tarred_audio")
    if weights and len(weights) != len(manifests):
        found = f"data.weights has {len(weights)} numbers for {len(manifests)} manifests"
        yield Problem(found, "one for each manifest, or none", "correct data.weights")
    if not all(0 < weight < math.inf for weight in weights):
        change = "leave a manifest that is not to be read out of data.manifest"
        yield Problem(f"data.weights is {weights}", "finite numbers above 0", change)


@_rule("data.validation_manifest")
def _validation_sets(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    sets = config.data.validation_sets
    for name, path, _ in sets:
        if not path:
            found = f"data.validation_manifest has a set without a path, {name!r}"
            yield Problem(found, "NAME=PATH, or a path", "name a manifest, or leave it out")
        elif not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            yield Problem(
                f"data.validation_manifest has the name {name!r}, of {path}",
                "letters, digits, _, - and dots inside, because metrics and files bear it",
                "choose another name; a path that holds a = needs one before it too",
            )
        elif name == "skipped":
            expected = "another, because skipped.jsonl lists the documents left out"
            yield Problem("data.validation_manifest has the name 'skipped'", expected, "choose another name")
    for name, count in Counter(name for name, _, _ in sets).items():
        if count > 1:
            yield Problem(
                f"data.validation_manifest has {count} sets of the name {name!r}",
                "a name of its own for each",
                "write NAME=PATH for all but one of them",
            )


@_rule("data.prompt", "data.audio_placeholder", "data.audio_capacity")
def _prompt(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mark, has_audio = config.data.audio_placeholder, config.data.audio_capacity > 0
    if not mark:
        expected = "what stands for a recording in prompts and conversations"
        yield Problem(
            "data.audio_placeholder is empty", expected, "set data.audio_placeholder to {audio}, say"
        )
        return
    count = config.data.prompt.count(mark)
    found = f"data.prompt {config.data.prompt!r} holds {mark} {count} times"
    if has_audio and count != 1:
        yield Problem(found, "exactly once, for the recording", f"write {mark} once in data.prompt")
    elif count and not has_audio:
        change = f"raise data.audio_capacity, or take {mark} out of data.prompt to train on text alone"
        yield Problem(found, "none, because data.audio_capacity is 0 and no recording fits", change)


@_rule("data.template", "data.template_options", "data.tokenizer")
def _chat_template(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    data = config.data
    if data.template == "chat_template" and data.tokenizer == "bytes":
        yield Problem(
            'data.template is "chat_template" with data.tokenizer "bytes"',
            "the folder of a checkpoint, which brings one",
            "set data.tokenizer to that folder, or data.template to chatml or plain",
        )
    try:
        _ = data.template_variables
    except UserError:
        yield Problem(
            f"data.template_options is {data.template_options!r}",
            'a JSON object such as {"enable_thinking": false}',
            "correct data.template_options",
        )
        return
    if data.template_options and data.template != "chat_template":
        yield Problem(
            f'data.template_options are given with data.template "{data.template}"',
            '"chat_template", which alone reads them',
            "take one of the two back",
        )


@_rule("data.spec_augment", "model.encoder.num_mels")
def _spec_augment(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    masks, mels = config.data.spec_augment, config.model.encoder.num_mels
    if masks.freq_masks and masks.freq_width >= mels:
        yield Problem(
            f"data.spec_augment.freq_width is {masks.freq_width} with {mels} mel bands",
            "less than model.encoder.num_mels, or a mask may leave nothing",
            f"set data.spec_augment.freq_width to {mels // 3}, say",
        )
    if masks.time_masks and masks.time_width >= 1:
        yield Problem(
            f"data.spec_augment.time_width is {masks.time_width}",
            "less than 1, being a fraction of the recording; more may leave nothing",
            "set data.spec_augment.time_width to 0.05",
        )


# --- the encoder ---


@_rule("model.encoder.num_mels")
def _num_mels(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    mels = config.model.encoder.num_mels
    try:
        mel_filterbank(mels)
    except ValueError as error:
        yield Problem(str(error), "bands wide enough for the spectrum", "set model.encoder.num_mels to 128")
    if mels % SUBSAMPLING:
        yield Problem(
            f"model.encoder.num_mels is {mels}",
            f"a multiple of {SUBSAMPLING}, because three convolutions halve the bands",
            f"set model.encoder.num_mels to {_multiples(mels, SUBSAMPLING)}",
        )


@_rule("model.encoder.dim", "model.encoder.heads")
def _encoder_heads(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    dim, heads = config.model.encoder.dim, config.model.encoder.heads
    if dim % 2:
        expected = "an even number: half of the position encoding are sines, half cosines"
        yield Problem(f"model.encoder.dim is {dim}", expected, f"set model.encoder.dim to {dim + 1}")
    if dim % heads:
        yield Problem(
            f"model.encoder.dim is {dim} with {heads} heads",
            f"a multiple of model.encoder.heads ({heads})",
            f"set model.encoder.dim to {_multiples(dim, heads)}, or change model.encoder.heads",
        )


@_rule("model.encoder.conv_kernel")
def _conv_kernel(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    taps = config.model.encoder.conv_kernel
    if taps % 2 == 0:
        expected = "an odd number: as many taps before a frame as behind it"
        change = f"set model.encoder.conv_kernel to {taps - 1} or {taps + 1}"
        yield Problem(f"model.encoder.conv_kernel is {taps}", expected, change)


# --- the decoder ---


@_rule("model.llm.pattern")
def _pattern(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    pattern = config.model.llm.pattern
    unknown = sorted(set(pattern) - set("M*-E|"))
    if unknown or not config.model.llm.letters:
        yield Problem(
            f"model.llm.pattern {pattern!r} " + (f"holds {', '.join(unknown)}" if unknown else "is empty"),
            "one letter a block of M (Mamba2), * (attention), - (MLP), E (mixture of experts), and | between "
            "pipeline stages",
            "correct model.llm.pattern",
        )


def _model(config: Config, tensor: int = 1) -> SpeechLM | None:
    """Shapes of the model; None where there is none: what is wrong with it is told by other rules."""
    try:
        return abstract_model(replace(config, mesh=MeshConfig(tensor=tensor)))
    except ValueError:
        return None


@_rule("model.llm.mtp_pattern")
def _mtp_pattern(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    unknown = sorted(set(config.model.llm.mtp_pattern) - set("M*-E"))
    if unknown:
        yield Problem(
            f"model.llm.mtp_pattern {config.model.llm.mtp_pattern!r} holds {', '.join(unknown)}",
            "one letter a block of M, *, - and E, the blocks of one depth (pipeline stages do not divide it)",
            'correct model.llm.mtp_pattern; "*E" is Nemotron-3\'s, "" is none',
        )


@_rule("mesh.tensor", "model.llm.dim", "model.llm.mtp_pattern")
def _mtp_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm, ranks = config.model.llm, config.mesh.tensor
    if llm.mtp_pattern and 2 * llm.dim % ranks:
        yield Problem(
            f"mesh.tensor is {ranks} with model.llm.dim {llm.dim} and model.llm.mtp_pattern",
            f"a divisor of {2 * llm.dim}, because the ranks share the projection of 2 * dim features",
            f"set mesh.tensor to {_divisors(2 * llm.dim, ranks)}",
        )


@_rule("adapt", "model", "train.mtp_loss")
def _mtp_loss(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    """Without a gradient weight decay alone would move it."""
    if not config.model.llm.mtp_pattern or config.train.mtp_loss:
        return
    model = _model(config)
    if model is None:
        return
    if any(jax.tree.leaves(trained(model, config.adapt)["mtp"])):
        yield Problem(
            f"train.mtp_loss is 0 with model.llm.mtp_pattern {config.model.llm.mtp_pattern!r}",
            "more than 0, or else its parameters frozen",
            'raise train.mtp_loss, keep the weights as they are (adapt.freeze "mtp.*"), or do without '
            '(model.llm.mtp_pattern "")',
        )


@_rule("model.llm")
def _head_groups(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm = config.model.llm
    for letter, whole, part, why in (
        ("*", "q_heads", "kv_heads", "as many query heads share each key and value head"),
        ("M", "mamba_heads", "mamba_groups", "as many heads share each group's B, C and norm"),
    ):
        heads, groups = getattr(llm, whole), getattr(llm, part)
        if letter in llm.kinds and heads % groups:
            yield Problem(
                f"model.llm.{whole} is {heads} with {part} {groups}",
                f"a multiple of {groups}: {why}",
                f"set model.llm.{whole} to {_multiples(heads, groups)}, or model.llm.{part} to a divisor",
            )


@_rule("model.llm")
def _dt_limit(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    low, high = config.model.llm.mamba_dt_limit
    if "M" in config.model.llm.kinds and not 0 <= low < high:
        expected = "0 <= lower < upper, as they clamp a time step"
        change = "set model.llm.mamba_dt_limit to (0.0, inf), which clamps nothing"
        yield Problem(f"model.llm.mamba_dt_limit is ({low}, {high})", expected, change)


@_rule("model.llm")
def _experts(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm = config.model.llm
    if "E" in llm.kinds and llm.experts_per_token > llm.experts:
        yield Problem(
            f"model.llm.experts_per_token is {llm.experts_per_token}",
            f"at most the {llm.experts} of model.llm.experts",
            f"set model.llm.experts_per_token to {llm.experts} or less",
        )


@_rule("data.tokenizer", "model.llm.vocab_size")
def _vocabulary(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    known = ByteTokenizer.vocab_size if config.data.tokenizer == "bytes" else None
    needed = device.vocabulary if device.vocabulary is not None else known
    if needed is not None and config.model.llm.vocab_size < needed:
        yield Problem(
            f"model.llm.vocab_size is {config.model.llm.vocab_size}",
            f"{needed} or more, the ids of the tokenizer {config.data.tokenizer!r}",
            f"set model.llm.vocab_size to {needed} or more",
        )


# --- how it is computed ---


@_rule("model.dtype")
def _dtype(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    dtype = config.model.dtype
    if dtype == "float64" and not device.x64:
        change = "set model.dtype to float32, or JAX_ENABLE_X64=1 in the environment"
        yield Problem(
            "model.dtype is float64 with jax's 64-bit mode off", "it on, as only tests need", change
        )
    elif dtype == "float64":
        change = "set model.dtype to float32 or bfloat16, unless this is a test"
        yield Problem("model.dtype is float64", "it in tests only, being slow", change, is_warning=True)
    elif dtype == "bfloat16" and device.platform == "cpu":
        change = "set model.dtype to float32 on a CPU"
        yield Problem(
            "model.dtype is bfloat16 on cpu", "it on GPUs, being slow here", change, is_warning=True
        )


@_rule("model.attention_backend", "model.dtype", "model.llm.head_dim", "mesh.tensor")
def _fused_attention(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    """What of it depends on versions is asked when it is admitted (jaxthd.kernels)."""
    backend = config.model.attention_backend
    reason = unfit_for_fused(attention_problem(config), device.platform)
    if backend in ("te", "cudnn") and reason:
        change = "set model.attention_backend to auto or xla"
        yield Problem(
            f'model.attention_backend is "{backend}", but {reason}', "one that can run here", change
        )


@_rule("model.attention_backend")
def _known_bad_kernels(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    """Padded rows too: they are told apart by segment id, so the same packed kernel computes them."""
    backend, capability = config.model.attention_backend, device.compute_capability
    for bad in KNOWN_BAD_KERNELS:
        if (
            backend == bad.backend
            and device.platform != "cpu"
            and capability in (bad.compute_capability, None)
        ):
            where = f"compute capability {capability or 'unknown'} ({device.kind})"
            yield Problem(
                f'model.attention_backend is "{backend}" on {where}',
                f"any but {bad.compute_capability}, where {bad.fault}",
                "set model.attention_backend to auto or xla",
                is_warning=capability is None,
            )


@_rule(
    "model.scan_backend",
    "model.dtype",
    "model.llm.pattern",
    "model.llm.mtp_pattern",
    "model.llm.mamba_chunk",
    "model.llm.mamba_head_dim",
    "model.llm.mamba_state",
)
def _scan_kernels(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    llm = config.model.llm
    if config.model.scan_backend != "pallas" or "M" not in llm.kinds:
        return
    found, change = 'model.scan_backend is "pallas"', "set model.scan_backend to xla"
    unfit = why_unfit(llm.mamba_chunk, llm.mamba_head_dim, llm.mamba_state, config.model.dtype)
    if unfit:
        expected = "model.llm.mamba_chunk, mamba_head_dim and mamba_state in powers of two from 16 up and"
        expected += " model.dtype float32 or bfloat16"
        yield Problem(f"{found}, but {' and '.join(unfit)}", expected, f"{change}, or change these")
    elif device.platform == "cpu":
        expected = "it on GPUs: here its kernels are interpreted, slowly"
        yield Problem(f"{found} on cpu", expected, change, is_warning=True)
    elif device.platform not in ("gpu", "cuda"):
        yield Problem(f"{found} on {device.platform}", "an NVIDIA GPU", change)
    elif device.compute_capability and numbers(device.compute_capability) < CAPABILITY_LEAST:
        where = f"compute capability {device.compute_capability} ({device.kind})"
        least = ".".join(map(str, CAPABILITY_LEAST))
        yield Problem(f"{found} on {where}", f"{least} or more, which has bfloat16 matrix units", change)


# --- what is trained ---


@_rule("adapt", "model")
def _adaptation(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    adapt = config.adapt
    if not adapt.freeze and not adapt.unfreeze and not adapt.lora_rank:
        return
    model = _model(config)
    if model is None:
        return
    parameters, can_adapt, cannot = parameter_names(model), list(projections(model)), no_projections(model)
    kinds = [("freeze", parameters), ("unfreeze", parameters)]
    for field, names in kinds + [("lora_targets", can_adapt)] * (adapt.lora_rank > 0):
        for pattern, near in unmatched(getattr(adapt, field), names):
            found = f"adapt.{field} {pattern!r} matches nothing"
            if field == "lora_targets" and any(matches(name, [pattern]) for name in cannot):
                found += " but routers or routed experts, which take no low-rank matrices"
            what = "projection" if field == "lora_targets" else "parameter"
            yield Problem(
                found,
                f"a pattern of {what} names, such as {', '.join(near)}",
                "correct it; python -m jaxthd.describe --names lists the names",
            )
    if not any(jax.tree.leaves(trained(model, adapt))):
        change = "freeze less, or set adapt.lora_rank to train low-rank matrices"
        yield Problem("adapt.freeze matches every parameter", "something to train", change)


@_rule("model", "mesh.tensor")
def _fp8(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    patterns = config.model.fp8
    if not patterns:
        return
    if not is_installed():
        change = "pip install 'jaxthd[fp8]', or empty model.fp8"
        yield Problem("model.fp8 is set and the package qwix is not installed", "it", change)
    if config.model.dtype == "float64":
        change = "choose bfloat16, or empty model.fp8"
        yield Problem("model.fp8 is set with model.dtype float64", "bfloat16 or float32", change)
    capability = device.compute_capability
    if device.platform == "gpu" and capability and numbers(capability) < (8, 9):
        change = "empty model.fp8"
        yield Problem(f"model.fp8 on {device.kind} (compute capability {capability})", "8.9 or more", change)
    model = _model(config, tensor=config.mesh.tensor)
    if model is None:
        return
    found = fp8_projections(model)
    lists = "python -m jaxthd.describe --names lists the names"
    for pattern, near in unmatched(patterns, list(found)):
        what = f"model.fp8 {pattern!r} matches no projection"
        yield Problem(what, f"a pattern such as {', '.join(near)}", f"correct it; {lists}")
    odd = {}
    for name, linear in found.items():
        cuts = (linear.cut_in, linear.cut_out)
        dims = [
            size // (config.mesh.tensor if cut and cut.is_cut(config.mesh) else 1)
            for size, cut in zip(linear.w.shape[-2:], cuts, strict=True)
        ]
        if matches(name, patterns) and any(dim % 16 for dim in dims):
            odd[name] = dims
    if odd:
        some = ", ".join(f"{name} {a} x {b}" for name, (a, b) in list(odd.items())[:3])
        what = f"model.fp8 matches {len(odd)} projections of sizes that tensor cores cannot take in 8 bits"
        change = "leave these out of model.fp8, or change the sizes or mesh.tensor"
        yield Problem(f"{what} ({some} on a rank)", "multiples of 16", change)


@_rule("adapt.lora_rank", "adapt.lora_targets", "adapt.lora_alpha")
def _lora(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    adapt = config.adapt
    if adapt.lora_rank and not adapt.lora_targets:
        change = "name projections, or set adapt.lora_rank to 0"
        yield Problem("adapt.lora_targets is empty with adapt.lora_rank", "a pattern or more", change)
    if adapt.lora_rank and not adapt.lora_alpha:
        change = "set adapt.lora_alpha to the rank, say"
        yield Problem("adapt.lora_alpha is 0, which scales LoRA's product to 0", "more than 0", change)


@_rule("adapt.encoder_lr_factor", "adapt.adapter_lr_factor", "adapt.llm_lr_factor")
def _lr_factors(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    for part in ("encoder", "adapter", "llm"):
        if not getattr(config.adapt, f"{part}_lr_factor"):
            change = "freeze that part with adapt.freeze, or raise the factor"
            yield Problem(f"adapt.{part}_lr_factor is 0", "more than 0", change)


# --- the optimization ---


@_rule("train.microbatches", "data.rows", "mesh.data")
def _microbatches(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    parts, rows, ranks = config.train.microbatches, config.data.rows, config.mesh.data
    if rows % ranks == 0 and rows // ranks % parts:
        yield Problem(
            f"train.microbatches is {parts} for {rows // ranks} rows on each data rank",
            "a divisor of them, because every part takes as many rows of each rank",
            f"set train.microbatches to {math.gcd(parts, rows // ranks)}, or data.rows to "
            f"{_multiples(rows, parts * ranks)}",
        )


@_rule("train.steps", "train.warmup_steps")
def _warmup(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    steps, warmup = config.train.steps, config.train.warmup_steps
    if warmup > steps:
        found = f"train.warmup_steps is {warmup} in a run of {steps} steps"
        change = f"set train.warmup_steps to {steps} or less"
        yield Problem(found, "a warm-up that ends, so that the peak is reached", change, is_warning=True)


@_rule("train.learning_rate", "train.min_learning_rate")
def _learning_rates(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    peak, least = config.train.learning_rate, config.train.min_learning_rate
    if least > peak:
        found = f"train.min_learning_rate {least} is above train.learning_rate {peak}"
        change = f"set train.min_learning_rate to {peak} or less"
        yield Problem(found, "a learning rate that falls", change, is_warning=True)


@_rule("train.beta1", "train.beta2", "train.clip_norm")
def _adamw(config: Config, device: DeviceFacts) -> Iterator[Problem]:
    for name in ("beta1", "beta2"):
        beta = getattr(config.train, name)
        if beta >= 1:
            yield Problem(f"train.{name} is {beta}", "less than 1", f"set train.{name} to 0.9 or 0.95, say")
    if config.train.clip_norm == 0:
        change = "raise train.clip_norm; a large one clips nothing"
        yield Problem("train.clip_norm is 0, which scales every gradient to 0", "more than 0", change)
