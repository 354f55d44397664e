"""The planner: its lengths are the loader's, its recommendations hold, and its report can be pasted."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.config import (
    AugmentConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Example
from jaxthd.data.mismatched import WithMismatched
from jaxthd.data.skipped import Skipped
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.models.blocks import MLP, Mamba2
from jaxthd.packing.fit import BufferLimits
from jaxthd.plan import main
from jaxthd.planning import lengths as lengths_module
from jaxthd.planning.lengths import Lengths, clip_samples, draw, measure, read_examples
from jaxthd.planning.report import describe_plan
from jaxthd.planning.search import TOLERANCE, make_plan, percentiles
from jaxthd.planning.simulate import simulate
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import size_text
from jaxthd.validate import DeviceFacts, findings
from tests.data.sets import read_manifest

MODEL = ModelConfig(
    encoder=EncoderConfig(
        num_mels=16, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8, chunk_seconds=1.0
    ),
    llm=LLMConfig(
        pattern="M*-", dim=16, blocks={"-": MLP(inner=16), "M": Mamba2(heads=2, head_dim=8, groups=1)}
    ),
)
DATA = DataConfig(
    capacity=256,
    audio_capacity=1024,
    max_documents=9,
    template="chatml",
    system_prompt="Listen.",
    prompt="Say: {audio}",
    validation_manifest="",
)
CONFIG = Config(data=DATA, model=MODEL)
RATES = (16000, 8000, 11025, 44100)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 lines: utterances, ranges of files and conversations; every sample rate; with and without durations.
    Six more lines cannot be used."""
    folder, rng = tmp_path_factory.mktemp("speech"), np.random.default_rng(0)
    for i in range(25):
        rate = RATES[i % len(RATES)]
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(rate * rng.uniform(0.3, 4))), rate)
    soundfile.write(folder / "short.wav", np.zeros(300), 16000)
    lines: list[dict] = []
    for i in range(25):
        seconds = soundfile.info(folder / f"{i}.wav").duration
        whole = {"audio_filepath": f"{i}.wav", "text": "é" * int(rng.integers(1, 30))}
        offset = round(seconds * rng.uniform(0, 0.5), 3)
        duration = round((seconds - offset) * rng.uniform(0.5, 0.99), 3)
        lines.append({**whole, "offset": offset} if i % 2 else whole)
        said = {"from": "User", "type": "audio", "value": f"{i}.wav", "offset": offset, "duration": duration}
        other = {"from": "User", "type": "audio", "value": f"{(i + 1) % 25}.wav"}
        answer = {"from": "Assistant", "type": "text", "value": "yes"}
        lines.append({"id": f"c{i}", "conversations": [said, answer, *([other, answer] if i % 3 else [])]})
    for name in ("missing.wav", "short.wav"):
        lines.append({"audio_filepath": name, "text": "no"})
    lines += [{"audio_filepath": "0.wav", "text": "<|im_start|>"}, {"audio_filepath": "0.wav"}]
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def examples_of(manifest: Path) -> list[Example]:
    return read_manifest(manifest, prompt=DATA.prompt)[0]


