// A whole group on one screen: the problem, and every completion with its reward, its reason, its text or its tokens.
import { blocks, render } from "/page/markdown.js";
import { button, make, makeReachable } from "/page/element.js";
import { get, short, visible } from "./server.js";

const MOST_LETTERS_SET = 20_000; // longer texts are shown as they are
const SHADES = 8;

/** A model's text: formulas, code and lists set, or as it stands. */
function prose(text, isSet) {
  if (!isSet || text.length > MOST_LETTERS_SET) return make("pre", { class: "plain", dir: "auto" }, visible(text));
  const tokens = blocks(visible(text), false);
  const element = make("div", { class: "prose" });
  for (const token of tokens) {
    if (token.type === "space" || token.type === "def") continue;
    const block = make("div", { dir: "auto" });
    block.append(render(Object.assign([token], { links: tokens.links }), false));
    element.append(block);
  }
  return element;
}

export class GroupView {
  #cards = [];

  constructor(name, step, line) {
    Object.assign(this, { name, step, line });
  }

  async open(element) {
    const group = (this.group = await get(["runs", this.name, "rollouts", this.step, this.line]));
    const { problem, completions } = group;
    this.way = make("select", { id: "way", onchange: () => this.#show() }, ...Object.entries({ set: "formulas and code set", plain: "as written", tokens: "tokens" }).map(([value, words]) => make("option", { value }, words)));
    this.shade = make("select", { id: "shade", onchange: () => this.#show() }, make("option", { value: "version" }, "policy version"), make("option", { value: "logprobs", selected: true }, "log-prob"));
    this.only = make("select", { id: "only", onchange: () => this.#hide() }, ...["all", "correct", "wrong", "no answer", "cut", "mixed language", "masked"].map((mark) => make("option", {}, mark)));
    this.shadeLabel = make("label", { hidden: true }, "shaded by ", this.shade);
    this.scale = make("p", { class: "note", hidden: true });
    const facts = [["ground truth", problem.answer], ["language", problem.language], [problem.environment ? "environment" : "domain", problem.environment || problem.domain], ["problem", problem.id]].filter(([, value]) => value);
    const right = completions.filter((one) => one.verdict === "correct").length;
    const step = (by) => button(by < 0 ? "‹ previous" : "next ›", () => this.move(by), { class: "quiet", disabled: this.line + by < 0 || this.line + by >= group.groups });
    element.append(
      make("div", { class: "head" }, make("h1", {}, `Step ${this.step}, group ${this.line + 1} of ${group.groups}`), make("span", { class: "pager" }, step(-1), step(1))),
      make("div", { class: "problem" }, prose(problem.text, true), make("dl", { class: "facts small" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { dir: "auto" }, visible(value)))))),
      make("div", { class: "controls" }, make("b", {}, `${right} of ${completions.length} correct`), make("label", {}, "text ", this.way), this.shadeLabel, make("label", {}, "show ", this.only)), this.scale,
      make("div", { class: "cards" }, ...completions.map((one, place) => this.#card(one, place))),
    );
    this.#show();
  }

  shown() {
    for (const { body } of this.#cards) makeReachable(body);
  }

  move(by) {
    const line = this.line + by;
    if (line >= 0 && line < this.group.groups) location.hash = `#/${[this.name, "rollouts", this.step, line].map(encodeURIComponent).join("/")}`;
  }

  #card(one, place) {
    const marks = [[one.verdict, one.verdict.split(" ")[0]], one.finish === "length" && ["cut", "cut"], one.consistent === false && ["mixed language", "mixed"], one.masked && ["masked: not trained", "masked"]].filter(Boolean);
    const parts = Object.entries(one.parts).filter(([, value]) => value !== 0);
    const body = make("div", { class: "body", tabindex: "0", role: "group", "aria-label": `Completion ${place + 1}` });
    const copied = make("span", { class: "note", role: "status" });
    const facts = [`${short(one.tokens)} tokens`, one.versions.length ? `version ${one.versions.join(", ")}` : "", one.answer ? `answer ${visible(one.answer)}` : "", one.languages.some(Boolean) ? one.languages.filter(Boolean).join(" → ") : ""].filter(Boolean);
    const card = make("article", { class: `card ${one.verdict.split(" ")[0]}`, "aria-label": `Completion ${place + 1}, ${one.verdict}, reward ${short(one.total)}` },
      make("header", {}, make("b", { class: "total" }, short(one.total)), ...marks.map(([words, kind]) => make("span", { class: `badge ${kind}` }, words)),
        copyButtonFor(() => get(["runs", this.name, "rollouts", this.step, this.line, place, "test"]), copied)),
      make("p", { class: "parts" }, parts.length ? parts.map(([name, value]) => `${name} ${value > 0 ? "+" : "−"}${short(Math.abs(value))}`).join("  ") : "no part of the reward"),
      one.reason ? make("p", { class: "reason", dir: "auto" }, visible(one.reason)) : "",
      make("p", { class: "note" }, facts.join(" · ")), body, copied);
    this.#cards.push({ one, place, card, body, marks: marks.map(([words]) => words.split(":")[0]), from: 0 });
    return card;
  }

  #hide() {
    for (const { card, marks } of this.#cards) card.hidden = this.only.value !== "all" && !marks.includes(this.only.value);
  }

  async #show() {
    const isTokens = this.way.value === "tokens";
    this.shadeLabel.hidden = this.scale.hidden = !isTokens;
    await Promise.all(this.#cards.map((item) => (isTokens ? this.#tokens(item) : item.body.replaceChildren(...this.#texts(item.one)))));
  }

  /** The text, or what the policy and its environment said in turns. */
  #texts(one) {
    const isSet = this.way.value === "set";
    if (!one.turns.length) return [prose(one.text, isSet)];
    return one.turns.map((turn) => make("div", { class: `turn ${turn.role === "policy" ? "policy" : "environment"}` },
      make("span", { class: "role" }, turn.role, turn.reward !== null ? ` · reward ${short(turn.reward)}` : "", turn.failure ? ` · failed: ${visible(turn.failure)}` : ""), prose(turn.text, isSet)));
  }

  /** Tokens, shaded by a number of each: stronger is less likely, newer, or further apart. */
  async #tokens(item) {
    item.found ??= await get(["runs", this.name, "rollouts", this.step, this.line, item.place, "tokens"]).catch((error) => ({ error }));
    const found = item.found;
    if (found.error) return item.body.replaceChildren(make("p", { class: "note" }, found.error.message));
    for (const name of Object.keys(found.columns)) this.#offer(name);
    const by = this.shade.value, columns = found.columns;
    const numbers = by === "version" ? found.version
      : by.endsWith(" − engine") ? (columns[by.slice(0, -9)] ?? []).map((value, place) => (found.version[place] === null || value === null || columns.logprobs?.[place] == null ? null : value - columns.logprobs[place]))
      : (columns[by] ?? []).map((value, place) => (found.version[place] === null ? null : value));
    const versions = this.group.completions.flatMap((one) => one.versions), oldest = Math.min(...versions), newest = Math.max(...versions);
    const levelOf = (value) => (value === null || value === undefined ? 0 : by === "version" ? 1 + Math.round(((SHADES - 1) * (value - oldest)) / Math.max(newest - oldest, 1)) : Math.min(Math.floor(Math.abs(value) * (by.endsWith(" − engine") ? 40 : 2)), SHADES));
    this.scale.textContent = by === "version" ? `The stronger, the newer the policy that sampled it: version ${oldest} to ${newest}. Not shaded: said by the environment.` : by.endsWith(" − engine") ? "The stronger, the larger the difference: full at 0.2 nats." : "The stronger, the less likely: full at −4 nats. Point at a token for its numbers.";
    const spans = found.ids.map((id, place) => {
      const piece = found.pieces ? found.pieces[place] : `${id} `;
      const told = Object.entries(columns).map(([name, values]) => `${name} ${short(values[place])}`);
      const shown = visible(piece).replaceAll("\n", "↵\n");
      return make("span", { class: `token s${levelOf(numbers[place])}${found.version[place] === null ? " context" : ""}`, title: [`token ${found.start + place}, id ${id}`, ...told, found.version[place] === null ? "not sampled" : `version ${found.version[place]}`].join("\n") }, shown);
    });
    const rest = found.start + found.ids.length < found.tokens ? make("p", { class: "note" }, `… ${short(found.tokens - found.ids.length)} more tokens`) : "";
    item.body.replaceChildren(found.pieces ? "" : make("p", { class: "note" }, "The tokenizer of this run’s model is not on this machine: ids are shown."), make("pre", { class: "tokens", dir: "auto" }, ...spans), rest);
  }

  #offer(name) {
    const names = name === "logprobs" ? [] : [name, `${name} − engine`];
    for (const one of names) if (![...this.shade.options].some((option) => option.value === one)) this.shade.append(make("option", { value: one }, one));
  }
}

/** A button that fetches a text and copies it. A clipboard may be written to only at once after a click, so the promise
 * is given to it. */
function copyButtonFor(fetchText, note) {
  const element = button("Copy as test case", async () => {
    note.textContent = "";
    try {
      const text = fetchText().then((found) => new Blob([found], { type: "text/plain" }));
      await navigator.clipboard.write([new ClipboardItem({ "text/plain": text })]);
      note.textContent = "Copied: paste it into a file of tests.";
    } catch (error) {
      note.textContent = `Not copied: ${error.message}`;
    }
  }, { class: "quiet" });
  return element;
}
