"""Published checkpoints in, published checkpoints out.

    jaxthd convert import nemotron_folder parakeet.nemo --out weights/speech
    jaxthd convert export runs/cp2 --out exported --like nemotron_folder --dtype bfloat16

import reads Hugging Face folders of the families below and .nemo archives (their encoder). It writes a
workdir without an optimizer: config.json and checkpoints/. If no source has an encoder, the model is
text-only. Train from the folder with --train.init-from, or from the sources themselves.

export reads the workdir of a run, or what import wrote (RUN@best and RUN@STEP choose a checkpoint, RUN@ema
the averaged parameters), and writes one of the formats below. Low-rank matrices (LoRA) are merged into
their projections; salm keeps them, and peft holds them alone, for a server that has the base. The default is
a format that holds the whole model (not salm) or, if there is none, formats that hold parts. Weights of a
vision tower are copied from --like, or absent.
config.json and generation_config.json name every token that ends an answer: what the run's template writes,
and what its tokenizer and --like name. Other entries of generation_config.json are kept.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.checkpoints.agreement import say_other_documents
from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.checksum import is_on_host
from jaxthd.checkpoints.sources import published_config
from jaxthd.checkpoints.stored import find_checkpoint
from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import AdaptConfig, Config, DataConfig, MeshConfig
from jaxthd.data.text.prompt import PromptTemplate, as_jinja
from jaxthd.data.text.published_tokenizer import write_tokenizer
from jaxthd.data.text.special_tokens import read_special_tokens
from jaxthd.data.text.tokenizer import FileTokenizer, load_tokenizer
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.paths import home_path
from jaxthd.files.run_folder import FILE, is_run, read_config, source_of, write_config
from jaxthd.files.tensor_names import ArraySlice
from jaxthd.files.tokenizer_files import BUILT_IN, FOLDER, has_tokenizer
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.hf.checkpoint import Checkpoint, open_checkpoint
from jaxthd.hf.export import export
from jaxthd.hf.family import Family, TokenIds
from jaxthd.hf.generation_config import added_end_tokens, write_generation_config
from jaxthd.hf.peft_folder import export_adapter
from jaxthd.hf.registry import FORMATS, PEFT, export_families, formats_help
from jaxthd.models.adapt import merge_lora
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState
from jaxthd.terminal.tables import size_text


def import_weights(sources: Sequence[str], out: Path, *, adapter_dim: int = 0) -> Config:
    """Writes the model made of these checkpoints into the new folder `out`; returns its settings.

    adapter_dim: model.adapter_dim if no source has an adapter, whose weights are then randomly initialised.
    If no source has an encoder, the model is text-only.
    Raises UserError, before it writes anything, if `out` exists, no source has an LLM, or one is damaged.
    """
    _is_new(out)
    config = published_config(sources, adapter_dim=adapter_dim)
    mesh = make_mesh(config.mesh)
    weights = load_weights(sources, Blueprint(config), mesh)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, zero, zero, weights.params, weights.buffers, ())
    with RemovedOnFailure(out, *(out / name for name in ("checkpoints", FOLDER, FILE))):
        out.mkdir(parents=True, exist_ok=True)
        write_config(out, config)
        with Checkpoints(out / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(0, state, position={})
        return read_config(out)


def export_weights(
    source: str | Path,
    out: Path,
    *,
    form: str | None = None,
    dtype: str = "float32",
    like: Path | None = None,
    limit: int = 4 * 2**30,
) -> list[Path]:
    """Writes the run's weights as published checkpoints; returns their folders.

    form: one of FORMATS; None: see export_families. dtype, like, limit: see jaxthd.hf.export.export.
    Raises UserError if `out` exists, the run cannot be read, or the format cannot hold the model.
    """
    _is_new(out)
    path, which = source_of(source)
    if not is_run(path):
        raise UserError(f"{path} holds no checkpoints; expected the workdir of a run, or what import wrote")
    config = replace(read_config(path), mesh=MeshConfig())
    if form == PEFT:
        return [export_lora(source, config, out, dtype=dtype, like=like)]
    original = open_checkpoint(like) if like else None
    families = export_families(config.model, form, original.family if original else None)
    folders = {out / name: family for name, family in families.items()}
    mesh = make_mesh(config.mesh)
    weights = load_weights([source], Blueprint(config), mesh, partly=False)
    lora = _lora_fields(config, named_weights(weights), list(folders.values()))
    if not lora:
        say_other_documents(path, config.adapt if config.adapt.lora_rank else None, AdaptConfig())
        params, config = merge_lora(weights.params, config)
        weights = weights._replace(params=params)
    arrays = named_weights(weights)
    take = partial(_taken, arrays, _indexing(mesh))
    shapes = {name: x.shape for name, x in arrays.items()}
    # What import wrote (step 0) has "bytes" where no source had a tokenizer.
    is_trained = find_checkpoint(path / "checkpoints", which)[0] > 0
    tokens = _token_ids(config, like) if is_trained or config.data.tokenizer not in BUILT_IN else None
    has_own = like is not None and has_tokenizer(like)
    with RemovedOnFailure(out, *folders):
        for folder, family in folders.items():
            export(
                config.model,
                shapes,
                take,
                family,
                folder,
                dtype=dtype,
                like=like if original and family is original.family else None,
                settings=_token_fields(tokens, family, original) | lora,
                beside=_tokenizer_folder(config) if family.token_fields and not has_own else None,
                limit=limit,
            )
            if family.token_fields and tokens:
                write_generation_config(folder, tokens)
            is_missing = config.data.tokenizer in BUILT_IN and not has_tokenizer(folder)
            if family.token_fields and is_trained and is_missing:
                write_tokenizer(config.data.tokenizer, folder)
            if family.finish:
                family.finish(folder, _chat_template(config.data, folder), config.model)
    return list(folders)


def export_lora(
    source: str | Path, config: Config, out: Path, *, dtype: str = "float32", like: Path | None = None
) -> Path:
    """Writes the run's low-rank matrices as a folder of peft's into `out`; returns it.

    config: the run's, on one device. Otherwise as export_weights. Raises UserError for a run without LoRA,
    and for LoRA on what no family holds by itself.
    """
    families = export_families(config.model, None, open_checkpoint(like).family if like else None)
    family = families.get("") or families["llm"]
    mesh = make_mesh(config.mesh)
    arrays = named_weights(load_weights([source], Blueprint(config), mesh, partly=False))
    take, shapes = partial(_taken, arrays, _indexing(mesh)), {name: x.shape for name, x in arrays.items()}
    with RemovedOnFailure(out):
        out.mkdir(parents=True, exist_ok=True)
        base = str(like or "")
        export_adapter(config.model, config.adapt, shapes, take, family, out, dtype=dtype, base=base)
    return out


def _chat_template(data: DataConfig, folder: Path) -> str | None:
    """The run's template in Jinja, for an export whose tokenizer has no chat template; None: there is none to
    write."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(folder)
    has_one = isinstance(tokenizer, FileTokenizer) and tokenizer.special.chat_template is not None
    return None if has_one else as_jinja(data, tokenizer)


