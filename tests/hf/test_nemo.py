"""NeMo archives: read without PyTorch, refused where they are more than tensors."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, EncoderConfig
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.hf.published import BASE, COMPUTE, group, load_reference, shapes_of, write_published

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


@pytest.mark.parametrize("compressed", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_encoder_is_that_of_the_library(tmp_path, compressed):
    """The same arrays as from transformers' folder of the same weights."""
    path = write_nemo(tmp_path / "a.nemo", checkpoint(nemo_weights()))
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    folder = write_published("fastconformer", tmp_path / "folder")
    config = Config(model=model_config(path, model=BASE), compute=COMPUTE)
    assert config.model == model_config(folder, model=BASE)
    assert config.model.encoder == EncoderConfig(
        num_mels=16, layers=2, dim=32, heads=4, ffn_dim=64, subsampling_channels=16
    )
    mesh = make_mesh(config.mesh)
    found, want = (named_weights(load_weights([x], Blueprint(config), mesh)) for x in (path, folder))
    for name in want:
        np.testing.assert_array_equal(found[name], want[name])


def hostile(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(marker)!r}, 'w')",))

    class Reader:
        def __reduce__(self) -> Any:
            return (getattr, (Global("torch\nFloatStorage"), "name"))

    strange = {**nemo_weights(), "encoder.layers.0.norm_out.weight": "no tensor"}
    return {
        "runs code": (checkpoint({"encoder.x": Evil()}), "asks for (__builtin__|builtins).exec"),
        "reads attributes": (checkpoint({"encoder.x": Reader()}), "asks for (__builtin__|builtins).getattr"),
        "no tensor": (checkpoint(strange), "is no tensor"),
        "list": (checkpoint([1, 2]), "expected named tensors"),
        "cut off": (checkpoint(nemo_weights())[:-4000], "no PyTorch checkpoint"),
        "no zip": (struct.pack("<Q", 3) * 100, "no PyTorch checkpoint"),
    }


@pytest.mark.parametrize("case", ["runs code", "reads attributes", "no tensor", "list", "cut off", "no zip"])
def test_hostile_weights_are_refused(tmp_path, case):
    """And nothing is executed."""
    weights, message = hostile(tmp_path)[case]
    with pytest.raises(UserError, match=message):
        open_checkpoint(write_nemo(tmp_path / "a.nemo", weights))
    assert not (tmp_path / "executed").exists()


def test_storage_that_is_too_short_is_refused(tmp_path):
    path = write_nemo(tmp_path / "a.nemo", checkpoint(nemo_weights()))
    found = open_checkpoint(path)
    name = "encoder.pre_encode.out.weight"
    stored = found.reader._stored[name]
    found.reader._stored[name] = stored._replace(shape=(1000, 1000))
    with pytest.raises(UserError, match="reaches beyond its storage"):
        found.reader.read(name)


def test_members_that_leave_the_archive_are_refused(tmp_path):
    def climbs(archive: tarfile.TarFile) -> None:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO())

    def links(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("tokenizer.model")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)

    weights = checkpoint(nemo_weights())
    for number, change in enumerate((climbs, links)):
        with pytest.raises(UserError, match="leaves the archive"):
            open_checkpoint(write_nemo(tmp_path / f"{number}.nemo", weights, change=change))
    with pytest.raises(UserError, match="leaves the archive"):
        open_checkpoint(write_nemo(tmp_path / "absolute.nemo", weights, prefix="/"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.nemo", "1.nemo", "absolute.nemo"]


def test_other_encoders_and_damaged_archives_are_refused(tmp_path):
    weights = checkpoint(nemo_weights())
    cases = {
        "another kind": {"self_attention_model": "rel_pos_local_attn"},
        "limited": {"att_context_size": [128, 128]},
        "cached": {"conv_norm_type": "layer_norm"},
    }
    for name, changed in cases.items():
        config = {**CONFIG, "encoder": CONFIG["encoder"] | changed}
        with pytest.raises(UserError, match=r"the encoder in .* describes a model that jaxthd does not have"):
            model_config(write_nemo(tmp_path / f"{name}.nemo", weights, config))
    linked = CONFIG["encoder"] | {"feat_in": "${model.preprocessor.features}"}
    for number, config in enumerate(({"decoder": {}}, {"encoder": None}, {"encoder": linked})):
        with pytest.raises(UserError, match="describes no FastConformer"):
            model_config(write_nemo(tmp_path / f"b{number}.nemo", weights, config))
    wrong = {**CONFIG, "encoder": CONFIG["encoder"] | {"n_layers": "two"}}
    with pytest.raises(UserError, match=r"has encoder\.n_layers 'two'; expected an integer"):
        open_checkpoint(write_nemo(tmp_path / "e.nemo", weights, wrong))
    with pytest.raises(UserError, match="it holds no settings"):
        open_checkpoint(write_nemo(tmp_path / "f.nemo", weights, []))
    path = write_nemo(tmp_path / "c.nemo", weights)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(UserError, match=r"no whole \.nemo archive|has no model_weights"):
        open_checkpoint(path)
    path = write_nemo(tmp_path / "d.nemo", checkpoint({"encoder.x": np.ones((3, 4), np.float32)}))
    config = Config(model=model_config(path, model=BASE), compute=COMPUTE)
    with pytest.raises(UserError, match=r"missing: .*bias(.|\n)*unknown: encoder\.x"):
        open_checkpoint(path).tensors(config.model, shapes_of(config))
