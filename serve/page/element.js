// Elements from code: attributes and text are set, never parsed.

/** An element. attributes: name -> value, with on... for a listener and false or null for none; then its children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A button with words on it. */
export function button(words, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, words);
}

/** A button that copies what `text()` returns, and says so. */
export function copyButton(words, text, attributes = {}) {
  const element = button(words, async () => {
    const done = await copy(text());
    element.textContent = done ? "Copied" : "Copying failed";
    setTimeout(() => (element.textContent = words), 1500);
  }, { "aria-live": "polite", ...attributes });
  return element;
}

/** Whether the text is in the clipboard now. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // without https browsers have no clipboard, only the older command
    const field = make("textarea", { class: "hidden", "aria-hidden": "true" });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** What scrolls sideways can be reached with the keyboard. */
export function makeReachable(root) {
  for (const element of root.querySelectorAll("pre, .tex.display, .table")) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
}
