"""The skip log: each item once, under the manifest it is of, whatever happened to the run."""

import json
from pathlib import Path

from jaxthd.data.skipped import Listed, SkipLog, main_reasons


def test_each_item_is_listed_once_under_its_manifest(tmp_path: Path):
    log = SkipLog(tmp_path / "skipped.jsonl")
    training, validation = Listed(log, ["a.jsonl", "b.jsonl"]), Listed(log, ["c.jsonl"])
    for _ in range(2):
        training("3:x/1:y.wav", "broken")
        training("1/3:x/1:y.wav", "other")
        validation("3:x/1:y.wav", "third")
    training("1/4:", "not JSON")
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [tuple(line.values()) for line in lines] == [
        ("a.jsonl", "3:x/1:y.wav", "broken"),
        ("b.jsonl", "3:x/1:y.wav", "other"),
        ("c.jsonl", "3:x/1:y.wav", "third"),
        ("b.jsonl", "4:", "not JSON"),
    ]
    assert len(log) == 4


def test_the_log_survives_a_kill_and_counts_what_this_run_left_out(tmp_path: Path):
    path = tmp_path / "skipped.jsonl"
    for _ in range(2):
        log = SkipLog(path)
        Listed(log, ["train"])("1:a.wav", "broken")
        Listed(log, ["validation"])("1:a.wav", "broken")
        assert len(log) == 2
        with path.open("a") as file:
            file.write('{"manifest": "train", "key": "2:b')
    later = SkipLog(path)
    assert len(later) == 0
    assert len(path.read_text().splitlines()) == 2
    Listed(later, ["train"])("3:c.wav", "other")
    Listed(later, ["train"])("3:c.wav", "other")
    assert later.total == 3
    assert later.reasons(["train"]) == ["broken", "other"], "of the whole run"
    assert later.reasons(["train"], this_call=True) == ["other"]
    assert (later.count(["train", "validation"]), later.count(["validation"])) == (1, 0)


def test_a_log_that_does_not_write_hands_over_what_another_lists(tmp_path: Path):
    path = tmp_path / "skipped.jsonl"
    listing, other = SkipLog(path), SkipLog(path, writes=False)
    for log in (listing, other):
        Listed(log, ["a"])("1:x", "broken")
    for _ in range(2):
        Listed(other, ["a"])("2:y", "other")
    news = other.news()
    assert news == [["a", "1:x", "broken"], ["a", "2:y", "other"]]
    assert other.news() == listing.news() == []
    for item in news:
        listing.add(*item)
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["1:x", "2:y"]
    assert len(listing) == 2


def test_alike_reasons_are_counted_together():
    long = [f"a/{n}.wav: more than 25.6 s, which is all that data.audio_capacity holds" for n in range(4)]
    slots = [f"its {n} token slots exceed the capacity of 128" for n in (130, 200)]
    reasons = ["not JSON", *slots, *long, "a line without text"]
    assert main_reasons(reasons) == (
        "… more than 25.6 s, which is all that data.audio_capacity holds (4); "
        "its … token slots exceed the capacity of 128 (2); not JSON (1); other reasons (1)"
    )
    assert main_reasons(long[:1]) == f"{long[0]} (1)"
    assert main_reasons([]) == ""
