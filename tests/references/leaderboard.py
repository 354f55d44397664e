"""Makes leaderboard.json: what the Open ASR leaderboard's own code makes of texts, and how it counts errors.

git clone https://github.com/huggingface/open_asr_leaderboard /tmp/leaderboard
python -m tests.references.leaderboard /tmp/leaderboard     # with kaldialign, regex and whisper-normalizer
"""

import importlib.util
import json
import random
import sys
import types
from pathlib import Path

TEXTS = [
    "Mr. O'Neill's dog isn't barking, uh-huh, at 5:30 p.m.",
    "It's the cat's 21st birthday; he's got twenty one dollars and five cents!",
    "We kinda wanna go 'cause dunno, sorta, y'all",
    "The B.B.C. and the U. S. A. on 5 G Wi-Fi, e-mail, X-ray, t-shirt",
    "Katherine, Mohamed and Stephen Macdonald met Bryan at St. Mary's",
    "okay OK o.k. kay, all right, al right, et cetera, etcetera",
    "the colour of the archaeological travelogue; its cancellation",
    "I a m here, a b c, i a, 1 2 3, b c",
    "one hundred and one point five percent, $2.50, two and a half million",
    "hmm mm ah [noise] (laughs) caf\u00e9 na\u00efve \u0153uvre stra\u00dfe",
    "how ever, sci-fi flyers; snowploughs, pummelled",
    "He said: 'what's that?' Who's there? That's Ann's, let's say",
    "double oh seven, nineteen ninety nine, the 1980s, 3rd, twenty-second",
    "",
]
WORDS = ["white", "paper", "whitepaper", "a", "b", "ab", "the", "then", "ice", "cream", "icecream"]


def code(folder: Path) -> types.ModuleType:
    """The leaderboard's module normalizer.normalizer, without its package, which needs datasets."""
    package = types.ModuleType("normalizer")
    package.__path__ = [str(folder / "normalizer")]
    sys.modules["normalizer"] = package
    path = folder / "normalizer" / "normalizer.py"
    spec = importlib.util.spec_from_file_location("normalizer.normalizer", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mixed(rng: random.Random, vocabulary: list[str]) -> str:
    """A text of words that the rules are about, in a random order, some with an 's or a full stop."""
    words = [
        rng.choice(vocabulary) + rng.choice(["", "", "", "'s", ".", ",", "'ve", "n't"]) for _ in range(9)
    ]
    return " ".join(words)


def main() -> None:
    """Writes the file."""
    from kaldialign import batch_error_rate
    from whisper_normalizer.english import EnglishTextNormalizer

    found, rng = code(Path(sys.argv[1])), random.Random(0)
    normalise = found.EnglishTextNormalizer()
    tables = normalise.standardize_spellings.mapping, normalise.standardize_names.mapping
    vocabulary = [*rng.sample(sorted(tables[0]), 40), *rng.sample(sorted(tables[1]), 40)]
    numbers = sorted(normalise.standardize_numbers.words)
    texts = [*TEXTS, *(mixed(rng, vocabulary + rng.sample(numbers, 40)) for _ in range(60))]
    # Every name, and every spelling that is another than in whisper_normalizer.
    whisper = EnglishTextNormalizer().standardize_spellings.mapping
    texts += [" ".join(sorted(x)) for x in (tables[1], dict(set(tables[0].items()) ^ set(whisper.items())))]
    pairs = [[" ".join(rng.choices(WORDS, k=rng.randrange(0, 9))) for _ in range(2)] for _ in range(60)]
    counts = [batch_error_rate([r.split()], [h.split()], merge_compounds=True)["total"] for r, h in pairs]
    sides = ([text.split() for text in side] for side in zip(*pairs, strict=True))
    total = batch_error_rate(*sides, merge_compounds=True)
    out = {
        "texts": {text: " ".join(normalise(text).split()) for text in texts},
        "pairs": [[*pair, count] for pair, count in zip(pairs, counts, strict=True)],
        "rate": total["err_rate"],
    }
    path = Path(__file__).with_name("leaderboard.json")
    path.write_text(json.dumps(out, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
