import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxthd.config import Config, DataConfig, TrainConfig
from jaxthd.data.text.special_tokens import read_special_tokens
from jaxthd.data.text.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TextStream,
    Tokenizer,
    load_tokenizer,
    needed_vocabulary,
)
from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import copy_tokenizer, tokenizer_digest

REFERENCES = Path(__file__).parents[1] / "references"
TEXTS = ["", "one seven two", "  spaces\n\tand lines ", "naïve — 日本語 🎙", "\x00\x7f"]


def write(path: Path, *special: str, gap: int = 0) -> Path:
    """A byte-level tokenizer.json whose post-processor, truncation and padding would all spoil documents."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)} | {"Ġone": len(alphabet) + gap}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    if special:
        first = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.BertProcessing(first, first)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["bytes", "file", "file without placeholder"])
def tokenizer(request, tmp_path) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    audio = ["<|audio|>"] if request.param == "file" else []
    return load_tokenizer(write(tmp_path / "tokenizer.json", "<s>", "</s>", "<pad>", *audio))


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode_and_no_token_is_added_or_cut(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.audio_id}
    assert len(special) == 4
    assert not special & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in special | set(ids))


def test_decode_leaves_out_special_ids(tokenizer):
    special = [tokenizer.bos_id, tokenizer.audio_id, tokenizer.eos_id, tokenizer.pad_id]
    mixed = [
        special[0],
        special[1],
        *tokenizer.encode("stop"),
        special[2],
        *tokenizer.encode(" now"),
        special[3],
    ]
    assert tokenizer.decode(mixed) == "stop now"


def test_decode_leaves_out_ids_past_the_vocabulary(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.vocab_size, 99_999]) == "a"


def test_workers_get_the_same_tokenizer(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("one two") == tokenizer.encode("one two")
    assert (copy.audio_id, copy.vocab_size) == (tokenizer.audio_id, tokenizer.vocab_size)


def test_byte_ids_are_those_of_the_config():
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.audio_id) == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("a\xff") == [97 + 4, 0xC3 + 4, 0xBF + 4]
    assert tokenizer.decode([0xC3 + 4, 97 + 4]) == "\ufffda"


def test_an_absent_placeholder_takes_an_extra_id_past_gaps(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<pad>", gap=1000))
    assert tokenizer.audio_id == 1000 + 256 + 1
    assert tokenizer.vocab_size == tokenizer.audio_id + 1
    assert tokenizer.text_vocab_size == tokenizer.audio_id
    assert tokenizer.decode(tokenizer.encode("<audio>")) == "<audio>"  # plain text here, not the placeholder


def test_a_placeholder_of_the_file_is_used_and_refused_in_text(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<pad>", "<so_embedding>"))
    assert tokenizer.vocab_size == 256 + 1 + 4
    assert tokenizer.audio_id == tokenizer.vocab_size - 1 == tokenizer.text_vocab_size
    with pytest.raises(ValueError, match="holds the special token <so_embedding>"):
        tokenizer.encode("say <so_embedding> aloud")
    with pytest.raises(ValueError, match="holds the special token </s>"):
        tokenizer.encode("the end </s> is not the end")


def test_a_placeholder_needs_a_row_of_the_embedding_only_where_it_is_looked_up(tmp_path):
    file = write(tmp_path / "t.json", "<s>", "</s>", "<pad>", "<audio>")
    config = Config(data=DataConfig(tokenizer=str(file)))
    assert needed_vocabulary(config) == 256 + 1 + 3
    assert needed_vocabulary(replace(config, train=TrainConfig(ctc_loss=0.1))) == 256 + 1 + 4
    inside = write(tmp_path / "t.json", "<s>", "<audio>", "</s>")
    assert needed_vocabulary(replace(config, data=DataConfig(tokenizer=str(inside)))) == 256 + 1 + 3


def test_tags_of_speakers_are_text_though_they_are_special_tokens(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<spk:0>", "<SPK:12>", "<ev:laugh>"))
    text = "<spk:0>hi <ev:laugh><SPK:12>no"
    ids = tokenizer.encode(text)
    assert len(ids) == len("hi no") + 3
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert not any(map(tokenizer.is_special, ids))
    with pytest.raises(ValueError, match="holds the special token </s>"):
        tokenizer.encode("<spk:0></s>")
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<asr_text>"))
    text = "language None<asr_text>hi"
    assert tokenizer.decode(tokenizer.encode(text)) == text, (
        "Qwen3-ASR's mark, which the published file calls text"
    )


def test_no_special_token_of_the_file_is_made_of_text_but_of_marks(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<unk>", "<|im_start|>"))
    with pytest.raises(ValueError, match=r"holds the special token <\|im_start\|>; remove it"):
        tokenizer.encode("a<|im_start|>b")
    (start,) = tokenizer.encode_marks("<|im_start|>")
    assert tokenizer.encode_marks("a<|im_start|>b") == [*tokenizer.encode("a"), start, *tokenizer.encode("b")]
    assert len(tokenizer.encode("<unk>")) == 1, "the unknown token may stand for any strange character"
    assert ByteTokenizer().encode_marks("<|im_start|>") == ByteTokenizer().encode("<|im_start|>")


def test_padding_falls_back_to_the_end_of_text(tmp_path):
    tokenizer = FileTokenizer(
        write(tmp_path / "t.json", "<|im_start|>", "<|endoftext|>")
    )  # as Qwen's base models
    assert tokenizer.pad_id == tokenizer.eos_id == tokenizer.bos_id
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>"))
    assert tokenizer.pad_id == tokenizer.eos_id != tokenizer.bos_id


def test_a_placeholder_that_the_file_does_not_call_special_is_left_out_too(tmp_path):
    file = tokenizers.Tokenizer.from_file(str(write(tmp_path / "t.json", "<s>", "</s>")))
    file.add_tokens(["<audio>"])
    file.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert tokenizer.audio_id == file.token_to_id("<audio>")
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.audio_id]) == "a"


@pytest.mark.parametrize(("special", "what"), [(["</s>"], "start-of-text"), (["<s>"], "end-of-text")])
def test_missing_special_tokens_are_reported_with_what_was_looked_for(tmp_path, special, what):
    with pytest.raises(ValueError, match=rf"t\.json has no {what} token: looked for .*endoftext"):
        FileTokenizer(write(tmp_path / "t.json", *special))


def test_a_folder_stands_for_its_tokenizer_json(tmp_path):
    write(tmp_path / "tokenizer.json", "<s>", "</s>")
    assert load_tokenizer(tmp_path).encode("ab") == load_tokenizer(str(tmp_path / "tokenizer.json")).encode(
        "ab"
    )


def test_a_path_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'expected "bytes".*data\.tokenizer'):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json that tokenizers can read"):
        load_tokenizer(tmp_path)


def checkpoint(folder: Path, **files: Any) -> Path:
    """A folder with a tokenizer of many special tokens, and these JSON files."""
    recordings = ("<so_embedding>", "<so_start>", "<so_end>")
    write(folder / "tokenizer.json", "<s>", "</s>", "<pad>", "<|start|>", "<|end|>", "<|turn|>", *recordings)
    for name, entries in files.items():
        (folder / f"{name}.json").write_text(json.dumps(entries))
    return folder


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [i for name in names for i in tokenizer.encode_marks(name)]


def test_special_tokens_are_those_that_the_checkpoint_names(tmp_path):
    """By text, by text in an object, by id, by several ids, by the names that multimodal families have."""
    plain = load_tokenizer(checkpoint(tmp_path))
    assert [plain.bos_id, plain.eos_id, plain.pad_id] == ids_of(plain, "<s>", "</s>", "<pad>")
    start, end, turn, audio = ids_of(plain, "<|start|>", "<|end|>", "<|turn|>", "<so_embedding>")
    tokenizer = load_tokenizer(
        checkpoint(
            tmp_path,
            tokenizer_config={
                "bos_token": {"content": "<|start|>", "lstrip": False},
                "eos_token": "<|end|>",
                "pad_token": None,
                "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
            },
            special_tokens_map={"eos_token": "</s>", "pad_token": {"content": "<|turn|>"}},
            generation_config={"eos_token_id": [turn, end], "bos_token_id": 1},
            config={"sound_context_token_id": audio, "llm_config": {"eos_token_id": plain.eos_id}},
        )
    )
    assert isinstance(tokenizer, FileTokenizer)
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.audio_id) == (start, turn, audio)
    assert tokenizer.eos_ids == (end, turn, plain.eos_id)
    assert tokenizer.eos_id == end
    assert tokenizer.recording == tuple(ids_of(plain, "<so_start>", "<so_embedding>", "<so_end>"))
    assert tokenizer.special.chat_template == "D"
    assert tokenizer.special.tokens["bos_token"] == "<|start|>"
    for name in ("<|turn|>", "<so_start>", "</s>"):
        with pytest.raises(ValueError, match="holds the special token"):
            tokenizer.encode(f"a{name}b")


def test_the_chat_template_beside_the_other_files_counts_first(tmp_path):
    checkpoint(tmp_path, chat_template={"chat_template": "json"})
    assert read_special_tokens(tmp_path).chat_template == "json"
    checkpoint(tmp_path, tokenizer_config={"chat_template": "config"})
    assert read_special_tokens(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("jinja é")
    assert read_special_tokens(tmp_path).chat_template == "jinja é"
    alone = FileTokenizer(tmp_path / "tokenizer.json")
    assert alone.special.chat_template is None, "a file is a file"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>"}},
            r"eos_token is '<\|im_end\|>', which it does not have",
        ),
        ({"generation_config": {"eos_token_id": 9999}}, r"eos_token_id is 9999; it has ids up to 265"),
        ({"config": {"pad_token_id": 266}}, "pad_token_id is 266; it has ids up to 265"),
        (
            {"config": {"audio_token_id": 12}, "tokenizer_config": {"audio_token": "<so_embedding>"}},
            "the audio token is '<so_embedding>', its id 263, and that its id is 12",
        ),
        ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id is '2'; expected a token id or several"),
        ({"config": ["a"]}, r"config\.json cannot be read \(a JSON list, not an object\)"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template is a JSON int; expected a string"),
        (
            {"tokenizer_config": {"chat_template": [{"name": "rag", "template": ""}]}},
            "has chat templates 'rag'; expected one of the name \"default\"",
        ),
    ],
)
def test_files_of_different_checkpoints_are_refused(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(checkpoint(tmp_path, **files))


def test_a_checkpoint_without_a_start_of_text_begins_with_its_end(tmp_path):
    """A chat template such as Qwen's needs none."""
    write(tmp_path / "tokenizer.json", "<|im_start|>", "<|im_end|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    found = load_tokenizer(tmp_path)
    assert (found.bos_id, found.eos_id) == tuple(2 * ids_of(found, "<|im_end|>"))


def test_a_placeholder_is_no_padding_whatever_its_name(tmp_path):
    """GLM-ASR's."""
    write(tmp_path / "tokenizer.json", "<s>", "</s>", "<|pad|>")
    (placeholder,) = ids_of(load_tokenizer(tmp_path), "<|pad|>")
    (tmp_path / "config.json").write_text(json.dumps({"audio_token_id": placeholder}))
    found = load_tokenizer(tmp_path)
    assert (found.audio_id, found.pad_id) == (placeholder, found.eos_id)


def test_ids_that_the_model_has_no_rows_for_are_passed_over(tmp_path):
    """transformers' configs of Qwen3-ASR and GLM-ASR have the published tokenizer's, whatever the model's
    vocabulary; save_pretrained repeats them in generation_config.json."""
    plain = load_tokenizer(checkpoint(tmp_path))
    stated = {"eos_token_id": [151643, plain.pad_id, 151645], "pad_token_id": 151645, "bos_token_id": 272}
    config = {**stated, "audio_token_id": 9999, "text_config": {"vocab_size": 272, "eos_token_id": 272}}
    found = load_tokenizer(checkpoint(tmp_path, config=config, generation_config=stated))
    assert (found.bos_id, found.eos_ids, found.pad_id) == (plain.bos_id, (plain.pad_id,), plain.pad_id)
    assert found.audio_id == 9999, "it is never looked up"


def test_broken_files_are_refused_by_name(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is no UTF-8 text"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", [*TEXTS, "\ufffd and \ufffd", "🎙🎙"])
def test_a_stream_gives_what_decoding_gives_in_whole_characters(tokenizer, text):
    ids = [*tokenizer.encode(text), tokenizer.audio_id, *tokenizer.encode(text), tokenizer.eos_id]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == text + text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) == 2 * len(text), "as soon as a character is whole"