def _lora_fields(config: Config, arrays: Mapping[str, Any], families: Sequence[Family]) -> dict[str, Any]:
    """The field "lora" of an export whose family keeps the run's LoRA; {} where it is merged, or there is
    none."""
    keeps = next((f.lora_fields for f in families if f.lora_fields), None)
    if keeps is None or not config.adapt.lora_rank:
        return {}
    adapted = frozenset(name.removesuffix(".lora.a") for name in arrays if name.endswith(".lora.a"))
    lora = keeps(config.model, config.adapt, adapted)
    return {"lora": lora} if lora else {}


def _tokenizer_folder(config: Config) -> Path | None:
    path = Path(config.data.tokenizer)
    return path if path.is_dir() else path.parent if path.is_file() else None


def _token_ids(config: Config, like: Path | None) -> TokenIds | None:
    """The run's special tokens; None, which is said, if its tokenizer is missing.

    eos_ids: what jaxthd generate stops at (PromptTemplate.stop_ids), and what the files of `like` name.
    """
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except OSError as error:
        print(f"warning: {error}. No special tokens are written, so that answers may not end")
        return None
    own = PromptTemplate(config.data, tokenizer).stop_ids
    theirs = read_special_tokens(like).eos_ids if like else ()
    eos_ids = tuple(dict.fromkeys((*own, *theirs)))
    return TokenIds(tokenizer.bos_id, eos_ids, tokenizer.pad_id, tokenizer.audio_id)


def _token_fields(tokens: TokenIds | None, family: Family, original: Checkpoint | None) -> dict[str, Any]:
    """config.json's fields for the tokens: all of them, or what is added to those of an original of the
    family."""
    if tokens is None or family.token_fields is None:
        return {}
    fields = family.token_fields(tokens)
    return added_end_tokens(original.fields, fields) if original and family is original.family else fields


def _indexing(mesh: Mesh) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x, at: x[at], out_shardings=everywhere)


def _taken(arrays: dict[str, Any], index: Any, part: ArraySlice) -> np.ndarray:
    """On devices of its own an array is indexed there, so that no more than the slice comes to the host."""
    array = arrays[part.name]
    return np.asarray(array)[part.at] if is_on_host(array) else np.asarray(index(array, part.at))


def _is_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; expected a new folder: choose another --out, or remove it")


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """The command `jaxthd convert`."""
    parser = argparse.ArgumentParser(
        prog="jaxthd convert",
        description=f"{__doc__}\n{formats_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("import", help="published checkpoints -> weights to train from")
    reading.add_argument("sources", nargs="+", help="Hugging Face folders, .nemo archives")
    reading.add_argument("--out", type=home_path, required=True, help="a new folder")
    reading.add_argument(
        "--adapter-dim", type=int, default=0, help="model.adapter_dim, where no source has an adapter"
    )
    writing = commands.add_parser("export", help="a run's weights -> Hugging Face folders")
    writing.add_argument(
        "source", help="the workdir of a run, or what import wrote; @best, @STEP or @ema after it"
    )
    writing.add_argument("--out", type=home_path, required=True, help="a new folder")
    writing.add_argument("--format", choices=FORMATS, help="one of the formats above")
    writing.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    writing.add_argument(
        "--like",
        type=home_path,
        help="the published folder that the run came from: its settings, tokenizer and vision tower go along",
    )
    options = parser.parse_args(argv)
    if options.command == "import":
        config = import_weights(options.sources, options.out, adapter_dim=options.adapter_dim)
        llm, encoder = config.model.llm, config.model.encoder
        audio = f"{encoder.title} of dim {encoder.dim}" if encoder else "no encoder"
        rank = config.adapt.lora_rank
        audio += f"; LoRA of rank {rank} on {', '.join(config.adapt.lora_targets)}" if rank else ""
        print(f"{options.out}: {llm.letters}, dim {llm.dim}; {audio}")
    else:
        folders = export_weights(
            options.source, options.out, form=options.format, dtype=options.dtype, like=options.like
        )
        for folder in folders:
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            print(f"{folder}: {size_text(size)}")


if __name__ == "__main__":
    with readable_errors():
        main()
