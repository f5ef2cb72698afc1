// Markdown and mathematics of a model as elements. What a model writes is hostile: HTML is shown as text, images become
// links, links open only when somebody follows them, formulas cannot load or run anything, and DOMPurify has the last word.
import { DOMPurify, Marked, highlight, temml } from "./vendor/libraries.js";
import { copyButton, make } from "./element.js";

const MOST_LETTERS_OF_A_BLOCK = 40_000; // longer ones are shown as they are
const MOST_LETTERS_OF_CODE = 20_000; // longer code has no colours
const MOST_LETTERS_OF_TEX = 4_000;
const TEX = { throwOnError: true, trust: false, strict: false, maxExpand: 500, maxSize: [20, 40], annotate: false };
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "div", "em", "figcaption", "figure", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const ENVIRONMENT = /^\\begin\{((?:equation|align|alignat|gather|multline|cases|[pbvBV]?matrix)\*?)\}[\s\S]+?\\end\{\1\}/;
const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (letter) => escapes[letter]);
const isAddress = (text) => /^https?:\/\//i.test(text);
let growing = false; // whether the text that is parsed now may go on

/** The formula that a text begins with: {raw, tex, display}, or null. */
function formula(source) {
  if (source.startsWith("\\boxed{")) return boxed(source);
  const found =
    /^\$\$([^$]{1,4000}?)\$\$/.exec(source) ?? /^\\\[([\s\S]{1,4000}?)\\\]/.exec(source) ??
    /^\\\(([\s\S]{1,4000}?)\\\)/.exec(source) ??
    /^\$(?![\s$])((?:\\.|[^$\\\n]){1,2000}?)(?<!\s)\$(?!\d)/.exec(source);
  return found && { raw: found[0], tex: found[1], display: /^(\$\$|\\\[)/.test(found[0]) };
}

/** \boxed{...} without dollars around it, as answers of reasoning models have it. */
function boxed(source) {
  let depth = 0;
  for (let place = 6; place < Math.min(source.length, MOST_LETTERS_OF_TEX); place++) {
    if (source[place] === "\\") place++;
    else if (source[place] === "{") depth++;
    else if (source[place] === "}" && --depth === 0) {
      const raw = source.slice(0, place + 1);
      return { raw, tex: raw, display: false };
    }
  }
  return null;
}

const inlineMath = {
  name: "inlineMath",
  level: "inline",
  start: (source) => { const place = source.search(/\$|\\[([]|\\boxed\{/); return place < 0 ? undefined : place; },
  tokenizer(source) {
    const found = formula(source);
    return found && { type: "inlineMath", ...found };
  },
  renderer: ({ tex, display }) => `<span class="tex${display ? " display" : ""}">${escape(tex)}</span>`,
};

const blockMath = {
  name: "blockMath",
  level: "block",
  start: (source) => { const place = source.search(/^(\$\$|\\\[|\\begin\{)/m); return place < 0 ? undefined : place; },
  tokenizer(source) {
    if (!/^(\$\$|\\\[|\\begin\{)/.test(source)) return undefined;
    const found = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/.exec(source);
    if (found) return { type: "blockMath", raw: found[0], tex: found[1] ?? found[2] };
    const environment = ENVIRONMENT.exec(source);
    if (environment) return { type: "blockMath", raw: environment[0], tex: environment[0] };
    const isOpen = source.startsWith("$$") ? !source.includes("$$", 2) : !/\\\]|\\end\{/.test(source);
    return growing && isOpen ? { type: "blockMath", raw: source, tex: null } : undefined; // its end has not arrived
  },
  renderer: ({ raw, tex }) =>
    tex === null ? `<p class="unfinished">${escape(raw)}</p>` : `<div class="tex display">${escape(tex)}</div>`,
};

const parser = new Marked({
  gfm: true,
  breaks: true,
  extensions: [inlineMath, blockMath],
  renderer: {
    html: ({ text }) => escape(text),
    heading({ tokens, depth }) {
      const tag = `h${Math.min(depth + 2, 6)}`; // the page has its own first and second level
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>\n`;
    },
    image: ({ href, text }) => {
      const words = escape(`image: ${text || href}`);
      return isAddress(href) ? `<a href="${escape(href)}">${words}</a>` : words;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = (lang ?? "").trim().split(/\s/)[0].slice(0, 30);
      const known = !growing && name && highlight.getLanguage(name) && text.length <= MOST_LETTERS_OF_CODE;
      const body = known ? highlight.highlight(text, { language: name, ignoreIllegals: true }).value : escape(text);
      return `<figure class="code"><figcaption><span>${escape(name || "text")}</span></figcaption><pre><code>${body}</code></pre></figure>`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
  node.setAttribute("title", node.getAttribute("href") ?? "");
});

/** The blocks of a text: a list of {raw, elements}. goesOn: more may come, so the last block may change. */
export function blocks(source, goesOn) {
  growing = goesOn;
  try {
    return parser.lexer(source);
  } finally {
    growing = false;
  }
}

/** The elements of blocks, as a fragment. */
export function render(tokens, goesOn) {
  const source = tokens.map((token) => token.raw).join("");
  if (source.length > MOST_LETTERS_OF_A_BLOCK) return plain(source);
  growing = goesOn;
  try {
    const fragment = DOMPurify.sanitize(parser.parser(tokens), ALLOWED);
    for (const element of fragment.querySelectorAll(".tex")) typeset(element);
    for (const figure of fragment.querySelectorAll("figure.code")) addCopy(figure);
    for (const table of fragment.querySelectorAll("table")) {
      const frame = make("div", { class: "table", role: "group", "aria-label": "Table" });
      table.replaceWith(frame);
      frame.append(table);
    }
    return fragment;
  } catch (error) {
    console.warn("shown as text:", error); // e.g. brackets nested too deeply for the stack
    return plain(source);
  } finally {
    growing = false;
  }
}

function plain(source) {
  const fragment = document.createDocumentFragment();
  fragment.append(make("p", { class: "plain" }, source));
  return fragment;
}

/** Set a formula; one that cannot be set stays as it was written. */
function typeset(element) {
  const tex = element.textContent;
  const displayMode = element.classList.contains("display");
  if (tex.length > MOST_LETTERS_OF_TEX) return;
  if (displayMode) element.setAttribute("role", "group"), element.setAttribute("aria-label", "Formula");
  try {
    temml.render(tex, element, { ...TEX, displayMode });
  } catch {
    element.replaceChildren(make("code", { class: "source", title: "This formula cannot be set" }, tex));
  }
}

function addCopy(figure) {
  const code = figure.querySelector("pre");
  code.setAttribute("role", "group");
  code.setAttribute("aria-label", `Code: ${figure.querySelector("figcaption").textContent}`);
  figure.querySelector("figcaption").append(copyButton("Copy", () => code.textContent, { class: "quiet" }));
}
