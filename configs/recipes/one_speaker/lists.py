r"""Lists of one person's recordings, in two halves: what is learned, and other texts to judge it by.

    python configs/recipes/one_speaker/lists.py SPEECH/manifest.jsonl runs/recipes/one_speaker_lists

Lines have audio_filepath, duration and text. The folder gets learned_0.jsonl, judged_0.jsonl,
learned_1.jsonl and judged_1.jsonl: a text of two words or more is learned in one half and judged in the
other, chosen by a hash of it; single words are learned in both. Texts are small letters, digits in words.
Recordings of more than 30 s, which the buffers of the recipe do not hold, and those without words are left
out.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path

from jaxthd.data.text.synthetic import digits_of
from jaxthd.inference.wer import make_normaliser

MOST_SECONDS = 30.0


def spoken(text: str) -> str:
    """The text as it is said: small letters without punctuation, each digit a word."""
    return make_normaliser("basic")(re.sub(r"\d", lambda digit: f" {digits_of(int(digit[0]))} ", text))


def lists(manifest: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Returns ({name of a list: its lines}, the recordings that are left out).

    Texts divide them. data.validation_manifest "held_out" divides by files, and several say the same.
    """
    found: dict[str, list[str]] = {f"{part}_{half}": [] for half in (0, 1) for part in ("learned", "judged")}
    left_out = []
    for line in manifest.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        text, path = spoken(item["text"]), str((manifest.parent / item["audio_filepath"]).resolve())
        if not text or item["duration"] > MOST_SECONDS:
            left_out.append(f"{path}: {item['duration']:.1f} s, {text[:40]!r}")
            continue
        written = json.dumps({"audio_filepath": path, "duration": item["duration"], "text": text})
        judged_in = hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 2
        for half in (0, 1):
            part = "judged" if half == judged_in and " " in text else "learned"
            found[f"{part}_{half}"].append(written)
    return found, left_out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path, help="the person's recordings")
    parser.add_argument("out", type=Path, help="folder of the lists")
    options = parser.parse_args()
    found, left_out = lists(options.manifest)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, lines in found.items():
        (options.out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{options.out / name}.jsonl: {len(lines)} recordings")
    print("\n".join(f"left out: {each}" for each in left_out))


if __name__ == "__main__":
    main()
