"""NeMo's AudioPerceptionModule: a FastConformer, a connector, a projection.

IdentityConnector passes the encoder's outputs on, MultiLayerProjectionConnector those of several blocks side
by side, QformerConnector makes the same number of tokens for every chunk.

Source: NeMo 3.0, collections/speechlm2/modules/perception.py and parts/encoder_chunking.py,
collections/asr/modules/conformer_encoder.py (ConformerMultiLayerFeatureExtractor).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, tensors
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.nemo_encoder import encoder_config, encoder_fields, encoder_tensors
from jaxthd.hf.parakeet import own_encoder
from jaxthd.hf.reader import Reader
from jaxthd.models.front_ends import FastConformer, QFormer
from jaxthd.models.front_ends.log_mel import filters, window

_MODULE = "nemo.collections.speechlm2.modules.perception"
IDENTITY, MULTI_LAYER, QFORMER = "IdentityConnector", "MultiLayerProjectionConnector", "QformerConnector"
CONNECTORS = (IDENTITY, MULTI_LAYER, QFORMER)
PREPROCESSOR: dict[str, Any] = {
    "sample_rate": 16000,
    "normalize": "per_feature",
    "window_size": 0.025,
    "window_stride": 0.01,
    "window": "hann",
    "n_fft": 512,
    "log": True,
    "frame_splicing": 1,
}
"""The features' settings as NeMo writes them."""
_FEATURES: dict[str, Any] = {
    **PREPROCESSOR,
    "preemph": 0.97,
    "lowfreq": 0,
    "log_zero_guard_type": "add",
    "log_zero_guard_value": 2**-24,
    "exact_pad": False,
    "pad_value": 0,
    "mag_power": 2.0,
    "mel_norm": "slaney",
}
_DEFAULTS = {"window_size": 0.02}
"""NeMo's, where it is not what jaxthd computes."""
_PAD_TO = 16
"""NeMo's default of pad_to."""
_PARTS = ("_target_", "target", "preprocessor", "encoder", "modality_adapter", "output_dim", "spec_augment")
_FILTERS = "perception.preprocessor.featurizer."
_QFORMER_FFN = 3072
"""Inner dim of the Q-Former, which no field holds: transformers' default of a BERT."""


def connector_of(perception: Fields) -> str:
    """The connector's class. Raises UserError for one that jaxthd does not have."""
    adapter = perception.get("modality_adapter") or {}
    name = str(adapter.get("_target_")).rpartition(".")[2]
    if name not in CONNECTORS:
        raise UserError(
            f"config.json has perception.modality_adapter {adapter.get('_target_')!r}; expected "
            f"{IDENTITY}, {MULTI_LAYER} or {QFORMER} of {_MODULE}: choose another checkpoint"
        )
    if name == IDENTITY and ("output_dim" in adapter or "d_model" not in adapter):
        raise UserError(
            "config.json has a perception.modality_adapter without d_model, or with output_dim, for which "
            "NeMo makes no projection; expected one: choose another checkpoint"
        )
    return name


def reading(perception: Fields, encoder: FastConformer) -> FastConformer:
    """The encoder whose blocks the connector reads. Raises UserError for blocks that it does not have."""
    if connector_of(perception) == IDENTITY:
        return encoder
    adapter = perception["modality_adapter"]
    blocks = required(adapter, "target_layer_ids", "perception.modality_adapter")
    return encoder.reading(blocks, and_last=adapter.get("include_final_output", True))


def read_perception(fields: Fields, model: ModelConfig, *, bfloat16_filters: bool) -> ModelConfig:
    """The model with the encoder, the connector and the projection of a checkpoint.

    fields: its config.json. bfloat16_filters: of are_rounded. Raises UserError for settings that jaxthd has
    no model for.
    """
    perception = required(fields, "perception")
    if unknown := sorted(name for name, x in perception.items() if x is not None and name not in _PARTS):
        raise UserError(
            f"config.json has perception.{', perception.'.join(unknown)}; expected only {', '.join(_PARTS)}, "
            "because jaxthd does not compute with others: choose another checkpoint"
        )
    preprocessor = _DEFAULTS | dict(perception.get("preprocessor") or {})
    must_be(preprocessor, _FEATURES, "perception.preprocessor")
    base = front_end_of(perception, preprocessor)
    encoder = reading(perception, encoder_config(perception, replace(model, encoder=base), "perception"))
    chunk = fields.get("encoder_chunk_size_seconds")
    if chunk is not None and chunk <= 0:
        raise UserError(
            f"config.json has encoder_chunk_size_seconds {chunk}; expected more than 0, or null: correct it"
        )
    encoder = replace(encoder, chunk_seconds=float(chunk or 0), bfloat16_filters=bfloat16_filters)
    return replace(model, encoder=encoder, adapter_dim=0, adapter_bias=True)


def front_end_of(perception: Fields, preprocessor: Fields) -> FastConformer:
    """The front end that the connector asks for, without the encoder's own settings. Raises UserError."""
    if connector_of(perception) != QFORMER:
        return FastConformer()
    adapter, where = perception["modality_adapter"], "perception.modality_adapter"
    pad_to = preprocessor.get("pad_to", _PAD_TO)
    if not isinstance(pad_to, int):
        raise UserError(
            f"config.json has perception.preprocessor.pad_to {pad_to!r}; expected a number with a {QFORMER}, "
            "which reads what is padded: choose another checkpoint"
        )
    heads = required(required(adapter, "encoder_config", where), "encoder_attention_heads", where)
    settings = {
        "queries": required(adapter, "prompt_size", where),
        "query_layers": required(adapter, "qformer_num_hidden_layers", where),
        "query_heads": heads,
        "query_ffn_dim": _QFORMER_FFN,
        "pad_to": pad_to,
    }
    return replace(QFormer(), **settings)


