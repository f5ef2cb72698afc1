// The chat page: joins its parts. Nothing here parses text; see markdown.js for what is shown of a model.
import { Conversation, newResponse } from "./conversation.js";
import { button, make, makeReachable } from "./element.js";
import { EXAMPLES } from "./examples.js";
import { exchange } from "./exchange.js";
import { asJson, asMarkdown, save } from "./export.js";
import { questionView } from "./question.js";
import { ResponseView } from "./response.js";
import { answerNow, modelName, setKey } from "./server.js";
import { Settings } from "./settings.js";

const $ = (id) => document.getElementById(id);
const conversation = new Conversation();
const settings = new Settings();
const views = new Map(); // turn -> its element
const WORDS = { thinking: "Thinking.", answering: "Answering.", stopped: "Stopped.", done: "The response is complete." };
let model = "";
let running = null; // {response, abort}
let afterKey = null; // what to do again once there is a key
let follows = true; // the page shows the end of a growing response
let lastPlace = 0;

// ---- asking --------------------------------------------------------------------------------------------------------

function ask(text) {
  conversation.turns.push({ role: "user", text });
  respond();
}

/** Let the model respond to the conversation as it stands. */
async function respond() {
  stop();
  note("");
  const response = newResponse();
  conversation.turns.push(response);
  conversation.save();
  drawTurns();
  const abort = new AbortController();
  running = { response, abort };
  showRunning();
  scrollToEnd();
  const view = views.get(response);
  const body = { ...settings.body(), messages: conversation.messagesBefore(response, settings.system) };
  let state = "";
  await exchange(body, response, abort.signal, () => {
    view.show();
    if (response.state !== state && WORDS[response.state]) $("status").textContent = WORDS[response.state];
    state = response.state;
    if (running?.response !== response) return;
    $("answer-now").hidden = state !== "thinking" || running.isEnding;
  });
  conversation.save();
  if (response.error?.status === 401) askForKey(() => retry(response));
  if (running?.response !== response) return;
  running = null;
  showRunning();
  if (follows) requestAnimationFrame(scrollToEnd);
}

function retry(response) {
  conversation.cut(response);
  $("question").focus();
  respond();
}

function stop() {
  running?.abort.abort();
  running = null;
  showRunning();
}

async function endReasoning() {
  const asked = running;
  asked.isEnding = true;
  $("answer-now").hidden = true;
  $("question").focus();
  try {
    await answerNow(asked.response.id);
    $("status").textContent = "The reasoning is being ended.";
  } catch (error) {
    note(error.message);
  }
}

// ---- showing -------------------------------------------------------------------------------------------------------

function drawTurns() {
  const elements = conversation.turns.map((turn) => {
    if (!views.has(turn)) views.set(turn, turn.role === "user" ? question(turn) : new ResponseView(turn, () => retry(turn)));
    return views.get(turn).element ?? views.get(turn);
  });
  const turns = $("turns");
  for (const old of [...turns.children]) if (!elements.includes(old)) old.remove();
  for (const element of elements) if (!element.isConnected) turns.append(element);
  for (const turn of views.keys()) if (!conversation.turns.includes(turn)) views.delete(turn);
  $("welcome").hidden = elements.length > 0;
  $("new").disabled = $("export").disabled = elements.length === 0;
}

function question(turn) {
  return questionView(turn, (text) => {
    stop();
    conversation.cut(turn);
    $("question").focus();
    ask(text);
  });
}

function showRunning() {
  const isRunning = running !== null;
  if (!isRunning && [$("stop"), $("answer-now")].includes(document.activeElement)) $("question").focus();
  if (isRunning && document.activeElement === $("send")) $("question").focus();
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (!isRunning) $("answer-now").hidden = true;
}

function note(words) {
  $("notice").textContent = words;
}

function scrollToEnd() {
  follows = true;
  scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}

// a growing response is followed until the user scrolls up, and again from the end on
addEventListener("scroll", () => {
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 48;
  if (isAtEnd) follows = true;
  else if (scrollY < lastPlace) follows = false;
  lastPlace = scrollY;
}, { passive: true });
new ResizeObserver(() => {
  if (!running) makeReachable($("turns"));
  else if (follows) scrollToEnd();
}).observe($("turns"));

// ---- the server ----------------------------------------------------------------------------------------------------

async function greet() {
  try {
    model = await modelName();
    $("model").textContent = model;
    document.title = `${model} · Maestrale`;
  } catch (error) {
    if (error.status === 401) askForKey(greet);
    else note(error.message);
  }
}

function askForKey(then) {
  afterKey = then;
  $("key-form").hidden = false;
  $("key").value = "";
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key-form").hidden = true;
  $("question").focus();
  if (!model && afterKey !== greet) greet();
  afterKey?.();
});

// ---- the user ------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || running) return;
  $("question").value = "";
  ask(text);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.defaultPrevented && !$("settings").open) stop();
});
$("stop").addEventListener("click", stop);
$("answer-now").addEventListener("click", endReasoning);
$("open-settings").addEventListener("click", () => settings.open());
$("new").addEventListener("click", () => {
  stop();
  conversation.turns = [];
  conversation.save();
  drawTurns();
  $("question").focus();
});
$("export-json").addEventListener("click", () => {
  save(asJson(conversation.turns, model, settings.values), "conversation.json", "application/json");
  $("export-menu").hidePopover();
});
$("export-markdown").addEventListener("click", () => {
  save(asMarkdown(conversation.turns, model), "conversation.md", "text/markdown");
  $("export-menu").hidePopover();
});
$("examples").append(...EXAMPLES.map(([lang, text]) => make("li", {}, button(text, () => {
  $("question").focus();
  ask(text);
}, { lang, dir: "auto", class: "example" }))));

drawTurns();
greet();
