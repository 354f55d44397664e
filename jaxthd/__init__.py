"""jaxthd trains speech language models in JAX, on packed sequences, over a mesh of devices.

The public names, for use from Python; docs/api.md shows them at work. Each is imported when it is first used:
`import jaxthd` alone does not import jax.
"""

import ast as _ast
import importlib as _importlib
import pathlib as _pathlib
import typing as _typing

# The one list of public names: type checkers follow it, and _homes reads it.
if _typing.TYPE_CHECKING:
    from jaxthd.checkpoints.checkpoint import Checkpoints as Checkpoints
    from jaxthd.checkpoints.sources import load_config as load_config
    from jaxthd.checkpoints.weights import Weights as Weights
    from jaxthd.checkpoints.weights import load_model as load_model
    from jaxthd.checkpoints.weights import load_weights as load_weights
    from jaxthd.config import AdaptConfig as AdaptConfig
    from jaxthd.config import AugmentConfig as AugmentConfig
    from jaxthd.config import BlockSizes as BlockSizes
    from jaxthd.config import ComputeConfig as ComputeConfig
    from jaxthd.config import Config as Config
    from jaxthd.config import DataConfig as DataConfig
    from jaxthd.config import EncoderConfig as EncoderConfig
    from jaxthd.config import FilterConfig as FilterConfig
    from jaxthd.config import LLMConfig as LLMConfig
    from jaxthd.config import MarksConfig as MarksConfig
    from jaxthd.config import MeshConfig as MeshConfig
    from jaxthd.config import ModelConfig as ModelConfig
    from jaxthd.config import PostTrainingConfig as PostTrainingConfig
    from jaxthd.config import RolloutConfig as RolloutConfig
    from jaxthd.config import RopeConfig as RopeConfig
    from jaxthd.config import SpecAugmentConfig as SpecAugmentConfig
    from jaxthd.config import TrainConfig as TrainConfig
    from jaxthd.config.block import Block as Block
    from jaxthd.config.block import PassedSizes as PassedSizes
    from jaxthd.config.block import register_block as register_block
    from jaxthd.config.front_end import FrontEnd as FrontEnd
    from jaxthd.config.front_end import Piece as Piece
    from jaxthd.config.front_end import register_front_end as register_front_end
    from jaxthd.data.example import Clip as Clip
    from jaxthd.data.example import Example as Example
    from jaxthd.data.example import Samples as Samples
    from jaxthd.data.example import Turn as Turn
    from jaxthd.data.example import utterance as utterance
    from jaxthd.data.loader import Loader as Loader
    from jaxthd.data.loader import make_loader as make_loader
    from jaxthd.data.packer import PackDocuments as PackDocuments
    from jaxthd.data.packer import PackedRow as PackedRow
    from jaxthd.data.packer import pack_documents as pack_documents
    from jaxthd.data.shards import data_shard as data_shard
    from jaxthd.data.skipped import Skipped as Skipped
    from jaxthd.data.sources.registry import SOURCES as SOURCES
    from jaxthd.data.sources.registry import register_source as register_source
    from jaxthd.data.sources.source import Source as Source
    from jaxthd.data.speech import SpeechDocuments as SpeechDocuments
    from jaxthd.data.text.tokenizer import load_tokenizer as load_tokenizer
    from jaxthd.errors import UserError as UserError
    from jaxthd.inference.generator import Generator as Generator
    from jaxthd.inference.model import Model as Model
    from jaxthd.inference.model import load as load
    from jaxthd.inference.scorer import Scorer as Scorer
    from jaxthd.models.blocks import MLP as MLP
    from jaxthd.models.blocks import Attention as Attention
    from jaxthd.models.blocks import GatedDelta as GatedDelta
    from jaxthd.models.blocks import KimiDelta as KimiDelta
    from jaxthd.models.blocks import LatentAttention as LatentAttention
    from jaxthd.models.blocks import Mamba2 as Mamba2
    from jaxthd.models.blocks import MoE as MoE
    from jaxthd.models.blocks import Parallel as Parallel
    from jaxthd.models.blocks import Router as Router
    from jaxthd.models.blocks import ShortConv as ShortConv
    from jaxthd.models.front_ends import FastConformer as FastConformer
    from jaxthd.models.front_ends import GraniteConformer as GraniteConformer
    from jaxthd.models.front_ends import QFormer as QFormer
    from jaxthd.models.front_ends import Qwen3Audio as Qwen3Audio
    from jaxthd.models.front_ends import Stacked as Stacked
    from jaxthd.models.front_ends import Transcribe as Transcribe
    from jaxthd.models.front_ends import Whisper as Whisper
    from jaxthd.models.front_ends.transcribe.settings import Diarizer as Diarizer
    from jaxthd.models.front_ends.transcribe.settings import SpeakerCache as SpeakerCache
    from jaxthd.models.front_ends.transcribe.settings import WordTimes as WordTimes
    from jaxthd.models.hybrid import HybridDecoder as HybridDecoder
    from jaxthd.models.speech_lm import SpeechLM as SpeechLM
    from jaxthd.models.stacks import from_stages as from_stages
    from jaxthd.models.stacks import to_stages as to_stages
    from jaxthd.objectives import OBJECTIVES as OBJECTIVES
    from jaxthd.objectives import Objective as Objective
    from jaxthd.objectives import Tokens as Tokens
    from jaxthd.objectives import register_objective as register_objective
    from jaxthd.packing.batch import Batch as Batch
    from jaxthd.packing.batch import concatenate_rows as concatenate_rows
    from jaxthd.packing.bridge import thd_batch as thd_batch
    from jaxthd.packing.bridge import to_batch as to_batch
    from jaxthd.packing.document import Document as Document
    from jaxthd.packing.pack import PackReport as PackReport
    from jaxthd.packing.pack import pack_row as pack_row
    from jaxthd.packing.segments import Segments as Segments
    from jaxthd.packing.segments import make_segments as make_segments
    from jaxthd.packing.segments import segments_of as segments_of
    from jaxthd.packing.thd_view import ThdView as ThdView
    from jaxthd.packing.thd_view import thd_view as thd_view
    from jaxthd.parallel.mesh import adopt_mesh as adopt_mesh
    from jaxthd.parallel.mesh import make_mesh as make_mesh
    from jaxthd.parallel.mesh import put_batch as put_batch
    from jaxthd.parallel.mesh import with_mesh as with_mesh
    from jaxthd.parallel.params import Init as Init
    from jaxthd.steps.blueprint import Blueprint as Blueprint
    from jaxthd.steps.scoring import make_scoring_step as make_scoring_step
    from jaxthd.steps.state import TrainState as TrainState
    from jaxthd.steps.state import abstract_state as abstract_state
    from jaxthd.steps.state import canonical_shardings as canonical_shardings
    from jaxthd.steps.state import checkpoint_layout as checkpoint_layout
    from jaxthd.steps.state import device_layout as device_layout
    from jaxthd.steps.state import init_state as init_state
    from jaxthd.steps.training import StepMetrics as StepMetrics
    from jaxthd.steps.training import loss_and_gradient as loss_and_gradient
    from jaxthd.steps.training import make_train_step as make_train_step


def _homes() -> dict[str, str]:
    """Public names, and the module under jaxthd that each is defined in: the imports under TYPE_CHECKING."""
    (listed,) = (x for x in _ast.parse(_pathlib.Path(__file__).read_text()).body if isinstance(x, _ast.If))
    imports = (x for x in listed.body if isinstance(x, _ast.ImportFrom))
    return {alias.name: str(x.module).removeprefix("jaxthd.") for x in imports for alias in x.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxthd' has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"jaxthd.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("_")} | {*_HOMES})
