"""A run chooses its context layout by its data, says so, and keeps to it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxthd.config import ComputeConfig, Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.planning.layout_choice import FILE, keep_layout, with_layout
from jaxthd.validate import ConfigError, DeviceFacts, validate

LLM = LLMConfig(
    pattern="M*-",
    dim=32,
    blocks={"*": Attention(heads=2, kv_heads=2, head_dim=16), "M": Mamba2(heads=4, groups=1)},
)


def config(folder: Path, words: int, documents: int = 400, context: int = 4) -> Config:
    """Text whose documents have about 5 tokens a word."""
    texts = [" ".join(["word"] * (words + i % 3)) for i in range(documents)]
    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
        for text in texts
    ]
    manifest = folder / "text.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Config(
        mesh=MeshConfig(context=context),
        data=DataConfig(
            manifest=(str(manifest),),
            validation_manifest="",
            tokenizer="bytes",
            capacity=1024,
            audio_capacity=0,
            max_documents=256,
        ),
        model=ModelConfig(None, LLM),
        compute=ComputeConfig(context_layout="auto"),
    )


@pytest.mark.parametrize(("words", "layout"), [(3, "whole"), (150, "buffer")])
def test_the_layout_follows_from_the_lengths_of_documents(
    words: int, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Short documents stay whole. Where each must be divided, states of each would be exchanged."""
    given = config(tmp_path, words)
    assert given.compute.layout == "buffer", "until it is chosen"
    chosen = with_layout(given, tmp_path)
    assert chosen == replace(given, compute=replace(given.compute, context_layout=layout))
    said = capsys.readouterr().out
    assert f"context layout: {layout}" in said
    assert all(name in said for name in ("buffer", "whole", "padding"))
    assert "document " not in said, "it would need another data.round_to"


def test_a_run_keeps_the_layout_on_its_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = config(tmp_path, 3)
    keep_layout(given, with_layout(given, tmp_path), tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["layout"] == "whole"
    longer = config(tmp_path, 150)
    assert with_layout(longer, tmp_path).compute.layout == "buffer", "no run has begun"
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert with_layout(longer, tmp_path).compute.layout == "whole"
    assert "as the run was begun with" in capsys.readouterr().out
    assert with_layout(replace(longer, mesh=MeshConfig(context=2)), tmp_path).compute.layout == "buffer"


def test_what_is_not_left_open_is_not_chosen(tmp_path: Path):
    asked = config(tmp_path, 3)
    asked = replace(asked, compute=ComputeConfig(context_layout="whole"))
    one = config(tmp_path, 3, context=1)
    for given in (asked, one):
        assert with_layout(given, tmp_path) == given
        keep_layout(given, given, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_documents_with_several_answers_and_unreadable_data_keep_the_buffer(tmp_path: Path):
    given = config(tmp_path, 3)
    pairs = replace(given, train=replace(given.train, objective="dpo"))
    missing = replace(given, data=replace(given.data, manifest=()))
    for each in (pairs, missing):
        assert with_layout(each, tmp_path).compute.context_layout == "buffer"


@pytest.mark.parametrize(
    ("changes", "path"),
    [({"data": {"capacity": 1020}}, "data.capacity"), ({"mesh": {"context": 0}}, "mesh.context")],
)
def test_a_config_that_cannot_work_is_left_to_the_validator(
    changes: dict[str, dict[str, int]], path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """No choice is made before it says what to change."""
    given = config(tmp_path, 3)
    faulty = replace(given, **{name: replace(getattr(given, name), **of) for name, of in changes.items()})
    chosen = with_layout(faulty, tmp_path)
    assert chosen.compute.layout == "buffer"
    assert not capsys.readouterr().out
    with pytest.raises(ConfigError, match=rf"{path} is"):
        validate(chosen, DeviceFacts("cpu", 4, "cpu"))


def test_a_layout_that_the_validator_refuses_is_not_chosen(tmp_path: Path):
    given = config(tmp_path, 3)
    assert with_layout(given, tmp_path).compute.layout == "whole"
    long = replace(given, model=ModelConfig(None, LLM.with_settings("M", conv=6)))
    assert with_layout(long, tmp_path).compute.layout == "buffer"


def test_where_no_document_fits_the_layout_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Training lists what it skips, and says what to change."""
    assert with_layout(config(tmp_path, 1000), tmp_path).compute.layout == "buffer"
    assert "no document fits" in capsys.readouterr().out


def test_documents_that_are_skipped_decide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Few short documents among many that fit no buffer."""
    short = Path(config(tmp_path, 3, documents=10).data.manifest[0]).read_text()
    given = config(tmp_path, 5000, documents=300)
    with Path(given.data.manifest[0]).open("a") as manifest:
        manifest.write(short)
    assert with_layout(given, tmp_path).compute.layout == "whole"
    assert "no document fits" not in capsys.readouterr().out
