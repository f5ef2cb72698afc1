// A response in the page: reasoning that folds, the answer, the badge, the figures, what can be done with it.
import { button, copyButton, make } from "./element.js";
import * as figures from "./figures.js";
import { badge } from "./language.js";
import { Prose } from "./prose.js";

const RUNNING = ["waiting", "thinking", "answering"];
const ENDS = { stopped: "Stopped.", length: "The response was cut at the limit of tokens." };

/** Shows one response while it grows. onRetry: asks again. */
export class ResponseView {
  #state = "";
  #summary = make("summary");
  #reasoning = make("div", { class: "prose" });
  #window = make("div", { class: "window" }, this.#reasoning); // on a phone it is low, and scrolls, while reasoning comes
  #details = make("details", { class: "reasoning", hidden: true }, this.#summary, this.#window);
  #answer = make("div", { class: "prose answer", "aria-live": "polite", "aria-busy": "true" });
  #foot = make("footer");
  #figures = make("span", { class: "figures" });
  #reasoningProse = new Prose(this.#reasoning);
  #answerProse = new Prose(this.#answer);
  #follows = true; // the newest words are shown, until the user scrolls up
  #lastPlace = 0;

  constructor(response, onRetry) {
    this.response = response;
    this.onRetry = onRetry;
    this.element = make("article", { class: "response", "aria-label": "Maestrale" }, this.#details, this.#answer, this.#foot);
    new ResizeObserver(() => this.#follow()).observe(this.#reasoning);
    this.#window.addEventListener("scroll", () => this.#notePlace(), { passive: true });
    this.show();
  }

  #follow() {
    const { scrollHeight, clientHeight } = this.#window;
    const scrolls = scrollHeight > clientHeight + 1;
    if (scrolls) Object.assign(this.#window, { tabIndex: 0, role: "group", ariaLabel: "Reasoning" });
    else for (const name of ["tabindex", "role", "aria-label"]) this.#window.removeAttribute(name);
    if (this.#follows) this.#window.scrollTop = scrollHeight;
  }

  #notePlace() {
    const { scrollTop, scrollHeight, clientHeight } = this.#window;
    if (scrollTop + clientHeight >= scrollHeight - 24) this.#follows = true;
    else if (scrollTop < this.#lastPlace) this.#follows = false;
    this.#lastPlace = scrollTop;
  }

  /** Show the response as it is now. */
  show() {
    const { response } = this;
    const hasReasoning = response.reasoning !== "";
    if (RUNNING.includes(response.state) || hasReasoning) {
      this.#details.hidden = !(hasReasoning || response.state === "waiting");
      const words = response.state === "waiting" ? `Waiting, ${figures.duration(response.total_s)}` : figures.ofReasoning(response);
      if (this.#summary.textContent !== words) this.#summary.textContent = words;
    } else this.#details.hidden = true;
    this.#reasoningProse.write(response.reasoning);
    this.#answerProse.write(response.answer);
    const isNew = response.state !== this.#state;
    const wasThinking = this.#state === "thinking";
    this.#state = response.state;
    if (isNew && response.state === "thinking") this.#details.open = true;
    if (isNew && wasThinking && response.state === "answering") this.#fold();
    this.#details.classList.toggle("running", response.state === "waiting" || response.state === "thinking");
    if (RUNNING.includes(response.state)) this.#showFigures();
    else if (isNew) this.#end();
  }

  #fold() {
    // who reads the reasoning with the keyboard keeps the place
    if (this.#window.contains(document.activeElement)) this.#summary.focus();
    this.#details.open = false;
  }

  #showFigures() {
    this.#figures.textContent = figures.ofResponse(this.response);
    if (!this.#figures.isConnected) this.#foot.replaceChildren(this.#figures);
  }

  #end() {
    const { response } = this;
    this.#reasoningProse.end();
    this.#answerProse.end();
    this.#reasoning.lang = response.language?.detected ?? "";
    this.#answer.lang = response.language?.answer_detected ?? response.language?.requested ?? "";
    this.#answer.setAttribute("aria-busy", "false");
    this.#answer.removeAttribute("aria-live"); // it does not change any more
    this.#showFigures();
    const end = ENDS[response.state] ?? ENDS[response.finish];
    const nothing = response.state === "done" && !response.answer ? "The model gave no answer." : "";
    this.#foot.replaceChildren(
      ...[nothing, end].filter(Boolean).map((words) => make("p", { class: "note" }, words)),
      ...(response.error ? [this.#errorBox(response.error)] : []),
      ...(response.language ? [badge(response.language)] : []),
      make("div", { class: "row" }, this.#figures,
        response.answer ? copyButton("Copy", () => response.answer, { class: "quiet", title: "Copy the answer as Markdown" }) : null,
        response.error ? null : button("Retry", this.onRetry, { class: "quiet", title: "Ask again; this response and what follows is removed" })));
  }

  #errorBox({ message, retryAfter_s }) {
    const wait = retryAfter_s ? ` The server asks to wait ${retryAfter_s} s.` : "";
    return make("div", { class: "error", role: "alert" }, make("p", {}, message + wait), button("Try again", this.onRetry));
  }
}
