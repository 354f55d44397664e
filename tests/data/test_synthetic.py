import json
import os
import re
import sys
import time

import numpy as np
import pytest

from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.sources import synthetic
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import Containers, SourceSetting
from jaxthd.data.sources.synthetic import synthetic_manifests
from jaxthd.data.text.synthetic import ENGLISH, GERMAN, NAMES, SPANISH, Words
from jaxthd.data.text.synthetic_tasks import (
    conversed,
    dictated,
    held_out,
    interrupted,
    questioned,
    telephoned,
)
from jaxthd.errors import UserError
from jaxthd.models.front_ends.log_mel import log_mel
from jaxthd.rl.rewards.values import equals
from tests.data.sets import read_manifest
from tests.rl.rewards.groups import group


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """150 + 40 utterances: {split: [(line of the manifest, samples)]}."""
    manifests = synthetic_manifests(150, 40, seed=3, cache_dir=tmp_path_factory.mktemp("cache"))
    out = {}
    for split, path in zip(("train", "validation"), manifests, strict=True):
        utterances, skipped = read_manifest(path)
        assert not skipped
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        clips = [clip for u in utterances for clip in u.clips]
        samples = [load_audio(clip.path, clip.offset, clip.duration) for clip in clips]
        out[split] = list(zip(lines, samples, strict=True))
    return out


def test_its_container_is_its_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "user_cache", lambda: tmp_path)
    monkeypatch.setitem(synthetic.SETS, "", synthetic.SETS[""]._replace(train=2, validation=1))
    source = open_source(SourceSetting("synthetic"))
    assert source.containers() == Containers(1, 1)
    assert [path.name for path in source.files()] == ["manifest.jsonl"]


def test_counts_and_durations_are_as_the_manifests_say(made):
    assert {split: len(items) for split, items in made.items()} == {"train": 150, "validation": 40}
    for line, samples in made["train"] + made["validation"]:
        assert line["duration"] == len(samples) / 16_000
        assert 0.5 <= line["duration"] < 10


def test_lengths_are_skewed_short_with_a_long_tail(made):
    durations = np.array([line["duration"] for line, _ in made["train"]])
    assert 1.0 < np.median(durations) < 2.0
    assert np.median(durations) < durations.mean()
    assert durations.max() > 2.5 * np.median(durations)


def test_validation_texts_and_voices_do_not_occur_in_training(made):
    texts, voices, variants = (
        {split: {get(u) for u, _ in items} for split, items in made.items()}
        for get in (
            lambda u: u["text"],
            lambda u: u["voice"],
            lambda u: u["voice"].split("+")[1],
        )
    )
    for found in (texts, voices, variants):
        assert not found["train"] & found["validation"]
    assert len(voices["train"]) > 20
    assert len(voices["validation"]) > 8
    assert len(texts["train"]) > 75


def test_texts_are_lower_case_words(made):
    for line, _ in made["train"] + made["validation"]:
        assert line["text"] == " ".join(line["text"].lower().split())
        assert all(word.isalpha() for word in line["text"].split())


def test_recordings_hold_speech_of_moderate_level(made):
    for line, samples in made["train"] + made["validation"]:
        assert 0.15 < np.abs(samples).max() < 0.95
        loud = np.abs(samples) > 0.1 * np.abs(samples).max()
        seconds = np.ptp(np.flatnonzero(loud)) / 16_000
        assert seconds > 0.05 * len(line["text"].split())
        assert np.isfinite(log_mel(samples, 80)).all()


def test_every_voice_sounds_different():
    with synthetic._espeak() as say:
        heard = {}
        for accent in synthetic._ACCENTS:
            for variant in sum(synthetic._VARIANTS.values(), ()):
                speech = say("three five nine", f"{accent}+{variant}", 160, 50)
                heard[accent, variant] = log_mel(speech, 80)[20:50]
    names = list(heard)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert np.abs(heard[a] - heard[b]).mean() > 0.02, (a, b)


def test_an_unknown_voice_is_refused():
    with synthetic._espeak() as say:
        for voice in ("gmw/en+nobody", "nowhere+m1"):
            with pytest.raises(RuntimeError, match="has no voice"):
                say("one", voice, 160, 50)


def test_the_same_arguments_make_the_same_files_even_in_a_process_that_has_spoken(tmp_path):
    folders = []
    for name in ("first", "second"):
        time.sleep(1.1 * len(folders))  # espeak-ng seeds its noise with the second of its start
        train, _ = synthetic_manifests(6, 3, seed=5, cache_dir=tmp_path / name)
        folders.append(train.parents[1])
    files = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    assert len(files[0]) == 6 + 3 + 2
    assert files[0] == files[1]


def test_another_seed_makes_other_texts(tmp_path):
    texts = [synthetic_manifests(8, 1, seed, tmp_path)[0].read_text() for seed in (0, 1)]
    assert texts[0] != texts[1]


