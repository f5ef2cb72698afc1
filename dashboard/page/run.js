// One run: how it stands, alarms, charts by subject, evaluations, the time of its ranks, its settings.
import { make } from "/page/element.js";
import { Chart, MOST_LINES, options } from "./chart.js";
import { accuracyOf, duration, get, short } from "./server.js";
import { Timeline } from "./timeline.js";

/** Subject -> charts: title -> metrics. What a run does not have is left out; what stands nowhere here comes last. */
const SUBJECTS = {
  "What it learns": { "Reward": ["reward/mean"], "Parts of the reward": ["reward/correctness", "reward/format", "reward/language", "reward/length", "reward/extra"], "Accuracy": ["accuracy", "tests_passed"], "Language and format": ["consistency", "format"], "Groups": ["groups/trained", "groups/filtered"], "Spread of the reward": ["reward/std"] },
  "Completions": { "Length": ["length/mean", "length/p50", "length/p99", "length/max"], "Cut": ["truncated"], "Turns": ["environment/turns", "environment/tool_calls"], "Environments that failed": ["environment/failed", "environment/failed_calls", "environment/started_anew"], "Interrupted": ["completions/aborted", "completions/continued"] },
  "Optimiser": { "Loss": ["loss"], "Entropy": ["entropy"], "Gradient norm": ["grad_norm"], "Importance ratio": ["ratio/mean", "ratio/max"], "Clipped and masked tokens": ["clip/low", "clip/high", "clip/masked"], "KL": ["kl/k3", "kl/reference", "kl/teacher"], "Learning rate": ["lr"], "Stage": ["stage"] },
  "Trainer and engine": { "Difference of log-probs": ["logprob_difference/mean", "logprob_difference/max"], "Staleness": ["staleness/mean", "staleness/max"], "Completions of several versions": ["spans/multi_version_share"], "Probe after an update": ["sync/logprob_diff_mean", "sync/logprob_diff_max", "sync/logprob_move_diff"] },
  "Time": { "A step": ["time/step_s", "time/wait_batch_s", "time/train_s", "time/wait_sync_s", "time/checkpoint_s"], "Weight update": ["sync/total_s", "sync/update_s", "sync/write_s"], "Stall seen by requests": ["sync/stall_ms"], "Tokens a second": ["tokens/generated_per_s", "tokens/trained_per_s"], "Tokens a second by device": ["tokens/generated_per_s_per_device", "tokens/trained_per_s_per_device"], "Operations": ["tflops_per_device"], "MFU": ["mfu"], "Idle while environments work": ["environment/idle_seats", "environment/waiting"] },
  "Machine": { "Memory": ["memory/controller_peak_bytes", "memory/trainer_peak_bytes", "memory/engine_peak_bytes"], "GPU memory": ["memory/trainer_peak_gpu_bytes", "memory/engine_peak_gpu_bytes"], "Engines started again": ["engine/restarts"], "Messages refused": ["messages/refused"], "Verdicts that are no grade": ["verify/timeout", "verify/crash", "verify/unverifiable", "verify/sandbox_refused"] },
  "SFT": { "Loss": ["sft/loss"], "Learning rate": ["sft/lr"], "Tokens a second": ["sft/tokens_per_s"] },
};
const APART = /^(evaluation|verify)\/|^time\/total_s$|^micro_batches$|^padding_share$|^sync\/(bytes|GB|stall_steps)|^sft\//;

/** Parts of an evaluation, of which each kind has a chart -> its words. */
const PARTS = { language: "language of the problem", asked: "language asked for" };

export class RunView {
  #charts = []; // {chart, names, range}
  #told = "";

  constructor(name) {
    this.name = name;
  }

