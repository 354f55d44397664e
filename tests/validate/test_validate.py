"""The validator: every rule has its error or warning, its advice works, and it agrees with the packer."""

import ast
import copy
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from jaxthd.config import BlockSizes, Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.config.block import Block, Blocks, usual_blocks
from jaxthd.data.packer import pack_documents
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.packing.document import AudioPiece, Document
from jaxthd.steps.blueprint import Blueprint
from jaxthd.validate import RULES, ConfigError, DeviceFacts, findings, rules, training, validate
from jaxthd.validate.values import faulty_values, leaves
from tests.front_ends import Carried

CPU = DeviceFacts("cpu", 8, "cpu")
GPU = DeviceFacts("gpu", 1, "NVIDIA H100", "9.0")
BLACKWELL = DeviceFacts("gpu", 1, "NVIDIA RTX 5090", "12.0")
AMPERE = DeviceFacts("gpu", 1, "NVIDIA A100", "8.0")
UNKNOWN = DeviceFacts("gpu", 1, "some GPU")


@pytest.fixture(autouse=True, scope="module")
def models_made_once() -> Iterator[None]:
    """Rules that read the model's shapes trace it; cases with the same model share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "Blueprint", shared_blueprint)
        yield


MADE: dict[Any, Blueprint] = {}


def shared_blueprint(config: Config) -> Blueprint:
    of_model = (config.model, config.compute, config.adapt, config.mesh, config.data.max_documents)
    try:
        return MADE.setdefault(of_model, Blueprint(config))
    except TypeError:  # a value of a faulty type has no hash
        return Blueprint(config)


def with_changes(changes: dict[str, Any]) -> Config:
    """The default Config with dotted paths set, even to faulty types, which constructors refuse here.

    It has the usual blocks of its patterns, and those whose settings are set.
    """
    letters = {
        *changes.get("model.llm.pattern", LLMConfig().pattern),
        *changes.get("model.llm.mtp_pattern", ""),
    }
    letters |= {path.split(".")[3] for path in changes if path.startswith("model.llm.blocks.")}
    blocks = Blocks({x: block for x, block in sorted(usual_blocks().items()) if x in letters})
    config = copy.deepcopy(Config())
    for path, value in {"model.llm.blocks": blocks, **changes}.items():
        *groups, name = path.split(".")
        node: Any = config
        for group in groups:
            node = node[group] if isinstance(node, dict) else getattr(node, group)
        object.__setattr__(node, name, copy.deepcopy(value))
    return config


@dataclass(frozen=True, kw_only=True)
class OneByOne(MLP):
    """A block that takes one token of a document at a time."""

    rolls_back: ClassVar[bool] = False


class Case(NamedTuple):
    """Changes, and a fragment of the one error (or warning) that they cause: fields and values, not prose."""

    changes: dict[str, Any]
    fragment: str
    device: DeviceFacts = CPU
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Recurrent(Block):
    """A block that cannot take documents that context ranks share."""

    title = "recurrent"
    letter = "A"
    kind: str = "recurrent"


PIPELINE = {"mesh.pipeline": 2, "data.rows": 4, "train.microbatches": 4}
TEXT = {"model.encoder": None, "data.manifest": ("text.jsonl",), "data.validation_manifest": ""}
CASES = [
    # Faulty in themselves.
    Case({"mesh.context": 0}, "mesh.context is 0; expected 1 or more"),
    Case({"data.capacity": -8}, "data.capacity is -8; expected 1 or more"),
    Case({"data.audio_capacity": -8}, "data.audio_capacity is -8; expected 0 or more"),
    Case({"model.encoder.chunk_seconds": 0.01}, "chunk_seconds is 0.01; expected 0.02 or more"),
    Case({"model.encoder.chunk_seconds": math.inf}, "chunk_seconds is inf; expected 0 or more"),
    Case({"train.learning_rate": -1e-3}, "train.learning_rate is -0.001; expected 0 or more"),
    Case({"train.learning_rate": math.nan}, "train.learning_rate is nan; expected a value of type float"),
    Case({"train.trackers": ("comet",)}, "train.trackers is ('comet',); expected a value of type tuple"),
    Case({"train.profile": "10"}, "train.profile is '10'; expected FIRST:LAST"),
    Case({"train.profile": "13:10"}, "train.profile is '13:10'; expected FIRST:LAST"),
    Case({"train.profile": "0:2"}, "train.profile is '0:2'; expected FIRST:LAST"),
    Case({"train.profile": "300:302"}, "in a run of 200 steps; expected steps that there are"),
    Case({"train.profile": "10:40"}, "31 steps; expected 20 or fewer", is_warning=True),
    Case({"data.rows": "4"}, "data.rows is '4'; expected a value of type int"),
    Case({"data.rows": True}, "data.rows is True; expected a value of type int"),
    Case(
        {"data.packing": "best"},
        "data.packing is 'best'; expected one of 'first_fit', 'best_fit', 'best_fit_decreasing', 'padded'",
    ),
    Case({"compute.dtype": "float16"}, "expected one of 'float32', 'bfloat16', 'float64'"),
    Case(
        {"model.llm.blocks.M.dt_limit": (0.0,)}, "blocks.M.dt_limit is (0.0,); expected a value of type tuple"
    ),
    Case({"model.llm.blocks": Blocks({"M": None})}, "model.llm.blocks is {'M': None}; expected a value of"),
    Case({"mesh": None}, "mesh is None; expected a value of type MeshConfig"),
    Case(
        {"data.validation_manifest": 3}, "data.validation_manifest is 3; expected a value of type str | tuple"
    ),
    Case({"data.validation_manifest": ("a", 3)}, "expected a value of type str | tuple"),
    # Mixing.
    Case({"data.weights_temperature": 0.0}, "data.weights_temperature is 0.0; expected 0.1 or more"),
    # Columns of tables.
    Case({"data.columns": ("audio=speech", "sound")}, "data.columns has 'sound'; expected FIELD=COLUMN"),
    # Filters.
    Case(
        {"data.filter.seconds": (2.0, 1.0)},
        "data.filter.seconds is (2, 1); expected",
    ),
    Case({"data.filter.tokens_per_second": (-1.0, 0.0)}, "tokens_per_second is (-1, 0); expected two"),
    # Augmentation.
    Case({"data.augment.speed": (0.1, 1.0)}, "data.augment.speed is (0.1, 1.0); expected speeds from 0.5"),
    Case({"data.augment.shares": ("noise=1.5",)}, "data.augment.shares has noise=1.5; expected 0 to 1"),
    Case({"data.augment.shares": ("hiss=1",)}, "data.augment.shares has 'hiss=1'; expected CHANGE=SHARE"),
    Case({"data.augment.noise_snr": (20.0, 5.0)}, "data.augment.noise_snr is (20.0, 5.0)"),
    Case({"data.augment.low_pass_hz": (4000.0, 8000.0)}, "data.augment.low_pass_hz is (4000.0, 8000.0)"),
    # Validation sets.
    Case({"data.validation_manifest": ("dev/x.json", "test/x.json")}, "2 sets of the name 'x'"),
    Case(
        {"data.validation_manifest": ("a=x", "b=y", "a=z")},
        "data.validation_manifest has 2 sets of the name 'a'",
    ),
    Case(
        {"data.validation_manifest": "held_out:2"},
        "data.validation_manifest is 'held_out:2'; expected a share of the training items above 0",
    ),
    Case({"data.validation_manifest": "held_out:half"}, "'held_out:half'; expected a share"),
    Case({"data.validation_manifest": ("held_out:0.1", "a=held_out:0.1")}, "with held_out twice"),
    Case(
        {"data.manifest": ("own.jsonl",), "data.validation_manifest": "synthetic"},
        "'synthetic', built-in English speech, with data.manifest own.jsonl; expected validation on",
        is_warning=True,
    ),
    Case({"data.validation_manifest": "libri/clean=x.json"}, "has the name 'libri/clean', of x.json"),
    Case(
        {"data.validation_manifest": "/data/lang=de/dev.json"},
        "has the name '/data/lang', of de/dev.json",
    ),
    Case({"data.validation_manifest": ("=x.json",)}, "has the name '', of x.json"),
    Case({"data.validation_manifest": (".a=x",)}, "has the name '.a', of x"),
    Case({"data.validation_manifest": ("a=", "b=y")}, "has a set without a path, 'a'"),
    Case({"data.validation_manifest": ("skipped=x",)}, "skipped.jsonl"),
    # The mesh and the machine.
    Case({"mesh.context": 2}, "1 devices (NVIDIA H100) for a mesh of 2", GPU),
    Case({}, "the other 1 may idle", DeviceFacts("gpu", 2, "NVIDIA H100", "9.0"), True),
    Case({"mesh.data": 2, "data.rows": 3}, "set data.rows to 2 or 4"),
    Case({"mesh.data": 2}, "set data.rows to 2"),
    Case({"mesh.context": 2, "data.capacity": 2050}, "set data.capacity to 2048 or 2052"),
    Case({"mesh.context": 3, "data.audio_capacity": 24000}, "set data.capacity to 2046 or 2052"),
    Case(
        {"mesh.context": 4, "data.capacity": 8, "model.llm.blocks.M.conv": 4, "data.audio_capacity": 0}
        | {"data.prompt": "", "data.max_documents": 8},
        "holds 1 tokens; expected 3",
    ),
    # Multi-token prediction.
    Case({"model.llm.mtp_pattern": "*|E"}, "model.llm.mtp_pattern '*|E' holds |"),
    Case({"model.llm.mtp_pattern": "*-", "model.llm.mtp_depths": 0}, "model.llm.mtp_depths is 0"),
    Case({"model.llm.mtp_pattern": "E", "model.llm.blocks.E.experts_per_token": 9}, "experts_per_token is 9"),
    Case(
        {"model.llm.mtp_pattern": "*-", "train.mtp_loss": 0.0},
        "train.mtp_loss is 0 with model.llm.mtp_pattern '*-'",
    ),
    Case(
        {"mesh.tensor": 3, "model.llm.pattern": "*", "model.llm.mtp_pattern": "*"}
        | {"model.llm.blocks.*.heads": 6, "model.llm.blocks.*.kv_heads": 3}
        | {"model.llm.vocab_size": 261, "data.audio_capacity": 24000},
        "set mesh.tensor to 1 or 2",
    ),
    Case(
        {"compute.num_speculative_tokens": 2},
        'compute.num_speculative_tokens is 2 with model.llm.mtp_pattern ""',
    ),
    Case(
        {**PIPELINE, "model.llm.mtp_pattern": "*", "compute.num_speculative_tokens": 1},
        "expected 0 with mesh.pipeline above 1",
    ),
    Case(
        {"model.llm.pattern": "*-", "model.llm.mtp_pattern": "*", "compute.num_speculative_tokens": 1}
        | {"model.llm.blocks": Blocks({"*": Attention(), "-": OneByOne()})},
        "compute.num_speculative_tokens is 1 with blocks - (MLP) of model.llm.blocks",
    ),
    # What tensor and pipeline ranks share.
    Case(
        {"mesh.tensor": 8, "model.llm.pattern": "*-", "model.llm.vocab_size": 264}
        | {"data.audio_capacity": 24064},
        "set mesh.tensor to 1, 2 or 4, or model.llm.blocks.*.heads to 8",
    ),
    Case(
        {"mesh.tensor": 3, "model.llm.pattern": "E", "model.llm.blocks.E.inner": 126}
        | {"model.llm.vocab_size": 261, "data.audio_capacity": 24000},
        "set mesh.tensor to 1 or 2, or model.llm.blocks.E.shared_inner to 255 or 258",
    ),
    Case(
        {"mesh.tensor": 3, "model.llm.pattern": "*", "model.llm.blocks.*.heads": 6}
        | {"model.llm.vocab_size": 261, "data.audio_capacity": 24000},
        "mesh.tensor is 3 with model.llm.blocks.*.kv_heads 2",
    ),
    Case({"mesh.tensor": 2, "model.llm.vocab_size": 261}, "set model.llm.vocab_size to 262"),
    Case(
        {"model.marks.classes": 9, "model.llm.tied_embedding": True},
        "model.marks.classes is 9 with 1 pipeline and tensor ranks and model.llm.tied_embedding True",
    ),
    Case({"mesh.stages_per_rank": 2}, "mesh.stages_per_rank is 2 with mesh.pipeline 1"),
    Case(
        {**PIPELINE, "model.llm.pattern": "M|-|M"},
        "is divided into 3 stages, mesh.pipeline 2 and mesh.stages_per_rank 1 make 2",
    ),
    Case({**PIPELINE, "model.llm.pattern": "M"}, "1 layers cannot be divided into 2 stages"),
    Case(
        {"mesh.pipeline": 4}, "train.microbatches is 1 on 4 pipeline ranks, which idle 75%", is_warning=True
    ),
    Case(
        {**PIPELINE, "mesh.stages_per_rank": 2, "data.rows": 3, "train.microbatches": 3},
        "set train.microbatches to 2 or 4",
        is_warning=True,
    ),
    Case(
        {"compute.sequence_sharded": True, "mesh.tensor": 2, "data.capacity": 2047},
        "compute.sequence_sharded with 2047 tokens of a microbatch for 2 tensor ranks",
    ),
    Case(
        {"mesh.data": 2, "data.rows": 2, "model.llm.pattern": "E", "model.llm.blocks.E.experts": 7},
        "model.llm.blocks.E has 7 experts for 2 data and context ranks",
        is_warning=True,
    ),
    Case(
        {"mesh.context": 4, "data.capacity": 8, "data.audio_capacity": 0, "model.llm.pattern": "D"}
        | {"data.prompt": "", "data.max_documents": 8},
        "model.llm.blocks.D has a convolution of 4 taps, which looks that far back",
    ),
    Case(
        {"mesh.tensor": 4, "model.llm.pattern": "D", "model.llm.blocks.D.value_heads": 6},
        "mesh.tensor is 4 with model.llm.blocks.D.value_heads 6",
    ),
    Case(
        {"mesh.context": 2, "compute.context_layout": "whole", "model.llm.pattern": "D*"}
        | {"model.llm.blocks.D.conv": 6},
        'model.llm.blocks.D has a convolution of 6 taps with compute.context_layout "whole"',
    ),
    Case(
        {"mesh.context": 2, "compute.context_layout": "whole", "model.llm.blocks.M.conv": 6},
        'model.llm.blocks.M has a convolution of 6 taps with compute.context_layout "whole"',
    ),
    Case(
        {"mesh.context": 2, "compute.context_layout": "whole", "model.llm.pattern": "A"}
        | {"model.llm.blocks": Blocks(A=Recurrent())},
        'model.llm.blocks.A is recurrent with compute.context_layout "whole"',
    ),
    # Buffers.
    Case({"data.round_to": 10}, "set data.capacity to 2040 or 2050, or data.round_to to 2"),
    Case({"data.max_documents": 4096}, "data.max_documents is 4096 for a buffer of 2048", is_warning=True),
    Case({"data.audio_capacity": 2000}, "recordings over 20.0 s do not fit", is_warning=True),
    Case({"data.capacity": 256}, "data.capacity is 256: recordings over 20.48 s", is_warning=True),
    # What is read.
    Case({"data.manifest": ()}, "data.manifest is ()"),
    Case({"data.manifest": ("synthetic", "")}, "data.manifest is ('synthetic', '')"),
    Case({"data.weights": (1.0, 2.0)}, "data.weights has 2 numbers for 1 manifests"),
    Case({"data.manifest": ("a", "b"), "data.weights": (1.0, 0.0)}, "data.weights is (1.0, 0.0)"),
    Case({"data.weights": (math.inf,)}, "data.weights is (inf,)"),
    Case({"data.template": "llama"}, "data.template is 'llama'; expected one of 'plain', 'chatml'"),
    Case({"data.template": "chat_template"}, 'data.template is "chat_template" with data.tokenizer "bytes"'),
    Case({"data.template_options": "[]"}, "data.template_options is '[]'; expected a JSON object such as"),
    Case({"data.template_options": '{"a": 1}'}, 'data.template_options are given with data.template "plain"'),
    Case({"data.audio_placeholder": ""}, "data.audio_placeholder is empty"),
    Case({"data.audio_placeholder": "<audio>"}, "write <audio> once in data.prompt"),
    Case(
        {"data.spec_augment.freq": (1, 80)},
        "data.spec_augment.freq is (1, 80) with 80 bands",
    ),
    Case(
        {"model.encoder": Carried(), "data.spec_augment.freq": (1, 4)},
        "data.spec_augment.freq is (1, 4) with the front end carried",
    ),
    Case(
        {"data.spec_augment.time": (1, 1.0)},
        "data.spec_augment.time is (1, 1); expected the number of masks, and the longest",
    ),
    Case({"data.spec_augment.time": (0, -0.1)}, "time is (0, -0.1); expected the number of masks"),
    Case({"data.spec_augment.freq": (-1, 27)}, "freq is (-1, 27); expected the number of masks"),
    Case({"data.prompt": "Transcribe."}, "holds {audio} 0 times"),
    Case({"data.prompt": "{audio} or {audio}"}, "holds {audio} 2 times"),
    Case({"data.audio_capacity": 0}, "holds {audio} 1 times; expected none"),
    # The model.
    Case({"model.encoder.num_mels": 4}, "set model.encoder.num_mels to 8"),
    Case({"model.encoder.num_mels": 84}, "set model.encoder.num_mels to 80 or 88"),
    Case({"model.encoder.num_mels": 200}, "200 mel bands leave bands [0, 25, 50] without a bin"),
    Case({"model.encoder.dim": 130}, "set model.encoder.dim to 128 or 132"),
    Case(
        {"model.encoder.dim": 135, "model.encoder.heads": 5},
        "set model.encoder.dim to 136",
    ),
    Case({"model.encoder.conv_kernel": 8}, "set model.encoder.conv_kernel to 7 or 9"),
    Case({"model.llm.pattern": ""}, "model.llm.pattern '' is empty"),
    Case({"model.llm.pattern": "|"}, "model.llm.pattern '|' is empty"),
    Case({"model.llm.pattern": "MXM*Y"}, "'MXM*Y' holds X, Y"),
    Case(
        {
            "model.llm.pattern": "M*",
            "model.llm.blocks": Blocks({"M": Mamba2(), "*": Attention(), "=": MLP()}),
        },
        "model.llm.blocks has '='; expected one letter",
    ),
    Case(
        {"model.llm.pattern": "VW"}
        | {"model.llm.blocks": Blocks({"V": Attention(window=2), "W": Attention(window=4)})},
        "attention has windows of [2, 4]; expected one size",
    ),
    Case(
        {"model.llm.pattern": "EF", "model.llm.blocks": Blocks({"E": MoE(), "F": MoE(experts=4)})},
        "model.llm.blocks E, F route tokens; expected one kind of block that does",
    ),
    Case({"model.llm.blocks.*.heads": 5}, "set model.llm.blocks.*.heads to 4 or 6"),
    Case(
        {"model.llm.pattern": "W-", "model.llm.blocks.W.heads": 5}, "set model.llm.blocks.W.heads to 4 or 6"
    ),
    Case({"model.llm.blocks.M.heads": 9}, "set model.llm.blocks.M.heads to 8 or 10"),
    Case(
        {"model.llm.pattern": "D*", "model.llm.blocks.D.value_heads": 5},
        "set model.llm.blocks.D.value_heads to 4 or 6, or model.llm.blocks.D.key_heads to a divisor",
    ),
    Case({"model.llm.blocks.M.dt_limit": (0.1, 0.1)}, "model.llm.blocks.M.dt_limit is (0.1, 0.1)"),
    Case(
        {"model.llm.blocks.*.rope.theta": 1e4, "model.llm.blocks.*.rope.fraction": 0.1},
        "model.llm.blocks.*.rope.fraction is 0.1, which is 3 features of model.llm.blocks.*.head_dim 32; "
        "expected an even",
    ),
    Case(
        {"model.llm.blocks.*.rope.theta": 0.5},
        "model.llm.blocks.*.rope.theta is 0.5 and factor 1.0; expected theta above 1",
    ),
    Case(
        {"model.llm.blocks.*.rope.theta": 1e4, "model.llm.blocks.*.rope.scaling": "yarn"},
        "model.llm.blocks.*.rope.original_positions is 0 with scaling 'yarn'; expected more than 0",
    ),
    Case(
        {
            "model.llm.blocks.*.rope.theta": 1e4,
            "model.llm.blocks.*.rope.scaling": "llama3",
            "model.llm.blocks.*.rope.original_positions": 8,
            "model.llm.blocks.*.rope.low_freq_factor": 4.0,
        },
        "low_freq_factor and high_freq_factor 4.0 and 4.0; expected the first less than the second",
    ),
    Case(
        {"model.llm.blocks.*.rope.scaling": "linear", "model.llm.blocks.*.rope.factor": 2.0},
        "model.llm.blocks.*.rope.scaling is 'linear' with theta 0",
        is_warning=True,
    ),
    Case(
        {"model.llm.pattern": "L-", "model.llm.blocks.*.qk_norm": True, "model.llm.blocks.W.sinks": True},
        "model.llm.blocks has *, W, which no block of model.llm.pattern is; expected settings of the blocks "
        "that it has, -, L",
    ),
    Case(
        {"model.llm.pattern": "-", "model.llm.blocks.*.heads": 5, "model.llm.blocks.M.heads": 9}
        | {"model.llm.blocks.E.experts_per_token": 9, "model.llm.blocks.M.dt_limit": (1.0, 0.0)},
        "model.llm.blocks has *, E, M, which no block",  # and nothing else is said of these
    ),
    Case(
        {"model.llm.pattern": "M"}
        | {"model.llm.blocks.-.form": "clamped_swiglu", "model.llm.blocks.-.limit": 0.0},
        "model.llm.blocks has -, which no block",
    ),
    Case(
        {"model.llm.pattern": "M", "model.llm.blocks.*.gate": True},
        "model.llm.blocks has *, which no block",
    ),
    Case(
        {"model.llm.pattern": "M", "model.llm.blocks.*.bias": True},
        "model.llm.blocks has *, which no block",
    ),
    Case(
        {"model.llm.pattern": "M-"}
        | {"model.llm.blocks.-.form": "clamped_swiglu", "model.llm.blocks.-.limit": 0.0},
        "model.llm.blocks.-.limit is 0 with",
    ),
    Case(
        {"model.llm.pattern": "ME", "model.llm.blocks.E.experts_per_token": 9},
        "at most the 8 of model.llm.blocks.E.experts",
    ),
    Case(
        {"model.llm.pattern": "E"}
        | {"model.llm.blocks.E.shared_inner": 0, "model.llm.blocks.E.shared_gate": True},
        "shared_inner is 0 with model.llm.blocks.E.shared_gate True",
    ),
    Case(
        {"model.llm.pattern": "E", "model.llm.blocks.E.router.groups": 3}, "router.groups is 3 with 8 experts"
    ),
    Case(
        {"model.llm.pattern": "E", "model.llm.blocks.E.router.groups": 8}, "a divisor of 8 up to 4, or to 1"
    ),
    Case(
        {"model.llm.pattern": "E"}
        | {"model.llm.blocks.E.router.groups": 4, "model.llm.blocks.E.experts_per_token": 3},
        "router.groups_per_token is 1; expected 2 to 4",
    ),
    Case(
        {"model.llm.pattern": "L-", "model.llm.blocks.L.qk_rope_head_dim": 7}
        | {"model.llm.blocks.L.rope.theta": 1e4},
        "set model.llm.blocks.L.qk_rope_head_dim to 6 or 8",
    ),
    Case(
        {"mesh.tensor": 2, "model.llm.pattern": "L", "model.llm.blocks.L.heads": 5},
        "model.llm.blocks.L.heads 5",
    ),
    Case(
        {
            "compute.attention_backend": "te",
            "compute.dtype": "bfloat16",
            "model.llm.pattern": "*L",
            "model.llm.blocks.*.head_dim": 20,
        },
        "and they have 20",
        GPU,
    ),
    *(
        Case({f"compute.{field}": "pallas"}, f'compute.{field} is "pallas" on cpu', is_warning=True)
        for field in ("attention_backend", "encoder_attention")
    ),
    Case({"model.llm.vocab_size": 259}, "model.llm.vocab_size is 259; expected 260"),
    Case(
        {"data.tokenizer": "tokenizer.json"},
        "model.llm.vocab_size is 260; expected 131072",
        DeviceFacts("cpu", 1, "cpu", vocabulary=131072),
    ),
    # How it is computed.
    Case({"compute.dtype": "float64"}, "compute.dtype is float64 with jax's 64-bit mode off"),
    Case(
        {"compute.dtype": "float64"},
        "compute.dtype is float64; expected",
        DeviceFacts("cpu", 1, "cpu", x64=True),
        True,
    ),
    Case({"compute.dtype": "bfloat16"}, "compute.dtype is bfloat16 on cpu", is_warning=True),
    Case({"compute.attention_backend": "flash"}, "compute.attention_backend is 'flash'"),
    Case({"compute.scan_backend": "triton"}, "compute.scan_backend is 'triton'"),
    Case({"compute.attention_backend": "te"}, 'compute.attention_backend is "te", but', GPU),
    Case({"compute.attention_backend": "cudnn"}, 'compute.attention_backend is "cudnn", but'),
    Case(
        {
            "compute.scan_backend": "pallas",
            "compute.block_sizes": BlockSizes(scan=48),
            "model.llm.blocks.M.state": 8,
        },
        "chunk 48 is no power of two from 16 up and state 8 is no power of two from 16 up",
        GPU,
    ),
    Case({"compute.scan_backend": "pallas"}, 'compute.scan_backend is "pallas" on cpu', is_warning=True),
    Case(
        {"compute.scan_backend": "pallas"},
        'compute.scan_backend is "pallas" on tpu',
        DeviceFacts("tpu", 1, "TPU"),
    ),
    Case(
        {"compute.scan_backend": "pallas"},
        "on compute capability 7.5 (T4); expected 8.0",
        DeviceFacts("gpu", 1, "T4", "7.5"),
    ),
    # What is trained.
    Case({"train.objective": "stf"}, "train.objective is 'stf'"),
    Case({"train.objective_options": ("beta=1",)}, "train.objective_options has 'beta=1'"),
    Case(
        {"adapt.freeze": ("encoder.*", "decoder.layers.mambo.*")},
        "adapt.freeze 'decoder.layers.mambo.*' matches nothing; expected a pattern of parameter names, such "
        "as decoder.layers.mamba.*",
    ),
    Case(
        {"adapt.freeze": ("decoder.*.q.lora.a",), "adapt.lora_rank": 4},
        "adapt.freeze 'decoder.*.q.lora.a' matches nothing",
    ),
    Case({"adapt.freeze": ("!Head",)}, "adapt.freeze 'Head' matches nothing"),
    Case({"adapt.freeze": ("*",)}, "adapt.freeze matches every parameter"),
    Case(
        {"adapt.lora_rank": 4, "adapt.lora_targets": ("*.q", "*.query")},
        "adapt.lora_targets '*.query' matches nothing",
    ),
    Case(
        {"adapt.lora_rank": 4, "adapt.lora_targets": ("*.mixer.router",), "model.llm.pattern": "E"},
        "'*.mixer.router' matches nothing but routers or routed experts",
    ),
    Case(
        {"adapt.lora_rank": 4, "adapt.lora_targets": ("decoder.*.moe.mixer.up",), "model.llm.pattern": "E*"},
        "mixer.up' matches nothing but routers or routed experts",
    ),
    Case({"compute.fp8": ("*.query",)}, "compute.fp8 '*.query' matches no projection"),
    Case({"compute.fp8": ("*.mixer.router",), "model.llm.pattern": "E"}, "'*.mixer.router' matches no proj"),
    Case(
        {"compute.fp8": ("*.mixer.k",), "mesh.tensor": 2}
        | {"model.llm.blocks.*.head_dim": 8, "model.llm.blocks.*.kv_heads": 2},
        "(decoder.layers.attention.mixer.k 128 x 8 on a rank)",
    ),
    Case(
        {"compute.fp8": ("*.q",)}, "compute.fp8 on NVIDIA A100 (compute capability 8.0); expected 8.9", AMPERE
    ),
    Case({"adapt.lora_rank": -1}, "adapt.lora_rank is -1; expected 0 or more"),
    Case({"adapt.lora_rank": 4, "adapt.lora_targets": ()}, "adapt.lora_targets is empty"),
    Case({"adapt.lora_rank": 4, "adapt.lora_alpha": 0.0}, "adapt.lora_alpha is 0"),
    Case(
        TEXT | {"adapt.lora_documents": "audio"},
        'adapt.lora_documents is "audio" with a model without an encoder',
    ),
    Case(
        {"adapt.lora_rank": 4, "adapt.lora_targets": ("decoder.*",), "adapt.lora_documents": "audio"}
        | {"model.llm.pattern": "L"},
        "adapt.lora_documents is 'audio' with LoRA on decoder.layers.latent_attention.mixer.kv",
    ),
    Case({"adapt.lr_factors": ("encoder=-0.1",)}, "adapt.lr_factors has encoder=-0.1"),
    Case({"adapt.lr_factors": ("head=2",)}, "adapt.lr_factors has 'head=2'; expected PART=FACTOR"),
    # Without an encoder.
    Case(TEXT | {"data.manifest": ("a.jsonl", "synthetic")}, 'data.manifest has "synthetic"'),
    Case(TEXT | {"data.validation_manifest": "synthetic"}, 'data.validation_manifest has "synthetic"'),
    Case(
        TEXT | {"data.validation_manifest": ("a=a", "b=synthetic")},
        'data.validation_manifest has "synthetic"',
    ),
    Case(TEXT | {"data.filter.seconds": (0.0, 20.0)}, "filter.seconds is (0.0, 20.0) with model.encoder"),
    Case(TEXT | {"data.augment.shares": ("low_pass=0.5",)}, "data.augment.shares is ('low_pass=0.5',) with"),
    Case(TEXT | {"data.spec_augment.freq": (2, 27)}, "set data.spec_augment.freq to (0, 27)"),
    Case(TEXT | {"data.spec_augment.time": (1, 0.05)}, "set data.spec_augment.time to (0, 0.05)"),
    Case(TEXT | {"model.adapter_dim": 64}, "set model.adapter_dim to 0"),
    Case(TEXT | {"adapt.lr_factors": ("encoder=0.5",)}, "leave out encoder of adapt.lr_factors"),
    Case(TEXT | {"adapt.freeze": ("encoder.*",)}, "adapt.freeze 'encoder.*' matches nothing"),
    Case(
        {"compute.fp8": ("experts",)},
        'compute.fp8 has "experts" with a model without experts; expected layers with experts',
    ),
    Case(
        {"compute.fp8": ("experts",), "model.llm.pattern": "E"},
        "compute.fp8 on NVIDIA A100 (compute capability 8.0); expected 8.9",
        AMPERE,
    ),
    Case(TEXT | {"compute.fp8": ("encoder.*",)}, "compute.fp8 'encoder.*' matches no projection"),
    Case(TEXT | {"data.audio_placeholder": ""}, "data.audio_placeholder is empty"),
    Case(TEXT | {"train.ctc_loss": 0.1}, "train.ctc_loss is 0.1 with model.encoder None"),
    # The optimization.
    Case(
        {"train.ctc_loss": 0.1, "data.audio_capacity": 0, "data.prompt": ""},
        "train.ctc_loss is 0.1 with data.audio_capacity 0",
    ),
    Case({"adapt.lora_dropout": 0.1}, "adapt.lora_dropout is 0.1 with adapt.lora_rank 0"),
    Case(
        {"adapt.lora_rank": 2, "adapt.lora_dropout": 1.0},
        "adapt.lora_dropout is 1.0; expected 0 or more, and less",
    ),
    Case(
        {"adapt.lora_rank": 2, "adapt.lora_dropout": 0.1, "train.objective": "grpo"},
        "adapt.lora_dropout is 0.1 with train.objective 'grpo'",
    ),
    Case({"adapt.dora": True}, "adapt.dora is set with adapt.lora_rank 0"),
    Case({"train.ema_decay": 1.0}, "train.ema_decay is 1.0; expected 0 or more, and less than 1"),
    Case({"train.validate_ema": True}, "train.validate_ema is set with train.ema_decay 0"),
    Case({"train.optimizer": "sgd"}, "train.optimizer is 'sgd'"),
    Case({"train.optimizer_options": ("beta=0.9",)}, "train.optimizer_options has 'beta=0.9'"),
    Case(
        {"train.optimizer_options": ("first_moment=float16",)},
        "train.optimizer_options has first_moment=float16",
    ),
    Case(
        {"train.optimizer": "muon", "train.optimizer_options": ("beta=1",)},
        "train.optimizer_options has beta=1",
    ),
    Case(
        {"train.schedule": "warmup_stable_decay", "train.decay_steps": 181},
        "train.decay_steps is 181 in a run of 200 steps",
        is_warning=True,
    ),
    Case({"train.warmup_steps": 201}, "train.warmup_steps is 201 in a run of 200 steps", is_warning=True),
    Case(
        {"train.min_learning_rate": 0.1},
        "train.min_learning_rate 0.1 is above train.learning_rate 0.001",
        is_warning=True,
    ),
    Case({"data.rows": 6, "train.microbatches": 4}, "set train.microbatches to 2, or data.rows to 4 or 8"),
    Case(
        {"mesh.data": 2, "data.rows": 6, "train.microbatches": 2},
        "train.microbatches is 2 for 3 rows on each data rank",
    ),
    Case({"train.optimizer_options": ("beta2=1.0",)}, "train.optimizer_options has beta2=1"),
    Case({"train.clip_norm": 0.0}, "train.clip_norm is 0"),
    # Objectives that compare answers.
    Case(
        {"train.objective": "dpo", "model.llm.mtp_pattern": "*"},
        "train.objective is 'dpo' with model.llm.mtp_pattern '*'",
    ),
    Case(
        {"train.objective": "dpo", "train.ctc_loss": 0.1}, "train.objective is 'dpo' with train.ctc_loss 0.1"
    ),
    Case(
        {"train.objective": "dpo", "posttraining.reference": "cached", "posttraining.reference_every": 5},
        'posttraining.reference is "cached" with posttraining.reference_every 5',
    ),
    Case(
        {
            "train.objective": "kto",
            "train.objective_options": ("kl=mismatched",),
            "posttraining.reference": "cached",
        },
        'posttraining.reference is "cached" with train.objective_options kl=mismatched',
    ),
    Case(
        {"train.objective": "grpo", "posttraining.reference": "cached"},
        "posttraining.reference is \"cached\" with train.objective 'grpo'",
    ),
    # Answers that are drawn.
    Case(
        {"train.objective": "grpo", "data.max_documents": 8},
        "data.max_documents is 8 with rollout.group_size 8",
    ),
    Case(
        {"train.objective": "grpo", "rollout.answers_at_once": 7},
        "rollout.answers_at_once is 7, 7 for each of 1 data ranks, with rollout.group_size 8",
    ),
    Case(
        {
            "train.objective": "grpo",
            "mesh.context": 2,
            "compute.context_layout": "whole",
            "rollout.max_new_tokens": 200,
        },
        "rollout.group_size 8 answers of rollout.max_new_tokens 200 take 1600",
        is_warning=True,
    ),
    Case({"train.objective": "grpo", "rollout.updates": 17}, "rollout.updates is 17 with rollout.prompts 16"),
    Case({"train.objective": "kto", "rollout.temperature": 0.0}, "rollout.temperature is 0"),
    Case(
        {"train.objective": "grpo", "rollout.mesh": MeshConfig(data=2)},
        "rollout.mesh (2, 1, 1, 1) is for 2 devices, mesh (1, 1, 1, 1) for 1",
    ),
    Case(
        {"train.objective": "grpo", "mesh.data": 2, "data.rows": 2, "rollout.mesh": MeshConfig(tensor=2)}
        | {"model.llm.vocab_size": 263},
        "for rollouts on (1, 1, 1, 2), model.llm.vocab_size is 263 with 2 pipeline and tensor ranks",
    ),
    Case({"rollout.top_p": 1.5}, "rollout.top_p is 1.5"),
    Case({"rollout.reward_seconds": 0.0}, "rollout.reward_seconds is 0"),
    Case(
        {"train.best_by": "reward", "train.objective": "grpo"},
        "train.best_by is 'reward' with train.objective 'grpo' and rollout.validation_prompts 0",
    ),
    Case({"train.best_by": "preferences"}, "train.best_by is 'preferences' with train.objective 'sft'"),
    Case(
        {"rollout.validation_prompts": 8, "data.validation_manifest": ""},
        "rollout.validation_prompts is 8 without a validation set",
    ),
    Case(
        {"train.objective": "grpo", "train.objective_options": ("old=current",), "rollout.epochs": 2},
        "old=current with rollout.epochs x rollout.updates = 2",
    ),
    Case(
        {"train.objective": "dpo", "rollout.epochs": 2},
        "rollout.epochs x rollout.updates is 2 with train.objective 'dpo'",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fragment[:60])
def test_each_mistake_gives_its_one_finding_whose_advice_removes_it(case: Case) -> None:
    """Every "set PATH to NUMBER (or NUMBER)" in the message is tried, one at a time."""
    config = with_changes(case.changes)
    (finding,) = findings(config, case.device)
    assert case.fragment in str(finding)
    assert finding.is_warning == case.is_warning
    if case.is_warning:
        assert validate(config, case.device) == [str(finding)]
    else:
        with pytest.raises(ConfigError, match=re.escape(case.fragment)):
            validate(config, case.device)
    for path, *values in re.findall(r"(\w+\.[\w.]+) to ([\d.]+)(?: or ([\d.]+))?", finding.change):
        for text in filter(None, values):
            value = float(text) if "." in text else int(text)
            after = with_changes(case.changes | {path: value})
            assert finding.found not in {p.found for p in findings(after, case.device)}


def test_every_finding_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place in the code of a rule that yields a finding."""
    places = set()
    for rule in RULES:
        lines, start = inspect.getsourcelines(rule)
        tree = ast.parse("".join(lines))
        yields = (node for node in ast.walk(tree) if isinstance(node, ast.Yield | ast.YieldFrom))
        places |= {(rule.__name__, start + node.lineno - 1) for node in yields}
    cases = [(with_changes(case.changes), case.device) for case in CASES]
    cases.append((with_changes({"compute.attention_backend": "te"}), BLACKWELL))
    cases.append((with_changes({"compute.fp8": ("experts",), "compute.dtype": "float64"}), CPU))
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    for config, device in cases:
        for rule in RULES if not faulty_values(config) else ():
            speaking: Any = rule(config, device)
            for _ in speaking:
                places.discard((rule.__name__, speaking.gi_frame.f_lineno))
    assert not places


