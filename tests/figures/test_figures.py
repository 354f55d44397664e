"""The pictures show what the run measured and what the batch holds."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from jaxthd.config import Config, DataConfig, MeshConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.draw import main
from jaxthd.errors import UserError
from jaxthd.figures.batch import MOST_ROWS, batch_figure, draw_batch
from jaxthd.figures.colors import HUES, INK, PADDING
from jaxthd.figures.curves import curves_figure
from jaxthd.figures.rollout_curves import PARTS, rollout_figure
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import SUBSAMPLING, Document, encoder_frames
from jaxthd.packing.layout import ContextLayout, DualChunkSwap, inverse_permutation
from jaxthd.packing.pack import PackReport, pack_row
from jaxthd.packing.thd_view import thd_view
from tests.answers import document_with_answers

CAPACITY, AUDIO = 256, 2560


def run_lines(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 5 / step,
            "grad_norm": 1 + step % 3,
            "learning_rate": step * 1e-3,
            "tokens_per_second": 6000.0 + step,
            "padding_ratio": 0.02 * (step % 2),
        }
        for step in range(1, steps + 1)
    ]


def drawn(figure: Figure) -> dict[str, Axes]:
    """The axes by title, those of a second scale by the label of their y axis."""
    return {axes.get_title(loc="left") or axes.get_ylabel(): axes for axes in figure.axes}


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_show_every_step_and_every_validation():
    lines = [{"step": 0, "validation_wer": 3.0, "validation_loss": 6.0}, *run_lines(130)]
    lines[40] |= {"validation_wer": 0.5, "validation_accuracy": 0.25, "validation_loss": 2.5}
    lines[130] |= {"validation_wer": 0.125, "validation_accuracy": 0.75, "validation_loss": 1.25}
    axes = drawn(curves_figure(lines))
    for name, key in (("Loss", "loss"), ("Optimization", "grad_norm"), ("Speed", "tokens_per_second")):
        x, y = axes[name].lines[0].get_data()
        np.testing.assert_array_equal(x, range(1, 131))
        np.testing.assert_array_equal(y, [line[key] for line in lines[1:]])
    for name, key in (("learning rate", "learning_rate"), ("padding, share of token slots", "padding_ratio")):
        np.testing.assert_array_equal(axes[name].lines[0].get_ydata(), [line[key] for line in lines[1:]])
    wer, accuracy = axes["Validation"].lines
    assert list(zip(*wer.get_data(), strict=True)) == [(0, 3.0), (40, 0.5), (130, 0.125)]
    assert list(zip(*accuracy.get_data(), strict=True)) == [(40, 0.25), (130, 0.75)]
    assert legend(axes["Validation"]) == [
        "word error rate: 300.0% → 12.5%",
        "accuracy of the next token: 25.0% → 75.0%",
    ]
    assert legend(axes["Loss"]) == ["training", "validation: 6.00 → 1.25"]


def test_the_smoothed_curve_goes_through_the_means_of_stretches():
    lines = run_lines(100)
    x, y = drawn(curves_figure(lines))["Loss"].lines[1].get_data()
    loss = np.array([line["loss"] for line in lines]).reshape(50, 2)
    np.testing.assert_allclose(y, loss.mean(1))
    np.testing.assert_allclose(x, np.arange(1, 101).reshape(50, 2).mean(1))


def test_steps_that_are_not_finite_are_marked_and_leave_the_curve_whole():
    lines = run_lines(9)
    lines[3]["loss"] = math.nan
    lines[6]["grad_norm"] = math.inf
    axes = drawn(curves_figure(lines))["Loss"]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert list(axes.lines[-1].get_xdata()) == [4, 7]
    assert "2 step(s) not finite" in legend(axes)


@pytest.mark.parametrize(
    ("first", "last"), [(5.69, 9e-4), (5.6, 0.02), (5.6, 0.5), (4.8, 3.1), (1.9, 0.95), (11, 9.5), (3, 1e-9)]
)
def test_the_losses_labels_are_few_and_apart(first: float, last: float):
    losses = np.geomspace(first, last, 40)
    figure = curves_figure([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    figure.draw_without_rendering()
    axes = drawn(figure)["Loss"]
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    labels = [x.label1 for x in ticks if low <= x.get_loc() <= high and x.label1.get_text()]
    assert 3 <= len(labels) <= 9
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(above.y0 - below.y1 > 4 for below, above in pairwise(boxes))


def test_a_run_without_validation_or_without_a_finite_step_can_be_drawn(tmp_path: Path):
    axes = drawn(curves_figure(run_lines(3)))["Validation"]
    assert [text.get_text() for text in axes.texts] == ["not measured"]
    curves_figure([{"step": 1, "loss": math.nan, "grad_norm": math.nan}]).savefig(tmp_path / "none.png")


@pytest.mark.parametrize("with_mesh", [True, False])
def test_the_parts_of_a_step_of_rollouts_are_stacked(with_mesh: bool):
    """Copying the weights to another mesh is a part where it happens; the first line is a validation's."""
    parts = dict.fromkeys(("rollout", "reward", "scoring", "training"), 1.0)
    parts |= {"resharding": 2.0} if with_mesh else {}
    line = {f"{name}_seconds": seconds for name, seconds in parts.items()}
    line |= {"step_seconds": sum(parts.values()), "reward": 1.0}
    lines = [{"step": 0, "validation_reward": 1.0}, *({"step": n, **line} for n in (1, 2, 3))]
    [axes] = [x for x in rollout_figure(lines).axes if x.get_title(loc="left").startswith("Time")]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [name for name in PARTS if name in parts]
    tops = [stack.get_paths()[0].get_extents().y1 for stack in axes.collections]
    assert tops == pytest.approx(np.cumsum([parts[name] for name in names]))


