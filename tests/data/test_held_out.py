"""A share of one's own data that is held out: which items, by what, what is trained on, how a run goes on."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig, TrainConfig
from jaxthd.config.values import UnsetText
from jaxthd.data.dataset import SpeechData
from jaxthd.data.loader import Loader
from jaxthd.data.sources.held_out import share_for
from jaxthd.data.sources.registry import training_sources, validation_sources
from jaxthd.errors import UserError
from jaxthd.files.run_folder import read_config, write_config
from jaxthd.planning.held_out import with_held_out
from jaxthd.terminal.arguments import parse_command_line
from tests.data.sets import sound, write_parquet

FIRST, MORE = 60, 25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Recordings under many names, of the same sound."""
    wave = np.random.default_rng(0).normal(0, 0.1, 8000)
    for number in range(FIRST + MORE):
        soundfile.write(tmp_path / f"{number}.wav", wave, 16000)
    return tmp_path


def manifest(path: Path, numbers: Sequence[int], **more: Any) -> Path:
    entries = [{"audio_filepath": f"{n}.wav", "text": "uno " * (1 + n % 3), **more} for n in numbers]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def config(*manifests: Path, **data: Any) -> Config:
    defaults: dict[str, Any] = {"workers": 0, "capacity": 64, "packing_bins": 2, "rows": 2}
    return Config(
        data=DataConfig(manifest=tuple(map(str, manifests)), **defaults | data),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )


def names(keys: Sequence[str]) -> list[str]:
    return [key.rpartition(":")[2] for key in keys]


def take(loader: Loader, batches: int) -> list[str]:
    return [key for _, report in islice(loader, batches) for row in report.keys for key in row]


def sides(data: DataConfig) -> tuple[list[list[str]], list[str]]:
    """(names of the training items of each set, names of those that are held out)."""
    training = training_sources(data)
    kept = [names([x.key for x in source.read(data)[0]]) for source in training]
    (held,) = validation_sources(data, training).values()
    return kept, names([x.key for x in held.read(data)[0]])


# --- which items ---


@pytest.mark.parametrize(
    ("items", "least", "most"), [(2, 1, 1), (3, 1, 1), (44, 8, 9), (600, 50, 50), (9_000, 450, 450)]
)
def test_a_twentieth_is_held_out_and_more_of_a_small_set(items: int, least: int, most: int):
    places = np.random.default_rng(items).random(items)
    share = share_for(places.tolist())
    assert least <= (places < share).sum() <= most
    assert len(repr(share)) <= 12


def test_a_large_set_gives_a_thousand_items_and_one_recording_none():
    places = np.random.default_rng(0).random(50_000)
    assert (places < share_for(places.tolist())).sum() == 1000
    assert share_for([0.5]) == share_for([0.3] * 90) == share_for([]) == 0
    assert share_for([0.2] * 9 + [0.1]) == 0.101  # the one item of a recording of its own
    assert share_for([0.1] * 9 + [0.2]) == 0, "the first recording has more than half"


def test_a_name_decides_whatever_the_order_and_what_is_added(folder: Path):
    data = config(manifest(folder / "m.jsonl", range(FIRST))).data
    held = set(sides(data)[1])
    share = f"held_out:{share_for_names(data)}"
    assert held == set(sides(replace(data, validation_manifest=share))[1])
    backwards = [*range(FIRST, FIRST + MORE), *range(FIRST - 1, -1, -1)]
    grown = config(manifest(folder / "n.jsonl", backwards), validation_manifest=share).data
    (kept,), now = sides(grown)
    assert {name for name in now if int(name.split(".")[0]) < FIRST} == held
    assert not held & set(kept)
    assert len(kept) + len(now) == FIRST + MORE


def share_for_names(data: DataConfig) -> float:
    training: Any = training_sources(data)
    return training[0].division.share


def test_the_parts_of_a_recording_and_its_transcripts_stay_together(folder: Path):
    lines = [
        {"audio_filepath": f"{n}.wav", "offset": 0.1 * part, "duration": 0.1, "text": f"{part}"}
        for part in range(4)
        for n in range(30)
    ]
    path = folder / "parts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (kept,), held = sides(config(path).data)
    assert not set(kept) & set(held)
    assert {held.count(name) for name in held} == {4}


