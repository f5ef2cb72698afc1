// The page: which view the address names, and news of the runs that it shows.
import { make } from "/page/element.js";
import { RunsView } from "./runs.js";
import { RunView } from "./run.js";
import { RolloutsView } from "./rollouts.js";
import { GroupView } from "./group.js";
import { options } from "./chart.js";

const LEAST_PAUSE_MS = 700; // between two refreshments
const main = document.getElementById("main");
const live = document.getElementById("live");
let view = null;
let path = [];
let due = false;
let failed = false; // the view could not be opened: its run may not have begun

/** The view of an address: #/, #/NAME, #/NAME/rollouts, #/NAME/rollouts/STEP/LINE. */
function viewOf([name, room, step, line]) {
  if (name === undefined) return new RunsView();
  if (room !== "rollouts") return new RunView(name);
  return line === undefined ? new RolloutsView(name, step) : new GroupView(name, Number(step), Number(line));
}

function addressOf(parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

async function open() {
  path = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  view?.close?.();
  const opened = (view = viewOf(path));
  const crumbs = path.slice(0, 2).map((part, place) =>
    make("a", { href: addressOf(path.slice(0, place + 1)), "aria-current": place + 1 === path.length ? "page" : null }, part));
  document.getElementById("place").replaceChildren(...crumbs.flatMap((crumb) => [make("span", { "aria-hidden": "true" }, "/"), crumb]));
  document.getElementById("chart-controls").hidden = path.length > 1;
  document.title = path.length ? `${path.join(" / ")} · Maestrale` : "Maestrale runs";
  main.replaceChildren(make("p", { class: "note" }, "Loading …"));
  const element = make("div", { class: opened.constructor.name });
  failed = false;
  try {
    await opened.open(element);
    if (view === opened) main.replaceChildren(element);
    opened.shown?.();
  } catch (error) {
    if (view !== opened) return;
    failed = true;
    main.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
  }
}

/** Refresh what is shown: at once, but never more often than every LEAST_PAUSE_MS. */
function refresh() {
  if (due) return;
  due = true;
  setTimeout(async () => {
    await (failed ? open() : view?.refresh?.().catch((error) => console.warn(error)));
    setTimeout(() => { due = false; if (missed) { missed = false; refresh(); } }, LEAST_PAUSE_MS);
  });
}
let missed = false;

let source = null;
/** Listen for changes while the page can be seen: browsers allow a server only six connections. */
function listen() {
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource("/api/events");
  source.addEventListener("changed", (event) => {
    if (path[0] !== undefined && !JSON.parse(event.data).includes(path[0])) return;
    if (due) missed = true;
    refresh();
  });
  source.onopen = () => { live.textContent = "live"; live.className = "on"; };
  source.onerror = () => { live.textContent = "no connection"; live.className = "off"; };
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const acts = {
    "/": () => document.querySelector("main input[type=search]")?.focus(),
    "?": () => document.getElementById("help").showModal(),
    h: () => (location.hash = "#/"),
    r: () => path.length && (location.hash = addressOf(path[1] ? [path[0]] : [path[0], "rollouts"])),
    j: () => view.move?.(1),
    k: () => view.move?.(-1),
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

for (const name of ["axis", "smooth"]) {
  const control = document.getElementById(name);
  control.addEventListener("input", () => { options[name] = name === "smooth" ? Number(control.value) : control.value; view.redraw?.(name); });
}
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
document.addEventListener("keydown", onKey);
document.addEventListener("visibilitychange", () => { listen(); if (!document.hidden) refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.redraw?.("colour"));
addEventListener("hashchange", open);
open();
listen();
