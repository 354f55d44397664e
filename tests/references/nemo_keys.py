"""Writes nemo_keys.json: the keys that NeMo's speechlm2 classes, its data module and what these build read.

    PYTHONPATH=. NEMO_PYTHON -m tests.references.nemo_keys [EXAMPLE.yaml ...]

NEMO_PYTHON has nemo-toolkit[asr] (3.0.0 wrote the file). Keys are found in the classes' code (cfg.x,
cfg.get("x")), in signatures and in dataclasses; given example files of NeMo's, their keys count too. They
are written as jaxthd/nemo/keys.py has them, without values.
"""

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("nemo_keys.json")
GROUPS = ("model", "data", "trainer", "exp_manager")
METHODS = {"get", "copy", "items", "keys", "append", "setdefault", "pop"}
"""Methods of configs, which are no keys."""
FOLDERS = {
    "collections/speechlm2/models": ("cfg", "model."),
    "collections/speechlm2/parts": ("cfg", "model."),
    "collections/speechlm2/data/duplex_stt_dataset.py": ("cfg", "model."),
    "collections/speechlm2/modules/perception.py": ("cfg", "model.perception."),
    "collections/common/data/lhotse/cutset.py": ("config", "data.train_ds."),
}
"""Code -> (what a config is called there, the group that it is)."""


def keys() -> set[str]:
    """All keys that NeMo's code reads."""
    import nemo

    root, found = Path(nemo.__file__).parent, set[str]()
    for place, (name, front) in FOLDERS.items():
        path = root / place
        for file in path.glob("*.py") if path.is_dir() else [path]:
            for key in read_keys(ast.parse(file.read_text()), name):
                first, _, rest = key.partition(".")
                if rest or first not in GROUPS:
                    found |= {key} if first in GROUPS else {front + key}
    found |= set(built_keys())
    groups = {key[:place] for key in found for place, letter in enumerate(key) if letter == "."}
    return found - groups


def read_keys(tree: ast.AST, name: str) -> Iterator[str]:
    """Yields the dotted keys that code reads of a config of this name."""
    for node in ast.walk(tree):
        path = path_of(node)
        if path and name in path and path[: path.index(name)] in ((), ("self",), ("model",)):
            below = path[path.index(name) + 1 :]
            names = tuple(x for x in below if x not in METHODS)
            if names and names == below[: len(names)]:
                yield ".".join(names)


def path_of(node: ast.AST) -> tuple[str, ...] | None:
    """The names of a.b["c"].get("d"); None for other expressions."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=value, attr=name):
            above = path_of(value)
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            above = path_of(value)
        case ast.Call(
            func=ast.Attribute(value=value, attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]
        ):
            above = path_of(value)
        case _:
            return None
    return None if above is None else (*above, name)


def built_keys() -> Iterator[str]:
    """Yields the keys that become arguments of classes."""
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from nemo.collections.asr.modules import (
        AudioToMelSpectrogramPreprocessor,
        ConformerEncoder,
        SpectrogramAugmentation,
    )
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig
    from nemo.collections.speechlm2.modules import perception
    from nemo.collections.speechlm2.parts.parallel import AutomodelParallelStrategy
    from nemo.core.optim import lr_scheduler
    from peft import LoraConfig

    perceived = "model.perception."
    built: list[tuple[str, Any]] = [
        ("trainer.", Trainer),
        ("trainer.strategy.", ModelParallelStrategy),
        ("trainer.strategy.", AutomodelParallelStrategy),
        (f"{perceived}encoder.", ConformerEncoder),
        (f"{perceived}preprocessor.", AudioToMelSpectrogramPreprocessor),
        (f"{perceived}spec_augment.", SpectrogramAugmentation),
        (f"{perceived}modality_adapter.", perception.QformerConnector),
        (f"{perceived}modality_adapter.", perception.MultiLayerProjectionConnector),
        ("model.optimizer.", torch.optim.AdamW),
        *(("model.lr_scheduler.", x) for x in vars(lr_scheduler).values() if is_schedule(x)),
    ]
    for front, kind in built:
        yield from (front + name for name in arguments(kind))
    for front, kind in (("model.lora.", LoraConfig), ("data.train_ds.", LhotseDataLoadingConfig)):
        yield from (front + field.name for field in dataclasses.fields(kind))
    yield from manager_keys()


def is_schedule(x: Any) -> bool:
    """Whether an object of NeMo's module is a schedule of learning rates."""
    return isinstance(x, type) and x.__module__ == "nemo.core.optim.lr_scheduler" and hasattr(x, "get_lr")


def arguments(kind: Any) -> Iterator[str]:
    """Yields the names of the arguments of a class but those that it is always given."""
    named = inspect.signature(kind.__init__).parameters
    yield from (x for x in named if x not in {"self", "args", "kwargs", "params", "optimizer"})


def manager_keys() -> Iterator[str]:
    """Yields the keys of exp_manager, whose groups are dataclasses too."""

    module = sys.modules["nemo.utils.exp_manager"]
    types = {name: x for name, x in vars(module).items() if isinstance(x, type)}
    kinds = {name: x for name, x in types.items() if "__dataclass_fields__" in vars(x)}
    for field in dataclasses.fields(kinds["ExpManagerConfig"]):
        inner = next((kind for name, kind in kinds.items() if name in str(field.type)), None)
        below = [f".{each.name}" for each in dataclasses.fields(inner)] if inner else [""]
        yield from (f"exp_manager.{field.name}{name}" for name in below)


def example_keys(files: Iterable[Path]) -> set[str]:
    """The keys of example files, as the table has them."""
    from jaxthd.nemo.experiment import read_yaml
    from jaxthd.nemo.keys import canonical, leaves

    return {canonical(place) for file in files for place, _ in leaves(read_yaml(file))}


if __name__ == "__main__":
    found = keys() | example_keys(map(Path, sys.argv[1:]))
    FILE.write_text(json.dumps(sorted(found), indent=0) + "\n")
    print(f"{FILE}: {len(found)} keys")