def test_the_command_draws_the_curves_of_a_workdir(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        main([str(tmp_path)])
    lines = "".join(json.dumps(line) + "\n" for line in run_lines(5))
    (tmp_path / "metrics.jsonl").write_text(lines)
    main([str(tmp_path)])
    assert imread(tmp_path / "curves.png").shape[:2] == (920, 1200)


def packed(rows: int, config: Config) -> tuple[Batch, BatchReport, list[PackReport]]:
    """Ragged documents, some of text alone, one a row with two clips; mels hold the segment's key."""
    rng = np.random.default_rng(0)
    batches, reports = [], []
    for _ in range(rows):
        documents = []
        for key in range(9):
            clips = [rng.integers(1, 90) for _ in range([1, 1, 0, 2][key % 4])]
            tokens = [5, *[0] * len(clips), *[1] * int(rng.integers(1, 9))]
            mels = [[np.full((n, 1), key, np.float32)] for n in clips]
            supervised = [token == 1 for token in tokens]
            documents.append(Document.splice(str(key), tokens, supervised, mels, placeholder=0))
        batch, report = pack_row(
            documents,
            capacity=CAPACITY,
            audio_capacity=AUDIO,
            num_mels=1,
            max_documents=9,
            context=config.mesh.context,
            audio_ranks=config.mesh.audio_ranks,
            round_to=config.data.round_to,
            layout=config.compute.context_layout,
        )
        batches.append(batch)
        reports.append(report)
    return concatenate_rows(batches), batch_report(reports), reports


def batch_report(reports: list[PackReport]) -> BatchReport:
    rows = tuple(RowReport.of(row, report, CAPACITY, AUDIO) for row, report in enumerate(reports))
    return BatchReport(rows, tuple(report.keys for report in reports))


def painted(axes: Axes, slots: int, scale: float, height: float) -> np.ndarray:
    """The colour of each slot, from the rectangles of that height; white where there is none."""
    rgb = np.ones((slots, 3))
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        if patch.get_height() == height:
            start, stop = (x / scale for x in (patch.get_x(), patch.get_x() + patch.get_width()))
            assert start == pytest.approx(round(start))
            assert stop == pytest.approx(round(stop))
            rgb[round(start) : round(stop)] = patch.get_facecolor()[:3]
    return rgb


def hue(segment: int) -> np.ndarray:
    return np.array(to_rgb(HUES[(segment - 1) % len(HUES)]))


MESHES = pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(MeshConfig(context=2), DataConfig(round_to=8)),
        Config(MeshConfig(context=4, data=2)),
    ],
)


@MESHES
def test_each_slot_has_the_colour_of_its_document(config: Config):
    batch, report, reports = packed(2, config)
    strips = batch_figure(batch, report, config).axes[::2]
    for axes, of_row, ids in zip(strips, reports, batch.segment_ids, strict=True):
        rgb = painted(axes, CAPACITY, 1.0, 1.0)
        view = thd_view(ids, round_to=config.data.round_to)
        expected = np.tile(to_rgb(PADDING), (CAPACITY, 1))
        starts, lengths = view.cu_seqlens_padded, np.diff(view.cu_seqlens)
        for segment, (start, length) in enumerate(zip(starts, lengths, strict=False), 1):
            expected[start : start + length] = hue(segment)
        light = ~np.isclose(rgb, expected).all(1)
        np.testing.assert_allclose(rgb[light], 0.4 * expected[light] + 0.6)
        assert (expected == to_rgb(PADDING)).all(1).sum() == CAPACITY - of_row.real_tokens
        assert not (light & (expected == to_rgb(PADDING)).all(1)).any()
        text = sum(np.sum((batch.segment_ids == s) & (batch.audio_slots < 0), axis=1) for s in range(1, 10))[
            strips.index(axes)
        ]
        assert light.sum() == text


