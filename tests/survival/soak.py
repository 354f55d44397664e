"""Case after case: a run, faults at random moments, and its end against that of a run without.

All that a soak knows lies in its folder, so that it goes on where it was interrupted: the runs without
faults, the compiled programs, and faults.jsonl, a line for each fault.
"""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jaxthd.files.jsonl import append_line, read_lines
from tests.stores.servers import Server, http_server
from tests.survival.faults import FAULTS, KILL
from tests.survival.phases import OF_GRPO, OF_TRAIN
from tests.survival.runs import ROOT, Kind, Run, differing, write_recordings
from tests.survival.scenes import Scene

KINDS = (
    Kind(), Kind("grpo"), Kind(processes=2), Kind(store=True), Kind(poison=True),
    Kind(), Kind(), Kind(processes=2), Kind(), Kind("grpo", 2),
)  # fmt: skip
"""The kinds of runs, by turns: more often those that take less time."""
IN_A_CASE = 8
"""Faults of a case, at most."""
DISK_BYTES = 2**26
OTHERS = tuple(name for name in FAULTS if name != KILL)


class Soak:
    """A soak in `folder`. package: the folder with the jaxthd to test. say: prints a line."""

    def __init__(
        self, folder: Path, seed: int = 0, package: Path = ROOT, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self._seed, self._package, self._say = folder.absolute(), seed, package, say
        self.file, self._disk = self.folder / "faults.jsonl", self.folder / "disk"
        self._disk.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        if not self._disk.is_mount():
            how = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._disk)]
            subprocess.run(how, check=True)
        self._server: Server | None = None
        self._wanted: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        """Ends what runs, and gives the small file system back."""
        self._stack.close()
        subprocess.run(["umount", "-l", str(self._disk)], check=False)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was injected so far."""
        return read_lines(self.file)

    def go_on(self, faults: int, names: Sequence[str] = (), kinds: Sequence[Kind] = KINDS) -> None:
        """Injects until so many are counted. names: of FAULTS; none: kills, and between them all others."""
        while (left := faults - _counted(self.lines, names)) > 0:
            case = max((x["case"] for x in self.lines), default=-1) + 1
            self.case(case, kinds[case % len(kinds)], left, names)

    def _next(self, run: Run, lines: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
        """The fault that the run gets next: of those that it can have, the one that was injected least."""
        found = Counter(x["fault"] for x in (*self.lines, *lines))
        is_kill = not names and len(lines) % 2 == 0
        able = [x for x in names or OTHERS if FAULTS[x].applies(run) and not is_kill]
        return min(able, key=lambda name: found[name], default=KILL)

    def want(self, kind: Kind) -> dict[str, Any]:
        """The result of such a run of a whole jaxthd without faults; run once, kept in the folder."""
        file = self.folder / f"{kind.name}.json"
        if kind.name not in self._wanted and not file.exists():
            run = Run(kind, self._disk / kind.name, self._data(kind), self.folder / "cache")
            run.clear()
            run.start()
            statuses = run.end()
            if set(statuses) != {0}:
                raise RuntimeError(f"the run without faults ended with {statuses}: {run.log()[-3000:]}")
            file.write_text(json.dumps(run.result()))
            run.clear()
        found: dict[str, Any] = self._wanted.setdefault(kind.name, json.loads(file.read_text()))
        return found

    def case(self, case: int, kind: Kind, most: int, names: Sequence[str] = ()) -> None:
        """One run with up to `most` faults, and IN_A_CASE, to its end; its lines are written when that is
        compared. names: see go_on."""
        want, rng = self.want(kind), np.random.default_rng([self._seed, case])
        workdir = self._disk / f"case-{case}"
        run = Run(kind, workdir, self._data(kind), self.folder / "cache", self._package)
        run.clear()
        self._stack.callback(run.kill)
        lines: list[dict[str, Any]] = []
        while _counted(lines, names) < most and len(lines) < IN_A_CASE and kind.steps not in run.saved():
            name = self._next(run, lines, names)
            if names and name not in names:  # a fault that needs checkpoints
                self._until_saved(run)
                continue
            began = time.monotonic()
            seen, end, holds = FAULTS[name].inject(Scene(run, rng, self._disk, self._server))
            run.kill()
            place = {"case": case, "seed": self._seed, "number": len(lines), "run": kind.name, "fault": name}
            what = {"phase": seen.phase, "evidence": seen.evidence, "step": run.step(), "end": end}
            lines.append(place | what | {"holds": holds, "seconds": round(time.monotonic() - began, 1)})
            self._say(line_text(lines[-1]))
        run.start()
        statuses = run.end()
        result = json.loads(json.dumps(run.result()))
        apart = differing(result, want) + [f"status {x}" for x in statuses if x]
        outcome = f"DIFFERS: {', '.join(apart[:5])} ({len(apart)} in all)" if apart else "bit-identical"
        self._say(f"case {case}, {kind.name}: after {len(lines)} faults {outcome}")
        for line in lines:
            append_line(self.file, line | {"outcome": outcome})
        run.clear()
        if not apart:
            run.log_file.unlink()

    def _until_saved(self, run: Run) -> None:
        """Lets the run go on until it has two checkpoints, and ends it."""
        run.start()
        run.wait(lambda: len(run.saved()) > 1)
        if len(run.saved()) < 2:
            raise RuntimeError(f"the run saves no two checkpoints: {run.log()[-3000:]}")
        run.kill()

    def _data(self, kind: Kind) -> str:
        folder = self.folder / ("poison" if kind.poison else "data")
        if not folder.exists():
            folder.mkdir()
            write_recordings(folder, kind.poison)
        if kind.store and self._server is None:
            self._server = self._stack.enter_context(http_server(folder))
        return self._server.url if kind.store and self._server else str(folder)


def counts(line: dict[str, Any]) -> bool:
    """A fault counts where evidence shows what the run was doing."""
    return bool(line["evidence"]) and line["phase"] not in ("ended", "unknown")


def _counted(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> int:
    """How many count, of those with these names; of all, where there are none."""
    return sum(counts(x) and (not names or x["fault"] in names) for x in lines)


def holds(line: dict[str, Any]) -> bool:
    """Whether the run did what it may after the fault, and ended bit-identical."""
    return line["holds"] and line["outcome"] == "bit-identical"


def line_text(line: dict[str, Any]) -> str:
    """A fault, in a line."""
    where = f"{line['run']} {line['seed']}.{line['case']}.{line['number']}"
    when = f"while {line['phase']} [{line['evidence']}], step {line['step']}"
    verdict = "holds" if line["holds"] else "FAILS"
    return f"{verdict}  {where} {line['fault']} {when}: {line['end']} ({line['seconds']} s)"


def summary(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Faults by kind and by phase, and how many do not hold."""
    counted = [x for x in lines if counts(x)]
    bad = [x for x in lines if not holds(x)]
    cases, others = len({x["case"] for x in lines}), len(lines) - len(counted)
    kinds = len({x["fault"] for x in counted})
    text = [f"{len(counted)} faults of {kinds} kinds counted in {cases} runs, {others} without evidence"]
    for key in ("fault", "phase", "run"):
        found = Counter(x[key] for x in counted).most_common()
        text.append(f"by {key}: " + ", ".join(f"{name} {number}" for name, number in found))
    phases = {x["phase"] for x in counted}
    unseen = [x for x in dict.fromkeys((*OF_TRAIN, *OF_GRPO)) if x not in phases]
    text.append(f"phases without a fault: {', '.join(unseen) or 'none'}")
    kills = [x for x in counted if x["fault"] == KILL]
    apart = sum(x["outcome"] != "bit-identical" for x in kills)
    text.append(f"{len(kills)} times kill -9: {apart} in runs whose end differs")
    text.append(f"{len(bad)} faults do not hold")
    return text + [f"{line_text(x)} -> {x['outcome']}" for x in bad[:20]]
