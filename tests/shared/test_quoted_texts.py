"""Texts of others in prompts spell no control token, however they write it."""

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from shared.chat import Chat
from shared.quoted_texts import QuotedTexts
from tests.shared.test_chat import make_folder


@pytest.mark.parametrize("text", ["＜call＞", "<CALL>", "＜ＥＯＳ＞", "a＜call＞b<eos>"])
def test_no_text_spells_a_token_once_it_is_normalised(tmp_path, text):
    """Tokenizers look for some added tokens in the text that their normaliser has made."""
    path = make_folder(tmp_path / "m") / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_tokens([AddedToken("<call>", normalized=True)])
    backend.save(str(path))
    chat, plain = Chat(path.parent), Chat(make_folder(tmp_path / "n"))
    added = set(chat.tokenizer.added_tokens_decoder)
    usual = [number for number in chat.render("x", "y") if number in added]
    for problem, system in ((text, "y"), ("x", text)):
        quoted = QuotedTexts(chat)
        ids = chat.render(quoted.quote(problem), quoted.quote_system(system), quoted)
        assert [number for number in ids if number in added] == usual
    assert added.isdisjoint(chat.encode_plain(text))
    assert chat.encode("a ＜b＞") == chat.encode_plain("a ＜b＞") and plain.encode("a b") == plain.encode_plain("a b")
