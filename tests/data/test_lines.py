"""Shards in braces, read as one data set; compressed ones too."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.data.example import Turn
from jaxthd.data.sources.conversations import own_prompt
from jaxthd.data.sources.lines import Entry, Line, expand_braces
from jaxthd.data.sources.source import Files, LineSource, SourceSetting
from jaxthd.errors import UserError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a/m.json", ["a/m.json"]),
        ("m_{0..2}.json", ["m_0.json", "m_1.json", "m_2.json"]),
        ("manifest__OP_0..1_CL_.json", ["manifest_0.json", "manifest_1.json"]),
        ("m-{08..11}", ["m-08", "m-09", "m-10", "m-11"]),
        ("m{7..7}", ["m7"]),
        ("{de,en}/m_{0..1}", ["de/m_0", "de/m_1", "en/m_0", "en/m_1"]),
        ("a{b}{}{c..d}{..2}(0..1)", ["a{b}{}{c..d}{..2}(0..1)"]),
        ("{,x}", ["", "x"]),
        ("_OP_de,en_CL_/m", ["de/m", "en/m"]),
        ("es_CL_m_{0..1}_OP_a.json", ["es_CL_m_0_OP_a.json", "es_CL_m_1_OP_a.json"]),
        ("x_OP_1_OP_0..1_CL__CL_", ["x_OP_10_CL_", "x_OP_11_CL_"]),
    ],
)
def test_braces_stand_for_what_a_shell_and_nemo_make_of_them(text, names):
    assert expand_braces(text) == names


def test_what_exists_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/x")
    for name in ("es_CL_train.jsonl", "x_OP_0..1_CL_.jsonl", "part{a,b}.jsonl", "m{0..2}.json", "~x"):
        assert expand_braces(name) != [name] or name in ("es_CL_train.jsonl", "~x")
        Path(name).touch()
        assert expand_braces(name) == [name]
        assert expand_braces(str(tmp_path / name)) == [str(tmp_path / name)]
    Path("a{b,c}", "~").mkdir(parents=True)
    assert expand_braces("a{b,c}/m_{0..1}") == ["a{b,c}/m_0", "a{b,c}/m_1"]
    assert expand_braces("{a,b}/a{b,c}") == ["a/ab", "a/ac", "b/ab", "b/ac"]
    assert expand_braces("~/m_{0..1}") == ["/home/x/m_0", "/home/x/m_1"]


@pytest.mark.parametrize("text", ["m_{2..0}.json", "{0..9999999}", "{0..9999}{0..9999}"])
def test_a_range_without_an_end_in_sight_is_refused(text):
    with pytest.raises(UserError, match=r"expected \{FIRST\.\.LAST\}, up to 1,000,000 in all"):
        expand_braces(text)


class Numbers(LineSource):
    """Lines {"n": 1}, whose turn says n and the number of the file. Negative numbers cannot be used."""

    expected = "n"

    def named(self) -> Files:
        return Files(self.existing())

    def turns_of(self, entry: Entry, item: Line, data: DataConfig) -> tuple[Turn, ...]:
        if entry["n"] < 0:
            raise ValueError(f"n is {entry['n']}")
        return (Turn("assistant", (f"{entry['n']} of {item.file}",)),)

    def name_of(self, entry: Entry) -> str:
        return str(entry["n"])


def read(*files: Path):
    names = ",".join(path.name for path in files)
    path = files[0].parent / f"{{{names}}}" if files[1:] else files[0]
    examples, skipped = Numbers(SourceSetting(str(path))).read(DataConfig())
    return {e.key: e.text for e in examples}, dict(skipped)


def test_keys_do_not_depend_on_how_lines_are_cut_into_files(tmp_path):
    lines = [b'{"n": %d}\n' % n for n in (3, 1, -4, 1, 5, 9)]
    lines[2:2] = [b"\n", b"{\n"]
    (tmp_path / "all").write_bytes(b"".join(lines))
    whole, skipped = read(tmp_path / "all")
    assert list(whole) == ["1:3", "2:1", "6:1", "7:5", "8:9"]
    assert skipped["5:-4"] == "n is -4"
    for *cuts, where in ((1, 5, "b.json line 4"), (1, 4, "c.json line 1"), (6, 7, "a.json line 5")):
        files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
        for file, start, end in zip(files, (0, *cuts), (*cuts, 8), strict=True):
            file.write_bytes(b"".join(lines[start:end]))
        shards, found = read(*files)
        assert list(shards) == list(whole)
        assert list(found) == list(skipped) == ["4:", "5:-4"]
        assert found["5:-4"] == f"{where}: n is -4"


def test_compressed_files_are_read_and_a_damaged_one_ends_the_run(tmp_path):
    noise = np.random.default_rng(0).bytes(40_000).hex()
    data = "".join(f'{{"n": {n}, "x": "{noise[16 * n : 16 * n + 16]}"}}\n' for n in range(5000)).encode()
    names = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl")]
    names[0].write_bytes(gzip.compress(data))
    names[1].write_bytes(b'{"n": 7}\n')
    examples, skipped = read(*names)
    assert (len(examples), skipped) == (5001, {})
    assert examples["5001:7"] == "7 of 1"
    whole = gzip.compress(data)
    flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
    for damage, cause in (
        (whole[:9000], "ended before the end-of-stream marker"),
        (whole[:-3000], "ended before the end-of-stream marker"),
        (whole[:-4], "ended before the end-of-stream marker"),
        (flipped, "CRC check failed"),
        (whole + b"xx", "bytes follow the end of the compressed data"),
    ):
        names[0].write_bytes(damage)
        with pytest.raises(
            UserError, match=rf"a\.jsonl\.gz, after line \d+: .*({cause}).*fetch or write it again"
        ):
            read(*names)
    names[0].write_bytes(whole + gzip.compress(b'{"n": 8}\n') + bytes(512))
    assert len(read(*names)[0]) == 5002, "several members, and zeros that fill a block, are sound"


LINE = b'{"n": 1, "x": "a"}\n'
ARRAY = json.dumps([{"n": 1}, {"n": 2}], indent=1).encode()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b"", "holds no bytes"),
        ("a.jsonl.gz", b"", "holds no bytes"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "holds no lines"),
        ("a.jsonl", b"\n  \n", "holds no lines"),
        ("a.jsonl.gz", gzip.compress(b"\n\n", mtime=0), "holds no lines"),
        ("a.jsonl", LINE * 3 + LINE[:9], "line 4: the file ends within a line"),
        ("a.jsonl", LINE[:9], "line 1: the file ends within a line"),
        ("a.jsonl", LINE * 3 + bytes(4096), "line 4: the file ends within a line"),
        ("a.jsonl", LINE + '{"n": "ä'.encode()[:-1], "line 2: the file ends within a line"),
        ("a.jsonl.gz", gzip.compress(LINE * 3 + LINE[:9], mtime=0), "line 4: the file ends within a line"),
        ("a.jsonl", gzip.compress(LINE, mtime=0), r"its name does not end in \.gz.*rename it"),
        ("a.jsonl.gz", LINE, r"not compressed by gzip, and its name ends in \.gz"),
        (
            "a.jsonl.bz2",
            bz2.compress(LINE),
            "bzip2.*expected JSON lines, plain or compressed by gzip.*bunzip2",
        ),
        ("a.jsonl.xz", lzma.compress(LINE), r"compressed \(xz\).*unxz"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20), r"compressed \(zstd\).*unzstd"),
        ("a.zip", b"PK\x03\x04" + bytes(20), r"compressed \(zip\)"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c" + bytes(20), r"compressed \(7z\)"),
        ("a.jsonl", b"PAR1" + bytes(20), r"is a parquet file; .*rename it to end in \.parquet"),
        ("a.jsonl", b"ARROW1" + bytes(20), "is an arrow file"),
        ("a.json", ARRAY, r"is one JSON array; expected JSON lines.*jq -c '\.\[\]'"),
        ("a.json", json.dumps([{"n": 1}, {"n": 2}]).encode(), "is one JSON array"),
        ("a.json", b'[{"n": 1},\n{"n": 2}]\n', "is one JSON array"),
        ("a.json.gz", gzip.compress(ARRAY, mtime=0), "is one JSON array"),
        ("a.json", json.dumps({"data": [{"n": 1}]}, indent=2).encode(), "an object over several lines"),
        ("a.jsonl", LINE.decode().encode("utf-16"), "is text in UTF-16.*iconv"),
        ("a.jsonl", LINE.decode().encode("utf-16-le"), "is text in UTF-16"),
        ("a.jsonl", LINE.decode().encode("utf-16-be"), "is text in UTF-16"),
        ("a.jsonl", b"<!DOCTYPE html><html>", "a page of HTML"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_empty_cut_or_no_lines_ends_the_run_alone_and_among_others(tmp_path, name, data, said):
    (tmp_path / "sound.jsonl").write_bytes(LINE)
    (tmp_path / name).write_bytes(data)
    for files in ([tmp_path / name], [tmp_path / "sound.jsonl", tmp_path / name]):
        with pytest.raises(UserError, match=said) as raised:
            read(*files)
        assert name in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [
        LINE * 2 + LINE[:-1],  # without a newline at its end
        b'[{"n": 1}]\n' + LINE,  # a bad line among others
        b"[1]\n" + LINE,
        b"{\n" + LINE,
        LINE.replace(b"{", b"{\n") + LINE,
        b"\xef\xbb\xbf" + LINE,
        b"\xff\xfe" + LINE + LINE,  # the mark of UTF-16 before bytes that are not
        LINE + b"[[\n",
    ],
)
def test_a_bad_line_costs_that_line(tmp_path, data):
    (tmp_path / "a.jsonl").write_bytes(data)
    examples, skipped = read(tmp_path / "a.jsonl")
    assert len(examples) + len(skipped) == len(data.splitlines())
    assert examples


def test_an_utterance_may_bring_its_own_prompts():
    assert own_prompt({"context": None}, "Say: <a>", "<a>") == ("Say: <a>", "")
    assert own_prompt({"context": ""}, "Say: <a>", "<a>") == ("Say: <a>", "")
    assert own_prompt({"context": "What?", "system_prompt": "Be brief."}, "", "<a>") == (
        "What? <a>",
        "Be brief.",
    )
    assert own_prompt({"context": "In <a>, what?"}, "", "<a>") == ("In <a>, what?", "")
    with pytest.raises(ValueError, match=r"context is \['x'\]; expected a string"):
        own_prompt({"context": ["x"]}, "", "<a>")
