// Who waits for whom: what trainers and engines did in the last steps, and how long the phases of the launch took.
import { make } from "/page/element.js";
import { duration, short } from "./server.js";

const SVG = "http://www.w3.org/2000/svg";
const STEPS = 24; // that fit beside each other
const PARTS = { wait: "wait for completions", train: "train", sync: "wait for weights", checkpoint: "checkpoint", other: "other" };

function rect(x, width, y, height, kind, words) {
  const element = document.createElementNS(SVG, "rect");
  for (const [name, value] of Object.entries({ x, y, width: Math.max(width, 0.05), height, class: kind })) element.setAttribute(name, value);
  const title = document.createElementNS(SVG, "title");
  title.textContent = words;
  element.append(title);
  return element;
}

export class Timeline {
  #data = null;

  constructor() {
    this.element = make("section", { class: "timeline" });
  }

  set(data, run) {
    this.#data = data;
    this.run = run;
    this.draw();
  }

  draw() {
    if (!this.#data) return;
    const { steps, phases } = this.#data;
    const parts = steps.length ? [make("h2", {}, "Who waits for whom"), this.#ranks(steps.slice(-STEPS)), this.#legend(steps)] : [];
    this.element.replaceChildren(...parts, ...(phases.length ? [make("h3", {}, "Phases of the launch"), this.#launch(phases)] : []));
  }

  /** A step is [step, end, step_s, wait, train, sync, checkpoint, stall_s]; times in s. */
  #ranks(steps) {
    const begin = steps[0][1] - steps[0][2], whole = Math.max(steps.at(-1)[1] - begin, 1e-3), at = (time) => (100 * (time - begin)) / whole;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 100 10");
    svg.setAttribute("preserveAspectRatio", "none");
    for (const [step, end, taken, wait, train, sync, checkpoint, stall] of steps) {
      let time = end - taken;
      for (const [kind, seconds] of [["checkpoint", checkpoint], ["wait", wait], ["train", train], ["sync", sync], ["other", Math.max(taken - wait - train - sync - checkpoint, 0)]]) {
        svg.append(rect(at(time), (100 * seconds) / whole, 0, 4.5, kind, `Step ${step}, trainers: ${PARTS[kind]}, ${duration(seconds)}`));
        time += seconds;
      }
      svg.append(rect(at(end - taken), (100 * taken) / whole, 5.5, 4.5, "sample", `Step ${step}, engines: they sample`));
      if (stall) svg.append(rect(at(end - taken), (100 * stall) / whole, 5.5, 4.5, "sync", `Step ${step}, engines: no token for ${short(1000 * stall)} ms while new weights come in`));
    }
    const words = `Trainers and engines in steps ${steps[0][0]} to ${steps.at(-1)[0]}, ${duration(whole)}`;
    return make("div", { class: "lanes" }, make("div", { class: "names", "aria-hidden": "true" }, make("span", {}, "trainers"), make("span", {}, "engines")), make("div", { role: "img", "aria-label": `${words}. The shares stand below.` }, svg), make("p", { class: "note" }, words));
  }

  #legend(steps) {
    const whole = steps.reduce((sum, step) => sum + step[2], 0) || 1;
    const share = (column) => steps.reduce((sum, step) => sum + step[column], 0) / whole;
    const shares = { wait: share(3), train: share(4), sync: share(5), checkpoint: share(6) };
    shares.other = Math.max(1 - Object.values(shares).reduce((sum, one) => sum + one, 0), 0);
    const items = Object.entries(shares).map(([kind, part]) => make("li", {}, make("span", { class: `mark ${kind}`, "aria-hidden": "true" }), PARTS[kind], " ", make("b", {}, `${Math.round(100 * part)} %`)));
    return make("ul", { class: "legend" }, ...items, make("li", {}, make("span", { class: "mark sample", "aria-hidden": "true" }), "engines sample"));
  }

  #launch(phases) {
    const last = this.run.state === "running" ? Date.now() / 1000 : Math.max(this.run.written, phases.at(-1).time);
    const rows = phases.map(({ time, phase }, place) => [phase, Math.max((phases[place + 1]?.time ?? last) - time, 0)]).slice(-16);
    const most = Math.max(...rows.map(([, seconds]) => seconds), 1e-3);
    return make("ol", { class: "phases" }, ...rows.map(([phase, seconds]) => {
      const bar = make("span", { class: "bar", "aria-hidden": "true" });
      bar.style.inlineSize = `${(100 * seconds) / most}%`;
      return make("li", {}, make("span", {}, phase), make("span", { class: "track" }, bar), make("b", {}, duration(seconds)));
    }));
  }
}
