// All runs: a list to choose from, and the chosen ones side by side.
import { button, make } from "/page/element.js";
import { Chart, colour, options } from "./chart.js";
import { accuracyOf, duration, get, short } from "./server.js";

const FIRST = 4; // runs that are chosen at first
const SHOWN = ["reward/mean", "accuracy", "entropy", "length/mean", "logprob_difference/mean", "tokens/generated_per_s"];

const KINDS = ["sft/", "evaluation/", ""];
const kindOf = (metric) => KINDS.find((kind) => metric.startsWith(kind));

export class RunsView {
  #runs = [];
  #chosen = null; // names of runs
  #filter = "";
  #charts = new Map();
  #metrics = JSON.parse(localStorage.getItem("metrics") ?? "null") ?? SHOWN;

  async open(element) {
    this.list = make("tbody");
    this.search = make("input", { type: "search", "aria-label": "Filter runs by name, state or setting", placeholder: "filter", oninput: () => { this.#filter = this.search.value.toLowerCase(); this.#drawList(); } });
    this.count = make("p", { class: "note" });
    this.compared = make("section", { "aria-labelledby": "compared-title" });
    this.more = make("select", { "aria-label": "Add a chart of", onchange: () => this.#add(this.more.value) });
    this.grid = make("div", { class: "charts" });
    this.differences = make("div", {});
    const heads = ["", "run", "state", "step", "reward", "accuracy", "a step (mean of 20)", "trained", "written"];
    element.append(
      make("div", { class: "head" }, make("h1", {}, "Runs"), this.search, this.count),
      make("div", { class: "table", role: "group", "aria-label": "Runs" }, make("table", { class: "runs" }, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head || make("span", { class: "hidden" }, "shown"))))), this.list)),
      make("div", { class: "head" }, make("h2", { id: "compared-title" }, "Side by side"), this.more), this.grid,
      make("h2", {}, "Settings in which they differ"), this.differences,
    );
    await this.#load();
  }

  shown() {
    this.redraw("size");
  }

  async refresh() {
    await this.#load();
  }

  redraw(what) {
    if (what === "axis") this.#compare();
    else for (const chart of this.#charts.values()) chart.redraw();
    if (what === "colour") this.#drawList();
  }

  async #load() {
    const found = await get(["runs"]);
    this.#runs = found.runs;
    this.now = found.now;
    const names = this.#runs.map((run) => run.name);
    this.#chosen ??= new Set(names.slice(0, FIRST));
    this.#drawList();
    Promise.all([this.#compare(), this.#tellDifferences()]).catch((error) => console.warn(error)); // the list need not wait
  }

  #place(name) {
    return [...this.#chosen].indexOf(name);
  }

  #drawList() {
    const shown = this.#runs.filter((run) => `${run.name} ${run.state} ${run.story}`.toLowerCase().includes(this.#filter));
    this.count.textContent = this.#runs.length ? `${shown.length} of ${this.#runs.length}` : "There is no run in this folder yet. The first one appears here by itself.";
    const focused = document.activeElement?.id;
    this.list.replaceChildren(...shown.map((run) => {
      const place = this.#place(run.name);
      const box = make("input", { type: "checkbox", id: `show-${run.name}`, checked: place >= 0, "aria-label": `Show ${run.name} side by side`, onchange: () => this.#choose(run.name) });
      if (place >= 0) box.style.accentColor = colour(place);
      const row = make("tr", {}, make("td", {}, box), make("th", { scope: "row" }, make("a", { href: `#/${encodeURIComponent(run.name)}` }, run.name)),
        make("td", {}, make("span", { class: `state ${run.state}`, title: run.story }, run.state)));
      const cells = [`${short(run.step)}${run.steps ? ` / ${short(run.steps)}` : ""}${run.kind === "sft" ? " SFT" : ""}`, short(run.reward), accuracyOf(run)[1], duration(run.step_s ?? NaN), duration(run.total_s ?? NaN), `${duration(Math.max(this.now - run.written, 0))} ago`];
      const heads = ["step", "reward", "accuracy", "a step (mean of 20)", "trained", "written"];
      row.append(...cells.map((text, column) => make("td", { class: "number", "data-head": heads[column] }, text)));
      return row;
    }));
    if (focused) document.getElementById(focused)?.focus();
  }

  #choose(name) {
    if (!this.#chosen.delete(name)) this.#chosen.add(name);
    this.#drawList();
    this.#compare();
    this.#tellDifferences();
  }

  #add(metric) {
    if (metric) this.#metrics = [...this.#metrics, metric];
    localStorage.setItem("metrics", JSON.stringify(this.#metrics));
    this.#compare();
  }

  #remove(metric) {
    this.#metrics = this.#metrics.filter((one) => one !== metric);
    this.#charts.get(metric)?.element.remove();
    this.#charts.delete(metric);
    this.#add("");
  }

  /** Draw the chosen runs' lines: a request for each run and kind of row, since each kind has steps of its own. */
  async #compare() {
    const names = [...this.#chosen].filter((name) => this.#runs.some((run) => run.name === name));
    const axis = options.axis, chosen = this.#metrics;
    const kinds = KINDS.map((kind) => chosen.filter((metric) => kindOf(metric) === kind)).filter((metrics) => metrics.length);
    const series = await Promise.all(names.flatMap((name) => kinds.map(async (metric) => [name, await get(["runs", name, "series"], { metric, axis, points: 600 }).catch(() => null)])));
    if (axis !== options.axis || chosen !== this.#metrics) return; // a later call draws
    for (const metric of this.#metrics) {
      let chart = this.#charts.get(metric);
      if (!chart) {
        chart = new Chart(metric);
        chart.element.querySelector("figcaption").append(button("×", () => this.#remove(metric), { class: "quiet", "aria-label": `Remove the chart ${metric}` }));
        this.#charts.set(metric, chart);
        this.grid.append(chart.element);
      }
      chart.set(series.flatMap(([name, found]) => found?.values[metric]?.some((value) => value !== null)
        ? [{ label: name, x: found.x, y: found.values[metric], place: this.#place(name) }] : []));
    }
    await this.#offer(names[0]);
  }

  async #offer(name) {
    if (name === undefined || this.offered === name) return;
    this.offered = name;
    const { names } = await get(["runs", name]);
    this.more.replaceChildren(make("option", { value: "" }, "add a chart …"), ...Object.keys(names).filter((one) => !this.#metrics.includes(one)).sort().map((one) => make("option", { value: one }, one)));
  }

  async #tellDifferences() {
    const names = [...this.#chosen].filter((name) => this.#runs.some((run) => run.name === name));
    const table = names.length > 1 ? await get(["differences"], { run: names }) : {};
    const rows = Object.entries(table).map(([key, values]) => {
      const told = names.map((name) => (values[name] === null ? "–" : JSON.stringify(values[name])));
      const usual = told.toSorted((a, b) => told.filter((one) => one === b).length - told.filter((one) => one === a).length)[0];
      return make("tr", {}, make("th", { scope: "row" }, key), ...told.map((text) => make("td", {}, text === usual ? text : make("mark", {}, text))));
    });
    const empty = names.length > 1 ? "None." : "Choose two runs or more.";
    this.differences.replaceChildren(rows.length
      ? make("div", { class: "table", role: "group", tabindex: "0", "aria-label": "Settings in which the runs differ" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "setting"), ...names.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows)))
      : make("p", { class: "note" }, empty));
  }
}
