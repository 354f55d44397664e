"""Draws docs/packing.png: packing, the context layout, the attention mask and the state passing.

    python scripts/draw_packing.py [--out docs/packing.png]

Nothing is drawn by hand: the packer packs the documents, and make_segments gives the key intervals, on as
many simulated devices as there are context ranks.

Legend: T token slots of the buffer, n slots of a rank; rank-major: rank 0's tokens, then rank 1's, ...
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from jaxthd.config import Config, MeshConfig
from jaxthd.figures.colors import FAINT, HUES, INK, PADDING, light, tint
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING, Document
from jaxthd.packing.layout import ContextLayout, DualChunkSwap
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.mesh import CONTEXT, make_mesh

CAPACITY, RANKS = 128, 4
CHUNK = CAPACITY // (2 * RANKS)
AUDIO = (6, 14, 27, 14, 4, 5, 11)
TEXT = (3, 7, 15, 8, 2, 2, 6)
TITLE: dict[str, Any] = {"fontsize": 15, "fontweight": "bold", "color": "#222222"}


class Buffer(NamedTuple):
    """A row of a batch in document order, with the fields of Batch; the context layout is undone.

    ids: the number of the token's document. segments: Batch.segment_ids.
    """

    ids: Int[np.ndarray, " T"]
    segments: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, " T"]
    audio_slots: Int[np.ndarray, " T"]
    weights: Float[np.ndarray, " T"]

    @property
    def audio(self) -> Bool[np.ndarray, " T"]:
        return self.audio_slots >= 0


def document_order(batch: Batch, row: int, config: Config) -> Buffer:
    """A row of the batch, in the order before it was laid out over the context ranks of `config`."""
    ids, cuts = np.asarray(batch.segment_ids)[row], batch.cuts_of(row)
    back = ContextLayout.of(config).inverse(ids, cuts)
    audio_slots = batch.audio_slots if batch.has_audio else np.full_like(batch.segment_ids, -1)
    fields = batch.documents, batch.segment_ids, batch.positions, audio_slots, batch.weights
    return Buffer(*(np.asarray(x)[row][back] for x in fields))


def hues(ids: Int[np.ndarray, "*slots"]) -> Float[np.ndarray, "*slots 3"]:
    """RGB of documents, one hue after the other by segment id; grey for padding."""
    return np.array([to_rgb(h) for h in (PADDING, *HUES)])[np.where(ids > 0, (ids - 1) % len(HUES) + 1, 0)]


def slot_colors(ids: Int[np.ndarray, " T"], audio: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "T 3"]:
    """RGB of each slot: the document's hue for audio, its light tint for text, grey for padding."""
    rgb = hues(ids)
    return np.where((audio | (ids == 0))[:, None], rgb, tint(rgb))


def slot_legend() -> list[Patch]:
    """Legend entries for slot_colors."""
    return [
        Patch(facecolor=HUES[0], label="audio slots of a document (encoder frames)"),
        Patch(facecolor=light(HUES[0]), label="its text tokens"),
        Patch(facecolor=PADDING, label="padding"),
    ]


def document(number: int, audio: int, text: int) -> Document:
    """A document of `audio` encoder frames, then `text` tokens."""
    mels = np.zeros((audio * SUBSAMPLING, 1), np.float32)
    return Document.splice(str(number), [0] + [1] * text, [False] + [True] * text, [[mels]], placeholder=0)


def packed() -> tuple[Batch, Buffer]:
    """One row as the loader makes it, in rank-major order, and the same row in document order."""
    documents = [document(i, *sizes) for i, sizes in enumerate(zip(AUDIO, TEXT, strict=True))]
    audio_capacity = CAPACITY * SUBSAMPLING
    batch, _ = pack_row(
        documents,
        capacity=CAPACITY,
        audio_capacity=audio_capacity,
        num_mels=1,
        max_documents=len(documents),
        context=RANKS,
    )
    return batch, document_order(batch, 0, Config(MeshConfig(context=RANKS)))


def key_ranges(batch: Batch) -> np.ndarray:
    """The interval of keys on each rank that each query sees: int [query rank, key rank, n, (lo, hi)]."""
    row, ranks = PartitionSpec(None, CONTEXT), PartitionSpec(CONTEXT)

    def of_rank(ids: Any, positions: Any) -> Any:
        segments = make_segments(ids, positions, block=8, axis=CONTEXT)
        steps = segments.keys_by_step
        return jax.numpy.stack([jax.numpy.stack([x.lo, x.hi], axis=-1) for x in steps])[None]

    mesh = make_mesh(MeshConfig(context=RANKS))
    mapped = jax.shard_map(of_rank, mesh=mesh, in_specs=(row, row), out_specs=ranks, check_vma=False)
    by_step = np.asarray(jax.jit(mapped)(batch.segment_ids, batch.positions))
    ranks_of = [[(rank - source) % RANKS for source in range(RANKS)] for rank in range(RANKS)]
    return np.stack([steps[order] for steps, order in zip(by_step, ranks_of, strict=True)])