def test_rows_of_a_table_and_lines_without_names_are_told_by_their_numbers(folder: Path):
    held = {"bytes": sound(0.2), "path": None}
    table = write_parquet(folder / "t.parquet", [{"audio": held, "text": f"{n}"} for n in range(40)])
    chats = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(40)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for each in (table, path):
        (kept,), held_names = sides(config(each).data)
        assert (len(kept), len(held_names)) == (32, 8)


# --- what is trained on ---


def test_what_is_held_out_is_never_trained_on_and_all_else_is(folder: Path, capsys: pytest.CaptureFixture):
    """Of two sets, one with faulty lines: over two epochs, and of each skipped item once."""
    first, second = manifest(folder / "a.jsonl", range(40)), manifest(folder / "b.jsonl", range(40, 60))
    with second.open("a") as file:
        file.write('{"audio_filepath": "gone.wav", "text": "x"}\n{"text": "none"}\n')
    settings = config(first, second, validation_manifest="held_out:0.3", max_skipped_share=0.2)
    data = SpeechData(settings, folder)
    said = capsys.readouterr().out
    held = [example.key for example in data.validation_examples("held_out")]
    with data.validation(name="held_out") as loader:
        heard = take(loader, 1000)
    assert sorted(heard) == sorted(held)
    assert len(set(held)) == len(held)
    with data.training() as loader:
        trained = take(loader, 60)
    everything = {f"{n}.wav" for n in range(60)}
    assert not set(names(trained)) & set(names(held))
    assert set(names(trained)) | set(names(heard)) == everything
    assert f"held out of {first}, {second} (validation): {len(held)} items" in said
    listed = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert sorted(names([line["key"] for line in listed])) == ["", "gone.wav"]


def test_another_command_finds_the_same_items_without_the_training(folder: Path):
    settings = config(manifest(folder / "m.jsonl", range(FIRST)), validation_manifest="held_out:0.2")
    both, alone = (SpeechData(settings, folder, training=training) for training in (True, False))
    keys = [[example.key for example in data.validation_examples("held_out")] for data in (both, alone)]
    assert keys[0] == keys[1]
    assert both.validation_digests == alone.validation_digests


def test_a_side_without_an_item_is_an_error(folder: Path):
    path = manifest(folder / "m.jsonl", range(10))
    for share, side in (("0.001", "holds out no item"), ("0.999", "leaves no item")):
        with pytest.raises(UserError, match=rf"the share {share} .* {side} of .*m\.jsonl; expected some"):
            SpeechData(config(path, validation_manifest=f"held_out:{share}"), folder)
    with pytest.raises(UserError, match=r"nothing can be held out of .*: set data\.validation_manifest to"):
        SpeechData(config(manifest(path, [3, 3, 3])), folder)


# --- how a run keeps it ---


