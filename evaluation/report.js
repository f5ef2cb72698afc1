"use strict";
// The browser of samples. What models wrote reaches the page by textContent only.
const samples = JSON.parse(document.getElementById("samples").textContent);
const several = samples.some((sample) => sample.sample > 0);
const benchmark = document.getElementById("benchmark");
const outcome = document.getElementById("outcome");
const search = document.getElementById("search");
const list = document.getElementById("list");
const detail = document.getElementById("detail");

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function passes(sample) {
  const words = search.value.toLowerCase();
  return (!benchmark.value || sample.benchmark === benchmark.value)
    && (!outcome.value || sample.outcome.includes(outcome.value))
    && (!words || [sample.id, sample.prompt, sample.reasoning, sample.answer].some((text) => text.toLowerCase().includes(words)));
}

function show(sample, button) {
  for (const other of list.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
  button.setAttribute("aria-current", "true");
  const facts = [sample.verdict, sample.reason, `requested: ${sample.language}`,
    `reasoning: ${sample.reasoning_language || "too few words to tell"}`,
    `answer: ${sample.answer_language || "too few words to tell"}`,
    `finish: ${sample.finish_reason}`, `${sample.tokens ?? "?"} tokens`];
  detail.replaceChildren(element("h3", several ? `${sample.id}, sample ${sample.sample + 1}` : sample.id), element("p", facts.join(" · ")));
  for (const [name, key] of [["Prompt", "prompt"], ["Reasoning", "reasoning"], ["Answer", "answer"],
    ["Judged", "extracted"], ["Ground truth", "ground_truth"]]) {
    if (!sample[key]) continue;
    const text = element("pre", sample[key]);
    text.dir = "auto";
    text.tabIndex = 0;
    text.setAttribute("aria-label", name);
    detail.append(element("h3", name), text);
  }
}

function filter() {
  const found = samples.filter(passes);
  document.getElementById("count").textContent = `${found.length} samples`;
  list.replaceChildren(...found.map((sample) => {
    const item = document.createElement("li");
    const where = sample.id.startsWith(sample.benchmark) ? sample.id : `${sample.benchmark} ${sample.id}`;
    const which = several ? `, sample ${sample.sample + 1}` : "";
    const button = element("button", `${where}${which}: ${sample.outcome.join(", ")}`,
      sample.outcome[0]);
    button.type = "button";
    button.addEventListener("click", () => {
      show(sample, button);
      detail.scrollIntoView({ block: "nearest" });
    });
    item.append(button);
    return item;
  }));
  detail.replaceChildren();
  if (found.length) show(found[0], list.querySelector("button"));
}

for (const name of new Set(samples.map((sample) => sample.benchmark))) benchmark.append(element("option", name));
for (const input of [benchmark, outcome]) input.addEventListener("change", filter);
search.addEventListener("input", filter);
filter();
