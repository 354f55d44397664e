"""Whether the model can memorise 100 short real recordings, from sound to words.

    python scripts/check_memorising.py --manifest recordings/manifest.jsonl

Takes the shortest recordings with different texts, trains on them alone, and decodes them. Without the sound
the texts cannot be told apart, so a low word error rate shows that the whole path works: features, packing,
encoder, insertion of embeddings, decoder, decoding. Prints a table; exits 1 above --target.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from jaxthd.config import Config
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.config_file import load_config
from jaxthd.inference.wer import make_normaliser
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.startup import simulate_devices
from jaxthd.train import train
from jaxthd.validate import DeviceFacts, validate


def shortest(manifest: Path, count: int) -> list[dict]:
    """Lines of the manifest, shortest duration first, each text once; paths are made absolute."""
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    found: dict[str, dict] = {}
    normalise = make_normaliser("basic")
    for line in sorted(lines, key=lambda line: line["duration"]):
        words = normalise(line["text"])
        if words and words not in found:
            path = manifest.absolute().parent / line["audio_filepath"]
            found[words] = line | {"audio_filepath": str(path)}
    if len(found) < count:
        raise UserError(f"{manifest} has {len(found)} different texts; expected {count}: lower --count")
    return list(found.values())[:count]


def run_config(subset: Path, steps: int) -> Config:
    base = load_config(Path(__file__).parents[1] / "configs" / "single.py")
    data = replace(base.data, manifest=(str(subset),), validation_manifest=str(subset))
    training = replace(
        base.train, steps=steps, warmup_steps=20, validate_every=50, checkpoint_every=steps, trackers=()
    )
    return replace(base, data=data, train=training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, default=Path("runs/memorising"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", type=float, default=0.2, help="word error rate to fall below")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    subset = options.workdir / "subset.jsonl"
    chosen = shortest(options.manifest, options.count)
    subset.write_text("".join(json.dumps(line) + "\n" for line in chosen))
    seconds = sum(line["duration"] for line in chosen)
    print(f"{len(chosen)} recordings, {seconds:.0f} s, at most {chosen[-1]['duration']:.2f} s each")
    config = run_config(subset, options.steps)
    simulate_devices(config.mesh.devices)
    validate(config, DeviceFacts.of_this_machine())
    train(config, options.workdir, ["train.steps"])
    measured = [line for line in read_metrics(options.workdir) if "validation_wer" in line]
    print("\n| step | loss a token | accuracy | word error rate |\n|---|---|---|---|")
    for line in measured:
        print(
            f"| {line['step']} | {line['validation_loss']:.3f} | {line['validation_accuracy']:.1%} | "
            f"{line['validation_wer']:.1%} |"
        )
    if not measured[-1]["validation_wer"] < options.target:
        sys.exit(f"the word error rate is not below {options.target:.0%}")


if __name__ == "__main__":
    with readable_errors():
        main()