@MESHES
def test_supervised_slots_are_marked_and_no_others(config: Config):
    batch, report, _ = packed(2, config)
    for row, axes in enumerate(batch_figure(batch, report, config).axes[::2]):
        marked = (painted(axes, CAPACITY, 1.0, 0.2) == to_rgb(INK)).all(1)
        ids, mesh, layout = batch.segment_ids[row], config.mesh, config.compute.context_layout
        back = ContextLayout(layout, mesh.context, config.data.round_to).inverse(ids)
        np.testing.assert_array_equal(marked, batch.weights[row][back] > 0)
        assert 0 < marked.sum() < CAPACITY


@MESHES
def test_each_clip_has_the_colour_of_its_document_where_its_rank_holds_it(config: Config):
    batch, report, reports = packed(2, config)
    for row, axes in enumerate(batch_figure(batch, report, config).axes[1::2]):
        rgb = painted(axes, AUDIO, 0.01, 1.0)
        valid = batch.mel_mask[row]
        segments = [1 + reports[row].keys.index(str(int(key))) for key in batch.mels[row, valid, 0]]
        np.testing.assert_allclose(rgb[valid], [hue(s) for s in segments])
        clips = clip_lengths(batch, row, config.mesh)
        assert sum(x.get_facecolor()[:3] != to_rgb(PADDING) for x in axes.patches) == len(clips)
        used = sum(SUBSAMPLING * encoder_frames(n) for n in clips)
        assert (rgb == to_rgb(PADDING)).all(1).sum() == AUDIO - used


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_document_with_answers_has_one_colour(share_prompts: bool):
    """In its tokens and its audio, however many segments it is."""
    rng = np.random.default_rng(0)
    documents = [document_with_answers(rng, str(n), answers=3, mels=2) for n in range(3)]
    sizes = {"capacity": CAPACITY, "audio_capacity": AUDIO, "num_mels": 2, "max_documents": 12}
    batch, report = pack_row(documents, **sizes, answers=True, share_prompts=share_prompts)
    tokens, audio = batch_figure(batch, batch_report([report]), Config()).axes
    rgb, ids = painted(tokens, CAPACITY, 1.0, 1.0), batch.document_ids[0]
    for number in (1, 2, 3):
        dark = rgb[(ids == number) & batch.is_audio[0]]
        np.testing.assert_allclose(dark, np.tile(hue(number), (len(dark), 1)))
    heard = {tuple(c) for c in painted(audio, AUDIO, 0.01, 1.0)} - {to_rgb(PADDING)}
    with_audio = [number for number in (1, 2, 3) if (batch.is_audio[0] & (ids == number)).any()]
    assert heard == {tuple(hue(number)) for number in with_audio}
    lines = [line for line in tokens.lines if line.get_color() == "white"]
    assert len(lines) == report.segments - 3


def clip_lengths(batch: Batch, row: int, mesh: MeshConfig) -> list[int]:
    """Mel frames of each clip, from the valid ones of each (rank, chunk)."""
    ids = np.repeat(batch.chunk_ids[row], SUBSAMPLING)
    rank = np.arange(AUDIO) * mesh.audio_ranks // AUDIO
    valid = batch.mel_mask[row]
    return np.unique(np.stack([ids, rank])[:, valid], axis=1, return_counts=True)[1].tolist()


@pytest.mark.parametrize("context", [2, 4, 16])
def test_each_share_names_the_rank_that_holds_it(context: int):
    config = Config(MeshConfig(context=context))
    batch, report, _ = packed(1, config)
    tokens, audio = batch_figure(batch, report, config).axes
    back = inverse_permutation(DualChunkSwap(context).permutation(CAPACITY))
    named = [
        (x.get_position()[0], int(x.get_text().split()[-1])) for x in tokens.texts if x.get_position()[1] > 1
    ]
    assert len(named) == 2 * context
    assert [rank for _, rank in named] == [back[int(x)] * context // CAPACITY for x, _ in named]
    named = [
        (x.get_position()[0], int(x.get_text().split()[-1])) for x in audio.texts if x.get_position()[1] > 1
    ]
    assert [rank for _, rank in named] == [int(x / (AUDIO / 100) * context) for x, _ in named]


def test_of_many_buffers_the_first_are_drawn_and_the_title_says_so(tmp_path: Path):
    batch, report, reports = packed(MOST_ROWS + 2, Config())
    figure = batch_figure(batch, report, Config())
    assert len(figure.axes) == 2 * MOST_ROWS
    title = figure.get_suptitle()
    padding = 1 - sum(r.real_tokens for r in reports) / (6 * CAPACITY)
    assert title.startswith("54 documents in 6 buffers of 256 token slots, of which 4 are drawn")
    assert f"{padding:.1%} padding" in title
    draw_batch(batch, report, Config(), tmp_path / "batch.png")
    assert imread(tmp_path / "batch.png").shape[1] == 1400


def test_a_batch_of_padding_alone_can_be_drawn(tmp_path: Path):
    batch, of_row = pack_row([], capacity=64, audio_capacity=64, num_mels=1, max_documents=2, context=2)
    draw_batch(batch, batch_report([of_row]), Config(MeshConfig(context=2)), tmp_path / "batch.png")
    assert (tmp_path / "batch.png").exists()
