"""The report of `jaxthd plan` as text: what the recommendation saves, and tables of what was tried."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxthd.config import Config
from jaxthd.config.values import Unset
from jaxthd.kernels.choose import attention_shapes
from jaxthd.ops.attention.cudnn import WORKSPACE_MOST, workspace
from jaxthd.planning.layouts import LAYOUT_COSTS, MULTIPLY_ADDS_PER_BYTE, layout_recommendation
from jaxthd.planning.search import SIZES, Plan, audio_mean, percentiles
from jaxthd.planning.simulate import COSTS, Outcome, balance
from jaxthd.terminal.tables import size_text, table

SETTINGS = (*SIZES, "packing", "packing_bins")
"""Settings of data that are recommended."""
LEAST_SAVED = 0.001
"""Share of a step's work that is worth a word."""


def describe_saving(plan: Plan, config: Config) -> str:
    """Says what the recommended settings save of a step's work, beside those that a run of the config has."""
    best, now = plan.recommended, plan.configured
    derived = any(isinstance(getattr(config.data, name), Unset) for name in SIZES)
    otherwise = "with the sizes that a run derives by itself" if derived else "as configured"
    if not now.buffers:
        return f"No document fits a buffer {otherwise}; here padding adds {best.overhead:.1%} to the work."
    saved = 1 - (1 + best.overhead) / (1 + now.overhead)
    text = f"Padding adds {best.overhead:.1%} to the work on documents, and {now.overhead:.1%} {otherwise}: "
    text += f"saves {saved:.1%} of a step's work" if saved >= LEAST_SAVED else "saves nothing"
    skipped = f"; {best.skipped:.2%} of the documents are skipped, and {now.skipped:.2%} {otherwise}"
    return text + skipped * bool(best.skipped or now.skipped)


def recommended_settings(plan: Plan, config: Config) -> dict[str, Any]:
    """The recommended settings of data that differ from the config's, or were not given there."""
    best = plan.recommended.data
    values = {name: (getattr(config.data, name), getattr(best, name)) for name in SETTINGS}
    return {name: new for name, (old, new) in values.items() if isinstance(old, Unset) or old != new}


def describe_plan(plan: Plan) -> str:
    """The tables of what was tried, and the reasons for what is recommended."""
    sections: list[Callable[[Plan], str]] = [_documents, _capacities, _work]
    if plan.stream.frames.any():
        sections.append(_audio_capacities)
    sections += [_maxima, _packers]
    if plan.layouts:
        sections.append(_layouts)
    return "\n\n".join(section(plan) for section in [*sections, _recommendation])


def _at(outcomes: Sequence[Outcome]) -> str:
    return f"at capacity {outcomes[0].data.capacity:,}"


def _share_within(outcome: Outcome, maximum: int) -> str:
    """The share of buffers that hold at most `maximum` documents."""
    return f"{np.mean(outcome.documents <= maximum):.1%}"


def _documents(plan: Plan) -> str:
    rows = [
        [name, *(f"{x:,.{digits}f}" for x in (of.mean(), *np.percentile(of, (50, 90, 99, 100))))]
        for name, of, digits in (
            ("tokens", plan.stream.tokens, 0),
            ("seconds of audio", plan.stream.seconds, 2),
        )
    ]
    return table("Documents", "|mean|P50|P90|P99|max", rows)


def _capacities(plan: Plan) -> str:
    limit = plan.configured.data.max_documents
    rows = [
        [
            o.data.capacity,
            o.data.audio_capacity,
            *percentiles(o.documents),
            _share_within(o, limit),
            *o.costs,
        ]
        for o in plan.by_capacity
    ]
    return table(
        "Capacities with any number of documents, each with the audio capacity of least overhead",
        f"capacity|audio_capacity|documents P50|P90|P99|max|{limit} or fewer|{COSTS}",
        rows,
    )


def _work(plan: Plan) -> str:
    (slot, frame), front_end = plan.work, plan.recommended.config.model.encoder
    frames, outputs = front_end.unit if front_end else (1, 1)
    return (
        "  Overhead is work on padding over work on documents. The work of a slot is the number of\n"
        f"  parameters it meets: {slot:,.0f} for a token slot, {frames / outputs * frame:,.0f} for an\n"
        f"  output of the encoder ({frames / outputs:g} audio frames)."
    )


def _audio_capacities(plan: Plan) -> str:
    mean, ranks = audio_mean(plan.stream, plan.recommended.config), plan.recommended.config.mesh.audio_ranks
    rows = [
        [o.data.audio_capacity, f"{o.data.audio_capacity / mean - 1:+.0%}", *o.costs] for o in plan.by_audio
    ]
    title = (
        f"Audio capacities {_at(plan.by_audio)} for {ranks} ranks, and their room over a full buffer's mean"
    )
    return table(title, f"audio_capacity|over it|{COSTS}", rows)


