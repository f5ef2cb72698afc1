"""The HTTP client for MCP servers: it unpacks nothing, and bounds replies that the `mcp` package reads as a whole.

Events of a stream have a bound of the package, 1 MiB each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

from shared.chat_endpoint import PLAIN, packing

MOST_BYTES = 8 << 20
"""Most bytes of a reply that is no stream of events."""
WAIT_S, EVENT_S = 30.0, 300.0
"""seconds for a connection, and for the next event of a stream, as in the package"""


class BoundedStream(httpx2.AsyncByteStream):
    """The bytes of a reply, as they come."""

    def __init__(self, stream: httpx2.AsyncByteStream):
        self.stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises StreamError for more than MOST_BYTES."""
        size = 0
        async for chunk in self.stream:
            size += len(chunk)
            if size > MOST_BYTES:
                raise httpx2.StreamError(f"a reply of more than {MOST_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection, unless it can be used again."""
        await self.stream.aclose()


async def _bound(response: httpx2.Response) -> None:
    if packed := packing(response.headers):
        raise ValueError(packed)
    kind = response.headers.get("content-type", "").lower()
    events = response.status_code == 200 and kind.startswith("text/event-stream")
    if not events or response.request.method not in ("GET", "POST"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = BoundedStream(response.stream)


def client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client that sends these headers."""
    timeout = httpx2.Timeout(WAIT_S, read=EVENT_S)
    return httpx2.AsyncClient(headers={**PLAIN, **headers}, timeout=timeout, event_hooks={"response": [_bound]})
