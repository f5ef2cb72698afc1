// The server as the page sees it: the same API as for every other client.
import { createParser } from "./vendor/libraries.js";

const KEY = "maestrale.key"; // sessionStorage: gone with the tab

/** What the server, or the way to it, says against a request. */
export class ServerError extends Error {
  constructor(message, { status = 0, retryAfter_s = 0 } = {}) {
    super(message);
    this.status = status;
    this.retryAfter_s = retryAfter_s;
  }
}

/** Remember the key until the tab is closed; an empty one is forgotten. */
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Name of the model that is served. Throws ServerError. */
export async function modelName() {
  const { data } = await (await send("/v1/models")).json();
  return data[0]?.id ?? "";
}

/** The events of a streamed response, one by one. Aborting the signal ends it here and frees its tokens there. */
export async function* chat(body, signal) {
  const response = await send("/v1/chat/completions", {
    ...body, stream: true, stream_options: { include_usage: true },
  }, signal);
  const events = [];
  const parser = createParser({ onEvent: ({ data }) => events.push(data) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => { throw translate(error); });
    if (done) throw new ServerError("The connection ended before the response did.");
    parser.feed(value);
    for (const data of events.splice(0)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message);
      yield event;
    }
  }
}

/** Ask the server to end the reasoning of a running response and to answer. Throws ServerError. */
export async function answerNow(id) {
  await send("/v1/chat/completions/control", { id, action: "reasoning_end" });
}

async function send(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, options).catch((error) => { throw translate(error); });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new ServerError(told.error?.message ?? `The server said ${response.status} ${response.statusText}.`, {
    status: response.status, retryAfter_s: Number(response.headers.get("Retry-After")) || 0,
  });
}

function translate(error) {
  return error.name === "AbortError" ? error : new ServerError("The server cannot be reached. Is it running?");
}
