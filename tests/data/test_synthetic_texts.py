"""The texts of the default data set, and the tokenizer "synthetic"."""

import numpy as np

from jaxthd.data.text import synthetic
from jaxthd.data.text.tokenizer import FileTokenizer, load_tokenizer


def test_each_word_of_the_texts_is_one_token(tmp_path):
    tokenizer = FileTokenizer(synthetic.tokenizer_file(tmp_path))
    rng = np.random.default_rng(0)
    for text in (synthetic.draw_text(rng) for _ in range(300)):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.split()), text
        assert tokenizer.decode(ids) == text


def test_other_text_is_encoded_too_and_decodes_to_itself(tmp_path):
    tokenizer = FileTokenizer(synthetic.tokenizer_file(tmp_path))
    for text in ("Hallo Wélt!", "a  b", "日本\nzero", "zerotwo", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_text_have_separate_ids(tmp_path):
    tokenizer = FileTokenizer(synthetic.tokenizer_file(tmp_path))
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.audio_id}
    assert len(special) == 4
    assert not special & set(tokenizer.encode(" ".join(synthetic.all_words())))


def test_the_file_is_the_same_each_time_and_made_once(tmp_path, monkeypatch):
    first, second = (synthetic.tokenizer_file(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_tokenizer("synthetic")
    monkeypatch.setattr(synthetic, "make_tokenizer", lambda: None)
    assert load_tokenizer("synthetic").encode("zero one") == FileTokenizer(first).encode("zero one")
