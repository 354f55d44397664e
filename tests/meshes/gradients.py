"""Loss and gradients of a run, in checkpoint layout, and how far they are from those of one device."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxthd.config import AdaptConfig, Config, LLMConfig, MeshConfig
from jaxthd.models.adapt import split
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.errors import worst_error
from tests.meshes.batches import batch_for
from tests.meshes.models import MODEL, PLAIN
from tests.meshes.runs import FILLED, Dtype, variants, with_ctc
from tests.weights import random_state

ORDERS = 24
"""Orders of the same rows, over which the rounding of one device in float32 is measured."""


@functools.cache
def canonical_state(dtype: str, adapt: AdaptConfig = PLAIN, llm: LLMConfig = MODEL.llm) -> tuple[Any, Any]:
    """(parameters, buffers); no value would hide an error."""
    filled = random_state(Blueprint(Config(model=replace(MODEL, llm=llm), adapt=adapt)).model)[1:]
    return jax.tree.map(lambda x: x.astype(dtype), filled)


@functools.lru_cache(maxsize=1)
def program(config: Config) -> Any:
    """The jitted loss and gradient of one config; the last one is cached, for several batches."""
    return jax.jit(loss_and_gradient(Blueprint(config), make_mesh(config.mesh)))


def evaluate(config: Config, state: tuple[Any, Any] | None = None, order: int = 0) -> tuple[Gradient, float]:
    """(loss, gradients and the rest in checkpoint layout, seconds in all). order: see batch_for."""
    dtype = config.compute.dtype
    with jax.enable_x64(dtype == "float64"):
        mesh, stages = make_mesh(config.mesh), Blueprint(config).stages
        canonical = state or canonical_state(
            dtype, config.adapt, replace(config.model.llm, pattern=config.model.llm.letters)
        )
        params, buffers = to_stages(canonical, stages)
        batch = put_batch(batch_for(config, order=order), mesh)
        start = time.perf_counter()
        # Moved to the host first: the rest is no work for all devices.
        found: Gradient = jax.tree.map(np.asarray, program(config)(params, buffers, batch))
        seconds = time.perf_counter() - start
        routing = from_stages({"layers": {"moe": found.routing}}, stages)["layers"]["moe"]
        gradients, buffers = from_stages((found.gradients, found.buffers), stages)
        return found._replace(gradients=gradients, buffers=buffers, routing=routing), seconds


@functools.cache
def one_device(
    dtype: Dtype,
    adapt: AdaptConfig = PLAIN,
    order: int = 0,
    llm: LLMConfig = MODEL.llm,
    *,
    fills: bool = False,
) -> Gradient:
    """One device's results. For an adapted model, LoRA's gradients are derived from the dense model's."""
    config = variants(MeshConfig(), dtype)[0]
    config = replace(config, data=FILLED) if fills else config
    config = replace(config, model=replace(config.model, llm=llm))
    config = with_ctc(config) if llm.mtp_pattern else config
    if adapt == PLAIN:
        return evaluate(config, order=order)[0]
    params, buffers = canonical_state(dtype, adapt, llm)
    scale = adapt.lora_alpha / adapt.lora_rank
    stored_statistics = replace(config, adapt=AdaptConfig(freeze=("encoder.blocks.conv.norm.*",)))
    found, _ = evaluate(stored_statistics, (without_lora(params, scale), buffers), order)
    is_trained = Blueprint(Config(model=replace(MODEL, llm=llm), adapt=adapt)).trained
    own, _ = split(of_lora(found.gradients, params, scale), is_trained)
    return found._replace(gradients=own)


def without_lora(params: Any, scale: float) -> Any:
    """The parameters with each pair of low-rank matrices merged into its w."""
    if not isinstance(params, dict):
        return params
    plain = {name: without_lora(child, scale) for name, child in params.items() if name != "lora"}
    if "lora" in params:
        plain["w"] = plain["w"] + scale * params["lora"]["a"] @ params["lora"]["b"]
    return plain


def of_lora(gradients: Any, params: Any, scale: float) -> Any:
    """Gradients of parameters with low-rank matrices, derived from those of the dense model."""
    if not isinstance(params, dict):
        return gradients
    found = {name: of_lora(gradients[name], child, scale) for name, child in params.items() if name != "lora"}
    if "lora" in params:
        dw, a, b = gradients["w"], params["lora"]["a"], params["lora"]["b"]
        found["lora"] = {"a": scale * dw @ b.swapaxes(-1, -2), "b": scale * a.swapaxes(-1, -2) @ dw}
    return found


def worst_of(got: Gradient, want: Gradient) -> tuple[float, str]:
    """(the largest error of a tensor, its name), over loss, gradients, statistics and routing. Each of these
    has its own typical norm. want: in float64.
    """
    parts = zip(Gradient._fields, got, want, strict=True)
    return max((error, f"{part}{name}") for part, g, w in parts for error, name in [worst_error(g, w)])


def of_decoder(gradient: Gradient) -> Gradient:
    """Without the gradients of the encoder's parameters."""
    return gradient._replace(gradients={k: v for k, v in gradient.gradients.items() if k != "encoder"})


Which = Callable[[Gradient], Gradient]
"""What of a gradient is compared."""


@functools.cache
def own_errors(adapt: AdaptConfig, llm: LLMConfig, which: Which, *, fills: bool = False) -> list[float]:
    """The errors of one device in float32, over several orders of the same rows."""
    truth = which(one_device("float64", adapt, 0, llm, fills=fills))
    each = (one_device("float32", adapt, order, llm, fills=fills) for order in range(ORDERS))
    return [worst_of(which(found), truth)[0] for found in each]


def everything(gradient: Gradient) -> Gradient:
    return gradient


def check(config: Config, which: Which = everything) -> dict[str, Any]:
    """Runs one config; returns its row of the table. which: what is compared."""
    got, seconds = evaluate(config)
    llm = replace(config.model.llm, pattern=config.model.llm.letters)
    fills = config.data == FILLED
    error, tensor = worst_of(which(got), which(one_device("float64", config.adapt, 0, llm, fills=fills)))
    allowed = 1e-10
    if config.compute.dtype != "float64":
        allowed = max(1e-5, 3 * max(own_errors(config.adapt, llm, which, fills=fills)))
    return {
        "mesh": "x".join(map(str, config.mesh.sizes)),
        "stages": "|".join(Blueprint(config).stages.patterns),
        "exchange": config.compute.context_exchange if config.mesh.context > 1 else "",
        "layout": config.compute.layout if config.mesh.context > 1 else "",
        "split": split_documents(config),
        "residual": "sharded" if config.compute.sequence_sharded else "",
        "adapted": "LoRA" if config.adapt.lora_rank else "",
        "mtp": llm.mtp_modules * llm.mtp_pattern,
        "dtype": config.compute.dtype,
        "loss": float(got.loss),
        "error": error,
        "allowed": allowed,
        "tensor": tensor,
        "seconds": round(seconds, 1),
    }


def split_documents(config: Config) -> str:
    """Under the layout "whole": how many documents of a row are split, least and most of the filled rows."""
    batch = batch_for(config)
    if batch.splits is None:
        return "0" if ContextLayout.of(config).keeps_documents else ""
    split = (batch.splits > 0).sum(1)[(batch.segment_ids > 0).any(1)]
    text = f"{split.min()} to {split.max()}" if split.min() < split.max() else f"{split.min()}"
    return text + ", filling the buffer" * (config.data == FILLED)