def strip(axes: Axes, rgb: np.ndarray, x: float, y: float, height: float = 1.0, width: float = 1.0) -> None:
    """Draws one cell for each token, from (x, y) to the right."""
    for i, color in enumerate(rgb):
        axes.add_patch(
            Rectangle((x + i * width, y), width, height, facecolor=color, edgecolor="white", linewidth=0.4)
        )


def canvas(axes: Axes, title: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set(xlim=x, ylim=y)
    axes.set_axis_off()
    axes.set_title(title, **TITLE, loc="left")


def draw_packing(axes: Axes, buffer: Buffer, rgb: np.ndarray) -> None:
    """Draws one document in each row, padded to the longest; then all of them in one buffer."""
    count = int(buffer.ids.max())
    lengths = np.bincount(buffer.ids)[1:]
    longest = int(lengths.max())
    slots = count * longest
    canvas(axes, "Padded: one document a row", (0, CAPACITY), (-4.3, count))
    for row in range(count):
        y = count - 1 - row
        own = rgb[buffer.ids == row + 1]
        strip(axes, own, 0, y, 0.8)
        grey = np.tile(to_rgb(PADDING), (longest - len(own), 1))
        strip(axes, grey, len(own), y, 0.8)
    note = f"{slots} slots, {1 - lengths.sum() / slots:.0%} of them padding"
    axes.text(longest + 2, count - 0.6, note, fontsize=14, va="center", color=INK)
    anchor = ((longest + 1) / CAPACITY, 0.76)
    axes.legend(handles=slot_legend(), loc="upper left", bbox_to_anchor=anchor, frameon=False, fontsize=14)
    padding = np.mean(buffer.ids == 0)
    title = f"Packed: the same documents in one buffer of {CAPACITY} slots, {padding:.0%} of them padding"
    axes.text(0, -1.7, title, **TITLE)
    strip(axes, rgb, 0, -3.2, 1.1)
    for chunk in range(2 * RANKS):
        axes.plot([chunk * CHUNK] * 2, [-3.7, -1.95], color=INK, linewidth=1.2)
        rank = min(chunk, 2 * RANKS - 1 - chunk)
        label = f"chunk {chunk}: rank {rank}"
        axes.text((chunk + 0.5) * CHUNK, -3.85, label, fontsize=13, ha="center", va="center", color=INK)
    axes.plot([CAPACITY] * 2, [-3.7, -1.95], color=INK, linewidth=1.2)


def draw_layout(axes: Axes, rgb: np.ndarray) -> None:
    """Draws the same slots in rank-major order."""
    canvas(
        axes,
        "Context layout: each rank holds an early chunk and a late one, side by side",
        (0, CAPACITY),
        (-1, 1.1),
    )
    order = DualChunkSwap(RANKS).permutation(CAPACITY)
    strip(axes, rgb[order], 0, 0)
    for place in range(2 * RANKS):
        chunk = int(order[place * CHUNK]) // CHUNK
        edge = place % 2 == 0
        axes.plot(
            [place * CHUNK] * 2, [-0.95 if edge else -0.35, 1], color=INK, linewidth=2.6 if edge else 1.2
        )
        axes.text((place + 0.5) * CHUNK, -0.25, f"chunk {chunk}", fontsize=13, ha="center", va="center")
    for rank in range(RANKS):
        axes.text(
            (2 * rank + 1) * CHUNK,
            -0.75,
            f"rank {rank}",
            fontsize=14,
            ha="center",
            va="center",
            weight="bold",
        )
    axes.plot([CAPACITY] * 2, [-0.95, 1], color=INK, linewidth=2.6)


def draw_mask(axes: Axes, ids: np.ndarray, ranges: np.ndarray) -> None:
    """Draws the causal mask in rank-major order: triangles for documents, rectangles for ring steps."""
    n = CAPACITY // RANKS
    picture = np.ones((RANKS, n, RANKS, n, 3))
    middle: dict[str, Any] = {"fontsize": 13, "ha": "center", "va": "center", "color": FAINT}
    for rank in range(RANKS):
        rgb = hues(ids.reshape(RANKS, n)[rank])
        for source in range(RANKS):
            lo, hi = (x[:, None] for x in ranges[rank, source].T)
            seen = (np.arange(n) >= lo) & (np.arange(n) < hi)
            rows, columns = (np.flatnonzero(seen.any(axis)) for axis in (1, 0))
            filled = np.broadcast_to((tint(rgb) if rank == source else rgb)[:, None], (n, n, 3))
            picture[rank, :, source][seen] = filled[seen]
            if not len(rows):
                axes.text((source + 0.5) * n - 0.5, (rank + 0.5) * n - 0.5, "skipped", **middle)
            elif rank != source:
                assert seen.sum() == len(rows) * len(columns), "a ring step is one rectangle"
                at = source * n + columns[0] - 0.5, rank * n + rows[0] - 0.5
                outline = Rectangle(at, len(columns), len(rows), fill=False, edgecolor=INK, linewidth=1.8)
                axes.add_patch(outline)
    axes.imshow(picture.reshape(CAPACITY, CAPACITY, 3), interpolation="nearest")
    for edge in range(RANKS + 1):
        axes.axhline(edge * n - 0.5, color=INK, linewidth=1)
        axes.axvline(edge * n - 0.5, color=INK, linewidth=1)
    middles, names = (np.arange(RANKS) + 0.5) * n - 0.5, [f"rank {r}" for r in range(RANKS)]
    axes.set_xticks(middles, names, fontsize=13)
    axes.set_yticks(middles, names, fontsize=13, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.set_xlabel("keys", fontsize=14)
    axes.set_ylabel("queries", fontsize=14)
    axes.set_title("Attention: what a query sees", **TITLE, loc="left")
    axes.legend(
        handles=[
            Patch(facecolor=light(HUES[0]), label="on its own rank"),
            Patch(facecolor=HUES[0], edgecolor=INK, linewidth=1.8, label="a ring step: one rectangle"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.09),
        ncols=2,
        frameon=False,
        fontsize=13,
    )


def draw_states(axes: Axes, buffer: Buffer, rgb: np.ndarray) -> None:
    """Draws context chunks on their ranks; an arrow is solid where the next chunk continues a document."""
    canvas(axes, "Mamba2: one state enters each chunk", (0, RANKS), (-1.25, 2))
    left, size, height, rows = 0.13, 0.74, 0.4, (1.15, 0.3)

    def corner(chunk: int) -> tuple[float, float]:
        """The chunk's lower left corner. A rank is a column; its first chunk is above, its second below."""
        place = min(chunk, 2 * RANKS - 1 - chunk)
        return place + left, rows[chunk >= RANKS]

    for rank in range(RANKS):
        axes.add_patch(Rectangle((rank + 0.02, 0), 0.96, 1.62, facecolor="#f3f3f3"))
        axes.text(rank + 0.5, 1.68, f"rank {rank}", fontsize=14, ha="center", weight="bold", color=INK)
    for chunk in range(2 * RANKS):
        x, y = corner(chunk)
        strip(axes, rgb[chunk * CHUNK : (chunk + 1) * CHUNK], x, y, height, size / CHUNK)
        axes.text(x + size / 2, y - 0.13, f"chunk {chunk}", fontsize=13, ha="center", va="center", color=INK)
    for chunk in range(1, 2 * RANKS):
        (x0, y0), (x1, y1) = corner(chunk - 1), corner(chunk)
        if chunk < RANKS:
            ends = (x0 + size, y0 + height / 2), (x1, y1 + height / 2)
        elif chunk == RANKS:
            ends = (x0 + size - 0.06, y0), (x1 + size - 0.06, y1 + height)
        else:
            ends = (x0, y0 + height / 2), (x1 + size, y1 + height / 2)
        passed = buffer.positions[chunk * CHUNK] > 0
        look = {"color": INK} if passed else {"color": FAINT, "linestyle": ":"}
        arrow = FancyArrowPatch(
            *ends, arrowstyle="-|>", mutation_scale=22, linewidth=2.6, shrinkA=0, shrinkB=0
        )
        arrow.set(**look)
        axes.add_patch(arrow)
    notes = (
        "solid: the next chunk continues a document",
        "dotted: it begins with a new document, so no state enters",
        "States have one size: traffic does not grow with the buffer.",
    )
    for line, note in enumerate(notes):
        axes.text(0.04, -0.25 - 0.22 * line, note, fontsize=14, va="center", color=INK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/packing.png"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    matplotlib.use("agg")
    from matplotlib import pyplot

    batch, buffer = packed()
    rgb = slot_colors(buffer.ids, buffer.audio)
    figure = pyplot.figure(figsize=(14, 14), dpi=100)
    spaces = {"left": 0.045, "right": 0.985, "top": 0.97, "bottom": 0.075, "hspace": 0.16, "wspace": 0.08}
    grid = figure.add_gridspec(3, 2, height_ratios=(4.4, 1.6, 6.6), width_ratios=(1, 1.12), **spaces)
    draw_packing(figure.add_subplot(grid[0, :]), buffer, rgb)
    draw_layout(figure.add_subplot(grid[1, :]), rgb)
    draw_mask(figure.add_subplot(grid[2, 0]), batch.segment_ids[0], key_ranges(batch))
    draw_states(figure.add_subplot(grid[2, 1]), buffer, rgb)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
