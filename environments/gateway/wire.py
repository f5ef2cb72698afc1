"""Bodies of the gateway's requests and responses: OpenAI's chat, and the token endpoint of vLLM 0.32.

How a turn is sampled is the run's: what would change that (temperature, top_p, max_tokens, seed, ...) is not read,
since the policy is trained on what it samples with the run's settings. What would change the form of the answer, or
asks for more than a turn, is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from environments.gateway.messages import AgentCall, AgentMessage, AgentTool, TurnGiven

MOST_MESSAGES, MOST_TOOLS, MOST_CALLS, MOST_TOKENS = 4096, 128, 32, 1 << 20
BODY = "the body must be a JSON object"
ONE = "a turn of the policy is one answer; send one request for each"
FORM = "the form of what the policy says cannot be forced here"
CHAT_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "n": (ONE, (1,)), "stop": ("the policy ends its turns itself", ([], "")),
    "logprobs": ("the run keeps them", (False,)), "top_logprobs": ("the run keeps them", (0,)),
    "response_format": (FORM, ({"type": "text"},)), "tool_choice": (f"{FORM}: only auto is there", ("auto",)),
    "functions": ("give tools", ([],)), "function_call": ("give tools", ("auto", "none")),
    "modalities": ("text only", (["text"],)), "audio": ("text only", ()), "prediction": ("nothing is predicted", ()),
    "web_search_options": ("give a tool that searches", ()),
}  # fmt: skip
"""field of a chat -> why it is refused, and its values that ask for nothing"""
TOKENS_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "n": (ONE, (1,)),
    "stop": ("the policy ends its turns itself", ([], "")),
    "prompt_logprobs": ("those of a prompt are not computed", ()),
    "structured_outputs": (FORM, ()),
    "features": ("text only", ()),
    "content_parts": ("text only", ([],)),
    "stream": ("the turn comes as a whole", (False,)),
}
Json = dict[str, Any]


class GatewayRefusal(Exception):
    """A request that gets an error instead of a turn."""

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


class TextOfAgent(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str = ""


class FunctionOfAgent(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: str = "{}"


class CallOfAgent(msgspec.Struct):
    """A call in a message of the assistant."""

    function: FunctionOfAgent
    id: str = ""


class MessageOfAgent(msgspec.Struct):
    """A message as it arrives. Fields beyond these are not read, the reasoning of earlier turns among them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextOfAgent] | None = None
    tool_calls: list[CallOfAgent] | None = None
    tool_call_id: str | None = None


class ToolOfAgent(msgspec.Struct):
    """A tool as it arrives."""

    type: Literal["function"]
    function: AgentTool


class ChatBody(msgspec.Struct):
    """The body of a chat, without what is not read."""

    messages: list[MessageOfAgent]
    tools: list[ToolOfAgent] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    model: str = ""


class GenerateBody(msgspec.Struct):
    """The body of a request for tokens, without what is not read."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    request_id: str = ""
    model: str | None = None


class AgentChat(NamedTuple):
    """A chat that was read."""

    messages: list[AgentMessage]
    tools: list[AgentTool]
    most_calls: int
    stream: bool
    model: str


def read_object(body: bytes) -> Json:
    """A body as a JSON object. Raises GatewayRefusal."""
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors, UTF-8's among them
        raise GatewayRefusal(f"{BODY}: {error}"[:300]) from error
    if not isinstance(content, dict):
        raise GatewayRefusal(BODY)
    return content


def _read(body: Json, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise GatewayRefusal(str(error)[:300]) from error


def _check_refused(body: Json, refused: dict[str, tuple[str, tuple[Any, ...]]]) -> None:
    for name, (why, nothing) in refused.items():
        if (value := body.get(name)) is not None and not any(value == one for one in nothing):
            raise GatewayRefusal(f"{name} is not supported while the policy is trained: {why}", param=name)


def read_chat(body: Json) -> AgentChat:
    """The chat of a body. Raises GatewayRefusal."""
    _check_refused(body, CHAT_REFUSED)
    asked: ChatBody = _read(body, ChatBody)
    if not 0 < len(asked.messages) <= MOST_MESSAGES:
        raise GatewayRefusal(f"messages: from 1 to {MOST_MESSAGES}, not {len(asked.messages)}", param="messages")
    tools = [tool.function for tool in asked.tools or []]
    if len(tools) > MOST_TOOLS:
        raise GatewayRefusal(f"tools: at most {MOST_TOOLS}", param="tools")
    messages = []
    for index, message in enumerate(asked.messages):
        content = message.content
        if isinstance(content, list):
            if other := [part.type for part in content if part.type != "text"]:
                raise GatewayRefusal(f"messages[{index}]: a part of type {other[0]:.40}: text only", param="messages")
            content = "".join(part.text for part in content)
        calls = [AgentCall(one.id, one.function.name, one.function.arguments) for one in message.tool_calls or []]
        messages.append(AgentMessage(message.role, content or "", calls, message.tool_call_id or ""))
    most = 1 if asked.parallel_tool_calls is False else MOST_CALLS
    return AgentChat(messages, tools, most, bool(asked.stream), asked.model)


def read_tokens(body: Json) -> GenerateBody:
    """The request for tokens of a body. Raises GatewayRefusal."""
    _check_refused(body, TOKENS_REFUSED)
    asked: GenerateBody = _read(body, GenerateBody)
    _check_refused(asked.sampling_params, TOKENS_REFUSED)
    if not 0 < len(asked.token_ids) <= MOST_TOKENS or min(asked.token_ids) < 0:
        raise GatewayRefusal(f"token_ids: from 1 to {MOST_TOKENS} numbers, none negative", param="token_ids")
    return asked


# ---- responses -------------------------------------------------------------------------------------------------------


def message_object(turn: TurnGiven) -> Json:
    """The assistant's message. It must come back as it is in the agent's next request; the reasoning need not."""
    message: Json = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
    if turn.reasoning:
        message |= {"reasoning": turn.reasoning, "reasoning_content": turn.reasoning}
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return message


def chat_object(head: Json, turn: TurnGiven) -> Json:
    """The response of a chat. It reports no usage, since the tokens of the prompt are not known here."""
    finish = "tool_calls" if turn.calls else "stop"
    choice = {"index": 0, "message": message_object(turn), "finish_reason": finish, "logprobs": None}
    return {**head, "object": "chat.completion", "choices": [choice]}


def chat_events(head: Json, turn: TurnGiven) -> bytes:
    """The same as server-sent events: the message in one piece, then its end."""
    message = message_object(turn)
    for number, call in enumerate(message.get("tool_calls", [])):
        call["index"] = number
    choices = [
        {"index": 0, "delta": message, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "tool_calls" if turn.calls else "stop"},
    ]
    events = [msgspec.json.encode({**head, "object": "chat.completion.chunk", "choices": [one]}) for one in choices]
    return b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])


def tokens_object(head: Json, prompt_tokens: int, turn: TurnGiven) -> Json:
    """The response to a request for tokens: vLLM's GenerateTokensResponse with one choice that has ended. Tokens have
    their older name next to their id, which `renderers` (the client of verifiers) reads."""
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None,
         "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": None}]}
        for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
    ]  # fmt: skip
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": turn.token_ids,
              "logprobs": {"content": content}}  # fmt: skip
    sampled = len(turn.token_ids)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
    return {**head, "output_mode": "tokens", "choices": [choice], "usage": usage}
