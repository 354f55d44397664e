"""The texts of docs/configuration.md (of jaxthd/config/) and docs/metrics.md (of jaxthd/run/metrics.py), and
the tables of docs/coming_from_nemo.md (of jaxthd/nemo/keys.toml)."""

import re
from collections.abc import Iterable
from pathlib import Path

from jaxthd.config.listing import Setting, all_groups
from jaxthd.nemo.keys import page
from jaxthd.objectives import OBJECTIVES
from jaxthd.objectives.metric import VALIDATION, Metric
from jaxthd.rl.display import of_function
from jaxthd.rl.held_out import HELD_OUT_METRICS
from jaxthd.rl.metrics import GRPO_METRICS, REWARD_METRICS
from jaxthd.run.metrics import PREFERENCE_METRICS, STEP_METRICS, TIME_METRICS, VALIDATION_METRICS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE, METRICS, NEMO = DOCS / "configuration.md", DOCS / "metrics.md", DOCS / "coming_from_nemo.md"
HEAD = """\
# Configuration

<!-- Written by scripts/write_reference.py from jaxthd/config/: change it there, and run that. -->

These are all settings of a run. A [config file](../configs/cp2.py) gives them in Python, for instance as
`DataConfig(max_documents=32)`; relative paths in it are relative to its folder. A run keeps its own in
`config.json`. Every command that takes either lets you override them by the names below:

    jaxthd train configs/cp2.py --data.manifest a.jsonl b.jsonl --mesh.no-fsdp

A setting of type `bool` is set by its name alone or with `True` (`--mesh.fsdp`, `--mesh.fsdp True`), and
unset by `no-` or `False` (`--mesh.no-fsdp`, `--mesh.fsdp False`). The defaults are those of the dataclasses.
`jaxthd train configs/cp2.py --help data` lists a group with the values that the file gives; `--help-all`
lists all groups. Settings that cannot work are refused before
anything is loaded, with what to change (`jaxthd/validate/`).

The settings of a decoder's block are named by its letter in the pattern. Each kind stands here under the
letter that it usually has; `W` is attention in a window of 128 tokens. A model has options for the letters of
its pattern, and a shell wants quotes around a star: `--model.llm.blocks.'*'.heads 8`. Of the front ends under
`model.encoder`, a model has the options of the one that its config file chose.
"""
METRICS_HEAD = """\
# Metrics

<!-- Written by scripts/write_reference.py from jaxthd/run/metrics.py, jaxthd/rl/ and
jaxthd/objectives/: change it there, and run that. -->

A run writes a line of JSON for each step to `metrics.jsonl`; trackers have the same numbers under `train/`
and `validation/`. The line on the terminal shows the time left, what the run is trained for (`loss`; with
`dpo` also `accuracy` and `margin`; with `jaxthd grpo` `reward`, `answer_tokens` and `kl`; and the newest of
the same on held-out data), `grad_norm` ("gradient"), the median of recent `tokens_per_second` ("real
tokens/s"), `padding_ratio` and `learning_rate`, as many as it has room for. A metric that was not measured is
absent; one that was not finite is `null`.
"""
OTHER_FIELDS = (
    ("step", "", "the optimizer's step; 0: a validation before training", ""),
    ("time", "s", "when the line was written, since 1970", ""),
    (
        "changed",
        "text",
        "settings that count from this step on, because the run was continued with others",
        "changes.jsonl has all of them.",
    ),
)
"""Fields of a line that are no metrics: name, unit, meaning, what to do where it is odd."""


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [HEAD]
    for group in all_groups():
        lines += [
            f"## {group.path}",
            "",
            f"`{group.kind.__name__}`. {_markdown(group.text)}",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *map(_row, group.settings),
            "",
        ]
    return "\n".join(lines)


def metrics_reference() -> str:
    """The text of docs/metrics.md."""
    sections = {
        "Of every line": OTHER_FIELDS,
        "Of every line: where the time went": _rows(TIME_METRICS),
        "Of every step": _rows(STEP_METRICS),
        **{
            f"Of every step with train.objective {name}": _rows(OBJECTIVES[name].metrics)
            for name in ("sft", "dpo", "kto", "grpo")
        },
        "Of every step of jaxthd grpo": _rows([*REWARD_METRICS, of_function("NAME"), *GRPO_METRICS]),
        "Of every validation set": _rows(VALIDATION_METRICS, VALIDATION),
        "Of held-out preferences, in jaxthd train": _rows(PREFERENCE_METRICS, VALIDATION),
        "Of held-out prompts, in jaxthd grpo": _rows(HELD_OUT_METRICS, VALIDATION),
    }
    lines = [METRICS_HEAD]
    for title, rows in sections.items():
        cells = [[_code(name), *map(_markdown, (unit, meaning, odd))] for name, unit, meaning, odd in rows]
        head = ["| field | unit | meaning | when it is odd |", "|---|---|---|---|"]
        lines += [f"## {title}", "", *head, *(f"| {' | '.join(row)} |" for row in cells), ""]
    lines += [
        "Where the time went: seconds since the run began, over all its commands. `goodput.json`",
        "has them as the last command left them, and `curves.png` shows them as a bar.",
        "",
        "With several sets, those of the set `clean` are `validation_clean_loss` and so on; without a name",
        "they are means over the sets, and the sum for documents. An objective of one's own adds its",
        "quotients by their names, and says how they are shown ([how](api.md#what-a-run-shows-of-it)).",
        "",
        "Word error rates can be compared where the normaliser is the same. `basic` and `english` were",
        "Whisper's own before 2026-11-25; `whisper` is Whisper's for English still. Since then both read",
        "every apostrophe (U+2018, U+2019, U+02BC, U+FF07, a backtick and the like) as `'`, an ellipsis as",
        "three dots, and leave out what cannot be seen (soft hyphens, zero-width spaces, byte order marks)",
        "and U+0640, which lengthens Arabic letters. `none` composes (NFC) and leaves out what cannot be",
        "seen. Texts without such characters have the numbers of before; others need `jaxthd evaluate`.",
        "",
    ]
    return "\n".join(lines)


def _rows(metrics: Iterable[Metric], prefix: str = "") -> list[tuple[str, str, str, str]]:
    return [(f"{prefix}{x.name}", x.unit, x.meaning, x.odd) for x in metrics]


def nemo_page(text: str) -> str:
    """The page with the tables of NeMo's keys. text: the page, whose other parts stay."""
    marks = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end -->)", re.S)
    return marks.sub(lambda found: f"{found[1]}{page(found[2])}\n{found[3]}", text)


def _row(setting: Setting) -> str:
    types, default = " or ".join(map(_code, setting.types)), _code(repr(setting.default))
    types += f", {setting.bounds}" if setting.bounds else ""
    return f"| {_code(setting.option)} | {types} | {default} | {_markdown(setting.text)} |"


def _code(text: str) -> str:
    """Code in a table cell, with | escaped because a bare one would end the cell."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def _markdown(text: str) -> str:
    """Plain text with Markdown's own characters escaped."""
    return re.sub(r"([\\`*<|\[])", r"\\\1", text)
