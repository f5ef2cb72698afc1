// The conversation as a file.
import { ofReasoning, ofResponse } from "./figures.js";
import { verdict } from "./language.js";

/** Everything, for programs. */
export function asJson(turns, model, settings) {
  return JSON.stringify({ model, exported: new Date().toISOString(), settings, turns }, null, 2);
}

/** What was said, for people. */
export function asMarkdown(turns, model) {
  const parts = [`# Conversation with ${model || "the model"}`];
  for (const turn of turns) {
    if (turn.role === "user") {
      parts.push("## Question", turn.text);
      continue;
    }
    parts.push("## Response");
    if (turn.reasoning) parts.push(`<details><summary>${ofReasoning(turn)}</summary>`, turn.reasoning.trim(), "</details>");
    parts.push(turn.answer.trim() || "(no answer)");
    const notes = [turn.error?.message, turn.language && verdict(turn.language)[1], ofResponse(turn)].filter(Boolean);
    if (notes.length) parts.push(`*${notes.join(" · ")}*`);
  }
  return parts.join("\n\n") + "\n";
}

/** Let the browser save a text. */
export function save(text, name, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
