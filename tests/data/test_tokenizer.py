import pickle
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxthd.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

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
    assert tokenizer.decode(tokenizer.encode("<audio>")) == "<audio>"  # plain text here, not the placeholder


def test_a_placeholder_of_the_file_is_used_and_refused_in_text(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path / "t.json", "<s>", "</s>", "<pad>", "<so_embedding>"))
    assert tokenizer.vocab_size == 256 + 1 + 4
    assert tokenizer.audio_id == tokenizer.vocab_size - 1
    with pytest.raises(ValueError, match="holds the special token <so_embedding>"):
        tokenizer.encode("say <so_embedding> aloud")
    with pytest.raises(ValueError, match="holds the special token </s>"):
        tokenizer.encode("the end </s> is not the end")


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
