// The conversation: turns in order. It is kept in sessionStorage, so that a reload does not lose it and closing the tab
// does: the next person at this browser does not find it.
const PLACE = "maestrale.conversation.2"; // the number goes up when fields of a turn change

/** Turns: {role: "user", text}, or {role: "assistant", reasoning, answer, ...} as newResponse makes them. */
export class Conversation {
  constructor() {
    this.turns = load();
  }

  /** Write it down. */
  save() {
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(this.turns));
    } catch (error) {
      console.warn("the conversation is too long to be kept over a reload:", error);
    }
  }

  /** Remove a turn and all after it. */
  cut(turn) {
    const place = this.turns.indexOf(turn);
    if (place >= 0) this.turns.length = place;
    this.save();
  }

  /** What is sent: the texts before a turn, without reasoning; system: a message that goes before all. */
  messagesBefore(turn, system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const each of this.turns.slice(0, this.turns.indexOf(turn))) {
      const content = each.role === "user" ? each.text : each.answer;
      if (content) messages.push({ role: each.role, content });
    }
    return messages;
  }
}

/** A response that has not begun. */
export function newResponse() {
  return {
    role: "assistant",
    reasoning: "",
    answer: "",
    id: "", // of the stream
    state: "waiting", // then thinking, answering, and at last done, stopped or failed
    pieces: 0, // events with text, about as many as tokens
    thinkingPieces: 0,
    thinking_s: 0, // from the request to the answer
    total_s: 0,
    usage: null, // the server's count of tokens
    finish: "", // the server's reason: stop or length
    language: null, // the server's object reasoning_language
    error: null, // {message, status, retryAfter_s}
  };
}

function load() {
  try {
    const turns = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
    for (const turn of turns) {
      if (["waiting", "thinking", "answering"].includes(turn.state)) turn.state = "stopped"; // by a reload
    }
    return turns;
  } catch {
    return [];
  }
}