def random_lengths(count: int, audio: bool = True, longest: int = 200) -> Lengths:
    rng = np.random.default_rng(0)
    text = rng.lognormal(2.5, 0.8, count).astype(int).clip(1, 60)
    seconds = rng.lognormal(0.5, 0.8, count).round(2).clip(0.1, longest * 0.05) * audio
    chunks = [
        [8 * -(-int(min(100, 100 * s - 100 * i)) // 8) for i in range(int(np.ceil(s)))] for s in seconds
    ]
    frames = np.array([sum(c) for c in chunks], int)
    return Lengths(text + frames // 8, frames, seconds, chunks)


def test_lengths_are_those_of_the_loaders_documents(manifest):
    config = replace(CONFIG, data=replace(DATA, audio_capacity=10**6))
    examples = examples_of(manifest)
    make = SpeechDocuments(config, load_tokenizer("bytes"), train=False)
    made = [make(example, 0) for example in examples]
    documents = [d for d in made if not isinstance(d, Skipped)]
    lengths, unusable = measure(examples, config)
    assert (len(documents), unusable) == (50, 3)
    assert lengths.tokens.tolist() == [len(d) for d in documents]
    assert lengths.frames.tolist() == [config.model.audio_encoder.taken(d.pieces) for d in documents]
    assert lengths.pieces == [[-(-len(x.features) // 8) * 8 for x in d.pieces] for d in documents]
    assert lengths.seconds == pytest.approx([sum(len(x.features) for x in d.pieces) / 100 for d in documents])
    assert max(map(len, lengths.pieces)) > 4
    whole = {clip for example in examples[:50] for clip in example.clips if clip.duration is None}
    for clip in whole:
        assert clip_samples(clip) == len(load_audio(clip.path, clip.offset))


def test_lengths_are_those_at_the_speeds_of_the_first_epoch(manifest):
    """But for documents that a speed makes too large, which keep theirs; and objectives of a policy."""
    augment = AugmentConfig(speed=(0.5, 1.0, 1.5))
    config = replace(CONFIG, data=replace(DATA, augment=augment, capacity=120))
    examples, tokenizer = examples_of(manifest), load_tokenizer("bytes")
    make = SpeechDocuments(config, tokenizer, train=True, augmentation=Augmentation(augment))
    made = [make(example, 0) for example in examples]
    lengths, _ = measure(examples, config)
    long = replace(CONFIG, data=replace(DATA, audio_capacity=10**6))
    as_read = measure(examples, long)[0].tokens
    heard = [len(d) for d in made if not isinstance(d, Skipped)]
    assert [n for n in lengths.tokens.tolist() if n <= 120] == [n for n in heard if n <= 120]
    assert (lengths.tokens > as_read).any()
    assert (lengths.tokens < as_read).any()
    slow = replace(config, data=replace(config.data, augment=AugmentConfig(speed=(0.5,))))
    kept = (measure(examples, slow)[0].tokens == as_read) & (as_read <= 120)
    assert kept.any(), "documents that half the speed makes too large"
    policy = replace(config, train=TrainConfig(objective="grpo"))
    assert measure(examples, policy)[0].tokens.tolist() == as_read.tolist()


def test_the_plan_counts_mismatched_answers(tmp_path):
    """They are those of the loader's first epoch, over both sets."""
    manifests = []
    for number in range(2):
        lines = [
            {"prompt": "p" * i, "completion": "a" * (3 * i + number), "label": bool(i % 2)}
            for i in range(1, 9)
        ]
        manifests.append(tmp_path / f"{number}.jsonl")
        manifests[-1].write_text("".join(json.dumps(x) + "\n" for x in [*lines, {"text": "no preference"}]))
    own = replace(CONFIG, data=replace(DATA, manifest=tuple(map(str, manifests))))
    kto = replace(own, train=TrainConfig(objective="kto", objective_options=("kl=mismatched",)))
    plain = replace(own, train=TrainConfig(objective="kto"))
    found = [list(chain(*(measure(x, c)[0].tokens for x in read_examples(c)))) for c in (plain, kto)]
    mixed = WithMismatched(list(chain(*read_examples(plain))), kto.data.seed)
    make = SpeechDocuments(kto, load_tokenizer("bytes"), train=False)
    made = [make(mixed.of_epoch(i, 0), 0) for i in range(len(mixed))]
    assert found[1] == [BufferLimits.of(kto).slots(document) for document in made]
    assert sum(found[1]) > sum(found[0])
    assert len(found[0]) == 16, "the lines without a preference are left out"


def test_a_stream_holds_whole_epochs_or_follows_the_weights(monkeypatch):
    monkeypatch.setattr(lengths_module, "LEAST_DRAWN", 3000)
    few, many = random_lengths(7), random_lengths(13)
    few = few._replace(tokens=np.arange(7))
    many = many._replace(tokens=np.arange(7, 20))
    whole = draw([few, many], DataConfig())
    assert np.bincount(whole.tokens).tolist() == [150] * 20
    assert whole.tokens[:20].tolist() != whole.tokens[20:40].tolist()
    drawn = draw([few, many], DataConfig(weights=(3.0, 1.0)))
    counts = np.bincount(drawn.tokens)
    assert counts[:7].sum() == pytest.approx(2250, rel=0.05)
    assert np.ptp(counts[:7]) <= 1
    assert np.ptp(counts[7:]) <= 1
    frames = np.concatenate([few.frames, many.frames])
    assert drawn.frames.tolist() == frames[drawn.tokens].tolist()
    assert drawn.pieces == [[*few.pieces, *many.pieces][i] for i in drawn.tokens]
    with pytest.raises(UserError, match=r"\[7, 0\] usable documents"):
        draw([few, Lengths(np.zeros(0, int), np.zeros(0, int), np.zeros(0), [])], DataConfig())


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(context=2), MeshConfig(context=4, tensor=2)])
def test_everything_proposed_is_valid_and_the_recommendation_skips_nothing(mesh):
    config = replace(CONFIG, mesh=mesh)
    made = make_plan(random_lengths(600), config, 200)
    device = DeviceFacts(platform="cpu", devices=mesh.devices, kind="cpu")
    tried = [*made.by_capacity, *made.by_audio, *made.by_packer, made.recommended]
    for outcome in tried:
        found = [p for p in findings(outcome.config, device) if not p.is_warning and "data." in str(p)]
        assert not found, outcome.config
    best = made.recommended
    assert best.skipped == 0
    assert best.overhead <= min(o.overhead for o in made.by_packer) + TOLERANCE
    assert best.overhead < made.in_order.overhead
    assert made.by_length.overhead < made.in_order.overhead
    again = simulate(made.stream, best.config, made.work)
    assert again == best
    assert best.documents.max() <= best.data.max_documents


def test_the_configured_capacity_is_kept_unless_it_costs():
    lengths = random_lengths(600)
    kept = make_plan(lengths, replace(CONFIG, data=replace(DATA, capacity=1024)), 200)
    assert kept.recommended.data.capacity == 1024
    raised = make_plan(lengths, replace(CONFIG, data=replace(DATA, capacity=32)), 200)
    assert raised.recommended.data.capacity >= lengths.tokens.max() > 32 * 4
    assert raised.configured.skipped > 0


def test_weights_are_as_many_as_manifests():
    with pytest.raises(UserError, match="1 manifests and 2 weights"):
        read_examples(replace(CONFIG, data=replace(DATA, weights=(1.0, 2.0))))


def test_text_alone_needs_no_audio_capacity():
    made = make_plan(random_lengths(400, audio=False), CONFIG, 400)
    assert made.recommended.data.audio_capacity == 0
    assert "Audio capacities" not in describe_plan(made)


def test_a_long_tail_of_documents_a_buffer_is_bounded_where_that_is_cheap():
    """One buffer in five hundred holds a series of the shortest documents."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(4000) < 0.5, 60, 3)
    tokens[2000:2020] = 1
    stream = Lengths(tokens, 0 * tokens, 0.0 * tokens, [[]] * 4000)
    made = make_plan(stream, replace(CONFIG, data=replace(DATA, capacity=240)), 4000)
    *_, p99, most = percentiles(made.by_maximum[-1].documents)
    assert p99 <= made.recommended.data.max_documents < most


def test_the_report_prices_documents_in_cudnns_workspace():
    """Heads x tokens x dims of a rank, 8 bytes, once for each document and once for padding."""
    made = make_plan(random_lengths(300), replace(CONFIG, mesh=MeshConfig(context=2, tensor=2)), 200)
    lines = [line.split() for line in describe_plan(made).splitlines()]
    for outcome in made.by_maximum:
        data = outcome.data
        expected = size_text(8 * (data.max_documents + 1) * 2 * (data.rows * data.capacity // 2) * 32)
        row = next(words for words in lines if words[:1] == [str(data.max_documents)] and words[1][-1] == "%")
        assert " ".join(row).endswith(expected)
    without = replace(CONFIG, model=replace(MODEL, llm=replace(MODEL.llm, pattern="M-")))
    assert "cuDNN" not in describe_plan(make_plan(random_lengths(300), without, 200))


def test_the_command_prints_settings_that_can_be_pasted_and_draws(manifest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lengths_module, "LEAST_DRAWN", 500)
    monkeypatch.setattr(lengths_module, "MOST_READ", 40)
    tiny, picture = tmp_path / "tiny.py", tmp_path / "plan.png"
    tiny.write_text("from tests.test_plan import CONFIG\n\n\ndef config():\n    return CONFIG\n")
    options = ["--config", str(tiny), "--data.manifest", str(manifest), "--mesh.context", "2"]
    main([*options, "--out", str(picture)])
    text = capsys.readouterr().out
    assert "53 documents, 1 lines skipped" in text
    assert "a random sample of 40 of 53 documents" in text
    assert "context ranks over the mean" in text
    lines = text.splitlines()
    flags = [word for x in lines if x.startswith("  --data.") for word in x.strip().split("  ")[0].split()]
    assert len(flags) == 10
    pasted = parse_command_line("train", [*options, *flags])[0].data
    (line,) = (x for x in lines if x.startswith("  DataConfig("))
    data = eval(line, {"DataConfig": DataConfig})
    names = ("capacity", "audio_capacity", "max_documents", "packing", "packing_bins")
    assert [getattr(pasted, n) for n in names] == [getattr(data, n) for n in names]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
