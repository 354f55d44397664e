"""What a run says of unusual steps, and at its end."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxthd.config import Config, DataConfig, ModelConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.objectives import SFT
from jaxthd.run.display import display_of
from jaxthd.run.padding import PaddingWatch, padding_reason
from jaxthd.run.report import end_report

DISPLAY = display_of(SFT())
CONFIG = Config(data=DataConfig(capacity=100, max_documents=8, audio_capacity=1000, rows=2))


def report(*rows: tuple[int, int, float]) -> BatchReport:
    """rows: (documents, real tokens, seconds of audio) of buffers of 100 slots."""
    every = tuple(RowReport(n, d, t, t, 100, s, 1.0, d) for n, (d, t, s) in enumerate(rows))
    return BatchReport(every, tuple((("x",) * row.documents) for row in every))


@pytest.mark.parametrize(
    ("rows", "config", "reason"),
    [
        (
            [(8, 50, 1.0), (8, 60, 1.0)],
            CONFIG,
            "2 of 2 buffers hold data.max_documents 8 documents; raise it",
        ),
        (
            [(3, 50, 9.5), (8, 90, 1.0)],
            replace(CONFIG, data=replace(CONFIG.data, max_documents=9)),
            "1 of 2 buffers are full of audio, data.audio_capacity 1000",
        ),
        ([(3, 50, 5.0), (0, 0, 0.0)], CONFIG, "1 of 2 buffers are empty"),
        ([(0, 0, 0.0), (0, 0, 0.0)], CONFIG, "no document was left"),
        ([(3, 50, 5.0), (4, 60, 5.0)], CONFIG, "raise data.packing_bins"),
        (
            [(3, 50, 9.9), (4, 60, 0.0)],
            replace(CONFIG, model=ModelConfig(encoder=None)),
            "raise data.packing_bins",
        ),
        (
            [(1, 50, 9.9)],
            replace(CONFIG, data=replace(CONFIG.data, packing="padded")),
            "each row holds one document",
        ),
    ],
)
def test_padding_has_a_reason(rows: list[tuple[int, int, float]], config: Config, reason: str):
    assert reason in padding_reason(report(*rows), config)


def test_only_unusual_padding_is_explained_and_not_in_every_step():
    lines: list[str] = []
    watch = PaddingWatch(CONFIG, lines.append)
    usual, much = report((5, 97, 1.0)), report((8, 50, 1.0))
    for step in range(1, 11):
        watch(step, usual)
    assert not lines
    for step in range(11, 15):
        watch(step, much)
    assert lines == ["step 11 has 50% padding: 1 of 1 buffers hold data.max_documents 8 documents; raise it"]
    for step in range(15, 130):
        watch(step, usual)
    watch(130, much)
    assert len(lines) == 2
    # Where much padding is usual, it is said once.
    lines.clear()
    watch = PaddingWatch(CONFIG, lines.append)
    for step in range(1, 300):
        watch(step, much)
    assert len(lines) == 1


def test_the_report_shows_figures_answers_and_what_comes_next(tmp_path: Path):
    (tmp_path / "curves.png").touch()
    lines = [
        {"step": 0, "validation_wer": 2.0},
        {"step": 100, "loss": 3.0},
        {"step": 200, "loss": 1.0, "validation_wer": 0.5},
    ]
    said = [
        ("one two", "One two"),
        ("three", "tr\x1bee"),
        ("four", ""),
        ("five", "five"),
        ("six", "seven"),
        ("eight", "nine"),
        ("", ""),
    ]
    hypotheses = [{"reference": a, "hypothesis": b} for a, b in said]
    text = end_report(
        tmp_path,
        CONFIG,
        lines,
        hypotheses,
        display=DISPLAY,
        parameters="7 parameters",
        skipped="1 of 9 training items (11.1%): gone (1)",
    )
    shown = text.splitlines()
    assert shown[0].startswith("200 steps")
    assert "  loss 3.0000 -> 1.0000" in shown
    assert "  validation WER 200.0% -> 50.0%" in shown
    assert "  skipped: 1 of 9 training items (11.1%): gone (1)" in shown
    assert "Trained: 7 parameters, on synthetic\nValidated: on synthetic\n" in text
    own = replace(
        CONFIG.data, manifest=("a.jsonl", "b.jsonl"), validation_manifest=("held_out:0.1", "c=c.jsonl")
    )
    of_own = end_report(
        tmp_path, replace(CONFIG, data=own), lines, [], display=DISPLAY, parameters="7", skipped=""
    )
    assert "\nValidated: on held_out:0.1 of a.jsonl, b.jsonl, c.jsonl\n" in of_own
    right, wrong = shown.index("Right"), shown.index("Wrong (what was said, what was written)")
    assert shown[right + 1 : right + 4] == ["  one two", "  five", ""]
    assert shown[wrong + 1 : wrong + 8] == [
        "  three",
        "    tr\ufffdee",
        "  four",
        "    (nothing)",
        "  six",
        "    seven",
        "",
    ]
    assert f"  {tmp_path / 'curves.png'}: what it learned, and its speed, over the steps" in shown
    assert shown[-4:] == [
        f"  jaxthd evaluate {tmp_path}",
        f"  jaxthd generate {tmp_path} --audio FILE",
        f"  jaxthd train {tmp_path} --train.steps 400",
        f"  jaxthd convert export {tmp_path} --out FOLDER",
    ]
    # Stopped early: the same command continues. Texts are compared as word error rates compare them.
    early = end_report(
        tmp_path,
        CONFIG,
        lines[:2],
        hypotheses[2:3],
        display=DISPLAY,
        parameters="7",
        skipped="",
        normalise=lambda text: "",
    )
    assert f"  jaxthd train {tmp_path}" in early.splitlines()
    assert "Wrong" not in early
    bare = end_report(tmp_path / "none", CONFIG, lines, [], display=DISPLAY, parameters="7", skipped="")
    assert not any(word in bare for word in ("Right", "Wrong", "Pictures", "skipped"))
