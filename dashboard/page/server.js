// What the page asks the dashboard's server for, and numbers as words.

/** JSON from a path of parts, with a query. Throws Error with the server's words. */
export async function get(parts, query = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) if (one !== null && one !== undefined) given.append(name, one);
  const reply = await fetch(`/api/${parts.map(encodeURIComponent).join("/")}${given.size ? `?${given}` : ""}`);
  if (reply.ok) return reply.headers.get("content-type").startsWith("application/json") ? reply.json() : reply.text();
  throw new Error((await reply.json().catch(() => null))?.error?.message ?? `the server answered ${reply.status}`);
}

/** A number in a few characters: 0.613, 12.4, 1,530, 2.1 M. */
export function short(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (unit === "bytes") return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e5) return value.toLocaleString("en");
  if (size >= 1e5) return scaled(value, 1000, ["", "k", "M", "G", "T"]);
  if (size < 1e-3) return value.toExponential(1);
  return size < 1 ? value.toFixed(3) : String(Number(value.toPrecision(4)));
}

/** [name, words] of a run's accuracy: its evaluations, first and last, or the batch of its last step. */
export function accuracyOf({ evaluated, accuracy }) {
  return evaluated ? ["evaluated accuracy", evaluated.map((value) => short(value)).join(" → ")] : ["accuracy of the batch", short(accuracy)];
}

function scaled(value, base, names) {
  const power = Math.min(Math.floor(Math.log(Math.max(Math.abs(value), 1)) / Math.log(base) + 1e-9), names.length - 1);
  return `${Number((value / base ** power).toPrecision(3))} ${names[power]}`.trim();
}

/** "12 s", "5 min", "3 h 20 min", "4 days". */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 90) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(minutes / 1440)} days`;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** A model's text with all its letters to be seen: control characters and changes of direction are named. */
export function visible(text) {
  return text.replace(/\r\n?/g, "\n").replace(HIDDEN, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}