def test_all_errors_are_listed_at_once_and_numbered() -> None:
    changes = {"data.rows": 3, "mesh.data": 2, "data.prompt": "", "data.round_to": 3}
    changes |= {"model.llm.blocks.*.heads": 5}
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(changes), CPU)
    first, *lines = str(caught.value).splitlines()
    assert "4 to correct" in first
    assert [line.split()[0] for line in lines] == ["1.", "2.", "3.", "4."]
    for field, line in zip(
        ("data.rows", "data.round_to", "data.prompt", "blocks.*.heads"), lines, strict=True
    ):
        assert field in line
        assert "; expected " in line
    with pytest.raises(ConfigError, match="2 to correct; then what settings mean together is checked"):
        validate(with_changes(changes | {"data.rows": 0, "train.steps": 0}), CPU)


ALL_BLOCKS = {"model.llm.pattern": "".join(usual_blocks())}


def test_numbers_beyond_32_bits_are_refused_for_every_setting() -> None:
    """Seeds have 32 bits, and no sign."""
    hints = {path: getattr(hint, "__origin__", hint) for path, hint, _ in leaves(with_changes(ALL_BLOCKS))}
    numbers = {path: hint for path, hint in hints.items() if hint in (int, float)}
    assert len(numbers) > 100
    for path, hint in numbers.items():
        for value in (10**19, -(10**19)) if hint is int else (1e39, -1e39):
            (finding,) = faulty_values(with_changes({path: value}))
            assert str(finding).startswith(f"{path} is {value}; expected ")
    for path in ("data.seed", "train.seed"):
        assert faulty_values(with_changes({path: 2**32 - 1})) == []
        assert "4294967295 at most" in str(faulty_values(with_changes({path: 2**32}))[0])
    assert "2147483647 at most" in str(faulty_values(with_changes({"train.steps": 2**31}))[0])


