// What the user has set: kept in localStorage, as nothing of it is secret. A field that is empty leaves the choice to
// the server.
const PLACE = "maestrale.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "thinking_token_budget", "seed"];

/** The form of settings, and the two selectors under the composer. */
export class Settings {
  #dialog = document.getElementById("settings");
  #form = this.#dialog.querySelector("form");
  #language = document.getElementById("language");
  #other = document.getElementById("other-language");
  #enforcement = document.getElementById("enforcement");

  constructor() {
    this.values = load();
    for (const name of [...NUMBERS, "system"]) this.#form.elements[name].value = this.values[name] ?? "";
    this.#showLanguage(this.values.reasoning_language ?? "auto");
    this.#enforcement.value = this.values.reasoning_language_enforcement ?? "";
    this.#form.addEventListener("input", () => this.#read());
    for (const field of [this.#language, this.#other, this.#enforcement]) {
      field.addEventListener("input", () => this.#read());
    }
    this.#form.addEventListener("reset", () => setTimeout(() => this.#read()));
    // the dialog closes by its form only when all numbers are possible
    this.#form.addEventListener("submit", () => this.#read());
  }

  /** Open the dialog. */
  open() {
    this.#dialog.showModal();
  }

  /** Fields of a request. */
  body() {
    const { system, ...fields } = { reasoning_language: "auto", ...this.values };
    if (!fields.reasoning_language) delete fields.reasoning_language;
    return fields;
  }

  /** The user's system message. */
  get system() {
    return (this.values.system ?? "").trim();
  }

  #showLanguage(wish) {
    const isListed = [...this.#language.options].some((option) => option.value === wish && wish !== "other");
    this.#language.value = isListed ? wish : "other";
    this.#other.value = isListed ? "" : wish;
    this.#other.hidden = isListed;
  }

  #read() {
    const values = {};
    for (const name of NUMBERS) {
      const field = this.#form.elements[name];
      if (field.value !== "" && field.validity.valid) values[name] = field.valueAsNumber;
    }
    if (this.#form.elements.system.value) values.system = this.#form.elements.system.value;
    const isOther = this.#language.value === "other";
    this.#other.hidden = !isOther;
    values.reasoning_language = isOther ? this.#other.value.trim() : this.#language.value;
    if (this.#enforcement.value) values.reasoning_language_enforcement = this.#enforcement.value;
    this.values = values;
    localStorage.setItem(PLACE, JSON.stringify(values));
  }
}

function load() {
  try {
    return JSON.parse(localStorage.getItem(PLACE) ?? "{}");
  } catch {
    return {};
  }
}
