"""The grammar of calls, in the library that the engine uses, token by token: with tokenizers that spell the tags of
calls in letters, join them with other letters, or have tokens of their own for them."""

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from examples.quickstart.tiny_model import train_tokenizer
from serve.tools import Tool, constrain_calls, with_control_tokens
from shared.tool_calls import CLOSE, OPEN, call_text

SCHEMAS = {
    "count": {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]},
    "add": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "now": {},
}
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
         for name, schema in SCHEMAS.items()]  # fmt: skip
COUNT, ADD, NOW = call_text("count", '{"kind": "plums"}'), call_text("add", '{"x": 3}'), call_text("now", "{}")
RIGHT = (COUNT, f"{ADD}\n{NOW}", call_text("count", '{"kind":"plums"}'))
TEXTS = ("It is 3.", "<tool_call", f"First {OPEN[:-1]} and then:\n{COUNT} so {ADD}.", "a < b > c\n\n")
WRONG = (call_text("add", '{"x": "a"}'), call_text("count", '{"kinds": "plums"}'), call_text("other", "{}"),
         f"{OPEN}{{}}", f'{OPEN}\n{{"name": "now"}}\n{CLOSE}')  # fmt: skip


@pytest.fixture(scope="module", params=["letters", "joined", "control"])
def tokenizer(request):
    texts = [COUNT, ADD, NOW, "It is 3."] * 50 if request.param == "joined" else ["It is 3. <think>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(texts, 420), eos_token="<|end|>")
    if request.param == "control":
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (OPEN, CLOSE)])
    return tokenizer


def accepts(tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar allows the tokens of a text, and that it ends behind them."""
    matcher = LLMatcher(from_tokenizer(tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.compute_logit_bias()[token]:
            return False
        matcher.consume_token(token)
    return bool(matcher.compute_logit_bias()[tokenizer.eos_token_id])


@pytest.mark.parametrize("must", [True, False])
def test_calls_are_allowed_as_a_model_writes_them_and_no_others(tokenizer, must):
    grammar = constrain_calls(TOOLS, must=must, parallel=True).value
    if OPEN in tokenizer.get_added_vocab():
        grammar = with_control_tokens(grammar)
    for text in RIGHT:
        assert accepts(tokenizer, grammar, text), text
    for text in TEXTS:
        assert accepts(tokenizer, grammar, text) is not must, text
    for text in WRONG:
        assert not accepts(tokenizer, grammar, text), text


def test_other_grammars_and_what_a_schema_spells_stay_as_they_are():
    schema = {"type": "object", "properties": {"a": {"const": f'\nopen: "{OPEN}"'}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    for must in (True, False):
        grammar = constrain_calls([tool], must=must, parallel=False).value
        changed = with_control_tokens(grammar)
        assert changed != grammar and changed.count(f'open: \\"{OPEN}\\"') == grammar.count(f'open: \\"{OPEN}\\"') == 1
        assert changed.split("\n")[:-4] == grammar.split("\n")[:-4]
        assert with_control_tokens(changed) == changed
    assert with_control_tokens("start: /a/") == "start: /a/"
