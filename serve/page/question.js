// A question in the page. What a user writes is text, never markup.
import { button, make } from "./element.js";

/** The element of a user's turn. onEdit(text): asks that instead. */
export function questionView(turn, onEdit) {
  const text = make("p", { class: "text", dir: "auto" }, turn.text);
  const edit = button("Edit", open, { class: "quiet", title: "Edit and ask again; what follows is removed" });
  const element = make("article", { class: "question", "aria-label": "You" }, text, make("div", { class: "row" }, edit));

  function open() {
    const field = make("textarea", { "aria-label": "Edit your question", dir: "auto", rows: 3 });
    const form = make("form", { class: "edit" }, field, make("div", { class: "row" },
      make("span", { class: "note" }, "What follows is removed."),
      button("Cancel", close, { class: "quiet" }), make("button", { type: "submit", class: "main" }, "Ask again")));
    field.value = turn.text;
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault(); // else a running response would be stopped
        close();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) onEdit(field.value.trim());
    });
    element.classList.add("editing");
    element.replaceChildren(form);
    field.focus();
  }

  function close() {
    element.classList.remove("editing");
    element.replaceChildren(text, make("div", { class: "row" }, edit));
    edit.focus();
  }

  return element;
}
