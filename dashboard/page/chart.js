// A chart: lines over steps, tokens or hours, smoothed, with a legend that tells the last values.
import uPlot from "/page/vendor/uplot.js";
import { make } from "/page/element.js";
import { short } from "./server.js";

/** What all charts obey. */
export const options = { axis: "step", smooth: 0 };
const AXIS = { step: "step", tokens: "trained tokens", time: "hours" };
const HEIGHT = 190;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
/** As many lines have a look of their own. */
export const MOST_LINES = 8 * DASHES.length;

/** Exponential mean of the values so far, corrected for its beginning; gaps stay. */
function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + 1 - share;
    return mean / weight;
  });
}

/** The colour of a line, of the page's scheme. */
export const colour = (place) => css(`--line-${place % 8}`);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** How a line is broken, so that those of one colour can be told apart. */
const dashes = (place) => DASHES[Math.floor(place / 8) % 4];

/** The mark of a line in a legend: its colour, broken as the line is. */
function swatch(place) {
  const mark = make("span", { class: dashes(place).length ? "mark dashed" : "mark", "aria-hidden": "true" });
  let end = 0;
  const stripes = dashes(place).map((length, part) => `${part % 2 ? "transparent" : colour(place)} ${end}px ${end += length}px`);
  mark.style.background = stripes.length ? `repeating-linear-gradient(90deg, ${stripes.join(", ")})` : colour(place);
  return mark;
}

/** Points that are hardly more than a few are drawn as dots too. */
const few = (x) => x.length <= 12;

/** Some lines in a figure. Each: {label, x, y, half?: half widths of intervals, unit?}. */
export class Chart {
  #plot = null;
  #lines = null;
  #signature = "";

  /** title: its heading. about: what it shows, in words. onzoom(low, high): when a part was chosen, or null for all. */
  constructor(title, { about = "", unit = "", axis = null, bound = null, onzoom = null } = {}) {
    Object.assign(this, { title, unit, axis, bound, onzoom });
    this.legend = make("ul", { class: "legend" });
    this.frame = make("div", { class: "plot", role: "img", "aria-label": `${title}: nothing to see yet` });
    this.element = make("figure", { class: "chart" }, make("figcaption", { title: about || null }, make("h3", {}, title), this.unitNote()), this.frame, this.legend);
    new ResizeObserver(() => this.#resize()).observe(this.frame);
  }

  unitNote() {
    return this.unit && this.unit !== "number" ? make("span", { class: "unit" }, this.unit) : null;
  }

  /** Show lines. */
  set(lines) {
    this.#lines = lines.filter((line) => line.x.length);
    this.redraw();
  }

  /** Draw again, after the data, the smoothing or the colours have changed. */
  redraw() {
    const lines = this.#lines;
    if (!lines) return; // nothing has come yet
    this.element.classList.toggle("empty", !lines.length);
    const signature = JSON.stringify([lines.map((line) => [line.label, few(line.x), line.place]), colour(0), this.axis ?? options.axis, options.smooth > 0]);
    const tables = lines.flatMap((line) => {
      const gentle = line.half ? line.y : smoothed(line.y, options.smooth);
      return options.smooth && !line.half ? [[line.x, line.y], [line.x, gentle]] : [[line.x, gentle]];
    });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]];
    if (signature !== this.#signature || !this.#plot) this.#build(lines, data);
    else this.#plot.setData(data);
    this.#signature = signature;
    this.#tell(lines);
  }

