"""jaxthd.load: a model of a run, and of a published folder, that transcribes, generates and scores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

import jaxthd
from jaxthd.config import Config, DataConfig, MeshConfig
from jaxthd.data.audio.windows import in_windows
from jaxthd.data.speech import SpeechDocuments
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from tests.helpers import save_run
from tests.hf.published import REFERENCES
from tests.test_generate import CONFIG

TEXT_ONLY = REFERENCES / "text_only"
SIZES = {"batch": 2, "max_new_tokens": 6}
"""Those of tests/test_generate.py's command, whose programs they are then."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.py, a run of it, and recordings: two short ones, and one of twice what fits."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "tiny.py").write_text(CONFIG.replace("microbatches=4", "microbatches=1"))
    save_run(load_config(folder / "tiny.py"), folder / "run", step=3)
    rng = np.random.default_rng(0)
    for name, seconds in (("a", 1), ("b", 0.8), ("long", 10)):
        soundfile.write(folder / f"{name}.wav", rng.normal(0, 0.1, round(16000 * seconds)), 16000)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> jaxthd.Model:
    return jaxthd.load(f"{folder}/run@3", **SIZES)


def test_a_run_is_a_model_with_its_config_tokenizer_and_template(folder: Path, model: jaxthd.Model):
    own = load_config(folder / "tiny.py")
    assert model.config.model == own.model
    assert model.config.mesh == own.mesh
    assert model.tokenizer.decode(model.tokenizer.encode("one")) == "one"
    turns = (jaxthd.Turn("user", ("hi",)),)
    written = model.tokenizer.decode(model.template.prompt(turns))
    assert written == "<|im_start|>user\nhi\n<|im_start|>assistant\n"


def test_it_transcribes_files_and_arrays_and_long_ones(folder: Path, model: jaxthd.Model):
    """As the conversations that ask for it; a bad file gets no answer and a warning."""
    array, _ = soundfile.read(folder / "b.wav")
    recordings = [
        folder / "a.wav",
        str(folder / "none.wav"),
        jaxthd.Samples(array, 16000),
        folder / "long.wav",
    ]
    with pytest.warns(UserWarning, match=r"1 of 4 could not be used(.|\n)*none\.wav: no such file"):
        found = model.transcribe(recordings, prompt="Hm?", temperature=0.9)
    assert [answer.end == "skipped" for answer in found] == [False, True, False, False]
    assert [answer.windows > 1 for answer in found] == [False, False, False, True]
    assert found[1].key == f"2:{folder}/none.wav"
    asked = jaxthd.Example(
        f"1:{folder}/a.wav", (jaxthd.Turn("user", (jaxthd.Clip(folder / "a.wav"), "Hm?")),)
    )
    assert model.generator.generate([asked], temperature=0.9) == [found[0]]
    (alone,) = model.transcribe(str(folder / "a.wav"), prompt="Hm?", temperature=0.9)
    assert alone == found[0]
    (cut,) = model.transcribe(folder / "long.wav", prompt="Hm?", window=3.0)
    assert cut.windows == len(in_windows(jaxthd.Clip(folder / "long.wav"), 3.0)) > found[3].windows
    with pytest.raises(UserError, match="1 of 1 could not be used"):
        model.transcribe([folder / "none.wav"])
    assert model.generator.programs.made == 3


def test_it_generates_from_texts_and_conversations(model: jaxthd.Model):
    conversation = jaxthd.Example("1:prompt", (jaxthd.Turn("user", ("one two",)),))
    (text,), (said,) = model.generate("one two"), model.generate([conversation])
    assert text == said
    assert model.generate(["one two"], max_new_tokens=2)[0].tokens == text.tokens[:2]
    with pytest.raises(UserError, match="temperature is -1"):
        model.generate("one", temperature=-1.0)
    with pytest.raises(UserError, match="0 recordings for 1 placeholders"):
        model.generate("{audio}?")


def test_it_scores_recordings_with_their_texts(folder: Path, model: jaxthd.Model):
    """As documents that are made of them; the text's tokens are those scored."""
    pairs = [(folder / "a.wav", "one"), (str(folder / "b.wav"), "two three")]
    found = model.score(pairs, top_k=2)
    texts = [model.tokenizer.decode(x.tokens[x.positions].tolist()) for x in found]
    assert texts == ["one", "two three"]
    clip = jaxthd.Clip(folder / "b.wav")
    turns = (jaxthd.Turn("user", (clip,)), jaxthd.Turn("assistant", ("two three",)))
    example = jaxthd.Example("x", turns)
    document = SpeechDocuments(model.config, model.tokenizer, train=False)(example)
    assert isinstance(document, jaxthd.Document)
    for other in ([example], [document]):
        (again,) = model.score(other, top_k=2)
        np.testing.assert_allclose(again.log_probs, found[1].log_probs, rtol=1e-5)
        np.testing.assert_array_equal(again.top_ids, found[1].top_ids)
    with pytest.raises(UserError, match=r"'1:none\.wav' cannot be packed: none\.wav: no such file"):
        model.score([("none.wav", "one")])


def test_a_published_folder_is_a_model_too():
    """With its own tokenizer, scored as transformers scores it (tests/references/text_only.py)."""
    config = jaxthd.load_config(TEXT_ONLY)
    assert config.data.tokenizer == str(TEXT_ONLY)
    assert config.train.init_from == (str(TEXT_ONLY),)
    assert config.model.encoder is None
    own = jaxthd.load(TEXT_ONLY).config
    assert (own.model, own.data, own.mesh) == (config.model, config.data, config.mesh)
    config = replace(config, data=replace(config.data, capacity=256))
    model = jaxthd.load([TEXT_ONLY], config, **SIZES)
    lines = (TEXT_ONLY / "documents.jsonl").read_text().splitlines()
    examples = [
        jaxthd.Example(
            line["id"], tuple(jaxthd.Turn(turn["role"], (turn["content"],)) for turn in line["messages"])
        )
        for line in map(json.loads, lines)
    ]
    scored = model.score(examples, every_token=True)
    expected = json.loads((TEXT_ONLY / "expected.json").read_text())
    for scores, want in zip(scored, expected, strict=True):
        np.testing.assert_array_equal(scores.tokens, want["tokens"])
        np.testing.assert_allclose(scores.log_probs, want["log_probs"], rtol=0, atol=2e-5)
    (answer,) = model.generate("it says")
    assert answer.end != "skipped"


def test_what_is_no_model_is_said(folder: Path, tmp_path: Path, model: jaxthd.Model):
    with pytest.raises(UserError, match=r"tiny\.py is a config file, which has no weights"):
        jaxthd.load(folder / "tiny.py")
    with pytest.raises(FileNotFoundError, match="no run at"):
        jaxthd.load(tmp_path / "none")
    with pytest.raises(UserError, match="holds no run; expected the workdir of one, a published checkpoint"):
        jaxthd.load(tmp_path)
    other = replace(model.config, mesh=MeshConfig(data=2))
    with pytest.raises(UserError, match=r"data\.rows is 1"):
        jaxthd.Model(other, model._given).score([(folder / "a.wav", "one")])
    small = Config(data=DataConfig(capacity=0))
    with pytest.raises(UserError, match=r"data\.capacity is 0"):
        jaxthd.load(folder / "run", small)
