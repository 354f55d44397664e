"""The phase of a process, seen from outside: it is stopped, and py-spy reads its main thread's stack."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PHASES = {
    "ending": ("_report ", "SpeechData.close ", "_shutdown (threading", "_python_exit"),
    "saving": ("Checkpoints.save ", "Checkpoints._wait ", "Checkpoints.__exit__ "),
    "restoring": ("Checkpoints.restore_latest ", "Checkpoints.__init__ "),
    "compiling": (
        "lower_jaxpr", "backend_compile", "get_executable_and_time", "trace_to_jaxpr", "Program.compiled ",
        "_infer_params", "lower_sharding_computation", "_cached_lowering", "cached_compilation",
    ),
    "rewarding": ("Rewarder.",),
    "drawing": ("Rollouts.", "Drawing.", "Collector._draw"),
    "validating": ("Validation.__call__ ", "HeldOutRollouts", "AnswerSupplier.held_out"),
    "loading": ("DocumentSupplier._load ", "Prompts."),
    "stepping": ("DocumentSupplier.step ", "AnswerSupplier.step ", "announced "),
    "reading": ("SpeechData.__init__ ", "DocumentSupplier.__init__", "AnswerSupplier.__init__"),
    "starting": ("run_training ", "main (jaxthd", "parse_command_line"),
    "importing": ("_find_and_load", "<frozen importlib", "<module>"),
}  # fmt: skip
"""Phase -> parts of "function (file" in the stack of the main thread. The first phase that has one counts."""
OF_TRAIN = tuple(x for x in PHASES if x not in ("rewarding", "drawing"))
OF_GRPO = tuple(x for x in PHASES if x != "loading")


class Seen(NamedTuple):
    """What a stopped process was doing. evidence: the frame that says so, or a file; "" for none."""

    phase: str
    evidence: str


def stop(pid: int) -> bool:
    """Stops the process; whether it lives."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        return True
    return False


def go_on(pid: int) -> None:
    """Lets a stopped process go on."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def look(pid: int, workdir: Path, since: float) -> Seen:
    """The phase of a stopped process that was started at `since` (time.time()). A checkpoint that it is
    writing behind the steps is evidence too."""
    frames = _main_stack(pid)
    found = next(
        (Seen(phase, f) for phase, marks in PHASES.items() for f in frames if any(m in f for m in marks)),
        Seen("unknown", ""),
    )
    torn = [x.name for x in (workdir / "checkpoints").glob("*tmp*") if x.stat().st_mtime > since]
    if torn and found.phase in ("stepping", "loading", "drawing", "rewarding", "compiling"):
        return Seen("saving", f"{torn[0]} beside {found.evidence or 'the step'}")
    return found


def _main_stack(pid: int) -> list[str]:
    """ "function (file:line)" of each frame, the innermost first."""
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    command = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    try:
        threads: list[dict[str, Any]] = json.loads(said)
    except ValueError:
        return []
    main: list[dict[str, Any]] = next((x["frames"] for x in threads if x.get("os_thread_id") == pid), [])
    return [f"{x['name']} ({x.get('short_filename') or x['filename']}:{x['line']})" for x in main]