  #build(lines, data) {
    this.#plot?.destroy();
    this.#plot = null;
    if (!lines.length || !this.frame.clientWidth) return;
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `11px ${css("--sans")}` };
    const label = this.axis ?? AXIS[options.axis];
    const series = lines.flatMap((line, place) => {
      const shape = { stroke: colour(line.place ?? place), width: 1.6, dash: dashes(line.place ?? place), spanGaps: true, points: { show: few(line.x) && !options.smooth, size: 5 } };
      return options.smooth && !line.half ? [{ ...shape, width: 1, alpha: 0.22, points: { show: false } }, shape] : [shape];
    });
    const bound = this.bound, reach = Math.max(0, ...lines.flatMap((line) => line.half ?? []));
    this.#plot = new uPlot({
      width: this.frame.clientWidth, height: HEIGHT, padding: [6, 10, 0, 0], legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: !this.onzoom }, focus: { prox: 24 }, points: { size: 6 } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
                y: { range: (u, low, high) => spread(low - reach, bound === null ? high + reach : Math.max(high, bound), this.unit) } },
      series: [{ label }, ...series],
      axes: [{ ...axis, size: 24, values: (u, marks) => marks.map((mark) => short(mark)) },
             { ...axis, size: 52, values: (u, marks) => marks.map((mark) => marked(mark, marks[1] - marks[0], this.unit)) }],
      hooks: {
        draw: [(plot) => this.#drawMore(plot)],
        setCursor: [(plot) => this.#tell(this.#lines, plot.cursor.idx)],
        setSelect: [(plot) => {
          if (!this.onzoom || plot.select.width < 4) return;
          this.onzoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, data, this.frame);
    this.#plot.over.addEventListener("dblclick", () => this.onzoom?.(null, null));
  }

  /** Intervals and the bound. */
  #drawMore(plot) {
    const { ctx } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    if (this.bound !== null) {
      const y = plot.valToPos(this.bound, "y", true);
      ctx.strokeStyle = css("--muted");
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath(), ctx.moveTo(plot.bbox.left, y), ctx.lineTo(plot.bbox.left + plot.bbox.width, y), ctx.stroke();
      ctx.setLineDash([]);
    }
    this.#lines.forEach((line, place) => line.half?.forEach((half, row) => {
      if (!half || line.y[row] === null) return;
      const [x, low, high] = [plot.valToPos(line.x[row], "x", true), ...[-half, half].map((more) => plot.valToPos(within(line.y[row] + more, this.unit), "y", true))];
      ctx.strokeStyle = colour(line.place ?? place);
      ctx.globalAlpha = 0.6;
      ctx.beginPath(), ctx.moveTo(x, low), ctx.lineTo(x, high), ctx.stroke();
      ctx.globalAlpha = 1;
    }));
    ctx.restore();
  }

  #resize() {
    if (!this.#plot) return this.#lines?.length ? this.redraw() : undefined;
    const width = this.frame.clientWidth;
    if (width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  /** The legend: values at the cursor, or the last ones; and the same in words for who cannot see the lines. */
  #tell(lines, row = null) {
    const each = options.smooth ? 2 : 1, data = this.#plot?.data;
    let column = 0;
    const items = lines.map((line, place) => {
      column += line.half ? 1 : each;
      const last = line.y.findLastIndex((value) => value !== null);
      const atCursor = row !== null && data?.[column]?.[row] !== undefined;
      const value = atCursor ? data[column][row] : last < 0 ? null : line.y[last];
      return make("li", {}, swatch(line.place ?? place), make("span", { class: "name" }, line.label), " ", make("b", {}, short(value, this.unit)));
    });
    if (row !== null && data?.[0]?.[row] !== undefined) items.push(make("li", { class: "at" }, `${this.axis ?? AXIS[options.axis]} ${short(data[0][row])}`));
    this.legend.replaceChildren(...items);
    if (row === null) this.frame.setAttribute("aria-label", `${this.title}. ${lines.map((line) => `${line.label}: ${line.y.length} values, the last is ${short(line.y.findLast((one) => one !== null) ?? null, this.unit)}`).join("; ")}`);
  }

  close() {
    this.#plot?.destroy();
  }
}

/** A mark of an axis, with as many digits as tell it from its neighbours. */
function marked(mark, step, unit) {
  const digits = [0, 1, 2, 3, 4, 5].find((count) => Math.abs(Number(step.toFixed(count)) - step) < 1e-6 * step);
  return unit === "bytes" || Math.abs(mark) >= 1e4 || digits === undefined ? short(mark, unit) : mark.toFixed(digits);
}

/** A value that is shown: of shares none is below 0 or above 1. */
const within = (value, unit) => (unit === "share" ? Math.min(Math.max(value, 0), 1) : value);

/** A range of values with a little room. */
export function spread(low, high, unit) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [within(low >= 0 && low - room < 0 ? 0 : low - room, unit), within(high + room, unit)];
}
