"""The faults by name, each injected from outside of the run: signals, disks, clocks, limits, bytes of files.

A fault starts the run, waits for a moment, strikes, and waits for what the run does. It returns how that
ended, and whether it may. After it the run is started again: that the end is bit-identical is checked there.
"""

import signal
from collections.abc import Callable
from typing import NamedTuple

from tests.survival import data_faults, file_faults, process_faults
from tests.survival.runs import Kind, Run
from tests.survival.scenes import Injected, Scene


class Fault(NamedTuple):
    """inject: starts the run and strikes. kinds: whether such runs can have it. saved: whether it needs
    checkpoints."""

    inject: Callable[[Scene], Injected]
    kinds: Callable[[Kind], bool] = lambda kind: True
    saved: bool = False

    def applies(self, run: Run) -> bool:
        """Whether the run can have it as it is now."""
        return self.kinds(run.kind) and (not self.saved or len(run.saved()) > 1)


def _of_several(kind: Kind) -> bool:
    return kind.processes > 1


def _signal(number: signal.Signals) -> Fault:
    return Fault(process_faults.signalled(number))


FAULTS = {
    "kill -9": Fault(process_faults.killed),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGINT": _signal(signal.SIGINT),
    "SIGHUP": _signal(signal.SIGHUP),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "stop and continue": Fault(process_faults.paused),
    "full disk": Fault(file_faults.full_disk),
    "read-only disk": Fault(file_faults.read_only_disk),
    "slow disk": Fault(file_faults.slow_disk),
    "hung disk": Fault(file_faults.hung_disk),
    "damaged checkpoint": Fault(file_faults.damaged, saved=True),
    "truncated checkpoint": Fault(file_faults.truncated, saved=True),
    "flipped array": Fault(file_faults.flipped_array, saved=True),
    "torn files": Fault(file_faults.torn_files, saved=True),
    "corrupted compilation cache": Fault(file_faults.bad_cache),
    "killed worker": Fault(process_faults.worker(signal.SIGKILL)),
    "hanging worker": Fault(process_faults.worker(signal.SIGSTOP)),
    "slow rank": Fault(process_faults.slow_rank, _of_several),
    "stalled rank": Fault(process_faults.stalled_rank, _of_several),
    "gone rank": Fault(process_faults.gone_rank, _of_several),
    "NaN in data": Fault(data_faults.bad_recordings, lambda kind: kind.poison),
    "NaN in gradients": Fault(data_faults.bad_gradients, lambda kind: kind == Kind()),
    "clock jump": Fault(process_faults.clock_jump),
    "little address space": Fault(process_faults.little_memory),
    "out of memory": Fault(process_faults.memory_group),
    "lost store": Fault(data_faults.lost_store, lambda kind: kind.store),
    "changed manifest": Fault(data_faults.changed_manifest, lambda kind: not kind.store, saved=True),
}
KILL = "kill -9"
