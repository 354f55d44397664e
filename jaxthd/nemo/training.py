"""The groups `trainer` and `exp_manager` of a NeMo experiment, and the optimizer: mesh and training."""

import math
import re
from typing import Any

from jaxthd.errors import UserError
from jaxthd.nemo.translation import Translation

NO_CLIPPING = 1e9
"""Gradients of a global norm up to this stay as they are."""
ALL = 1_000_000
"""More batches than a validation set has."""
_DTYPES = {"bf16": "bfloat16", "32": "float32", "64": "float64"}
_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "lion": "lion", "muon": "muon", "adafactor": "adafactor"}
_SCHEDULES = {"CosineAnnealing": "cosine", "PolynomialDecayAnnealing": "linear", "WarmupPolicy": "constant"}
_CALLBACK = "exp_manager.checkpoint_callback_params"


def translate_training(found: Translation) -> None:
    """The settings of the mesh, of the computation, of the optimization and of checkpoints."""
    _mesh(found)
    _compute(found)
    steps = _steps(found)
    _optimizer(found)
    _schedule(found, steps)
    _validation(found)
    _checkpoints(found)
    norm = float(found.get("trainer.gradient_clip_val") or NO_CLIPPING)
    found.set("train.clip_norm", norm, "trainer.gradient_clip_val")


def _last(target: Any) -> str:
    """The class that a _target_ names."""
    return str(target or "").rpartition(".")[2]


