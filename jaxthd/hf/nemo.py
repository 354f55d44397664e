"""NeMo archives (.nemo): a tar file of model_config.yaml and model_weights.ckpt, a PyTorch checkpoint.

Nothing is extracted and nothing in the archive is executed. The checkpoint is a zip file. Its pickle says how
tensors lie in the other members; the unpickler here knows the few names that tensors need and refuses all
others. Only the encoder is read: a FastConformer, as in Parakeet and Canary.
"""

import io
import pickle
import re
import shutil
import tarfile
import tempfile
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import yaml
from jaxtyping import Shaped

from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"

_STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class _Storage(NamedTuple):
    """A member of the zip file: elements of one dtype."""

    dtype: Any
    key: str


class _Stored(NamedTuple):
    """A tensor, as a view of a storage. offset, stride: in elements."""

    storage: _Storage
    offset: int
    shape: Shape
    stride: Shape


class NemoArchive:
    """The encoder's tensors in the archive `path`, by name. fields: NeMo's settings of the model.

    Raises UserError for an archive that is damaged, names files outside itself or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as files:
            config, weights = _members(path, files)
            self.fields = _settings(config, path)
            self._zip, self._root, state = _read_checkpoint(weights, path)
            found = {str(n): x for n, x in state.items() if str(n).startswith("encoder.")}
            strange = [name for name, x in found.items() if not isinstance(x, _Stored)]
            if strange:
                raise UserError(
                    f"{strange[0]} in {path} is no tensor; expected the weights of a NeMo model: copy it anew"
                )
            weakref.finalize(self, files.pop_all().close)
        self._stored = found
        self.shapes: dict[str, Shape] = {name: x.shape for name, x in self._stored.items()}

    def dtype(self, name: str) -> str:
        """NumPy's name of the tensor's dtype."""
        return str(np.dtype(self._stored[name].storage.dtype))

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One tensor, from the disk."""
        (dtype, key), offset, shape, stride = self._stored[name]
        try:
            elements = np.frombuffer(self._zip.read(f"{self._root}data/{key}"), dtype)
        except (KeyError, zipfile.BadZipFile, ValueError, OSError) as error:
            raise UserError(f"{name} in {self.path} cannot be read ({error}): copy the file anew") from error
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if min(offset, *stride, 0) < 0 or last >= len(elements):
            raise UserError(f"{name} in {self.path} reaches beyond its storage: copy the file anew")
        steps = [s * elements.itemsize for s in stride]
        return np.lib.stride_tricks.as_strided(elements[offset:], shape, steps, writeable=False)

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names, sorted: the archive's members have no better order."""
        return sorted(names)


def _read_checkpoint(weights: Any, path: Path) -> tuple[zipfile.ZipFile, str, Mapping[Any, Any]]:
    """(the zip file, the folder in it, the unpickled object)."""
    try:
        archive = zipfile.ZipFile(weights)
        root = next(n for n in archive.namelist() if n.endswith("/data.pkl")).removesuffix("data.pkl")
        state = _Unpickler(io.BytesIO(archive.read(f"{root}data.pkl"))).load()
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{WEIGHTS} in {path} holds more than tensors ({error}); nothing of it was executed. "
            "Expected the weights of a NeMo model: do not use this file"
        ) from error
    except (zipfile.BadZipFile, StopIteration, EOFError, OSError) as error:
        raise UserError(f"{WEIGHTS} in {path} is no PyTorch checkpoint ({error!r}): copy it anew") from error
    if not isinstance(state, Mapping):
        raise UserError(
            f"{WEIGHTS} in {path} holds a {type(state).__name__}; expected named tensors: copy it anew"
        )
    return archive, root, state


def _members(path: Path, files: ExitStack) -> tuple[bytes, Any]:
    """(the text of CONFIG, WEIGHTS as a seekable file). files: closes what is opened."""
    try:
        archive = files.enter_context(tarfile.open(path))  # noqa: SIM115
        found: dict[str, tarfile.TarInfo] = {}
        for member in archive:
            parts = Path(member.name).parts
            if ".." in parts or member.name.startswith("/") or member.issym() or member.islnk():
                raise UserError(
                    f"{path} has a member {member.name!r}, a link or a path that leaves the archive; "
                    "expected plain files: do not use this file"
                )
            found["/".join(parts)] = member
        missing = [name for name in (CONFIG, WEIGHTS) if name not in found or not found[name].isfile()]
        if missing:
            raise UserError(
                f"{path} has no {' and no '.join(missing)}; expected an archive that NeMo saved: copy it anew"
            )
        config, weights = (archive.extractfile(found[name]) for name in (CONFIG, WEIGHTS))
        assert config is not None
        assert weights is not None
        text = config.read()
        with path.open("rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        if not is_compressed:
            return text, weights
        # Seeking back in a compressed file would decompress it from the start.
        whole = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        shutil.copyfileobj(weights, whole, 1 << 24)
        return text, whole
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{path} is no whole .nemo archive ({error}): copy it anew") from error


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dicts. Imports nothing that the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name in the pickle. Raises UnpicklingError for one that tensors do not need."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in _STORAGES:
            return _Kind(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """A tensor's storage. Raises UnpicklingError for anything else."""
        match pid:
            case ("storage", _Kind() as kind, str(key), _, int()) if re.fullmatch(r"\w+", key):
                return _Storage(_STORAGES[kind.name], key)
        raise pickle.UnpicklingError(f"it asks for {pid!r}")


class _Kind:
    """Stands for the class of a storage."""

    def __init__(self, name: str) -> None:
        self.name = name


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Stored:
    whole = isinstance(storage, _Storage) and isinstance(offset, int) and len(shape) == len(stride)
    if not whole or not all(isinstance(n, int) for n in (*shape, *stride)):
        raise pickle.UnpicklingError("it describes a tensor in an unknown way")
    return _Stored(storage, offset, tuple(shape), tuple(stride))


def _settings(text: bytes, path: Path) -> Any:
    """Returns the settings of a model. Raises UserError where there are none."""
    try:
        settings = yaml.safe_load(text)
        if not isinstance(settings, Mapping):
            raise ValueError("it holds no settings")
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{CONFIG} in {path} cannot be read ({error}): copy the archive anew") from error
    return settings
