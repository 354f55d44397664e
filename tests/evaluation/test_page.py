"""report.html: its data and recordings in the file; then, in a browser, by clicks."""

import base64
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.data.example import Clip, Example, utterance
from jaxthd.evaluation.page import write_page
from jaxthd.evaluation.results import SetResult, scored_set
from jaxthd.inference.evaluator import Evaluation, Hypothesis
from tests.evaluation.browser import CHROMIUM, Browser, browser

RATE = 16_000
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> </script>"


def recording(path: Path, seconds: float) -> Path:
    times = np.arange(int(seconds * RATE)) / RATE
    soundfile.write(path, 0.4 * np.sin(2 * np.pi * (300 + 900 * times) * times), RATE)
    return path


def made(folder: Path, count: int) -> tuple[list[SetResult], dict[str, dict[str, Example]]]:
    """Sets "clean" and "noisy" of so many documents; the first ones have recordings of their own."""
    rng = np.random.default_rng(0)
    files = [recording(folder / f"{n}.wav", seconds) for n, seconds in enumerate((1.5, 0.6, 2.25))]
    results, examples = [], {}
    for name in ("clean", "noisy"):
        hypotheses, of_set = [], {}
        for number in range(count):
            words = list(rng.choice(["turn", "on", "the", "light", "now", "please"], rng.integers(1, 12)))
            heard = [w for w in words if rng.random() > 0.1] + ["more"] * int(rng.random() < 0.1)
            key, said = f"{number + 1}:{name}{number}.wav", " ".join(words)
            answer = " ".join(heard)
            if number == 0:
                said, answer = (
                    "turn on the light",
                    f"turn off the {EVIL}" if name == "clean" else "turn on light",
                )
            times = [{"word": w, "start": 0.3 * n, "end": 0.3 * n + 0.25} for n, w in enumerate(said.split())]
            clip = Clip(files[number % 3], 0.0, None)
            turns = utterance(clip, said, "{audio}", "{audio}")
            of_set[key] = Example(key, turns, fields={"words": times} if number == 0 else {})
            hypotheses.append(Hypothesis(key, said, answer, 1.5, True))
        order = {key: n for n, key in enumerate(of_set)}
        results.append(scored_set(name, Evaluation({}, hypotheses, 1.5 * count, 1.0), "none", order))
        examples[name] = of_set
    return results, examples


def parts(page: str) -> tuple[dict, dict[str, bytes]]:
    """(the page's data, its recordings by id), read as a browser does."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    held = re.findall(r'<script type="text/plain" id="r([\d-]+)">(.*?)</script>', page)
    return json.loads(text[1]), {name: base64.b64decode(sound) for name, sound in held}


def test_the_page_holds_texts_as_data_and_the_worst_documents_recordings(tmp_path: Path):
    results, examples = made(tmp_path, 20)
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "report.html"
    write_page(path, "A & B", results, examples, compounds=False, audio_bytes=40_000)
    page = path.read_text()
    data, held = parts(page)
    assert len(data["documents"]) == 40
    evil = data["documents"][0]
    assert evil["answered"] == f"turn off the {EVIL}"
    assert EVIL not in page
    assert html.escape(EVIL) not in page
    assert [kind for _, _, kind in evil["pairs"]].count("substitution") == evil["substitutions"]
    assert evil["times"][2] == {"word": "the", "start": 0.6, "end": 0.85}
    assert 0 < len(held) < 40, "the size is bounded"
    worst = sorted(data["documents"], key=lambda d: -d["wrong"] / d["total"])[: len(held)]
    least = min(d["wrong"] / d["total"] for d in worst)
    assert all(data["documents"][int(n.split("-")[0])]["rate"] >= least for n in held)
    assert "0-0" in held
    sound, rate = soundfile.read(io.BytesIO(held["0-0"]))
    assert rate == RATE
    assert len(sound) == pytest.approx(1.5 * RATE, abs=2500)
    others = [d for d in data["documents"] if d["recordings"][0]["id"] not in held]
    assert {d["recordings"][0]["path"] for d in others} <= {f"../{n}.wav" for n in range(3)}


def test_a_set_of_letters_is_shown_letter_by_letter(tmp_path: Path):
    clip = Clip(recording(tmp_path / "a.wav", 0.3), 0.1, 0.1)
    example = Example("1:a", utterance(clip, "\u4eca\u65e5\u306f", "{audio}", "{audio}"))
    found = Evaluation(
        {}, [Hypothesis("1:a", "\u4eca\u65e5\u306f", "\u4eca\u660e\u306f", 0.1, True)], 0.1, 1.0
    )
    result = scored_set("ja", found, "basic", {"1:a": 0})
    write_page(tmp_path / "p.html", "", [result], {"ja": {"1:a": example}}, compounds=False, audio_bytes=0)
    data, held = parts((tmp_path / "p.html").read_text())
    assert not held
    assert data["rate"] == "CER"
    (document,) = data["documents"]
    assert document["pairs"] == [
        ["\u4eca", "\u4eca", ""],
        ["\u65e5", "\u660e", "substitution"],
        ["\u306f", "\u306f", ""],
    ]
    assert (document["wrong"], document["total"]) == (1, 3)
    assert document["recordings"][0]["path"] == ""
    assert "part of a file" in document["recordings"][0]["why"]


def test_words_of_the_wrong_speaker_are_errors_on_the_page(tmp_path: Path):
    """The words are right; with each speaker's own put together, one is another, one too much, one lost."""
    said, heard = "[S1] turn on [S2] the light", "[S1] turn [S2] on the [S1] light"
    example = Example(
        "1:a", utterance(Clip(recording(tmp_path / "a.wav", 0.3), 0.0, None), said, "{audio}", "{audio}")
    )
    found = Evaluation({}, [Hypothesis("1:a", said, heard, 0.3, True)], 0.3, 1.0)
    result = scored_set("two", found, "basic", {"1:a": 0})
    write_page(tmp_path / "p.html", "", [result], {"two": {"1:a": example}}, compounds=False, audio_bytes=0)
    data, _ = parts((tmp_path / "p.html").read_text())
    assert data["sets"] == [{"name": "two", "figures": "1 documents, WER 0.00%, cpWER 75.00%"}]
    assert data["documents"][0]["cpwer"] == 0.75
    assert data["documents"][0]["rate"] == 0.0


