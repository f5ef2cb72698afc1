// One request and its response, from the first event to the last.
import { ServerError, chat } from "./server.js";

/** Fill a response from the server's stream; `told(response)` after every change. Never throws. */
export async function exchange(body, response, signal, told) {
  const start = performance.now();
  const elapsed_s = () => (performance.now() - start) / 1000;
  const clock = setInterval(() => tick(), 200);
  function tick() {
    response.total_s = elapsed_s();
    if (response.state === "waiting" || response.state === "thinking") response.thinking_s = response.total_s;
    told(response);
  }
  try {
    for await (const event of chat(body, signal)) {
      read(event, response);
      tick();
    }
    response.state = "done";
  } catch (error) {
    if (error.name === "AbortError") response.state = "stopped";
    else {
      response.state = "failed";
      const { message, status = 0, retryAfter_s = 0 } = error;
      response.error = { message: error instanceof ServerError ? message : `The page failed: ${message}`, status, retryAfter_s };
    }
  } finally {
    clearInterval(clock);
    response.total_s = elapsed_s();
    told(response);
  }
}

/** Take one event into the response. */
function read(event, response) {
  response.id ||= event.id;
  response.usage = event.usage ?? response.usage;
  response.language = event.reasoning_language ?? response.language;
  const [choice] = event.choices;
  if (!choice) return;
  response.finish = choice.finish_reason ?? response.finish;
  const { reasoning, reasoning_content, content } = choice.delta;
  const words = reasoning ?? reasoning_content;
  if (words) {
    response.state = "thinking";
    response.reasoning += words;
    response.thinkingPieces++;
    response.pieces++;
  }
  if (content) {
    response.state = "answering";
    response.answer += content;
    response.pieces++;
  }
}
