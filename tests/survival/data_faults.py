"""Faults of data: numbers that are none, a manifest that changes, a store that cannot be reached."""

from pathlib import Path

from tests.stores.servers import Server
from tests.survival.phases import Seen
from tests.survival.runs import POISON, STORE_SECONDS, Run
from tests.survival.scenes import Injected, Scene, continues, ends, release, says, strike


def changed_manifest(scene: Scene) -> Injected:
    """Other transcripts in the manifest of a run that has checkpoints: it is refused by name."""
    run, file = scene.run, Path(scene.run.data) / "manifest.jsonl"
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    at = int(scene.rng.integers(len(lines)))
    lines[at] = lines[at].replace("number", "numbers")
    file.write_text("".join(lines))
    try:
        run.start()
        seen = Seen("saved", f"checkpoints of steps {run.saved()} on the disk; line {at + 1} changed")
        return ends(scene, seen, lambda status, log: status == 1 and "manifest" in log)
    finally:
        file.write_text(whole)


def bad_gradients(scene: Scene) -> Injected:
    """A learning rate that makes every later gradient NaN: a run of its own stops, and says so."""
    run = scene.run
    other = Run(run.kind, run.workdir.with_name(run.workdir.name + "-nan"), run.data, run.cache)
    other.more = ("--train.learning-rate", "1e35")
    other.start()
    statuses, log = other.end(), other.log()
    said = [x for x in log.splitlines() if "finite" in x]
    listed = (other.workdir / "not_finite.jsonl").exists()
    other.clear()
    end = f"status {statuses}: {said[-1][:200] if said else 'not named'}"
    seen = Seen("stepping", "not_finite.jsonl lists the steps" * listed)
    return Injected(seen, end, statuses[0] == 1 and bool(said))


def bad_recordings(scene: Scene) -> Injected:
    """Recordings whose samples are no numbers, or so large that no gradient is one: listed, and left out."""
    run, file = scene.run, scene.run.workdir / "skipped.jsonl"

    def is_listed() -> bool:
        found = file.read_text() if file.exists() else ""
        return all(f"{name}.wav" in found for name in POISON)

    is_new = not is_listed()
    run.start()
    run.wait(is_listed)
    evidence = f"{file.name} has them" * (is_new and is_listed())
    run.kill()
    end = f"killed after step {run.step()}"
    return Injected(Seen("loading", evidence), end, is_listed())


def lost_store(scene: Scene) -> Injected:
    """The store of the data refuses, cuts off, or is slow: for seconds, or until the run gives up."""
    run, server = scene.run, scene.server
    assert server is not None
    run.start()
    seen = strike(scene)
    before, for_good = _requests(server), scene.rng.random() < 0.3
    kind = str(scene.rng.choice(["503", "lost"] if for_good else ["503", "lost", "cut", "slow"]))
    server.faults({"match": ".", "kind": kind, "seconds": 2})
    try:
        release(run)
        run.wait(seconds=3 * STORE_SECONDS if for_good else float(scene.rng.uniform(2, 6)))
        struck = _requests(server) - before
        server.faults()
        how = f"{struck} requests answered with {kind}{' until it gave up' * for_good}"
        seen = seen._replace(evidence=f"{seen.evidence}; {how}" * bool(struck))
        if for_good and not run.is_running:
            return ends(scene, seen, says(server.proxy))
        return continues(scene, seen)
    finally:
        server.faults()


def _requests(server: Server) -> int:
    """How many came so far."""
    return sum(number for name, number in server.seen().items() if name != "bytes")
