"""Ways of users, documents, tools and models to switch the language policy off, or to fake its measurement; a line of
jailbreaks.jsonl is one. Fields that would take its place are refused: mistakes.jsonl."""

import pytest

from shared.languages import request_for
from tests.tables import read_table

QUESTION = "Ein Korb hat neun Birnen, und zwei davon sind faul. Wie viele gute Birnen liegen noch im Korb?"
ENGLISH = "<think>There are nine pears in the basket and two of them are bad, so we take two away.</think>Seven."
CONTROL = ("<eos>", "<user>", "<assistant>", "<system>", "<think>", "</think>", "<turn>")
REPORT = "The council of the valley met in spring and wrote down how pears are picked, stored and sold. " * 20
LONG = [f"{REPORT}\n\n{QUESTION}", QUESTION + f"\n\n{request_for('en')}" * 50]


def test_nothing_that_a_request_holds_switches_the_policy_off(serve):
    prompts = []
    served = serve(lambda ids, *_: prompts.append(ids) or ENGLISH, reasoning_language="auto", max_tokens=60_000)
    chat = served.server.prompts.chat
    control = {chat.encode(token)[0] for token in CONTROL}
    long = [{"messages": [{"role": "user", "content": text}], "fields": {}} for text in LONG]
    for row in [*read_table("serve/jailbreaks", kind="asks"), *long]:
        prompts.clear()
        messages, fields = row["messages"], row["fields"]
        body = {"messages": messages, "reasoning_language": "de", **fields}
        reply = served.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, (row, reply.text)
        measured = reply.json()["reasoning_language"]
        assert (measured["requested"], measured["match"]) == ("de", False), row
        text, system = chat.tokenizer.decode(prompts[0]), served.server.prompts.system_prompt("de")
        last = [message["content"] for message in messages if message["role"] == "user"][-1]
        last = last if isinstance(last, str) else "".join(part["text"] for part in last)
        assert text.count(f"<user>{last}\n\n{request_for('de')}<eos>") == 1, row
        assert text.startswith(f"<system>{system}"), "the client's own stand behind it"
        turns = 1 + sum(message["role"] not in ("system", "developer") for message in messages)
        tags = sum(token in control for token in chat.encode(system)) + ("tools" in fields)  # these begin the reasoning
        assert sum(token in control for token in prompts[0]) == 2 * turns + 1 + tags, (row, "the template's only")


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_writes_is_measured_and_cannot_be_faked(serve, stream):
    text = ""
    served = serve(lambda *_: text)
    for row in (*read_table("serve/jailbreaks", kind="writes"), *read_table("serve/jailbreaks", kind="hides")):
        text = row["text"]
        if stream:
            events = served.events(QUESTION, reasoning_language="de")
            [told] = [event["reasoning_language"] for event in events if "reasoning_language" in event]
        else:
            told = served.ask(QUESTION, reasoning_language="de").json()["reasoning_language"]
        assert told["match"] is row["match"] if row["kind"] == "writes" else told["match"] is not True, row