def test_a_faulty_value_silences_the_rules() -> None:
    (finding,) = findings(with_changes({"mesh.context": 0, "data.capacity": 2050}), CPU)
    assert "mesh.context is 0" in str(finding)
    (finding,) = findings(with_changes({"model.llm.blocks.M.groups": 0, "model.llm.blocks.*.heads": 5}), CPU)
    assert "blocks.M.groups is 0" in str(finding)


def test_blocks_follow_a_pattern_that_replaces_another() -> None:
    """The command line may give another pattern than the config file: blocks go and come. A letter of a kind
    that another letter has takes its settings."""
    attention, mamba = Attention(heads=8, head_dim=16), Mamba2(heads=4)
    given = LLMConfig(pattern="M*", blocks={"M": mamba, "*": attention})
    assert replace(given, pattern="M").blocks == {"M": mamba}
    assert replace(given, pattern="MWE").blocks == {
        "M": mamba,
        "W": replace(attention, window=128),
        "E": MoE(),
    }
    assert findings(Config(model=ModelConfig(llm=replace(given, pattern="M"))), CPU) == []
    unused = LLMConfig(pattern="M", blocks={"M": mamba, "E": MoE()})
    (found,) = findings(Config(model=ModelConfig(llm=unused)), CPU)
    assert "model.llm.blocks has E" in str(found)


