"""Speech LLMs: what transformers computes from a recording alone, jaxthd computes packed (tests/references/
speech_llms.py)."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
import pytest

from jaxthd.checkpoints.sources import published_config
from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import AdaptConfig, Config, MeshConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.models.adapt import merge_lora
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.helpers import assert_same, save_run
from tests.hf.published import (
    Published,
    assert_identical,
    assert_trained_as_published,
    change_published,
    load_reference,
    published,
    tensors,
    write_published,
)
from tests.hf.speech_folders import (
    NAMES,
    NEVER_TIED,
    ON_DISK,
    add_adapter,
    as_authors,
    change_config,
    merged,
)

LONG = [pytest.param(f"{name}_long", marks=pytest.mark.nightly) for name in NAMES]


@pytest.fixture(scope="module", params=[*NAMES, *LONG])
def family(request, tmp_path_factory) -> Published:
    return published(request.param, tmp_path_factory.mktemp("published") / request.param)


def test_logits_and_gradients_equal_transformers(family):
    """Recordings of 0.3 s and more, one or two of them or none a document, in one buffer."""
    order = [*family.numbers[1:], 0]
    loss, logits, gradients = family.run(order)
    for place, n in enumerate(order):
        want, tokens = family.arrays[f"logits.{n}"], family.arrays[f"tokens.{n}"]
        found = logits[place] if len(want) == len(tokens) else logits[place][tokens != 47]
        assert_same(found, want, 2e-5)
    np.testing.assert_allclose(loss, family.arrays["loss"], rtol=1e-5)
    want = {name: x for name, x in family.gradients().items() if name in gradients}
    assert {*gradients} == {*want}
    assert_same({name: gradients[name] for name in want}, want, 1e-4)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(1, 2, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(2, 2, 1, 2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_meshes_equal_transformers(name, mesh, tmp_path):
    assert_trained_as_published(published(name, tmp_path / "published"), mesh)


@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_the_original_bit_by_bit(name, tmp_path):
    """Without the original it lacks the towers that are not read."""
    folder = write_published(name, tmp_path / "published")
    want, patterns = tensors(folder), open_checkpoint(folder).family.ignored
    ignored = [pattern for pattern in patterns if not pattern.endswith("lm_head.weight")]
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "like", like=folder)
    assert_identical(tensors(tmp_path / "like"), want)
    export_weights(tmp_path / "imported", tmp_path / "out")
    read = {key: x for key, x in want.items() if not any(fnmatch(key, pattern) for pattern in ignored)}
    assert_identical(tensors(tmp_path / "out"), read)


@pytest.mark.parametrize("name", NEVER_TIED)
def test_a_head_that_the_library_never_ties_is_read_and_written(name, tmp_path):
    """Of a run whose embedding is tied, it is the embedding."""
    folder = write_published(name, tmp_path / name)
    change_config(folder, tie_word_embeddings=True)
    model = model_config(folder)
    assert not model.llm.tied_embedding
    save_run(Config(model=replace(model, llm=replace(model.llm, tied_embedding=True))), tmp_path / "run")
    for like in (None, folder):
        out = tmp_path / f"like {like and like.name}"
        export_weights(tmp_path / "run", out, form=open_checkpoint(folder).family.format, like=like)
        stored = tensors(out)
        head, embedding = (stored[f"language_model.{x}.weight"] for x in ("lm_head", "model.embed_tokens"))
        np.testing.assert_array_equal(head, embedding)
        assert model_config(out) == model
        config = json.loads((out / "config.json").read_text())
        assert not config["tie_word_embeddings"]
        assert not config["text_config"]["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("glmasr", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type: 'linear'"),
        ("qwen2_5_omni", {"n_window": 70}, "n_window 70; expected a divisor of 15000"),
        ("qwen3_asr", {"n_window_infer": 250}, "n_window_infer 250; expected a multiple of 100"),
        (
            "granite_speech",
            {"downsample_rate": 4},
            "downsample_rate 4; expected a divisor of window_size, 15",
        ),
    ],
)
def test_an_encoder_that_is_not_computed_is_refused(name, change, message, tmp_path):
    def changed(settings, _):
        settings = settings.get("thinker_config", settings)
        settings.get("audio_config", settings).update(change)

    folder = change_published(write_published(name, tmp_path / name), changed)
    with pytest.raises(UserError, match=re.escape(message)):
        model_config(folder)


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni"])
def test_an_exported_thinker_is_named_as_published(name, tmp_path):
    """The library looks for it by its model_type, and else builds a model of its default sizes."""
    folder = write_published(name, tmp_path / name)
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out")
    was, now = (json.loads((x / "config.json").read_text()) for x in (folder, tmp_path / "out"))
    assert now["model_type"] == was["model_type"]
    for field in ("model_type", "architectures"):
        assert now["thinker_config"][field] == was["thinker_config"][field]


@pytest.mark.parametrize(
    ("name", "seconds"), [("qwen2_audio", 2), ("audioflamingo3", 600), ("glmasr", 654), ("qwen2_5_omni", 300)]
)
def test_a_recording_is_heard_for_as_long_as_the_processor_takes_it(name, seconds, tmp_path):
    """In whole windows, which have 2 s here."""
    encoder = model_config(write_published(name, tmp_path / name)).audio_encoder
    assert encoder.heard(16000 * 1000) == 16000 * seconds
    form = open_checkpoint(tmp_path / name).family
    with pytest.raises(UserError, match=f"windows: 7 .the format stands for {encoder.windows}."):
        form.fields(replace(model_config(tmp_path / name), encoder=replace(encoder, windows=7)))


def test_glm_asr_s_windows_are_those_of_the_processor(tmp_path):
    """Its encoder takes any: positions are not stored. An export has the files that say so."""
    folder = write_published("glmasr", tmp_path / "glmasr")
    assert model_config(folder).audio_encoder.longest == 200, "by its positions"
    extractor = {"feature_size": 16, "chunk_length": 4}
    for name, settings in (
        ("preprocessor_config.json", {**extractor, "chunk_length": 8}),
        ("processor_config.json", {"feature_extractor": extractor, "processor_class": "GlmAsrProcessor"}),
    ):
        (folder / name).write_text(json.dumps(settings))
    model = model_config(folder)
    assert (model.audio_encoder.longest, model.audio_encoder.windows) == (400, 655 // 4)
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    assert model_config(tmp_path / "out") == model
    (folder / "processor_config.json").write_text(json.dumps({**extractor, "chunk_length": 0}))
    with pytest.raises(UserError, match="chunk_length 0; expected an integer from 1 on"):
        model_config(folder)


def test_qwen3_s_attention_may_have_biases(tmp_path):
    """Four a layer, which an export has again."""

    def change(settings, tensors):
        settings["text_config"]["attention_bias"] = True
        for name, x in [*tensors.items()]:
            if "language_model" in name and name.endswith("_proj.weight") and ".self_attn." in name:
                tensors[name.replace("weight", "bias")] = np.arange(len(x), dtype=np.float32)

    folder = change_published(write_published("qwen3_asr", tmp_path / "published"), change)
    model = model_config(folder)
    biases = [
        x for x in tensors(folder) if ".self_attn." in x and "language_model" in x and x.endswith("bias")
    ]
    assert len(biases) == 2 * len(model.llm.letters)
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert_identical(tensors(tmp_path / "out"), tensors(folder))
    assert model_config(tmp_path / "out") == model


def test_qwen3_asr_in_its_authors_form(tmp_path):
    """The same model, also as their own code names its text model; an export like it has its form, with the
    axes of its rotary embedding."""
    plain, authors = (write_published("qwen3_asr", tmp_path / name) for name in ("plain", "authors"))
    as_authors(authors)
    assert model_config(authors) == model_config(plain)

    def change(settings, _):
        settings["thinker_config"]["text_config"]["model_type"] = "qwen3_asr_text"

    change_published(authors, change)
    assert model_config(authors) == model_config(plain)
    import_weights([str(authors)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "like", like=authors)
    assert_identical(tensors(tmp_path / "like"), tensors(authors))
    assert model_config(tmp_path / "like") == model_config(plain)
    new = {"form": open_checkpoint(authors).family.format}
    export_weights(tmp_path / "imported", tmp_path / "new", **new)
    was, now, other = (
        json.loads((x / "config.json").read_text())["thinker_config"]["text_config"]["rope_scaling"]
        for x in (authors, tmp_path / "like", tmp_path / "new")
    )
    assert now == was
    assert other["mrope_section"] == [24, 20, 20], "the authors' code fails without sections"
    assert model_config(tmp_path / "new") == model_config(plain)
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert_identical(tensors(tmp_path / "out"), tensors(plain))


@pytest.mark.parametrize("prefix", ["model.language_model.", ON_DISK])
def test_granite_speech_with_lora_in_files_of_its_own(prefix, tmp_path, capsys):
    """It stays LoRA in a run of the folder alone and in an export; in another run it is merged."""
    folder = add_adapter(write_published("granite_speech", tmp_path / "published"), prefix)
    plain = merged(folder, tmp_path / "plain")
    adapt = published_config([folder]).adapt
    assert (adapt.lora_rank, adapt.lora_alpha, len(adapt.lora_targets)) == (3, 5.0, 2)
    config = Config(model=model_config(folder))
    found = {}
    for source, lora in ((folder, adapt), (folder, AdaptConfig()), (plain, AdaptConfig())):
        blueprint = Blueprint(replace(config, adapt=lora))
        weights = load_weights([str(source)], blueprint, make_mesh(config.mesh))
        params, _ = merge_lora(weights.params, blueprint.config)
        found[source, bool(lora.lora_rank)] = named_weights(weights._replace(params=params))
    want = found.pop((plain, False))
    assert_same(found[folder, True], want, 1e-6)
    assert_same(found[folder, False], want, 1e-6)

    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    again, original = (change_names(tensors(x), prefix) for x in (tmp_path / "out", folder))
    assert_identical(again, original)
    assert open_checkpoint(tmp_path / "out").lora == adapt
    assert json.loads((tmp_path / "out" / "config.json").read_text())["has_lora_adapter"] is True


def test_granite_speech_s_lora_is_on_with_audio_alone(tmp_path):
    """Beside it in one buffer, text by itself is what the library computes without LoRA."""
    folder = add_adapter(write_published("granite_speech", tmp_path / "published"), ON_DISK)
    arrays, order = load_reference("granite_speech"), [3, 2, 0]
    found, with_lora = (
        Published.of(arrays, x).run(order)[1] for x in (folder, merged(folder, tmp_path / "merged"))
    )
    assert not arrays["seconds.3"].size
    assert_same(found[0], arrays["logits.3"], 2e-5)
    assert_same(found[1:], with_lora[1:], 1e-6)
    assert not np.allclose(found[0], with_lora[0], atol=1e-3)


def change_names(named: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Tensors with the decoder's names in the adapter's file as they are in others."""
    start = "base_model.model."
    return {name.replace(f"{start}{prefix}", f"{start}{ON_DISK}"): x for name, x in named.items()}
