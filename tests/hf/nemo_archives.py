"""NeMo archives that tests write: what torch.save writes, without PyTorch."""

import io
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.hf.published import group, load_reference

NEMO_NAMES = (
    ("subsampling.layers.", "pre_encode.conv."),
    ("subsampling.linear.", "pre_encode.out."),
    (".self_attn.q_proj.", ".self_attn.linear_q."),
    (".self_attn.k_proj.", ".self_attn.linear_k."),
    (".self_attn.v_proj.", ".self_attn.linear_v."),
    (".self_attn.o_proj.", ".self_attn.linear_out."),
    (".self_attn.relative_k_proj.", ".self_attn.linear_pos."),
    (".self_attn.bias_", ".self_attn.pos_bias_"),
    (".conv.norm.", ".conv.batch_norm."),
)
CONFIG = {
    "preprocessor": {"features": 16},
    "encoder": {
        "feat_in": 16,
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "ff_expansion_factor": 2,
        "conv_kernel_size": 9,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": 16,
        "xscaling": True,
        "att_context_size": [-1, -1],
    },
}


class Global:
    """Pickled as a name that the unpickler has to look up, though no module has it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        raise AssertionError


class Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes tensors as torch.save does: names of torch's, data beside the pickle."""

    def __init__(self, file: Any, data: dict[str, bytes]) -> None:
        super().__init__(file, protocol=2)
        self._data = data

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + obj.name.encode() + b"\n")
        elif isinstance(obj, np.ndarray):
            key = str(len(self._data))
            # Every other element: strides and an offset that are not those of a fresh tensor.
            wide = np.zeros((2 * obj.size + 1,), obj.dtype)
            wide[1::2] = obj.reshape(-1)
            self._data[key] = wide.tobytes()
            kind = "LongStorage" if obj.dtype == np.int64 else "FloatStorage"
            strides = tuple(2 * s // obj.itemsize for s in obj.strides)
            self.save(Global("torch._utils\n_rebuild_tensor_v2"))
            self.write(pickle.MARK)
            self.save(("storage", Global(f"torch\n{kind}"), key, "cpu", len(wide)))
            self.write(pickle.BINPERSID)
            for part in (1, obj.shape, strides, False, OrderedDict()):
                self.save(part)
            self.write(pickle.TUPLE + pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


def checkpoint(state: Any) -> bytes:
    """What torch.save writes."""
    text, data = io.BytesIO(), {}
    Pickler(text, data).dump(state)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("weights/data.pkl", text.getvalue())
        for key, value in data.items():
            archive.writestr(f"weights/data/{key}", value)
        archive.writestr("weights/version", "3\n")
    return out.getvalue()


def write_nemo(
    path: Path, weights: bytes, config: Any = CONFIG, prefix: str = "./", change: Callable | None = None
) -> Path:
    with tarfile.open(path, "w") as archive:
        members = {"model_config.yaml": yaml.safe_dump(config).encode(), "model_weights.ckpt": weights}
        for name, content in members.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if change is not None:
            change(archive)
    return path


def nemo_weights() -> dict[str, Any]:
    state: dict[str, Any] = OrderedDict()
    for name, x in group(load_reference("fastconformer"), "weight").items():
        for theirs, nemos in NEMO_NAMES:
            name = name.replace(theirs, nemos)
        state[f"encoder.{name}"] = x
        if name.endswith("running_var"):
            state[f"encoder.{name.replace('running_var', 'num_batches_tracked')}"] = np.zeros((), np.int64)
    state["preprocessor.featurizer.fb"] = np.ones((1, 16, 257), np.float32)
    state["decoder.decoder_layers.0.weight"] = np.ones((5, 32, 1), np.float32)
    return state
