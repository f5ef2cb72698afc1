// Times and counts in words.

/** "0.4 s", "12 s", "2 min 5 s". */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** "1 token", "about 12 tokens". */
export function tokens(count, isExact) {
  return `${isExact ? "" : "about "}${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`;
}

/** What the summary of the reasoning says. */
export function ofReasoning(response) {
  const isOver = !["waiting", "thinking"].includes(response.state);
  const exact = response.usage?.completion_tokens_details?.reasoning_tokens;
  const count = tokens(exact ?? response.thinkingPieces, exact !== undefined);
  return `${isOver ? "Thought for" : "Thinking,"} ${duration(response.thinking_s)} · ${count}`;
}

/** What stands under a response: tokens, time, speed over the whole request. */
export function ofResponse(response) {
  const exact = response.usage?.completion_tokens;
  const count = exact ?? response.pieces;
  if (!count) return "";
  const speed = (count / Math.max(response.total_s, 0.001)).toFixed(1);
  return `${tokens(count, exact !== undefined)} · ${duration(response.total_s)} · ${speed} tokens/s`;
}
