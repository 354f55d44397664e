"""The form of a benchmark: options, calls by turns after a warm-up, memory, a table, claims.

A benchmark's main() makes its parser with `benchmark`, times its ways with `by_turns`, shows its table, and
ends with `conclude`, which exits with status 1 where a claim fails and --check is given.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.config import Config
from jaxthd.config.values import with_value
from jaxthd.terminal.tables import size_text, table
from scripts.peer_process import children

__all__ = [
    "Claim",
    "Step",
    "benchmark",
    "by_turns",
    "changed",
    "conclude",
    "memory",
    "show",
    "size_text",
    "table",
]

Call = Callable[[], Any]


class Claim(NamedTuple):
    """Assertion of a benchmark or a check, and whether it holds."""

    text: str
    holds: bool


def show(title: str, columns: str, rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table whose columns are all right-aligned."""
    print(f"\n{table(title, columns, rows, left=())}", flush=True)


def conclude(claims: Sequence[Claim], *, check: bool) -> None:
    """Prints the claims. With `check`, ends the process with status 1 if one fails."""
    print("\nClaims")
    for claim in claims:
        print(f"  {'holds' if claim.holds else 'FAILS'}  {claim.text}")
    if check and not all(claim.holds for claim in claims):
        sys.exit(1)


def benchmark(
    doc: str | None, *, check: bool = True, manifest: bool = False, rounds: int = 0
) -> argparse.ArgumentParser:
    """The parser of a script. check, manifest: with that option. rounds: the default of --rounds; 0: none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if check:
        parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    if manifest:
        parser.add_argument(
            "--manifest", type=_path, default="synthetic", help="recordings; else the synthetic speech"
        )
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="passes over every way")
    return parser


def _path(text: str) -> str:
    """The path of a manifest; of the synthetic speech, which is made on first use, for "synthetic"."""
    if text != "synthetic":
        return text
    # Benchmarks of kernels run where few of jaxthd's dependencies are installed.
    from jaxthd.data.sources.synthetic import synthetic_manifests

    return str(synthetic_manifests()[0])


def by_turns(
    ways: Mapping[str, Sequence[Call]],
    rounds: int,
    *,
    wait: Callable[[Any], Any],
    calls: int = 1,
    warm_up: Iterable[Call] | None = None,
) -> dict[str, float]:
    """Seconds of each way: the sum over its calls of each call's median over the rounds.

    Every call runs once before the clock starts, or those of warm_up. Then the ways alternate, call by call,
    so that other load on the machine affects them alike. wait: blocks until a call's result is there. calls:
    how often a call is made back to back in a round; its time is divided by that.
    """
    for call in chain(*ways.values()) if warm_up is None else warm_up:
        wait(call())
    times: dict[str, list[list[float]]] = {name: [[] for _ in each] for name, each in ways.items()}
    for _ in range(rounds):
        for number, together in enumerate(zip_longest(*ways.values())):
            for name, one in zip(ways, together, strict=True):
                if one is not None:
                    start = time.perf_counter()
                    for _ in range(calls):
                        result = one()
                    wait(result)
                    times[name][number].append((time.perf_counter() - start) / calls)
    return {name: sum(map(statistics.median, each)) for name, each in times.items()}


def changed(config: Config, settings: Iterable[str]) -> Config:
    """The config with settings such as train.optimizer=lion, or an option of XLA such as xla_x=1.

    A tuple gets one more value, others a value of the type that they have."""
    for text in filter(None, settings):
        name, _, value = text.partition("=")
        if name.startswith("xla_"):
            name, value = "compute.xla_options", text
        old = attrgetter(name)(config)
        new: Any = (*old, value) if isinstance(old, tuple) else value
        if not isinstance(old, str | tuple):
            new = type(old)(float(value))
        config = with_value(config, name, new)
    return config


class Step:
    """A compiled training step, whose calls train one state.

    compile_seconds: of tracing and compiling. program: jax's compiled program.
    """

    def __init__(self, config: Config, batch: Any) -> None:
        # Benchmarks of kernels run where few of jaxthd's dependencies are installed.
        from jaxthd.parallel.mesh import make_mesh
        from jaxthd.steps.blueprint import Blueprint
        from jaxthd.steps.state import init_state
        from jaxthd.steps.training import make_train_step

        mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
        self._state, self._batch = init_state(blueprint, mesh), batch
        start = time.perf_counter()
        step: Any = make_train_step(blueprint, mesh)
        self.program = step.lower(self._state, batch).compile()
        self.compile_seconds = time.perf_counter() - start

    def __call__(self, batch: Any = None) -> Any:
        """(the new state, the metrics) of a step on a batch; without one, on that of the compilation."""
        batch = self._batch if batch is None else batch
        self._state, metrics = self.program(self._state, batch)
        return self._state, metrics


def memory(program: Any) -> int:
    """Bytes of a compiled program: arguments, results and temporaries. Results that are written over
    arguments, as a new state over the old one, count once."""
    sizes = program.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return held - sizes.alias_size_in_bytes


class Used(NamedTuple):
    """resident: bytes of memory of this process and its children. seconds: theirs on cores so far."""

    resident: int
    seconds: float


def used() -> Used:
    """Returns the use of this process and its children, from /proc."""
    pages = ticks = 0
    for process in (os.getpid(), *children(os.getpid())):
        folder = Path(f"/proc/{process}")
        with suppress(OSError):  # it has just ended
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            pages += int((folder / "statm").read_text().split()[1])
            ticks += int(stat[11]) + int(stat[12])
    return Used(pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))