def test_transformer_engine_is_refused_where_it_is_known_to_be_wrong() -> None:
    """An error on sm_120, a warning on an unknown GPU, nothing on others: the table of known bad kernels."""

    def about_gradients(device: DeviceFacts, **data: Any) -> list[bool]:
        changes = {"compute.attention_backend": "te", **{f"data.{k}": v for k, v in data.items()}}
        return [p.is_warning for p in findings(with_changes(changes), device) if "gradients" in str(p)]

    assert about_gradients(BLACKWELL) == [False]
    assert about_gradients(BLACKWELL, packing="padded") == [False]
    assert about_gradients(UNKNOWN) == [True]
    assert about_gradients(GPU) == about_gradients(CPU) == []
    found = findings(with_changes({"compute.attention_backend": "te"}), CPU)
    assert any("it runs on NVIDIA GPUs, and this is cpu" in str(p) for p in found)
    assert validate(Config(), BLACKWELL) == []


@pytest.mark.parametrize(
    "changes",
    [
        {
            "mesh.context": 4,
            "data.capacity": 24,
            "data.audio_capacity": 32,
            "model.encoder.chunk_seconds": 0.02,
        }
        | {"data.max_documents": 24},  # a context chunk of 3 tokens for 4 taps; 8 mel frames a rank
        {"data.capacity": 376, "data.round_to": 376, "data.audio_capacity": 3008},  # one chunk of 30 s
        {"model.llm.pattern": "ME", "model.llm.blocks.E.experts_per_token": 8, "model.llm.vocab_size": 260}
        | {"model.llm.blocks.E.shared_inner": 0},
        {"model.llm.pattern": "LE", "model.llm.blocks.E.shared_inner": 0}
        | {"model.llm.blocks.E.router.groups": 4, "model.llm.blocks.E.router.groups_per_token": 1},
        {"model.llm.pattern": "M", "model.llm.mtp_pattern": "W", "model.llm.blocks.W.qk_norm": True},
        {"model.encoder.num_mels": 8, "model.encoder.conv_kernel": 1, "model.encoder.heads": 64},
        {"train.steps": 20, "train.min_learning_rate": 1e-3, "train.validate_every": 0},
        {"data.audio_capacity": 0, "data.prompt": ""},
        {"data.audio_placeholder": "<a>", "data.prompt": "<a>", "data.spec_augment.freq": (0, 80)},
        {"data.rows": 8, "mesh.data": 2, "train.microbatches": 4},
        {**PIPELINE, "mesh.tensor": 4, "data.audio_capacity": 24064, "model.llm.vocab_size": 264}
        | {"compute.sequence_sharded": True},  # a key and value head, and a group, for two ranks each
        {
            **PIPELINE,
            "mesh.stages_per_rank": 2,
            "model.llm.pattern": "M|*-|-|ME",
        },  # unlike stages
        {**PIPELINE, "mesh.context": 2, "model.llm.pattern": "M*-M*-"},  # equal ones
        {"mesh.context": 2, "compute.context_layout": "whole", "model.llm.blocks.M.conv": 6}
        | {"compute.context_splits": 0},  # no document is split
        {"data.capacity": 2047},  # one context rank holds any number of tokens
        {"data.packing": "padded", "data.max_documents": 4096},  # the bound is not used
        TEXT,
        # What is said of audio does not matter without an encoder, nor does its fraction of the ranks.
        TEXT | {"mesh.context": 8, "data.audio_capacity": 7, "data.prompt": "", "data.capacity": 64},
        TEXT | {"adapt.freeze": ("decoder.*",)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_limits_themselves_are_allowed(changes: dict[str, Any]) -> None:
    assert findings(with_changes(changes), CPU) == []


@pytest.mark.parametrize("context", [1, 2, 4])
def test_padded_rows_work_with_any_context(context: int) -> None:
    config = Config(
        mesh=MeshConfig(context=context),
        data=DataConfig(packing="padded", rows=4, capacity=384, audio_capacity=3008),
    )
    assert validate(config, CPU) == []


def test_simulated_cpu_devices_are_never_too_few() -> None:
    config = Config(mesh=MeshConfig(data=4), data=DataConfig(rows=4))
    assert validate(config, DeviceFacts("cpu", 1, "cpu")) == []


def test_the_facts_of_this_machine() -> None:
    assert DeviceFacts.of_this_machine(300) == DeviceFacts("cpu", 8, "cpu", None, False, 300)


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.27])
def test_the_validator_warns_of_exactly_the_audio_capacities_without_room_for_a_chunk(
    context: int, seconds: float
) -> None:
    """Whatever the mesh: a document of one longest chunk is packed, or there was a warning."""
    encoder = EncoderConfig(num_mels=8, chunk_seconds=seconds)
    n = encoder.units(encoder.longest)
    piece, flags = AudioPiece(np.zeros((encoder.longest, 8), np.float32), 0, n), np.ones(n, bool)
    document = Document("a", np.zeros(n, np.int32), flags, ~flags, (piece,))
    for frames in range(8, 3 * 144 + 16, 8):
        data = DataConfig(capacity=96, audio_capacity=frames, max_documents=3)
        config = Config(mesh=MeshConfig(context=context), data=data, model=ModelConfig(encoder=encoder))
        is_packed = not pack_documents(config).limits.fit(document).reject_reason
        found = findings(config, CPU)
        assert all(finding.is_warning for finding in found)
        assert any("audio_capacity" in finding.found for finding in found) == (not is_packed), frames


def test_validation_sets_have_names_of_their_own():
    """As the command line and configs give them: a path, none, several, a path that holds a =."""

    def sets(given: str | tuple[str, ...]) -> list[tuple[str, str, bool]]:
        found = with_changes({"data.validation_manifest": given})
        assert not findings(found, CPU)
        return [(each.name, each.path, each.is_named) for each in found.data.validation_sets]

    assert sets("synthetic") == [("synthetic", "synthetic", False)]
    assert sets(("dev/clean.v2.jsonl",)) == [("clean.v2", "dev/clean.v2.jsonl", False)]
    assert sets("shards/dev_{0..3}.json") == [("dev_-0..3", "shards/dev_{0..3}.json", False)]
    assert sets("dev.json::a_{0..3}.tar") == [("dev", "dev.json", False)]
    assert sets("...") == [("validation", "...", False)]
    assert sets("") == sets(()) == sets(("",)) == []
    assert sets("dev=x/lang=de/y.jsonl") == [("dev", "x/lang=de/y.jsonl", True)]
    assert sets(("a=x", "y.jsonl", "Größe-1=z")) == [
        ("a", "x", True),
        ("y", "y.jsonl", True),
        ("Größe-1", "z", True),
    ]