def _maxima(plan: Plan) -> str:
    unbounded, config = plan.by_maximum[-1], plan.recommended.config
    title = (
        f"Maxima of documents {_at(plan.by_maximum)}, and the share of buffers that would hold no more anyway"
    )
    columns = f"max_documents|no more|{COSTS}"
    rows: list[list[Any]] = [
        [o.data.max_documents, _share_within(unbounded, o.data.max_documents), *o.costs]
        for o in plan.by_maximum
    ]
    if all(
        shape is None or shape.window for shape in (x.attention(1) for _, x in config.model.llm.each_block)
    ):
        return table(title, columns, rows)
    for row, o in zip(rows, plan.by_maximum, strict=True):
        shapes = attention_shapes(replace(config, data=o.data))
        row.append(size_text(max(map(workspace, shapes))))
    explained = (
        "  The last column is what the number of documents costs the back-end cudnn on each GPU: its\n"
        "  backward pass pads every document to the buffer. The back-end is not used where that is over\n"
        f"  {size_text(WORKSPACE_MOST)}. The other back-ends pay nothing for it."
    )
    return f"{table(title, f'{columns}|cuDNN workspace', rows)}\n\n{explained}"


def _packers(plan: Plan) -> str:
    rows: list[list[Any]] = [
        [o.data.packing, o.data.packing_bins, f"{o.documents.mean():.1f}", *o.costs] for o in plan.by_packer
    ]
    for name, o in (("random", plan.in_order), ("by length", plan.by_length)):
        rows.append([f"padded, {name}", "", plan.rows, *o.costs])
    title = f"Packers {_at(plan.by_packer)}, and batches of as many documents padded to their longest"
    return (
        table(title, f"packer|open buffers|documents|{COSTS}", rows)
        + "\n\n  One open buffer is concatenation: a document that does not fit closes the buffer."
    )


def _layouts(plan: Plan) -> str:
    context = plan.recommended.config.mesh.context
    title = f"Context layouts over {context} ranks; the busiest rank in million multiply-adds a real token"
    explained = (
        "  Bytes are what a rank receives in a layer of Mamba2 or attention and step. An exchanged byte\n"
        f"  counts as {MULTIPLY_ADDS_PER_BYTE} multiply-adds. Step: slots and attention, busiest / mean."
    )
    rows = [cost.cells for cost in plan.layouts]
    return "\n".join(
        [table(title, LAYOUT_COSTS, rows), explained, f"  {layout_recommendation(plan.layouts)}"]
    )


def _recommendation(plan: Plan) -> str:
    """The settings for the command line and for a config file, the reasons for them, and their costs."""
    chosen, data, now = plan.recommended, plan.recommended.data, plan.configured
    settings = ", ".join(f"{name}={getattr(data, name)!r}" for name in SETTINGS)
    reasons = _reasons(plan)
    width = max(len(setting) for setting, _ in reasons)
    lines = [
        f"Recommended: overhead {chosen.overhead:.1%}, {chosen.skipped:.2%} of documents skipped",
        *(f"  --data.{setting:<{width}}  {reason}" for setting, reason in reasons),
        f"  DataConfig({settings})",
        f"As configured: overhead {now.overhead:.1%}, {now.skipped:.2%} of documents skipped",
    ]
    if chosen.config.mesh.context > 1:
        before, after = balance(plan.stream, chosen)
        lines.append(
            f"Attention work of the busiest of {chosen.config.mesh.context} context ranks over the mean: "
            f"{before:.2f} as packed, {after:.2f} as the loader orders the documents"
        )
    return "\n".join(lines)


def _reasons(plan: Plan) -> list[tuple[str, str]]:
    """(option with its value, reason) for each recommended setting."""
    chosen, data = plan.recommended, plan.recommended.data
    mean = audio_mean(plan.stream, chosen.config)
    tight = min(plan.by_audio, key=lambda o: abs(o.data.audio_capacity - mean))
    one, least = plan.by_packer[0], min(plan.by_packer, key=lambda o: o.overhead)
    _, _, p99, most = percentiles(plan.by_maximum[-1].documents)
    return [
        (
            f"capacity {data.capacity}",
            "overhead " + ", ".join(f"{o.overhead:.1%} at {o.data.capacity:,}" for o in plan.by_capacity),
        ),
        (
            f"audio-capacity {data.audio_capacity}",
            f"pads {chosen.audio_padding:.1%} of audio frames, overhead {chosen.overhead:.1%}; "
            f"{tight.data.audio_capacity} pads {tight.audio_padding:.1%}, overhead {tight.overhead:.1%}",
        ),
        (
            f"max-documents {data.max_documents}",
            f"99% of buffers hold {p99} or fewer, none more than {most}; a training step does not pay for "
            "it, decoding in validation reserves room for each document",
        ),
        (
            f"packing {data.packing} --data.packing-bins {data.packing_bins}",
            f"overhead {chosen.overhead:.1%}; {one.overhead:.1%} with one open buffer, {least.overhead:.1%} "
            f"with {least.data.packing_bins} ({least.data.packing}), whose documents wait on the host",
        ),
    ]
