// The rollouts of a run: the groups of a step, or those that a search finds in all steps, newest first.
import { button, make } from "/page/element.js";
import { get, short } from "./server.js";

const MARKS = { "": "all", wrong: "wrong", correct: "correct", "no answer": "no answer", cut: "cut", "mixed language": "mixed language", masked: "masked" };

const PART = 500; // groups of one answer of the server

export class RolloutsView {
  #before = null;

  constructor(name, step) {
    this.name = name;
    this.step = step === undefined ? null : Number(step);
  }

  async open(element) {
    this.search = make("input", { type: "search", id: "text", placeholder: "text of a problem or completion", "aria-label": "Search in all steps", oninput: () => { clearTimeout(this.pause); this.pause = setTimeout(() => this.#find(), 250); } });
    this.filters = make("div", { class: "filters", role: "group", "aria-label": "Show groups that have a completion that is" }, ...Object.entries(MARKS).map(([mark, words]) => button(words, () => this.#filter(mark), { "aria-pressed": String(mark === ""), "data-mark": mark })));
    this.chooser = make("input", { type: "range", "aria-label": "Step", oninput: () => this.#choose(this.steps[Number(this.chooser.value)]) });
    this.which = make("output", {});
    this.list = make("ul", { class: "groups" });
    this.more = button("", () => (this.#searching ? this.#find(true) : this.#choose(this.step, this.list.children.length)), { hidden: true });
    this.note = make("p", { class: "note", role: "status" });
    element.append(make("div", { class: "head" }, make("h1", {}, "Rollouts"), this.search), this.filters, make("div", { class: "steps" }, this.chooser, this.which), this.note, this.list, this.more);
    await this.refresh();
  }

  async refresh() {
    this.steps = await get(["runs", this.name, "rollouts"]);
    const newest = this.steps.at(-1), follows = this.step === null || this.step === this.newest; // the newest step, whatever it is
    this.chooser.max = Math.max(this.steps.length - 1, 0);
    if (!this.steps.length) this.note.textContent = "There are none yet: they are written after each step.";
    else if (this.newest !== newest && (follows || this.newest === undefined) && !this.#searching) await this.#choose(follows ? newest : this.step);
    this.newest = newest;
  }

  get #mark() {
    return this.filters.querySelector("[aria-pressed=true]").dataset.mark;
  }

  get #searching() {
    return this.#mark !== "" || this.search.value.trim() !== "";
  }

  #filter(mark) {
    for (const one of this.filters.children) one.setAttribute("aria-pressed", String(one.dataset.mark === mark));
    this.#find();
  }

  async #choose(step, start = 0) {
    this.step = step;
    this.chooser.value = this.steps.indexOf(step);
    this.chooser.setAttribute("aria-valuetext", `step ${step}`);
    this.which.textContent = `step ${step} of ${this.steps.at(-1)}`;
    const groups = await get(["runs", this.name, "rollouts", step], { start });
    if (this.step !== step) return;
    this.list.replaceChildren(...(start ? this.list.children : []), ...groups.map((group) => this.#item(group)));
    this.more.hidden = groups.length < PART;
    this.more.textContent = "Further groups";
    this.note.textContent = `${this.list.children.length} groups${this.more.hidden ? "" : " so far"}`;
  }

  async #find(further = false) {
    if (!this.#searching) return this.#choose(this.step ?? this.steps.at(-1));
    const asked = (this.asked = {});
    const found = await get(["runs", this.name, "search"], { mark: this.#mark, text: this.search.value, before: further ? this.#before : null });
    if (this.asked !== asked) return; // another search has begun
    this.#before = found.next;
    this.list.replaceChildren(...(further ? this.list.children : []), ...found.hits.map((group) => this.#item(group)));
    this.more.hidden = found.next === null;
    this.more.textContent = "Look further back";
    this.which.textContent = "in all steps";
    this.note.textContent = `${this.list.children.length} groups; ${found.next === null ? "that is all" : `looked back to step ${found.next}`}`;
  }

  #item(group) {
    const dots = make("span", { class: "dots", "aria-hidden": "true" }, ...group.totals.slice(0, 64).map((total) => {
      const dot = make("i", {});
      dot.style.opacity = total === null ? 0.15 : Math.min(0.2 + 0.8 * Math.max(total, 0), 1);
      return dot;
    }));
    const marks = Object.entries(group.marks).filter(([mark]) => mark !== "correct").map(([mark, count]) => make("span", { class: `badge ${mark.split(" ")[0]}` }, `${count} ${mark}`));
    return make("li", {}, make("a", { href: `#/${[this.name, "rollouts", group.step, group.line].map(encodeURIComponent).join("/")}` },
      make("span", { class: "text", dir: "auto" }, group.head || "(no text)"),
      make("span", { class: "meta" }, dots, make("b", {}, `${group.marks.correct ?? 0} of ${group.completions} correct`), ` · reward ${short(group.reward)} · ${short(Math.round(group.tokens))} tokens · ${[group.environment || group.domain, group.language].filter(Boolean).join(", ")} · step ${group.step}`),
      make("span", { class: "badges" }, ...marks)));
  }
}