@pytest.mark.nightly
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")
def test_the_page_works_in_a_browser_by_clicks(tmp_path: Path):
    """From a file, with 5,000 documents, wide and small."""
    results, examples = made(tmp_path, 2500)
    path = tmp_path / "report.html"
    write_page(path, "A small model", results, examples, compounds=False, audio_bytes=2_000_000)
    data, _ = parts(path.read_text())
    with browser(tmp_path / "profile") as page:
        page.open(path, 1280, 800)
        assert page.ask("window.hacked === undefined && document.title") == "A small model"
        assert page.ask("find('count').textContent") == "5,000 of 5,000"
        assert page.ask("document.querySelectorAll('audio').length") == 0, "players come with a document"
        _scrolls(page)
        _sorts(page, data)
        _opens(page)
        _filters(page, data)
        page.screenshot(tmp_path / "wide.png")
        page.open(path, 390, 780)
        page.click("#rows .line", 2)
        page.wait("document.querySelector('#detail canvas')?.dataset.frames > 10")
        assert page.ask("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        page.screenshot(tmp_path / "small.png")
        assert page.ask("window.hacked === undefined && performance.getEntriesByType('resource').length") == 0


def _scrolls(page: Browser) -> None:
    """Few rows are in the document, wherever it is scrolled to, and they are drawn at once."""
    worst, rows = page.ask(
        """(async () => { const list = find("list"); let worst = 0, rows = 0;
        for (let n = 0; n <= 60; n++) {
          list.scrollTop = (list.scrollHeight * n) / 60;
          await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
          const start = performance.now(); draw_rows(); find("rows").offsetHeight;
          worst = Math.max(worst, performance.now() - start);
          rows = Math.max(rows, document.querySelectorAll("#rows .line").length); }
        return [worst, rows]; })()"""
    )
    print(f"5,000 rows: {rows} in the document, drawn in {worst:.1f} ms at most")
    assert rows < 80
    assert worst < 100
    last = page.ask("[...document.querySelectorAll('#rows .line')].at(-1).getBoundingClientRect().bottom")
    assert last <= page.ask("find('list').getBoundingClientRect().bottom + 1")
    page.ask("find('list').scrollTop = 0")


def _column(page: Browser, number: int) -> list[str]:
    return page.ask(
        "[...document.querySelectorAll('#rows .line')].slice(0, 15)"
        f".map((x) => x.children[{number}].textContent)"
    )


def _sorts(page: Browser, data: dict) -> None:
    """By a click on a column's name, and the other way by a second one."""
    page.click("#head button", 3)
    assert (
        list(map(int, _column(page, 3))) == sorted((d["wrong"] for d in data["documents"]), reverse=True)[:15]
    )
    page.click("#head button", 3)
    assert list(map(int, _column(page, 3))) == sorted(d["wrong"] for d in data["documents"])[:15]
    page.click("#head button", 1)
    assert _column(page, 1)[:3] == ["1:clean0.wav", "1:noisy0.wav", "2:clean1.wav"], "numbers in order"


def _opens(page: Browser) -> None:
    """A document's words, spectrogram and player; a click on a word goes to its time, which is marked."""
    page.click("#rows .line", 0)
    pairs = page.ask("[...document.querySelectorAll('.pair')].map((x) => [x.className, x.innerText])")
    assert pairs[0] == ["pair", "turn\\nturn".replace("\\n", "\n")]
    assert pairs[1] == ["pair error substitution", "on\noff"]
    assert page.ask("document.querySelectorAll('#detail script, #detail img').length") == 0
    page.wait("document.querySelector('#detail canvas')?.dataset.frames > 10")
    page.wait("document.querySelector('audio').duration > 0")
    assert page.ask("document.querySelector('audio').duration") == pytest.approx(1.5, abs=0.15)
    page.click(".times button", 2)
    page.wait("document.querySelector('.times .now')")
    page.ask("document.querySelector('audio').pause()")
    page.ask("void (document.querySelector('audio').currentTime = 0.7)")
    page.wait("document.querySelector('.times .now')?.textContent === 'the'")
    assert page.ask("document.querySelectorAll('.times .now').length") == 1
    page.click("#rows .line", 1)
    assert page.ask("document.querySelectorAll('audio').length") == 1, "the player before is gone"


def _filters(page: Browser, data: dict) -> None:
    """By words, by set, and to those with errors."""
    page.click("#query")
    page.type("NOISY1.wav")
    page.wait("find('count').textContent.startsWith('1 of')")
    page.ask(
        "find('query').value = ''; find('which').value = 'noisy';"
        "find('which').dispatchEvent(new Event('change'))"
    )
    page.click("#errors")
    wrong = sum(d["set"] == "noisy" and d["wrong"] > 0 for d in data["documents"])
    page.wait(f"find('count').textContent === '{wrong:,} of 5,000'")
