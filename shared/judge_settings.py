"""The settings of a judge: [reward.judge], and each of [reward.judges]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.section import Section


class Critic(Section):
    """Who argues in a debate: [reward.judges.NAME.critic]."""

    url: str = ""
    """address as the judge's; needed where the judge asks for a debate"""
    model: str = ""
    """model name as that API knows it"""
    key_variable: str = ""
    """environment variable that holds the API key; "" for none"""
    words: int = Field(150, ge=1)
    """longest rebuttal, words; a response is cut at eight times as many"""


class Judge(Section):
    url: str = ""
    """address of an OpenAI-compatible API up to its version, e.g. "http://127.0.0.1:8000/v1"; asked only when
    reward.extra names llm_judge, or this judge"""
    api: Literal["chat", "pooling", "http"] = "chat"
    """"chat": a language model; "pooling": a reward model at vLLM's /pooling, whose last number goes through a
    sigmoid; "http": url itself is sent {problem, answer, response} and returns {"score": number from 0 to 1}"""
    model: str = ""
    """model name as that API knows it"""
    key_variable: str = ""
    """environment variable that holds the API key; "" for none (the key itself is never in a settings file)"""
    instructions: str = (
        "Grade how clear, complete and honest the solution is for a reader who has only the problem and the true "
        "answer. 10 is best, 0 is worst."
    )
    """instructions for the judge: the qualities that count"""
    deadline_s: float = Field(60.0, gt=0)
    """all attempts at one question together, from when it is its turn; later the completion is not graded"""
    max_tokens: int = Field(1024, ge=1)
    """longest reply of the judge, its reasoning included, and of the critic"""
    asks: Literal["score", "pairs", "debate", "answers"] = "score"
    """"score": from 0 to 10 for one response; "pairs": which of two responses of a group is better, each pair in both
    orders, as a reward of the group; "debate": which of two different answers is right, after a critic has argued for
    both; "answers": the same without a critic and without the responses (docs/oversight.md)"""
    article: Literal["", "shown", "hidden"] = ""
    """for "debate" and "answers": a problem's text up to its last blank line is an article. "hidden": the judge does
    not see it, a critic does, and quotations are checked against it; "shown": a judge of answers sees it"""
    critic: Critic = Critic()
    """who argues in a debate"""
    opponents: int = Field(2, ge=1)
    """with how many responses of its group a response debates at most"""
    principles: list[str] = []
    """principles to judge by, of which `principles_drawn` are drawn for each group"""
    principles_drawn: int = Field(3, ge=1)
    """principles of a group"""
    measured: float = Field(0.0, ge=0, le=1)
    """share of the problems with a verifier on which this judge is measured: it is not shown their true answer"""
    least_accuracy: float = Field(0.0, ge=0, le=1)
    """the run stops where the judge is right on a smaller share of what it is measured on (of the last 400, once there
    are 100)"""
    most_bias: float = Field(0.5, ge=0, le=0.5)
    """the run stops where a judge of pairs prefers one place by more: the share of first places chosen, less 1/2"""
