"""The choice of a run's kernels: those that are admitted on the devices of all its processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.kernels.admission import Kernel, Verdict, admit
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.encoder_probe import encoder_kernels
from jaxthd.kernels.machine import this_machine
from jaxthd.kernels.scan_probe import scan_kernels
from jaxthd.ops.attention.backends import BACKENDS as ATTENTION
from jaxthd.ops.attention.backends import for_any_intervals
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.scan.backends import BACKENDS as SCANS
from jaxthd.ops.scan.contract import ScanShape
from jaxthd.ops.scan.pallas import chunk_of
from jaxthd.parallel.processes import exchange


def attention_shapes(config: Config) -> list[AttentionShape]:
    """Shapes of the decoder's attention on one tensor rank, over the buffers of a microbatch."""
    mesh, data = config.mesh, config.data
    rows = max(1, data.rows // mesh.data // config.train.microbatches)
    buffers = rows * data.capacity // mesh.context, rows * data.max_documents
    sizes = (block.attention(mesh.tensor) for _, block in config.model.llm.each_block)
    shapes = (
        AttentionShape(config.compute.dtype, x.heads, x.kv_heads, x.kernel_dim, *buffers) for x in sizes if x
    )
    return list(dict.fromkeys(shapes))


def scan_shapes(config: Config) -> list[ScanShape]:
    """Shapes of one rank's scans: its context chunks, for all heads of its tensor rank. Under the layout
    "whole" states enter what is scanned without the kernel. A group whose heads lie on several ranks is on
    each of them.
    """
    mesh, context = config.mesh, config.mesh.context
    tokens, states_enter = config.data.capacity, context > 1
    if context > 1 and config.compute.layout == "whole":
        tokens, states_enter = tokens // context, False
    elif context > 1:
        tokens //= 2 * context
    chunk = chunk_of(config.compute.blocks.scan, tokens)
    sizes = (block.scan(mesh.tensor) for _, block in config.model.llm.each_block)
    return [ScanShape(config.compute.dtype, *each, chunk, states_enter) for each in sizes if each]


def _encoder_shapes(config: Config) -> Sequence[Any]:
    """Shapes of the front end's attention."""
    encoder = config.model.encoder
    return [] if encoder is None else encoder.kernel_shapes(config.compute.dtype)


def _not_for_windows(config: Config, name: str) -> str | None:
    sizes = (block.attention(1) for _, block in config.model.llm.each_block)
    if any(each and not each.window for each in sizes) or ATTENTION[name].takes_any_intervals:
        return None
    return "it does not compute windows, and the decoder has no other attention"


class Choice(NamedTuple):
    """A setting of compute.* that names a back-end.

    shapes: what the model computes with it; none: it has no such layers. kernels: of a shape, those of the
    back-ends that need admission ("xla" too, which needs none). A back-end is used where it is admitted for
    every shape. plain: the one that needs no admission: what "auto" is on a CPU, and on a GPU that admits no
    kernel. interpreted: back-ends that a CPU interprets: a probe there would say nothing about the GPU's.
    useless: why "auto" does not try a back-end, None if it does.
    """

    field: str
    shapes: Callable[[Config], Sequence[Any]]
    kernels: Callable[[Any], Sequence[Kernel]]
    plain: str
    interpreted: tuple[str, ...]
    useless: Callable[[Config, str], str | None] = lambda config, name: None


CHOICES = (
    Choice(
        "attention_backend",
        attention_shapes,
        attention_kernels,
        "xla",
        tuple(name for name, backend in ATTENTION.items() if backend.is_interpreted_on_cpu),
        _not_for_windows,
    ),
    Choice(
        "scan_backend",
        scan_shapes,
        scan_kernels,
        "xla",
        tuple(name for name, backend in SCANS.items() if backend.is_interpreted_on_cpu),
    ),
    Choice("encoder_attention", _encoder_shapes, encoder_kernels, "blocks", ("pallas",)),
)


def kernels_of_run(config: Config, choice: Choice) -> list[dict[str, Kernel]]:
    """The kernels by name, for each shape that the run computes."""
    shapes = dict.fromkeys(choice.shapes(config))
    return [{kernel.name: kernel for kernel in choice.kernels(shape)} for shape in shapes]


LARGE_KERNELS: dict[str, Any] = {"expert_rounds": True, "front_end": 1024}
"""Block sizes on GPUs, which take few large products in place of loops over small ones. The kernels are XLA's
and need no admission."""


def with_admitted(config: Config, say: Callable[[str], None], folder: Path | None = None) -> Config:
    """The config with the back-ends of attention, scan and encoder that the run may use: those that are
    admitted for all shapes of kernels_of_run. All processes call this together.

    "auto" becomes the first back-end that every process admits, and one line says why the others are not
    used; on a CPU, and where the attention is asked to be XLA's, it is XLA's code, without a line.
    say: prints a line. folder: see admit. Raises UserError if the back-end asked for by name is not admitted.
    """
    without = config.compute.attention_backend == "xla"
    for choice in CHOICES:
        is_open = getattr(config.compute, choice.field) == "auto"
        found = choice.plain if without and is_open else _admitted(config, choice, say, folder)
        config = using(config, **{choice.field: found})
    attention = config.compute.attention_backend
    if config.model.llm.window and for_any_intervals(attention).name != attention:
        say(f"attention in windows: xla; {attention} does not compute it, pallas does")
    if this_machine().platform == "gpu" and config.compute.block_sizes is None:
        config = using(config, block_sizes=replace(config.compute.blocks, **LARGE_KERNELS))
    return config


def _admitted(config: Config, choice: Choice, say: Callable[[str], None], folder: Path | None) -> str:
    asked: str = getattr(config.compute, choice.field)
    machine, plain = this_machine(), choice.plain
    if asked == plain or (machine.platform == "cpu" and asked == "auto"):
        return plain
    of_shapes = kernels_of_run(config, choice)
    if not of_shapes:
        return plain
    if machine.platform == "cpu" and asked in choice.interpreted:
        return asked
    if asked == "auto":
        return _first_admitted(config, choice, of_shapes, say, folder)
    for kernel in (kernels[asked] for kernels in of_shapes):
        if refusal := _refusal(admit(kernel, machine, folder)):
            raise UserError(
                f'compute.{choice.field} is "{asked}", but {refusal} ({kernel.shape}, {machine.kind}); '
                f"expected a back-end that computes the {kernel.kind} right here: set "
                f"compute.{choice.field} to auto or {plain}"
            )
    return asked


def _first_admitted(
    config: Config,
    choice: Choice,
    of_shapes: Sequence[Mapping[str, Kernel]],
    say: Callable[[str], None],
    folder: Path | None,
) -> str:
    """The name of the first that is admitted for all shapes, in their order; the plain one if no other is."""
    machine, chosen = this_machine(), choice.plain
    refused = []
    for name in (name for name in of_shapes[0] if name != choice.plain):
        refusal = choice.useless(config, name)
        for kernels in of_shapes:
            if refusal is None:
                refusal = _refusal(admit(kernels[name], machine, folder))
                if refusal and len(of_shapes) > 1:
                    refusal += f" ({kernels[name].shape})"
        if refusal is None:
            chosen = name
            break
        refused.append(f"not {name}: {refusal}")
    kind = next(iter(of_shapes[0].values())).kind
    say(f"{kind}: {'; '.join([chosen, *refused])}")
    return chosen


def using(config: Config, **backends: Any) -> Config:
    """The config with these settings of compute.*, such as attention_backend."""
    return replace(config, compute=replace(config.compute, **backends))


def _refusal(verdict: Verdict) -> str | None:
    """Why the first process that refuses does; None if none does."""
    return next((refusal for refusal in exchange(verdict.refusal) if refusal is not None), None)
