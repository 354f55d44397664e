"""What asks a run to stop."""

import os
import signal

from jaxthd.run.signals import stop_requested


def test_a_signal_or_the_time_stops_a_run_and_says_so():
    with stop_requested() as asked:
        assert asked() == ""
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == "by a signal"
    with stop_requested(3600.0) as asked:
        assert asked() == ""
    with stop_requested(1e-6) as asked:
        assert asked() == "by train.max_seconds 1e-06"