def _mesh(found: Translation) -> None:
    """The sizes of the mesh, and the rows of a step: a buffer a data rank, times the accumulated batches."""
    strategy = found.get("trainer.strategy", "auto")
    target = _last(strategy.get("_target_")) if isinstance(strategy, dict) else str(strategy)
    sizes: dict[str, int] = {}
    for axis, names in {
        "tensor": ("tp_size", "tensor_parallel_size"),
        "context": ("cp_size",),
        "pipeline": ("pp_size",),
    }.items():
        keys = [f"trainer.strategy.{name}" for name in names]
        given = next((found.get(key) for key in keys if found.experiment.has(key)), 1)
        if given == "auto":
            found.note(keys[1], "'auto' is the GPUs of a node; here it is 1: give --mesh.tensor")
        sizes[axis] = 1 if given == "auto" else int(given)
        if sizes[axis] > 1:
            found.set(f"mesh.{axis}", sizes[axis], *keys)
    of_data = ("trainer.strategy.dp_size", "trainer.strategy.data_parallel_size")
    given = next((found.get(key) for key in of_data if isinstance(found.get(key), int)), None)
    devices, nodes = found.get("trainer.devices", 1), int(found.get("trainer.num_nodes", 1))
    count = len(devices) if isinstance(devices, list) else devices
    if isinstance(count, str) and count.isdecimal():
        count = int(count)
    others = math.prod(sizes.values())
    if given is None and (not isinstance(count, int) or count < 1):
        found.note(
            "trainer.devices", f"{devices!r} is all GPUs that a machine has; here it is 1: give --mesh.data"
        )
        count = nodes = 1
    data = given or max(int(count) * nodes // others, 1)
    found.set("mesh.data", data, *of_data, "trainer.devices", "trainer.num_nodes")
    if "ddp" in target.lower():
        key = "trainer.strategy._target_" if isinstance(strategy, dict) else "trainer.strategy"
        found.set("mesh.fsdp", False, key)
    accumulated = int(found.get("trainer.accumulate_grad_batches", 1))
    found.set("data.rows", data * accumulated, "trainer.accumulate_grad_batches", "trainer.devices")
    if accumulated > 1:
        found.set("train.microbatches", accumulated, "trainer.accumulate_grad_batches")


def _compute(found: Translation) -> None:
    """The dtype, what is computed again, what is sharded besides, products in 8 bits."""
    precision = str(found.get("trainer.precision", "32-true"))
    dtype = next((ours for theirs, ours in _DTYPES.items() if precision.startswith(theirs)), "")
    if not dtype:
        found.lose("trainer.precision", precision, "the dtypes are bfloat16 and float32; here it is bfloat16")
    found.set("compute.dtype", dtype or "bfloat16", "trainer.precision")
    again = [f"trainer.strategy.activation_checkpointing_{part}" for part in ("llm", "perception")]
    if any(found.get(key) for key in again):
        found.set("compute.remat", "full", *again)
    sequence = "trainer.strategy.distributed_config.sequence_parallel"
    if found.get(sequence):
        found.set("compute.sequence_sharded", True, sequence)
    if found.get("model.automodel_backend.te_fp8"):
        found.set("compute.fp8", ("decoder.layers.*",), "model.automodel_backend.te_fp8")


def _epoch(found: Translation) -> int | None:
    """Optimizer steps of what NeMo calls an epoch; None if the file does not say."""
    batches = found.get("trainer.limit_train_batches")
    if not isinstance(batches, int):
        return None
    return max(batches // int(found.get("trainer.accumulate_grad_batches", 1)), 1)


def _steps(found: Translation) -> int | None:
    """Sets the steps, and returns them; None where the file does not say."""
    steps, epochs, epoch = found.get("trainer.max_steps"), found.get("trainer.max_epochs"), _epoch(found)
    if not isinstance(steps, int) or steps < 1:
        steps = epochs * epoch if isinstance(epochs, int) and epochs > 0 and epoch else None
    if steps is None:
        found.note(
            "trainer.max_steps", "nothing says how long the run is; here it is 200 steps: give --train.steps"
        )
        return None
    found.set("train.steps", steps, "trainer.max_steps", "trainer.max_epochs")
    return steps


def _optimizer(found: Translation) -> None:
    """The optimizer and its numbers; those of AdamW where the file gives none."""
    target = _last(found.get("model.optimizer._target_", "AdamW"))
    name = next((ours for theirs, ours in _OPTIMIZERS.items() if target.lower().endswith(theirs)), "")
    if not name:
        found.lose("model.optimizer._target_", target, "there is no such optimizer; here it is adamw")
    found.set("train.optimizer", name or "adamw", "model.optimizer._target_")
    if name in ("", "adamw", "lion"):
        usual = (0.9, 0.99) if name == "lion" else (0.9, 0.999)
        first, second = (float(x) for x in found.get("model.optimizer.betas", usual))
        options = (f"beta1={first:g}", f"beta2={second:g}")
        found.set("train.optimizer_options", options, "model.optimizer.betas")
    elif found.experiment.has("model.optimizer.betas"):
        betas = found.get("model.optimizer.betas")
        found.lose("model.optimizer.betas", betas, f"{name} has other options: see the page on training")
    rate, decay = found.get("model.optimizer.lr", 1e-3), found.get("model.optimizer.weight_decay", 1e-2)
    found.set("train.learning_rate", float(rate), "model.optimizer.lr")
    found.set("train.weight_decay", float(decay), "model.optimizer.weight_decay")


def _schedule(found: Translation, steps: int | None) -> None:
    """The learning rate over the steps: without a scheduler it is constant, without a warm-up."""
    scheduler = found.get("model.lr_scheduler") or {}
    target = _last(scheduler.get("_target_"))
    name = "constant" if not scheduler else _SCHEDULES.get(target, "")
    if name == "linear" and float(scheduler.get("power", 1.0)) != 1:
        name = ""
    if not name:
        why = f"the schedules are {', '.join(_SCHEDULES)} (of power 1); here it is cosine"
        found.lose("model.lr_scheduler._target_", target, why)
    found.set("train.schedule", name or "cosine", "model.lr_scheduler._target_")
    warmup, ratio = scheduler.get("warmup_steps"), scheduler.get("warmup_ratio")
    warmup = int(warmup) if warmup is not None else int(float(ratio or 0) * (steps or 0))
    found.set(
        "train.warmup_steps", warmup, "model.lr_scheduler.warmup_steps", "model.lr_scheduler.warmup_ratio"
    )
    if name != "constant":
        found.set("train.min_learning_rate", float(scheduler.get("min_lr") or 0), "model.lr_scheduler.min_lr")


def _validation(found: Translation) -> None:
    """When it is validated, and on how many batches."""
    epoch, key = _epoch(found), "trainer.val_check_interval"
    interval, epochs = found.get(key, 1.0), int(found.get("trainer.check_val_every_n_epoch", 1))
    if isinstance(interval, int):
        batches: float | None = interval / int(found.get("trainer.accumulate_grad_batches", 1))
    else:
        batches = epoch * float(interval) * epochs if epoch else None
    limit = found.get("trainer.limit_val_batches", 1.0)
    if not found.get("data.validation_ds") or not limit:
        found.set("train.validate_every", 0, "data.validation_ds" if limit else "trainer.limit_val_batches")
    elif batches is None:
        found.note(key, "nothing says how long an epoch is; here it is 50 steps: give --train.validate-every")
    else:
        found.set("train.validate_every", max(round(batches), 1), key, "trainer.limit_train_batches")
    if isinstance(limit, float) and limit != 1:
        found.lose("trainer.limit_val_batches", limit, "a share of a set; here all of it is read")
    limit = limit if isinstance(limit, int) else ALL
    found.set("train.validation_batches", max(limit, 1), "trainer.limit_val_batches")


def _checkpoints(found: Translation) -> None:
    """Checkpoints, averages, trackers and the time that a run may take."""
    every, epoch = found.get(f"{_CALLBACK}.every_n_train_steps"), _epoch(found)
    if not every and epoch:
        every = epoch * int(found.get(f"{_CALLBACK}.every_n_epochs", 1) or 1)
    if every:
        keys = (
            f"{_CALLBACK}.every_n_train_steps",
            f"{_CALLBACK}.every_n_epochs",
            "trainer.limit_train_batches",
        )
        found.set("train.checkpoint_every", int(every), *keys)
    kept = found.get(f"{_CALLBACK}.save_top_k")
    if kept is not None:
        if kept < 1:
            found.note(f"{_CALLBACK}.save_top_k", f"{kept}: here the newest three are kept, and the best")
        else:
            found.set("train.keep_checkpoints", int(kept), f"{_CALLBACK}.save_top_k")
    if found.get("exp_manager.ema.enable"):
        found.set(
            "train.ema_decay", float(found.get("exp_manager.ema.decay", 0.999)), "exp_manager.ema.decay"
        )
        is_averaged = not found.get("exp_manager.ema.validate_original_weights", False)
        found.set("train.validate_ema", is_averaged, "exp_manager.ema.validate_original_weights")
    trackers = [
        name
        for name, usual in (("tensorboard", True), ("wandb", False), ("mlflow", False))
        if found.get(f"exp_manager.create_{name}_logger", usual)
    ]
    found.set(
        "train.trackers",
        tuple(trackers),
        *(f"exp_manager.create_{x}_logger" for x in ("tensorboard", "wandb")),
    )
    for key in ("exp_manager.max_time_per_run", "trainer.max_time"):
        if time := found.get(key):
            found.set("train.max_seconds", seconds_of(time, key), key)
            break


def seconds_of(time: Any, key: str) -> float:
    """Seconds of DD:HH:MM:SS, or of a mapping of days, hours, minutes and seconds. Raises UserError."""
    units = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    if isinstance(time, dict) and time.keys() <= units.keys():
        return math.fsum(units[name] * float(count) for name, count in time.items())
    if isinstance(time, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", time):
        return math.fsum(x * float(y) for x, y in zip(units.values(), time.split(":"), strict=True))
    raise UserError(f"{key} is {time!r}; expected DD:HH:MM:SS, such as 00:03:50:00: correct it")
