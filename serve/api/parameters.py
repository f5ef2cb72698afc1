"""Parameters of OpenAI's and vLLM's APIs that this server does not accept, why, and what to do instead.

tests/serve/test_parameters.py reads the names from the installed packages, so that none is missing;
`python -m serve.api` writes docs/parameters.md from this module and from the fields that are accepted.
"""

from __future__ import annotations

from typing import Any

from serve.api.base import Refused


def of(names: str, why: str, *nothing: Any) -> dict[str, Refused]:
    """Return several parameters that are refused for one reason; nothing: values without effect."""
    return {name: Refused(why, nothing or (False,)) for name in names.split()}


INTERNAL = of(
    "detokenize extra_args flat_logprobs output_kind output_text_buffer_length prompt_logprob_start skip_clone "
    "prompt_logprob_token_ids skip_reading_prefix_cache trace_decode_token_ids",
    "it is a field inside vLLM, which its own server does not take either",
)
EVERYWHERE = {
    **INTERNAL,
    **of("structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
         "guided_whitespace_pattern", "in chats give response_format, or tools"),
    **of("use_beam_search", "completions are sampled"),
    **of("length_penalty", "it belongs to beam search, and completions are sampled", 1),
    **of("watermarking", "no watermark is put into texts"),
    **of("spaces_between_special_tokens", "texts are told as the tokenizer writes them", True),
    **of("truncate_prompt_tokens truncation_side", "prompts are never cut: shorten it"),
    **of("logprob_token_ids", "ask for the most probable tokens (top_logprobs in chats, logprobs in completions)"),
    **of("priority", "requests are served in their order", 0),
    **of("request_id session_id", "send the header X-Request-ID"),
    **of("return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text",
         "POST /tokenize tells the tokens of a text"),
    **of("routed_experts_prompt_start", "the experts of a model are not told", 0),
    **of("mm_payload", "this server reads and writes text only", "tensors"),
    **of("return_mm_kwargs media_io_kwargs mm_processor_kwargs", "this server reads and writes text only"),
    **of("cache_salt", "start another server for prompts that must share no cache"),
    **of("kv_transfer_params ec_transfer_params vllm_xargs", "it steers an arrangement of several vLLM servers"),
    **of("repetition_detection", "give repetition_penalty or max_tokens"),
    **of("stream_interval", "tokens are sent as they come", 1),
    **of("moderation", "nothing is moderated"),
    **of("prompt_cache_options prompt_cache_retention", "prompts stay in the cache while there is room"),
    **of("prompt_embeds", "prompts are text or tokens"),
}  # fmt: skip
OF_THE_PROMPT = of("chat_template chat_template_kwargs documents add_special_tokens echo",
                   "the server renders the prompt itself, with its own system prompt")  # fmt: skip
CHAT = {
    **EVERYWHERE, **OF_THE_PROMPT,
    **of("add_generation_prompt", "the server renders the prompt itself, with its own system prompt", True),
    **of("continue_final_message", "the server renders the prompt itself, with its own system prompt"),
    **of("functions function_call", "give tools and tool_choice"),
    **of("store", "nothing is stored: leave it out or send false"),
    **of("service_tier", "all requests are served alike", "auto", "default"),
    **of("modalities", "this server reads and writes text only", ["text"]),
    **of("audio", "this server reads and writes text only"),
    **of("prediction", "nothing is predicted"),
    **of("web_search_options", "the server asks nobody: give tools"),
    **of("verbosity", "say in a message how long the answer is to be", "medium"),
    **of("prompt_logprobs", "only POST /v1/completions tells them"),
    **of("skip_special_tokens", "tags of thoughts may be special tokens; the end of the text is not told"),
}  # fmt: skip
COMPLETIONS = {
    **EVERYWHERE,
    **of("echo", "the prompt is not told again: the client has it"),
    **of("suffix", "models here write on, and do not fill in"),
    **of("best_of", "give n, and choose", 1),
    **of("add_special_tokens", "prompts go to the model as they stand: write special tokens into them", False),
    **of("response_format thinking_token_budget", "prompts go to the model as they stand: use /v1/chat/completions"),
}  # fmt: skip
MEMORY = "this server remembers nothing: send the whole input"
RESPONSES = {
    **{name: refused for name, refused in CHAT.items() if name not in (
        "functions", "function_call", "modalities", "audio", "prediction", "web_search_options", "verbosity")},
    **of("previous_response_id conversation prompt previous_input_messages", MEMORY),
    **of("background background_options", MEMORY),
    **of("context_management", "prompts are never cut: shorten the input"),
    **of("stream_options", "events are not padded, and the last one tells the usage", {"include_obfuscation": False}),
    **of("truncation", "prompts are never cut: shorten the input", "disabled"),
    **of("max_tool_calls", "the client runs the tools, and may stop"),
    **of("image", "this server reads and writes text only"),
    **of("access_programs", "there are none"),
    **of("top_logprobs logprobs", "chats tell them: /v1/chat/completions with logprobs and top_logprobs", 0, False),
    **of("n", "one response a request; chats have n", 1),
    **of("max_tokens", "it is called max_output_tokens here"),
    **of("enable_response_messages", "the items of the output are what the model said"),
}  # fmt: skip
"""refused parameters of POST /v1/responses, by name"""