def are_rounded(reader: Reader, bands: int) -> bool:
    """Whether the features' window and filters, which checkpoints store, are rounded to bfloat16.

    Raises UserError where they are others than jaxthd's.
    """
    found = []
    for name, ours in (("window", window), ("fb", lambda rounded: filters(bands, rounded).toarray())):
        if _FILTERS + name not in reader.shapes:
            continue
        theirs = np.squeeze(np.asarray(reader.read(_FILTERS + name), np.float64))
        alike = [x for x in (False, True) if _are_alike(theirs, ours(x))]
        if not alike:
            raise UserError(
                f"{_FILTERS}{name} in {reader.path} is not that of jaxthd's features, nor that in bfloat16; "
                f"expected those of {PREPROCESSOR}: choose another checkpoint"
            )
        found.append(alike[0])
    if len({*found}) > 1:
        raise UserError(
            f"one of {_FILTERS}window and fb in {reader.path} is rounded to bfloat16, the other is not; "
            "expected both or neither: choose another checkpoint"
        )
    return any(found)


def _are_alike(theirs: np.ndarray, ours: np.ndarray) -> bool:
    return theirs.shape == ours.shape and bool(np.allclose(theirs, ours, rtol=0, atol=1e-6 * ours.max()))


def perception_fields(model: ModelConfig) -> dict[str, Any]:
    """NeMo's settings of the model's encoder and adapter. Raises UserError for ones that they cannot
    describe."""
    encoder = own_encoder(model)
    if model.adapter_dim or not model.adapter_bias:
        raise UserError(
            f"model.adapter_dim is {model.adapter_dim} and model.adapter_bias {model.adapter_bias}; the salm "
            "format holds an adapter of one linear layer with a bias (0, True): choose --format parts"
        )
    pad_to = encoder.pad_to if isinstance(encoder, QFormer) else 0
    return {
        "target": f"{_MODULE}.AudioPerceptionModule",
        "output_dim": model.llm.dim,
        "modality_adapter": _adapter_fields(encoder, model.llm.dim),
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            **PREPROCESSOR,
            "features": encoder.num_mels,
            "dither": 1e-5,
            "pad_to": pad_to,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_out": -1,
            **encoder_fields(model),
        },
    }


def _adapter_fields(encoder: FastConformer, dim: int) -> dict[str, Any]:
    *blocks, last = encoder.output_layers or (encoder.layers - 1,)
    of_blocks = {"target_layer_ids": blocks or [last], "include_final_output": bool(blocks)}
    if isinstance(encoder, QFormer):
        if encoder.query_ffn_dim != _QFORMER_FFN:
            raise UserError(
                f"model.encoder.query_ffn_dim is {encoder.query_ffn_dim}; expected {_QFORMER_FFN}, which "
                f"NeMo's {QFORMER} has: the model cannot be exported to it"
            )
        return {
            "_target_": f"{_MODULE}.{QFORMER}",
            "prompt_size": encoder.queries,
            **of_blocks,
            "qformer_num_hidden_layers": encoder.query_layers,
            "encoder_config": {"d_model": encoder.dim, "encoder_attention_heads": encoder.query_heads},
            "llm_config": {"hidden_size": dim},
        }
    if encoder.output_layers:
        sizes = {"input_dim": encoder.dim, "output_dim": dim}
        return {"_target_": f"{_MODULE}.{MULTI_LAYER}", **of_blocks, **sizes}
    return {"_target_": f"{_MODULE}.{IDENTITY}", "d_model": encoder.dim}


def perception_tensors(
    model: ModelConfig, perception: Fields, shapes: Mapping[str, Shape]
) -> Iterator[Tensor]:
    """The tensors of encoder and adapter."""
    kind, encoder = connector_of(perception), own_encoder(model)
    yield from encoder_tensors(model, shapes, encoder_prefix(kind))
    if kind == IDENTITY:
        yield from tensors({"proj": "out"}, shapes, "perception.", "adapter.")
        return
    below, projection = "perception.modality_adapter.", {"proj": "out"}
    if isinstance(encoder, QFormer):
        yield from tensors(encoder.query_tensors(), shapes, below, "encoder.")
        projection = {"proj.1": "out"}
    yield from tensors(projection, shapes, below, "adapter.")


def encoder_prefix(kind: str) -> str:
    """The beginning of the names of the encoder's tensors behind this connector."""
    return "perception.encoder." if kind == IDENTITY else "perception.encoder_multilayer.encoder."


def unread_perception(perception: Fields) -> tuple[str, ...]:
    """Patterns of tensors that may be left unread: the filters, which follow from the settings, and blocks
    behind the last one that the connector reads."""
    layers = int(required(required(perception, "encoder"), "n_layers", "perception.encoder"))
    behind = range(reading(perception, FastConformer(layers=layers)).layers, layers)
    prefix = encoder_prefix(connector_of(perception))
    return (
        "perception.preprocessor.*",
        f"{prefix}pos_enc.*",
        *(f"{prefix}layers.{number}.*" for number in behind),
    )
