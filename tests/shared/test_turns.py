"""Episodes of several turns, exact to the token: what is trained is what was sampled and what the environment said."""

import random
from pathlib import Path

import pytest

from examples.quickstart.tiny_model import CHAT_TEMPLATE
from rollout.output_collector import copy_unfinished, extend
from shared.chat import Chat
from shared.errors import ModelError
from shared.types import CONTEXT, Completion, Group, Problem, Prompt, Turn
from tests.shared.test_chat import write_tokenizer
from trainer.objectives.sequences import sequence_of

FOLDER = Path(__file__).parent / "chat_templates"
CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>",
]  # fmt: skip
ENDS = {
    "ours": "<|end|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "phi3": "<|end|>", "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>", "qwen3_instruct_2507": "<|im_end|>",
}  # fmt: skip


def chat_of(folder: Path, name: str) -> Chat:
    """A tokenizer with the control tokens of all families, and the template of one."""
    template = CHAT_TEMPLATE if name == "ours" else (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    settings = {"chat_template": template, "eos_token": ENDS[name], "bos_token": "<|begin_of_text|>"}
    write_tokenizer(folder, CONTROL, [("a", "b"), ("h", "e"), ("i", "n")], **settings)
    return Chat(folder)


@pytest.mark.parametrize("name", ENDS)
def test_what_is_trained_is_what_was_sampled_and_what_was_said(tmp_path, name):
    """Random transcripts, spelling control tokens too; log-probs and versions stay with the sampled tokens."""
    chat, draw, changed = chat_of(tmp_path, name), random.Random(7), 0
    control = set(chat.tokenizer.convert_tokens_to_ids(CONTROL))
    for number in range(100):
        prompt = Prompt(number, Problem("1", "?", "1"), chat.render("Guess.", ""))
        completion, expected, logprobs, version = Completion(number, 0, 0), [], [], 0
        for turn in range(draw.randint(1, 4)):
            if turn:
                text = "".join(draw.choice(["ab", "é", " x", *CONTROL]) for _ in range(draw.randint(0, 6)))
                between, spelt = chat.bridge([("user", text)]), chat.encode_plain(text)
                assert not control & {*spelt} and chat.tokenizer.decode(spelt) == text, "the text is there, as text"
                completion.token_ids += between
                completion.logprobs += [0.0] * len(between)
                expected += [(token, CONTEXT) for token in between]
                assert not completion.waiting and not completion.turn_begun
            start = len(completion.token_ids)
            for _ in range(draw.randint(1, 3)):  # chunks of one engine step or more, under versions that grow
                sampled = [draw.randrange(len(chat.tokenizer)) for _ in range(draw.randint(1, 5))]
                values = [-draw.random() for _ in sampled]
                extend(completion, sampled, values, version, engine=0)
                expected += [(token, 1) for token in sampled]
                logprobs += values
                version += draw.random() < 0.4
            extend(completion, [chat.eos_id], [-0.5], version, engine=0)
            expected.append((chat.eos_id, 1))
            logprobs.append(-0.5)
            assert completion.turn_start == start and completion.turn_begun
            changed += chat.encode(chat.decode(completion.token_ids[start:])) != completion.token_ids[start:-1]
            completion.turns.append(Turn(start, len(completion.token_ids)))
            assert completion.waiting and completion.last_turn == completion.token_ids[start:]
        one = sequence_of(Group(prompt, [completion], [None]), completion, [0.5])
        places = list(zip(one.token_ids, one.mask, strict=True))
        assert places == [*((token, CONTEXT) for token in prompt.token_ids), *expected]
        assert one.columns["behaviour"] == logprobs and one.advantages == [0.5] * len(completion.turns)
        assert completion.sampled_tokens == len(logprobs) == sum(span.end - span.start for span in completion.spans)
        assert all(any(t.start <= s.start and s.end <= t.end for t in completion.turns) for s in completion.spans)
        assert copy_unfinished(completion) == completion
    assert changed > 50, "rendering a history again would have changed what was sampled"


@pytest.mark.parametrize("name", ENDS)
def test_bridges_stand_where_the_template_puts_them_and_one_that_rewrites_its_history_is_refused(tmp_path, name):
    chat = chat_of(tmp_path, name)
    turns = [{"role": "user", "content": "Guess."}]
    stitched = chat.encode(chat.render_turns(turns))
    for answer, reply in (("hello", "Higher."), ("in", "Lower.")):
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
        stitched += [*chat.encode(answer), chat.eos_id, *chat.bridge([("user", reply)])]
    assert stitched == chat.encode(chat.render_turns(turns))
    for system in ("", "Be brief."):
        if name == "qwen3":
            with pytest.raises(ModelError, match=r"drops the reasoning of earlier turns.*environment\.history"):
                chat.check_history(system)
        else:
            chat.check_history(system)


def test_what_an_environment_says_is_cut(tmp_path):
    chat = chat_of(tmp_path, "ours")
    whole, none = chat.bridge([("user", "x" * 50)]), chat.bridge([("user", "")])
    assert len(whole) == len(none) + 50 and len(chat.bridge([("user", "x" * 50)], 8)) == len(none) + 8
    both = [("user", "x" * 50), ("user", "y" * 50)]
    assert len(chat.bridge(both, 60)) == len(chat.bridge([("user", ""), ("user", "")])) + 60, "together"