  async open(element) {
    this.top = make("div", {});
    this.alarms = make("section", { class: "alarms", "aria-label": "Alarms" });
    this.timeline = new Timeline();
    this.bodies = make("div", {});
    this.evaluated = make("section", {});
    this.rest = make("section", {});
    element.append(this.top, this.alarms, this.evaluated, this.bodies, this.timeline.element, this.rest);
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const item = this.#charts.find((one) => one.chart.element === entry.target);
        if (item && (item.near = entry.isIntersecting) && item.stale) this.#fill(item);
      }
    }, { rootMargin: "300px" });
    await this.refresh();
  }

  shown() {
    this.redraw("size");
  }

  close() {
    this.seen.disconnect();
    for (const { chart } of this.#charts) chart.close();
  }

  redraw(what) {
    this.timeline.draw();
    for (const item of this.#charts) {
      if (what === "axis") item.range = [null, null], this.#renew(item);
      else item.chart.redraw();
    }
    this.accuracy?.redraw();
    for (const chart of this.parts?.values() ?? []) chart.redraw();
  }

  async refresh() {
    const found = await get(["runs", this.name]);
    this.#tellTop(found);
    this.#tellAlarms(found);
    const wanted = Object.keys(found.names).sort().join();
    if (wanted !== this.#told) this.#lay(found);
    this.#told = wanted;
    for (const item of this.#charts) this.#renew(item);
    this.timeline.set(found.timeline, found.run);
    this.#tellEvaluations(found.evaluations);
    this.#tellRest(found);
  }

  #tellTop({ run, verdicts, rollouts, damaged }) {
    const share = run.steps ? Math.min(run.step / run.steps, 1) : null;
    const left = share && run.state === "running" && run.step_s ? `, about ${duration((run.steps - run.step) * run.step_s)} left` : "";
    const facts = [
      ["step", `${short(run.step)}${run.steps ? ` of ${short(run.steps)}` : ""}`], ["reward", short(run.reward)], accuracyOf(run),
      ["a step (mean of 20)", duration(run.step_s ?? NaN)], ["trained", `${duration(run.total_s ?? NaN)}${left}`],
    ];
    const failed = Object.entries(verdicts).filter(([name, count]) => count && !["correct", "wrong", "open", "no_answer"].includes(name));
    const bar = make("progress", { max: 1, value: share ?? 0, "aria-label": "Steps done" });
    this.top.replaceChildren(
      make("div", { class: "head" }, make("h1", {}, run.name), make("span", { class: `state ${run.state}` }, run.state), make("span", { class: "note" }, run.story),
        rollouts.length ? make("a", { class: "button", href: `#/${encodeURIComponent(run.name)}/rollouts` }, "Rollouts") : null),
      make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
      ...(share === null ? [] : [bar]),
      ...(failed.length ? [make("p", { class: "note" }, `Not graded since the launch: ${failed.map(([name, count]) => `${short(count)} ${name.replaceAll("_", " ")}`).join(", ")}.`)] : []),
      ...(damaged ? [make("p", { class: "note" }, `${damaged} lines of metrics.jsonl cannot be read and are left out.`)] : []),
    );
  }

  #tellAlarms({ alarms, run }) {
    if (run.state === "crashed") alarms = [{ name: "The run has ended before its time", seen: run.story, advice: "The same command goes on from its last checkpoint. What each process did stands in the run’s folder stacks/." }, ...alarms];
    this.alarms.hidden = !alarms.length;
    this.alarms.replaceChildren(...alarms.map((alarm) => make("details", { class: "alarm" }, make("summary", {}, make("b", {}, alarm.name), ` ${alarm.seen}.`), make("p", {}, alarm.advice))));
  }

  /** Lay out the charts of what the run has. */
  #lay({ names, bound }) {
    for (const { chart } of this.#charts) chart.close();
    this.seen.disconnect();
    this.#charts = [];
    const known = new Set(Object.values(SUBJECTS).flatMap((charts) => Object.values(charts).flat()));
    const others = Object.keys(names).filter((name) => !known.has(name) && !APART.test(name));
    const subjects = { ...SUBJECTS, "Other": Object.fromEntries(others.map((name) => [name, [name]])) };
    this.bodies.replaceChildren(...Object.entries(subjects).flatMap(([subject, charts]) => {
      const items = Object.entries(charts).map(([title, metrics]) => [title, metrics.filter((name) => names[name])]).filter(([, metrics]) => metrics.length).map(([title, metrics]) => {
        const item = { names: metrics, range: [null, null], stale: true };
        const about = metrics.map((name) => `${name}: ${names[name].definition}`).join("\n");
        item.chart = new Chart(title, { about, unit: names[metrics[0]].unit, axis: names[metrics[0]].kind === "sft" ? "SFT step" : null, bound: title === "Staleness" ? bound : null, onzoom: (low, high) => { item.range = [low, high]; this.#fill(item); } });
        this.seen.observe(item.chart.element);
        this.#charts.push(item);
        return item.chart.element;
      });
      return items.length ? [make("section", {}, make("h2", {}, subject), make("div", { class: "charts" }, ...items))] : [];
    }));
    this.#fillAll(this.#charts);
  }

  /** Fill the charts that nobody has scrolled to, one after another: a print or a picture of the page has them all. */
  async #fillAll(items) {
    for (const item of items) {
      await new Promise((resolve) => setTimeout(resolve));
      if (items !== this.#charts) return;
      if (item.stale) await this.#fill(item);
    }
  }

  #renew(item) {
    item.stale = true;
    if (item.near) this.#fill(item);
  }

  async #fill(item) {
    item.stale = false;
    const axis = item.chart.axis ? "step" : options.axis;
    const found = await get(["runs", this.name, "series"], { metric: item.names, axis, points: 800, low: item.range[0], high: item.range[1] });
    if (!item.chart.axis && axis !== options.axis) return;
    const prefix = item.names.length > 1 ? item.names[0].split("/")[0] : "";
    item.chart.set(item.names.map((name) => ({ label: name.startsWith(`${prefix}/`) ? name.slice(prefix.length + 1).replaceAll("_", " ") : name, x: found.x, y: found.values[name] })));
  }

  /** Evaluations: accuracy with its 95 % intervals, and a table of the first and the last. */
  #tellEvaluations(all) {
    if (!all.length) return this.evaluated.replaceChildren();
    if (!this.accuracy) {
      this.accuracy = new Chart("Accuracy, with 95 % intervals", { axis: "version", unit: "share" });
      this.parts = new Map();
      this.evaluationCharts = make("div", { class: "charts" }, this.accuracy.element);
      this.evaluationTable = make("div", { class: "table", role: "group", tabindex: "0", "aria-label": "Evaluations" });
      this.evaluated.replaceChildren(make("h2", {}, "Evaluations"), this.evaluationCharts, make("details", {}, make("summary", {}, "As a table"), this.evaluationTable));
    }
    const rows = all.filter((one) => one.version !== null).toSorted((a, b) => a.version - b.version);
    const lineOf = (label, some, pick, half) => ({ label, x: some.map((one) => one.version), y: some.map((one) => pick(one) ?? null), half: some.map((one) => half(one) ?? 0) });
    const sampled = rows.filter((one) => one.temperature !== 0), greedy = rows.filter((one) => one.temperature === 0);
    this.accuracy.set([lineOf("sampled", sampled, (one) => one.accuracy, (one) => one.accuracy_half_width), lineOf("greedy", greedy, (one) => one.accuracy, (one) => one.accuracy_half_width)].filter((line) => line.y.some((value) => value !== null)));
    const names = [...new Set(sampled.flatMap((one) => Object.keys(one.parts ?? {})))].sort();
    for (const kind of new Set(names.map((name) => name.split("/")[0]))) {
      const some = names.filter((name) => name.startsWith(`${kind}/`));
      if (!this.parts.has(kind)) {
        const cut = some.length > MOST_LINES ? `: the first ${MOST_LINES} of ${some.length}` : "";
        this.parts.set(kind, new Chart(`Accuracy by ${PARTS[kind] ?? kind}, sampled${cut}`, { axis: "version", unit: "share" }));
        this.evaluationCharts.append(this.parts.get(kind).element);
      }
      this.parts.get(kind).set(some.slice(0, MOST_LINES).map((name) => lineOf(name.slice(kind.length + 1), sampled, (one) => one.parts?.[name]?.accuracy, (one) => one.parts?.[name]?.accuracy_half_width)));
    }
    const shown = [...new Set([rows[0], ...rows.slice(-6)])].filter(Boolean);
    const columns = { temperature: "temperature", accuracy: "accuracy", "pass@k": "pass_at_k", "maj@k": "majority", "one language": "consistency", format: "format", reward: "reward", tokens: "tokens", problems: "problems" };
    const known = Object.entries(columns).filter(([, field]) => shown.some((one) => typeof one[field] === "number"));
    this.evaluationTable.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...["version", ...known.map(([head]) => head)].map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...shown.map((one) =>
      make("tr", {}, make("th", { scope: "row" }, short(one.version)), ...known.map(([, field]) => make("td", { class: "number" }, `${short(one[field])}${field === "accuracy" && one.accuracy_half_width ? ` ± ${short(one.accuracy_half_width)}` : ""}`)))))));
  }

  #tellRest({ settings, stages }) {
    const open = this.rest.querySelector("details")?.open;
    this.rest.replaceChildren(
      ...(stages.length ? [make("h2", {}, "Stages"), make("ol", {}, ...stages.map((one) => make("li", {}, `from version ${short(one.version)}: ${one.change}`)))] : []),
      make("details", { open }, make("summary", {}, make("h2", {}, "Settings")), make("dl", { class: "settings" }, ...Object.entries(settings).map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, JSON.stringify(value)))))),
    );
  }
}
