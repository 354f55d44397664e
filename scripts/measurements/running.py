"""Runs the command of a claim, keeps what it prints, and reads the values from it.

A log begins with a line that tells when, where and of which code it is, and ends with a line that tells how
the command ended. So it can be read again later.

Which code is a digest, by which a claim calls itself stale: equal as long as nothing changes that runs.
Comments, docstrings and the layout of the text do not count, nor where code lies: the statements at the top
of modules are hashed each by itself, without imports, and sorted. So a function that moves to another file, a
file that moves to another folder, or better words in a docstring leave the digest as it was.
"""

import ast
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import UserError
from scripts.measurements.claims_file import Claim, Measured, Number

HEAD, END = "# measured: ", "# ended: "


class Outcome(NamedTuple):
    """What a log tells of a claim.

    values: those that were printed. problems: why the claim does not hold; none where it holds.
    """

    measured: Measured
    minutes: Number
    values: dict[str, Number]
    problems: list[str]


def git(root: Path, *words: str) -> str:
    """What git prints, or nothing where it fails."""
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()


def changed_files(root: Path) -> list[str]:
    """Files of the work tree that are not as in the last commit. Pages and claims do not count."""
    return git(root, "status", "--porcelain", "--", ".", ":!docs", ":!README.md").splitlines()


def measured_now(claim: Claim, root: Path, machine: str) -> Measured:
    """Today, this code and this interpreter's libraries. machine: what to say of it; else its processor."""
    commit = git(root, "rev-parse", "--short=7", "HEAD") or "unknown"
    commit += " with changes" * bool(changed_files(root))
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    versions = f"python {platform.python_version()}, {versions}"
    code = digest(root, claim.code)
    return Measured(datetime.date.today(), commit, machine or this_machine(), versions, code)


def this_machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.+)$", described, re.M)
    return f"{cores} CPU cores ({model[1] if model else platform.machine()}), simulated devices"


def resolved(command: str, inputs: Mapping[str, str], work: Path, root: Path) -> str:
    """The command with the names of inputs, and WORK, replaced. Raises UserError for a missing file."""
    words = {"WORK": str(work.resolve())}
    for name in inputs.keys() & set(re.findall(r"\b[A-Z]+\b", command)):
        words[name] = os.path.normpath(root / inputs[name]) if "/" in inputs[name] else inputs[name]
        if "/" in inputs[name] and not Path(words[name]).exists():
            raise UserError(f"{name} is {words[name]}, which does not exist: give --input {name}=PATH")
    return re.sub(rf"\b({'|'.join(words)})\b", lambda word: shlex.quote(words[word[0]]), command)


def run(
    claim: Claim, inputs: Mapping[str, str], measured: Measured, log: Path, root: Path, limit: Number
) -> None:
    """Runs a claim's command and writes its log. limit: minutes, after which the command is ended."""
    work = log.with_suffix(".work")
    command = resolved(claim.command, inputs, work, root)
    work.mkdir()
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    started = time.monotonic()
    told = measured._asdict() | {"date": measured.date.isoformat(), "command": command}
    with log.open("w") as file:
        print(HEAD + json.dumps(told), file=file, flush=True)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | paths,
            start_new_session=True,
        )
        try:
            ended = f"exit status {process.wait(60 * limit)}"
        except subprocess.TimeoutExpired:
            ended = "no end"
        finally:  # whatever the command has started ends with it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with log.open("a") as file:
        print(f"\n{END}{ended} after {(time.monotonic() - started) / 60:.2f} minutes", file=file)
    if ended == "exit status 0":
        shutil.rmtree(work)


def outcome(claim: Claim, log: Path) -> Outcome:
    """Reads a log: the values, and what does not hold. Raises UserError for a file that is no whole log."""
    text = log.read_text(errors="replace")
    end = re.search(rf"^{END}(.*) after ([\d.]+) minutes\n\Z", text, re.M)
    if not text.startswith(HEAD) or not end:
        raise UserError(f"{log} is not a whole log of a claim; expected what --run writes: run it again")
    head, printed = text[len(HEAD) :].split("\n", 1)
    told = json.loads(head)
    del told["command"]
    measured = Measured(**told | {"date": datetime.date.fromisoformat(told["date"])})
    problems = []
    if end[1] != "exit status 0":
        said = printed[: printed.rindex(END)].split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")
        problems.append(f"{end[1]} after {end[2]} minutes: {last}")
    values = {}
    for name, value in claim.values.items():
        try:
            found = value.find(printed)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if found is not None:
            values[name] = found
            if not value.holds(found):
                problems.append(f"{name} is {found:g}, expected {value.bound}")
    if missing := claim.values.keys() - values.keys():
        listed = ", ".join(name for name in claim.values if name in missing)
        problems.append(f"not printed: {listed}; their `read` finds nothing in {log}")
    return Outcome(measured, max(1, round(float(end[2]))), values, problems)


UNREAD = {"ctx", "kind", "module", "level", "type_comment"}
"""Fields of syntax trees that say nothing that runs, or where the module lies that a name comes from."""


def digest(root: Path, paths: Iterable[str]) -> str:
    """The digest of files and folders below `root`, 16 hexadecimal digits.

    Raises FileNotFoundError for a path that is not there."""
    hashes = sorted({each for file in files(root, paths) for each in hashes_of(file)})
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


@cache
def hashes_of(file: Path) -> frozenset[str]:
    """The hashes of a file's parts; a file is read once, though many claims depend on it."""
    return frozenset(hashlib.sha256(part).hexdigest() for part in parts(file))


def files(root: Path, paths: Iterable[str]) -> Iterator[Path]:
    """The Python files below some paths; another file where a path names it."""
    for path in paths:
        if (root / path).is_dir():
            yield from (root / path).rglob("*.py")
        elif (root / path).is_file():
            yield root / path
        else:
            raise FileNotFoundError(f"{path} does not exist; expected a file or folder of the repository")


def parts(file: Path) -> Iterator[bytes]:
    """What of a file is hashed by itself: the statements of a module, or all of another file."""
    content = file.read_bytes()
    if file.suffix != ".py":
        yield content
        return
    for statement in ast.parse(content).body:
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not is_text(statement):
            yield repr(normal(statement)).encode()


def normal(node: Any) -> Any:
    """A syntax tree as nested tuples without docstrings, equal in all versions of Python."""
    if isinstance(node, ast.AST):
        fields = ((name, normal(x)) for name, x in ast.iter_fields(node) if name not in UNREAD)
        return type(node).__name__, *(field for field in fields if field[1] not in (None, ()))
    if isinstance(node, list):
        return tuple(normal(x) for x in node if not is_text(x))
    return node


def is_text(node: Any) -> bool:
    """Whether a statement is a docstring: a text alone."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
