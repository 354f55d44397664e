"""Output that nobody reads any more ends no command, and loses nothing that somebody could read."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxthd.data.child_process import Child
from jaxthd.files import unread_output
from jaxthd.files.unread_output import drop_unread_output, goes_on_unread


@pytest.fixture(params=["terminal", "pipe"])
def output(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(the end where a program writes, the end where it is read). The second may be closed."""
    read, write = pty.openpty() if request.param == "terminal" else os.pipe()
    yield write, read
    os.close(write)


def test_what_nobody_can_read_does_not_end_a_run(
    output: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that was closed, and a pipe whose reader (tee) got Ctrl-C too."""
    write, read = output
    monkeypatch.setattr(unread_output, "OUTPUTS", (write,))
    drop_unread_output()
    os.write(write, b"read\n")
    assert os.read(read, 4) == b"read"
    os.close(read)
    with pytest.raises(OSError, match=r"pipe|Input/output"):
        os.write(write, b"lost\n")
    drop_unread_output()
    os.write(write, b"lost\n")


PROGRAM = """
import sys
from jaxthd.files.unread_output import goes_on_unread
@goes_on_unread()
def main():
    print("first")
    print("second", flush=True)
    sys.stdin.readline()
    for number in range(3000):
        print("lost", number, flush=number % 2)
    print("and here", file=sys.stderr)
main()
print("after", flush=True)
"""


def started(**streams: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **streams)


def test_a_command_goes_on_when_the_reader_of_its_pipe_has_ended():
    """As `command | head -1` does: standard error says so, once."""
    process = started(stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    with process:
        _, errors = process.communicate("go on\n")
    said = errors.splitlines()
    assert process.returncode == 0
    assert [line.partition(" (")[0] for line in said] == [
        "warning: nobody reads standard output any more", "and here"
    ]  # fmt: skip


def test_a_command_goes_on_when_nobody_reads_its_errors_either():
    """As with `command 2>&1 | head -1`."""
    process = started(stderr=subprocess.STDOUT)
    assert process.stdout
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    with process:
        process.communicate("go on\n")
    assert process.returncode == 0


def test_what_is_read_is_whole_and_a_full_disk_still_raises():
    program = PROGRAM.replace("sys.stdin.readline()", "")
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines()[:2] == ["first", "second"]
    assert read.stdout.splitlines()[2:] == [*(f"lost {number}" for number in range(3000)), "after"]
    assert read.stderr == "and here\n"
    with open("/dev/full", "w") as full:
        failed = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert failed.returncode
    assert "No space left on device" in failed.stderr


def test_streams_that_others_have_replaced_stay(capsys: pytest.CaptureFixture[str]):
    before = sys.stdout, sys.stderr
    with goes_on_unread():
        assert (sys.stdout, sys.stderr) == before
        print("captured")
    assert capsys.readouterr().out == "captured\n"


def test_a_worker_whose_output_nobody_reads_goes_on():
    """A reward function of a user may print."""
    program = (
        "import os; from jaxthd.data.child_process import parents_end\n"
        "pipe = parents_end(); read, write = os.pipe(); os.dup2(write, 1); os.close(write); os.close(read)\n"
        "print('lost', flush=True); pipe.send_bytes(b'still there')"
    )
    child = Child("-c", program)
    try:
        assert child.receive(30.0) == b"still there"
    finally:
        child.end()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_warning_is_there_when_the_process_is_killed(unbuffered: str):
    """kill -9 flushes nothing: what was printed has to be written by then."""
    program = (
        "import os, sys\n"
        "from jaxthd.files.unread_output import goes_on_unread\n"
        "with goes_on_unread():\n"
        "    print('warning: damaged', file=sys.stderr)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    found = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert found.returncode == -9
    assert found.stderr == "warning: damaged\n"