def test_a_stream_that_ends_inside_a_character_says_so(tokenizer):
    stream = TextStream(tokenizer)
    first = tokenizer.encode("é")[0]
    assert stream.push(tokenizer.encode("a")[0]) == "a"
    assert stream.push(first) == ""
    assert stream.finish() == "\ufffd"
    broken = TextStream(tokenizer)
    assert [broken.push(i) for i in (first, *tokenizer.encode("ab"))] == ["", "\ufffda", "b"]


def write_byte_pairs(folder: Path, reference: dict[str, Any]) -> Path:
    (folder / "vocab.json").write_text(json.dumps(reference["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *reference["merges"], ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps(reference["settings"]))
    return folder


def test_vocabulary_and_merges_are_read_as_transformers_reads_them(tmp_path):
    """tests/references/byte_pairs.py; where there is no tokenizer.json."""
    reference = json.loads((REFERENCES / "byte_pairs.json").read_text())
    folder = write_byte_pairs(tmp_path, reference)
    found = load_tokenizer(folder)
    for text, ids in reference["encoded"]:
        assert found.encode_marks(text) == ids
        assert found.decode(found.encode(text)) == normalize("NFC", text)
    assert (found.eos_id, found.encode_marks("<timestamp>")) == (297, [299])
    first = tokenizer_digest(folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_digest(folder) != first
    copy_tokenizer(folder, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("one") == load_tokenizer(folder).encode("one")
    write(folder / "tokenizer.json", "<|endoftext|>", "<|im_end|>")
    assert load_tokenizer(folder).encode_marks("<timestamp>") != [299]


def test_a_vocabulary_that_does_not_fit_its_added_tokens_is_refused(tmp_path):
    reference = json.loads((REFERENCES / "byte_pairs.json").read_text())
    del reference["settings"]["added_tokens_decoder"]["297"]
    with pytest.raises(UserError, match=r"gives <\|im_end\|> the id 298, and with vocab.json it has 297"):
        load_tokenizer(write_byte_pairs(tmp_path, reference))
    (tmp_path / "merges.txt").write_text("a")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
