"""NeMo archives: read without PyTorch, refused where they are more than tensors."""

import gzip
import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, EncoderConfig
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.hf.nemo_archives import CONFIG, Global, checkpoint, nemo_weights, write_nemo
from tests.hf.published import BASE, COMPUTE, shapes_of, write_published


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