def test_a_new_run_says_the_share_and_goes_on_with_it_where_the_data_has_grown(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """What is held out stays so, the epoch under way ends as it began, and later ones have the new items."""
    path, run = manifest(folder / "m.jsonl", range(FIRST)), folder / "run"
    given = config(path)
    begun = with_held_out(given, run)
    share = begun.data.held_out_share
    assert share
    said = capsys.readouterr().out
    assert f"held_out:{share}: 12 of 60 items of {path} are held out for validation" in said
    run.mkdir()
    write_config(run, begun)
    (run / "checkpoints" / "1").mkdir(parents=True)
    with SpeechData(begun, run).training() as loader:
        take(loader, 2)
        state = json.loads(json.dumps(loader.get_state()))
        wanted = take(loader, 2)
    manifest(path, range(FIRST + MORE))
    again = with_held_out(given, run)
    assert again.data.validation_manifest == read_config(run).data.validation_manifest == f"held_out:{share}"
    data = SpeechData(again, run)
    with data.training() as loader:
        loader.set_state(state)
        found = take(loader, 2)
        assert found == wanted
        later = take(loader, 60)
    held = {example.key for example in data.validation_examples("held_out")}
    assert not held & {*found, *later}
    assert {f"{n}.wav" for n in range(FIRST, FIRST + MORE)} <= {*names(later), *names(list(held))}
    other = replace(again, data=replace(again.data, validation_manifest="held_out:0.5"))
    with (
        SpeechData(other, run).training() as loader,
        pytest.raises(UserError, match="another stream of documents"),
    ):
        loader.set_state(state)


def test_a_run_of_before_keeps_the_validation_that_it_has(folder: Path):
    given, run = config(manifest(folder / "m.jsonl", range(FIRST))), folder / "run"
    run.mkdir()
    write_config(run, replace(given, data=replace(given.data, validation_manifest="synthetic")))
    (run / "checkpoints" / "1").mkdir(parents=True)
    assert with_held_out(given, run).data.validation_manifest == "synthetic"


def test_what_was_chosen_stays(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = manifest(folder / "m.jsonl", range(FIRST))
    for chosen in ("", "synthetic", "dev.jsonl", ("a=dev.jsonl", "b=synthetic"), "held_out:0.25"):
        given = config(path, validation_manifest=chosen)
        assert with_held_out(given, folder / "run") is given
    built_in = Config()
    assert with_held_out(built_in, folder / "run") is built_in
    assert [each.path for each in built_in.data.validation_sets] == ["synthetic"]
    never = replace(config(path), train=TrainConfig(validate_every=0))
    assert with_held_out(never, folder / "run").data.validation_manifest == ""
    assert not any(capsys.readouterr())
    several = with_held_out(config(path, validation_manifest=("own=held_out", "b=dev.jsonl")), folder / "run")
    assert several.data.validation_manifest[0].startswith("own=held_out:0.")
    assert several.data.validation_manifest[1] == "b=dev.jsonl"


def test_without_anything_to_hold_out_a_run_says_that_it_has_no_validation(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    path = manifest(folder / "m.jsonl", [3] * 9)
    assert with_held_out(config(path), folder / "run").data.validation_manifest == ""
    assert "warning: this run has no validation: nothing can be held out of" in capsys.readouterr().err
    (source,) = training_sources(config(path).data)
    assert len(source.read(config(path).data)[0]) == 9, "other commands, such as plan, take all of it too"
    asked = config(path, validation_manifest="held_out")
    assert with_held_out(asked, folder / "run").data.validation_manifest == "held_out"


FILE = """
from jaxthd.config import Config, DataConfig
def config(): return Config(data=DataConfig({}))
"""


@pytest.mark.parametrize(
    ("settings", "flags", "validation"),
    [
        ("", [], None),
        ("", ["--data.manifest", "own.jsonl"], None),
        ("validation_manifest='synthetic'", ["--data.manifest", "own.jsonl"], None),
        ("validation_manifest='synthetic'", ["--data.manifest", "own.jsonl", "synthetic"], "synthetic"),
        ("validation_manifest='synthetic'", ["--data.manifest", "synthetic:sums"], "synthetic"),
        ("validation_manifest=''", ["--data.manifest", "own.jsonl"], ""),
        (
            "manifest=('m.jsonl',), validation_manifest='synthetic'",
            ["--data.manifest", "own.jsonl"],
            "synthetic",
        ),
        (
            "",
            ["--data.manifest", "own.jsonl", "--data.validation-manifest", "synthetic"],
            "synthetic",
        ),
    ],
)
def test_a_command_line_that_replaces_built_in_data_replaces_its_validation(
    settings: str, flags: list[str], validation: str | None, tmp_path: Path
):
    """None: it counts as not given. What a file says of its own data, and what is given beside it, stays."""
    file = tmp_path / "my.py"
    file.write_text(FILE.format(settings))
    found = parse_command_line("train", [str(file), *flags]).config.data
    if validation is None:
        assert isinstance(found.validation_manifest, UnsetText)
        expected = ["held_out"] if flags else ["synthetic"]
        assert [each.path for each in found.validation_sets] == expected
    else:
        assert not isinstance(found.validation_manifest, UnsetText)
        assert found.validation_manifest == validation
