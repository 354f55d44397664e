"""A profile of some steps of a run, which TensorBoard opens."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax.profiler

from jaxthd.config import TrainConfig
from jaxthd.parallel.processes import is_first


@contextmanager
def profiled(
    steps: Iterable[int],
    config: TrainConfig,
    workdir: Path,
    say: Callable[[str], None],
    aside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Iterable[int]]:
    """Yields the steps. Those of the window are traced, in process 0; the end of the context ends a trace.

    config: names the window in `profile`. workdir: receives tensorboard/plugins/profile/TIME, where
    TensorBoard looks for profiles. say: prints a line. aside: a context for work of the cause that it
    is given (TimeAccount.during). A profiler that fails is reported, and the run goes on.
    """
    window = config.profile_window if is_first() else None
    trace = _Trace(workdir / "tensorboard", say)

    def numbers() -> Generator[int, None, None]:
        """Yields the steps, and begins and ends the trace around those of the window."""
        for step in steps:
            if window and not trace.was_started and window[0] <= step <= window[1]:
                with aside("other"):
                    trace.start(f"steps {step} to {window[1]}")
            with jax.profiler.StepTraceAnnotation("train", step_num=step) if trace.is_open else nullcontext():
                yield step
            if window and step == window[1]:
                with aside("other"):
                    trace.stop()

    try:
        with closing(numbers()) as traced:
            yield traced
    finally:
        trace.stop()


class _Trace:
    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._what = folder, say, ""
        self.is_open = self.was_started = False

    def start(self, what: str) -> None:
        """Begins the trace. what: the steps, for messages."""
        self.was_started, self._what = True, what
        try:
            jax.profiler.start_trace(self._folder)
            self.is_open = True
        except Exception as error:
            self._failed(error)

    def stop(self) -> None:
        """Ends the trace, if it is open, and says where it is."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            jax.profiler.stop_trace()
            self._say(
                f"the profile of {self._what} is in {self._folder}/plugins/profile: "
                f"tensorboard --logdir {self._folder} (pip install tensorboard xprof)"
            )
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        self._say(f"warning: {self._what} cannot be profiled ({why}); the run goes on")
