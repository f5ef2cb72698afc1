"""LangChain's ChatOpenAI, unmodified: python langchain_client.py URL; prints what it got as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="tiny", timeout=30, max_retries=0,
                  stream_usage=True)  # fmt: skip
whole = chat.invoke("How many apples?")
joined = None
for chunk in chat.stream("How many apples?"):
    joined = chunk if joined is None else joined + chunk
inline = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="tiny", max_retries=0,
                    extra_body={"reasoning_format": "inline"}).invoke("How many apples?")  # fmt: skip
print(json.dumps({
    "text": whole.content,
    "thinking_tokens": whole.usage_metadata["output_token_details"]["reasoning"],
    "streamed_text": joined.content,
    "same_usage": joined.usage_metadata == whole.usage_metadata,
    "inline": inline.content,
}))  # fmt: skip
