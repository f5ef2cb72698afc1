// Languages in words, and the badge that says what a response was measured to be written in.
import { make } from "./element.js";

const names = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });
const SOURCES = {
  body: "the request", header: "the request's header", key: "the key's default", default: "the server's default",
  question: "the language of the question", "earlier turn": "the language of an earlier question",
  "accept-language": "the browser's languages", fallback: "the server's fallback", off: "nobody",
};

/** "German" for "de"; the code itself where it is no language. */
export function languageName(code) {
  try {
    return names.of(code);
  } catch {
    return code;
  }
}

/** [kind, words]: kind is match, mismatch or unknown. */
export function verdict({ requested, detected, answer_detected: answer, match }) {
  const name = languageName;
  const thought = detected && (match || detected !== requested);
  const spoken = thought ? detected : answer;
  const did = spoken ? `${thought ? "Thought" : "Answered"} in ${name(spoken)}` : "Written in several languages, or in none";
  if (match === true) return ["match", `${did}, as wanted`];
  if (match === false) return ["mismatch", `${did}, not in ${name(requested)} as wanted`];
  if (detected && !requested) return ["unknown", `Thought in ${name(detected)}; no language was asked for`];
  return ["unknown", requested ? `Too few words to tell whether it thought in ${name(requested)}` : "Too few words to tell the language"];
}

const SIGNS = { match: "✓", mismatch: "✗", unknown: "?" };

/** The badge of a response: its verdict, and all that was measured inside it. */
export function badge(language) {
  const [kind, words] = verdict(language);
  const percent = language.share === null || language.share === undefined ? "" : ` (${Math.round(language.share * 100)} % of the letters)`;
  const rows = [
    ["Wanted", language.requested ? `${languageName(language.requested)}, by ${SOURCES[language.source] ?? language.source}` : "nothing"],
    ["Reasoning", language.detected ? languageName(language.detected) + percent : "too few words to tell"],
    ["Answer", language.answer_detected ? languageName(language.answer_detected) : "too few words to tell"],
    ["Tries", `${language.tries}`],
    ["Enforcement", language.enforcement ?? "none"],
  ];
  return make("details", { class: `badge ${kind}` },
    make("summary", {}, make("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]), words),
    make("dl", {}, ...rows.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)])));
}
