"""Rules about training."""

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import jax
from flax import nnx

from jaxthd.config import Config
from jaxthd.config.findings import Finding, multiples
from jaxthd.hf.family_names import OurNames, our_names, patterns_of
from jaxthd.models.adapt import (
    absorbed,
    dotted,
    fp8_projections,
    matches,
    no_projections,
    parameter_names,
    projections,
    trained,
    unmatched,
)
from jaxthd.objectives import make_objective
from jaxthd.ops.backend import version_numbers
from jaxthd.steps.optimizer_kinds import optimizer_kind
from jaxthd.validate.posttraining import draws
from jaxthd.validate.rules import DeviceFacts, refusals, shapes_of

MOST_PROFILED = 20
"""More steps than this in a profile are warned of: it has every operation of every step."""


# --- what is trained ---


def _kinds(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """The objective and the optimizer."""
    train = config.train
    yield from refusals(lambda: make_objective(train.objective, train.objective_options))
    yield from refusals(lambda: optimizer_kind(train.optimizer, train.optimizer_options))


def _adaptation(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that patterns of names match, and that something trains."""
    adapt = config.adapt
    if not adapt.freeze and not adapt.lora_rank:
        return
    model = shapes_of(config)
    if model is None:
        return
    parameters, can_adapt, cannot = parameter_names(model), list(projections(model)), no_projections(model)
    freeze = [pattern.removeprefix("!") for pattern in adapt.freeze]
    kinds = [("freeze", freeze, parameters)]
    for field, patterns, names in kinds + [("lora_targets", list(adapt.lora_targets), can_adapt)] * (
        adapt.lora_rank > 0
    ):
        for pattern, near in unmatched(patterns, names):
            found = f"adapt.{field} {pattern!r} matches nothing"
            if field == "lora_targets" and any(matches(name, [pattern]) for name in cannot):
                found += " but routers or routed experts, which have no low-rank matrices"
            what = "projection" if field == "lora_targets" else "parameter"
            yield _no_match(found, what, names, near, our_names(pattern, config.model, _shapes(model)))
    of_all = [name for name in absorbed(model) if matches(name, adapt.lora_targets)]
    if of_all and adapt.lora_rank and adapt.lora_documents != "all":
        expected = '"all", because decoding multiplies these projections\' matrices into others'
        found = f"adapt.lora_documents is {adapt.lora_documents!r} with LoRA on {', '.join(of_all)}"
        yield Finding(
            found, expected, "set adapt.lora_documents to all, or leave them out of adapt.lora_targets"
        )
    if not any(jax.tree.leaves(trained(model, adapt))):
        change = "freeze less, or set adapt.lora_rank to train low-rank matrices"
        yield Finding("adapt.freeze matches every parameter", "one that trains", change)


def _no_match(
    found: str, what: str, names: Sequence[str], near: Sequence[str], ours: Sequence[OurNames]
) -> Finding:
    """The finding that a pattern matches none of `names`, which are those of each `what`. near: the most like
    it. ours: what it means in published families; then our patterns for that are said in place of these."""
    meant = []
    for title, arrays, is_part in ours:
        if chosen := [name for name in names if name in arrays or f"{name}.w" in arrays]:
            said = " ".join(map(repr, patterns_of(chosen, names)))
            note = " (all layers of its kind, which cannot be chosen by themselves)" * is_part
            meant.append(f"{said} for what {title} calls so{note}")
    if meant:
        return Finding(found, f"jaxthd's own name of a {what}, {', or '.join(meant)}", "give that")
    return Finding(
        found,
        f"a pattern of {what} names, such as {', '.join(near)}",
        "correct it; jaxthd describe runs/my --names lists the names",
    )


def _shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's arrays, by name."""
    return {dotted(path): x.shape for path, x in nnx.to_flat_state(nnx.state(model)) if hasattr(x, "shape")}


def _fp8(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks what is computed in 8 bits, and by which device."""
    llm, patterns, tensor = config.model.llm, config.compute.fp8_projections, config.mesh.tensor
    if not config.compute.fp8:
        return
    change = "set compute.dtype to bfloat16, or compute.fp8 to ()"
    if config.compute.dtype == "float64":
        yield Finding("compute.fp8 is set with compute.dtype float64", "bfloat16 or float32", change)
    capability = device.compute_capability
    if device.platform == "gpu" and capability and version_numbers(capability) < (8, 9):
        where = f"{device.kind} (compute capability {capability})"
        yield Finding(f"compute.fp8 on {where}", "8.9 or more", change)
    if config.compute.fp8_experts and not any(block.routes for _, block in llm.each_block):
        found = 'compute.fp8 has "experts" with a model without experts'
        yield Finding(found, "layers with experts", 'leave "experts" out of compute.fp8')
    if patterns and find_spec("qwix") is None:
        change = "pip install 'jaxthd[fp8]', or set compute.fp8 to ()"
        yield Finding("compute.fp8 is set and qwix is not installed", "that package", change)
    model = shapes_of(config, tensor=tensor) if patterns else None
    found_linears = {} if model is None else fp8_projections(model)
    if model is not None:
        for pattern, near in unmatched(patterns, list(found_linears)):
            found = f"compute.fp8 {pattern!r} matches no projection"
            ours = our_names(pattern, config.model, _shapes(model))
            yield _no_match(found, "projection", list(found_linears), near, ours)
    odd = {}
    for name, linear in found_linears.items():
        sharding = (linear.sharded_in, linear.sharded_out)
        dims = [
            size // (tensor if dim and dim.is_sharded(config.mesh) else 1)
            for size, dim in zip(linear.w.shape[-2:], sharding, strict=True)
        ]
        if matches(name, patterns) and any(dim % 16 for dim in dims):
            odd[name] = dims
    if odd:
        some = ", ".join(f"{name} {a} x {b}" for name, (a, b) in list(odd.items())[:3])
        what = f"compute.fp8 matches {len(odd)} projections whose sizes tensor cores cannot take in 8 bits"
        change = "match fewer projections with compute.fp8, or change the sizes or mesh.tensor"
        yield Finding(f"{what} ({some} on a rank)", "multiples of 16", change)


def _lora(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the settings of low-rank matrices."""
    adapt = config.adapt
    if adapt.lora_rank and not adapt.lora_targets:
        change = "name projections, or set adapt.lora_rank to 0"
        yield Finding("adapt.lora_targets is empty with adapt.lora_rank", "a pattern or more", change)
    if adapt.lora_dropout and not adapt.lora_rank:
        change = "set adapt.lora_rank to 16, for example, or adapt.lora_dropout to 0.0"
        yield Finding(f"adapt.lora_dropout is {adapt.lora_dropout} with adapt.lora_rank 0", "0", change)
    if adapt.lora_documents == "audio" and config.model.encoder is None:
        found = 'adapt.lora_documents is "audio" with a model without an encoder, where LoRA is never on'
        yield Finding(found, '"all"', "set adapt.lora_documents to all")
    if adapt.lora_dropout and draws(config):
        yield Finding(
            f"adapt.lora_dropout is {adapt.lora_dropout} with train.objective {config.train.objective!r}",
            "0, because answers are trained with the probabilities that they were drawn by",
            "set adapt.lora_dropout to 0.0",
        )
    if adapt.dora and not adapt.lora_rank:
        change = "set adapt.lora_rank to 16, for example, or adapt.dora to False"
        yield Finding("adapt.dora is set with adapt.lora_rank 0", "1 or more", change)
    if adapt.lora_rank and not adapt.lora_alpha:
        change = "set adapt.lora_alpha to the rank, for example"
        yield Finding("adapt.lora_alpha is 0, which scales LoRA's product to 0", "more than 0", change)


def _parts(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Factors of the learning rate, and the loss that trains the encoder alone."""
    wrong = list(refusals(lambda: config.adapt.factors))
    yield from wrong
    for part, factor in {} if wrong else config.adapt.factors.items():
        if not 0 < factor < math.inf:
            change = "freeze that part with adapt.freeze, or raise the factor"
            yield Finding(f"adapt.lr_factors has {part}={factor:g}", "more than 0, and finite", change)
        elif factor != 1 and part != "llm" and config.model.encoder is None:
            yield Finding(
                f"adapt.lr_factors has {part}={factor:g} with model.encoder None",
                f"none, because a model without an encoder has no {part}",
                f"leave out {part} of adapt.lr_factors",
            )
    if config.train.ctc_loss and config.model.encoder is not None and not config.data.audio_capacity:
        change = "set train.ctc_loss to 0.0, or raise data.audio_capacity"
        yield Finding(f"train.ctc_loss is {config.train.ctc_loss} with data.audio_capacity 0", "0", change)


# --- the optimization ---


def _steps(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks microbatches, the averaged parameters, and the schedule of the learning rate."""
    train, rows, ranks = config.train, config.data.rows, config.mesh.data
    if rows % ranks == 0 and rows // ranks % train.microbatches:
        yield Finding(
            f"train.microbatches is {train.microbatches} for {rows // ranks} rows on each data rank",
            "a divisor of them, because every microbatch takes equally many rows of each rank",
            f"set train.microbatches to {math.gcd(train.microbatches, rows // ranks)}, or data.rows to "
            f"{multiples(rows, train.microbatches * ranks)}",
        )
    if train.validate_ema and not train.ema_decay:
        change = "set train.ema_decay to 0.999, for example, or train.validate_ema to False"
        yield Finding("train.validate_ema is set with train.ema_decay 0", "more than 0", change)
    if train.warmup_steps > train.steps:
        found = f"train.warmup_steps is {train.warmup_steps} in a run of {train.steps} steps"
        change = f"set train.warmup_steps to {train.steps} or less"
        yield Finding(found, "fewer, so that the peak is reached", change, is_warning=True)
    if train.schedule == "warmup_stable_decay" and train.warmup_steps + train.decay_steps > train.steps:
        yield Finding(
            f"train.decay_steps is {train.decay_steps} in a run of {train.steps} steps with "
            f"train.warmup_steps {train.warmup_steps}",
            "both together at most train.steps",
            f"set train.decay_steps to {max(train.steps - train.warmup_steps, 0)} or less",
            is_warning=True,
        )
    if train.min_learning_rate > train.learning_rate:
        yield Finding(
            f"train.min_learning_rate {train.min_learning_rate} is above train.learning_rate "
            f"{train.learning_rate}",
            "a learning rate that falls",
            f"set train.min_learning_rate to {train.learning_rate} or less",
            is_warning=True,
        )


def _profile(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the steps that are profiled."""
    steps, text = config.train.steps, config.train.profile
    wrong = list(refusals(lambda: config.train.profile_window))
    yield from wrong
    first, last = (not wrong and config.train.profile_window) or (0, 0)
    if first > steps:
        change = f"set train.profile to {max(1, steps - 3)}:{steps}, for example"
        yield Finding(f"train.profile is {text!r} in a run of {steps} steps", "steps that there are", change)
    elif last - first >= MOST_PROFILED:
        change = "profile fewer steps, unless the trace may take gigabytes"
        found = f"train.profile is {text!r}, {last - first + 1} steps"
        yield Finding(found, f"{MOST_PROFILED} or fewer", change, is_warning=True)


RULES = (_kinds, _adaptation, _fp8, _lora, _parts, _steps, _profile)