def test_a_cached_set_needs_no_espeak(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = synthetic_manifests(2, 1)
    assert made[0].is_relative_to(tmp_path / "jaxthd")
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    assert synthetic_manifests(2, 1) == made
    with pytest.raises(ImportError, match=r"pip install 'jaxthd\[demo\]'"):
        synthetic_manifests(3, 1)
    assert os.listdir(tmp_path / "jaxthd") == [made[0].parents[1].name]


def test_an_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    write = synthetic._utterance
    monkeypatch.setattr(synthetic, "_utterance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        synthetic_manifests(2, 1, cache_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_two_processes_that_make_the_same_set_both_get_it(tmp_path, monkeypatch):
    """The other process finishes while this one is still writing."""

    def overtaken(*arguments):
        monkeypatch.setattr(synthetic, "_utterance", write)
        synthetic_manifests(2, 1, cache_dir=tmp_path)
        return write(*arguments)

    write = synthetic._utterance
    monkeypatch.setattr(synthetic, "_utterance", overtaken)
    train, validation = synthetic_manifests(2, 1, cache_dir=tmp_path)
    assert len(read_manifest(train)[0]) == 2
    assert len(read_manifest(validation)[0]) == 1
    assert len(os.listdir(tmp_path)) == 1


def test_sums_have_an_answer_and_no_transcript(tmp_path):
    train, validation = synthetic_manifests(12, 6, cache_dir=tmp_path, kind="sums")
    voices = []
    for path in (train, validation):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        examples, skipped = read_manifest(path, prompts=True)
        assert not skipped
        assert all(example.is_unanswered for example in examples)
        assert all(0 <= line["answer"] <= 18 and "text" not in line for line in lines)
        assert len({line["answer"] for line in lines}) > 2
        voices.append({line["voice"].split("+")[1] for line in lines})
    assert not voices[0] & voices[1]
    answered, _ = synthetic_manifests(12, 1, cache_dir=tmp_path, kind="sums-answered")
    for line in map(json.loads, answered.read_text().splitlines()):
        (right,) = equals(group(line["text"], answer=line["answer"]), field="answer")
        assert right == 1.0, line
    with pytest.raises(UserError, match="synthetic:sums"):
        open_source(SourceSetting("synthetic:products"))


def test_an_empty_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train=0"):
        synthetic_manifests(0, 1, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("kind", "words", "language", "accent"),
    [("spanish", SPANISH, "es", "roa/es"), ("german", GERMAN, "de", "gmw/de")],
)
def test_other_languages_have_their_words_and_their_accents(
    tmp_path, kind: str, words: Words, language: str, accent: str
):
    """Of voices and texts that are not in training too."""
    manifests = synthetic_manifests(40, 12, cache_dir=tmp_path, kind=kind)
    train, validation = ([json.loads(line) for line in path.read_text().splitlines()] for path in manifests)
    phrases = (*words.digits, *words.single, *words.verbs, *words.things, *words.endings, words.joint)
    known = {word for phrase in phrases for word in phrase.split()}
    assert len(train) == 40
    for line in train + validation:
        assert set(line["text"].split()) <= known
        assert line["language"] == language
        assert line["voice"].startswith(accent)
    assert not {line["text"] for line in train} & {line["text"] for line in validation}
    assert not {x["voice"].split("+")[1] for x in train} & {x["voice"].split("+")[1] for x in validation}


SPLITS = ("train", "validation")


def test_each_question_has_the_answer_that_is_said():
    """Found from the words that are said, in another way than they were drawn."""
    rng, asked = np.random.default_rng(0), set()
    for n in range(400):
        ((_, said),), fields, *_ = questioned(rng, SPLITS[n % 2])
        assert held_out(said) == bool(n % 2)
        question, answer = fields["context"], fields["text"]
        asked.add(question)
        if question == "how many":
            assert ENGLISH.digits[len(said.split())] == answer
        elif question in ("first", "do what"):
            assert said.startswith(f"{answer} ")
        elif question in ("last", "and"):
            assert said.endswith(f" {answer}")
        else:
            assert f" the {answer} " in said
    assert asked == {"first", "last", "how many", "do what", "which thing", "and"}


def test_lists_have_the_names_that_are_said_and_never_one_that_sounds_alike():
    other = {a: b for pair in NAMES for a, b in (pair, pair[::-1])}
    rng, counts = np.random.default_rng(0), set()
    for n in range(400):
        ((_, said),), fields, *_ = telephoned(rng, SPLITS[n % 2], listed=True)
        assert fields["text"] == said
        listed, names = fields["context"].split(), set(said.split()) & set(other)
        assert names <= set(listed)
        assert not {other[name] for name in listed} & set(listed)
        counts.add((len(names), len(listed)))
    assert counts == {(0, 1), (0, 2), (0, 3), *((1, n) for n in range(1, 5)), *((2, n) for n in range(2, 6))}


def test_a_list_changes_nothing_of_what_is_heard(tmp_path):
    plain, listed = (
        synthetic_manifests(6, 3, cache_dir=tmp_path, kind=kind) for kind in ("telephone", "telephone-lists")
    )
    for one, other in zip(plain, listed, strict=True):
        for a, b in zip(one.read_text().splitlines(), other.read_text().splitlines(), strict=True):
            without, with_list = json.loads(a), json.loads(b)
            assert with_list.pop("context")
            assert without == with_list
            path = with_list["audio_filepath"]
            assert (one.parent / path).read_bytes() == (other.parent / path).read_bytes()


def test_names_that_are_pairs_sound_alike_in_every_accent():
    """Each by an espeak-ng of its own, whose noise begins anew."""
    spoken: list[dict[str, bytes]] = []
    for side in (0, 1):
        with synthetic._espeak() as say:
            for accent in synthetic._ACCENTS:
                spoken.append({"/".join(p): say(p[side], f"{accent}+m1", 160, 50).tobytes() for p in NAMES})
    count = len(synthetic._ACCENTS)
    for first, second in zip(spoken[:count], spoken[count:], strict=True):
        assert [name for name in first if first[name] != second[name]] == []


def test_a_transcript_names_the_speaker_where_the_speaker_changes():
    rng, counts = np.random.default_rng(0), set()
    for n in range(200):
        parts, fields, *_ = conversed(rng, SPLITS[n % 2])
        said = [(int(name[2]) - 1, text) for name, text in re.findall(r"(\[S\d\]) ([^[]+)", fields["text"])]
        merged: list[tuple[int, str]] = []
        for speaker, text in parts:
            if merged and merged[-1][0] == speaker:
                merged[-1] = (speaker, f"{merged[-1][1]} {text}")
            else:
                merged.append((speaker, text))
        assert merged == [(speaker, text.strip()) for speaker, text in said]
        assert merged[0][0] == 0
        counts.add((len(parts), len(merged)))
    assert counts == {(n, m) for n in range(1, 5) for m in range(1, n + 1)}


def test_speakers_of_a_recording_differ_and_pauses_are_heard(tmp_path):
    """Where there is noise, it is there in the pauses too."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        voices = synthetic._voices(rng, "validation", synthetic._ACCENTS, 2)
        assert len({voice.name.split("+")[1] for voice in voices}) == 2
    for kind in ("speakers", "pauses"):
        for path in synthetic_manifests(12, 6, cache_dir=tmp_path, kind=kind):
            examples, skipped = read_manifest(path)
            assert not skipped
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line, example in zip(lines, examples, strict=True):
                (clip,) = example.clips
                samples = load_audio(clip.path, clip.offset, clip.duration)
                speakers = len(set(re.findall(r"\[S\d\]", line["text"]))) or 1
                assert len(line["voice"].split()) == speakers
                silence = np.diff(np.flatnonzero(np.abs(samples) > 1e-4)).max()
                if kind == "pauses":
                    assert silence < 500
                    assert line["duration"] > interrupted(rng, "train").pauses[0] + 0.5
                elif " [S" in line["text"]:
                    assert silence > 0.14 * 16_000


def test_dictations_are_texts_in_a_row_that_begin_and_end_anywhere():
    rng, counts, longest, inside = np.random.default_rng(0), set(), 0, 0
    verbs = {verb.split()[0] for verb in ENGLISH.verbs}
    for n in range(300):
        spoken = dictated(rng, SPLITS[n % 2])
        texts = [text for _, text in spoken.parts]
        assert spoken.fields["text"] == " ".join(texts)
        assert held_out(spoken.fields["text"]) == bool(n % 2)
        counts.add(len(texts))
        longest = max(longest, *(len(text.split()) for text in texts))
        inside += " the " in f" {texts[0]} " and texts[0].split()[0] not in verbs
        inside += texts[-1].split()[-1] == "the"
    assert counts >= set(range(1, 8))
    assert longest >= 8
    assert inside > 10


def test_dictations_of_all_paces_are_up_to_12_seconds_of_one_voice_with_short_pauses(tmp_path):
    lengths = []
    for path in synthetic_manifests(30, 10, cache_dir=tmp_path, kind="dictated"):
        examples, skipped = read_manifest(path)
        assert not skipped
        for line, example in zip(path.read_text().splitlines(), examples, strict=True):
            assert len(json.loads(line)["voice"].split()) == 1
            (clip,) = example.clips
            samples = load_audio(clip.path, clip.offset, clip.duration)
            lengths.append(len(samples) / 16_000)
            assert np.diff(np.flatnonzero(np.abs(samples) > 1e-3)).max() < 0.8 * 16_000
    assert max(lengths) < 15
    assert np.ptp(lengths) > 8
