"""The planner: its lengths are the loader's, its recommendations hold, and its report can be pasted."""

import json
import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.__main__ import main as run_command
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
from jaxthd.files.run_folder import read_config
from jaxthd.models.blocks import MLP, Mamba2
from jaxthd.packing.fit import BufferLimits
from jaxthd.plan import main
from jaxthd.planning import lengths as lengths_module
from jaxthd.planning.lengths import Lengths, clip_samples, draw, measure, read_examples
from jaxthd.planning.report import describe_plan, describe_saving, recommended_settings
from jaxthd.planning.search import TOLERANCE, flops_per_slot, make_plan, percentiles
from jaxthd.planning.simulate import simulate
from jaxthd.run.metrics_file import read_metrics
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


def test_the_recommended_buffer_holds_what_is_needed_besides():
    """The longest document of a validation set, for one; in whole units of slots and of the front end."""
    config, lengths = replace(CONFIG, mesh=MeshConfig(context=2)), random_lengths(600)
    best = make_plan(lengths, config, 200).recommended.data
    needed = best.capacity + 1, best.audio_capacity + 1
    more = make_plan(lengths, config, 200, needed).recommended
    assert (more.data.capacity, more.data.audio_capacity) == (best.capacity + 4, best.audio_capacity + 8)
    assert more.overhead == simulate(lengths, more.config, flops_per_slot(config)).overhead


def test_what_is_saved_is_the_work_on_padding():
    lengths = random_lengths(600)
    config = replace(CONFIG, data=replace(DATA, capacity=1024, audio_capacity=9000))
    made = make_plan(lengths, config, 200)
    now, best = made.configured.overhead, made.recommended.overhead
    assert now > best + 0.05
    text = describe_saving(made, config)
    assert text == (
        f"Padding adds {best:.1%} to the work on documents, and {now:.1%} as configured: saves "
        f"{(now - best) / (1 + now):.1%} of a step's work"
    )
    as_recommended = made.recommended.config
    again = make_plan(lengths, as_recommended, 200)
    assert describe_saving(again, as_recommended).endswith("as configured: saves nothing")
    assert not recommended_settings(again, as_recommended)
    unset = Config(model=MODEL)
    assert "with the sizes that a run derives by itself" in describe_saving(
        make_plan(lengths, unset, 200), unset
    )
    assert set(recommended_settings(made, unset)) >= {"capacity", "audio_capacity", "max_documents"}
    small = replace(CONFIG, data=replace(DATA, capacity=16))
    skipped = make_plan(lengths, small, 200)
    share = skipped.configured.skipped
    assert f"0.00% of the documents are skipped, and {share:.2%} as configured" in describe_saving(
        skipped, small
    )


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file in the working folder, whose name a shell would divide; samples are small."""
    monkeypatch.setattr(lengths_module, "LEAST_DRAWN", 500)
    monkeypatch.setattr(lengths_module, "MOST_READ", 40)
    monkeypatch.setattr("jaxthd.plan.MOST_READ", 40)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my tiny.py").write_text(
        "from tests.test_plan import CONFIG\n\n\ndef config():\n    return CONFIG\n"
    )
    return "my tiny.py"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """(the words of the command line that the command begins with, the rest of what it prints)."""
    capsys.readouterr()
    main(list(words))
    first, _, rest = capsys.readouterr().out.partition("\n")
    return shlex.split(first), rest


def test_the_command_begins_with_a_line_that_can_be_pasted(manifest, tiny, capsys):
    """The words that were typed are kept, but for what is recommended in their place."""
    typed = [
        "--mesh.context",
        "2",
        "--data.max_documents",
        "3",
        "--data.seed=5",
        "--data.manifest",
        str(manifest),
    ]
    words, rest = planned(capsys, "--config", tiny, *typed, "--out", "plan.png")
    assert Path("plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert words[:6] == ["jaxthd", "train", tiny, "--mesh.context", "2", "--data.seed=5"]
    assert words.count("--data.max-documents") == 1
    assert len(rest.splitlines()) == 2
    pasted = parse_command_line("train", words[2:]).config
    assert pasted.mesh.context == 2
    assert pasted.data.seed == 5
    assert pasted.data.manifest == (str(manifest),)
    device = DeviceFacts(platform="cpu", devices=2, kind="cpu")
    assert not [x for x in findings(pasted, device) if not x.is_warning and "data." in str(x)]
    again, detailed = planned(capsys, *words[2:], "--details", "--out", "plan.png")
    assert again == words[:2] + words[2:], "what is recommended is kept"
    assert "a step's work" in detailed.splitlines()[0] or "saves nothing" in detailed.splitlines()[0]
    for title in ("Documents", "Capacities ", "Audio capacities ", "Maxima ", "Packers ", "Context layouts "):
        assert f"\n{title}" in detailed
    (line,) = (x for x in detailed.splitlines() if x.startswith("  DataConfig("))
    data = eval(line, {"DataConfig": DataConfig})
    names = ("capacity", "audio_capacity", "max_documents", "packing", "packing_bins")
    assert [getattr(pasted.data, n) for n in names] == [getattr(data, n) for n in names]


def test_documents_of_the_validation_sets_fit(manifest, tiny, capsys):
    """The one that is longer than all others gives the capacity; a set that cannot be read is said."""
    (Path("long.jsonl")).write_text(
        json.dumps({"messages": [{"role": "assistant", "content": "a" * 1500}]}) + "\n"
    )
    sets = ["--data.manifest", str(manifest), "--data.validation-manifest"]
    found = {}
    for name in ("long", "missing"):
        words, _ = planned(capsys, tiny, *sets, f"{name}.jsonl")
        found[name] = parse_command_line("train", words[2:]).config.data.capacity
    assert found["long"] >= 1500 > found["missing"]
    main([tiny, *sets, "missing.jsonl"])
    assert (
        "the validation sets are left out, since they cannot be read: no manifest" in capsys.readouterr().err
    )


def test_progress_goes_elsewhere(manifest, tiny, capsys):
    main([tiny, "--data.manifest", str(manifest)])
    shown = capsys.readouterr()
    assert shown.out.startswith("jaxthd train ")
    assert "53 documents, 1 lines skipped" in shown.err
    assert "a random sample of 40 of 53 documents" in shown.err


@pytest.mark.exhaustive
def test_the_line_trains_and_a_run_keeps_its_sizes(manifest, tiny, tmp_path, capsys, monkeypatch):
    """Pasted, it begins a run of these sizes; from then on another workdir is named."""
    monkeypatch.setattr("jaxthd.run.startup.simulate_devices", lambda devices: True)  # the tests have enough
    shortened = ["--train.steps", "2", "--train.validate-every", "0", "--data.manifest", str(manifest)]
    words, _ = planned(capsys, tiny, *shortened)
    run_command(words[1:])
    workdir = Path("runs") / "my tiny"
    pasted = parse_command_line("train", words[2:]).config.data
    kept = read_config(workdir).data
    assert (kept.capacity, kept.audio_capacity) == (pasted.capacity, pasted.audio_capacity)
    for source in (tiny, str(workdir)):
        words, _ = planned(capsys, source, *shortened)
        assert words[-2:] == ["--workdir", f"{workdir}-2"]
    run_command(words[1:])
    assert len(read_metrics(tmp_path / f"{workdir}-2")) == 2
    words, _ = planned(capsys, tiny, *shortened)
    assert words[-1] == f"{workdir}-3"
