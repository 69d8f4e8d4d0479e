// The page: messages, one reply at a time, settings. All text goes in as text, never as markup.
import { chunks, modelName } from "./stream.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
let messages = []; // {role, content, reasoning_content}, without the system message
let running = null; // AbortController of the reply that comes

function made(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function addMessage(role, text = "") {
  const article = made("article", role);
  const said = made("div", "said", text);
  article.append(made("h2", "", role === "user" ? "You" : "Model"), said);
  $("log").append(article);
  toEnd(true);
  return { article, said };
}

// Follow the reply, unless the person has scrolled up.
function toEnd(always = false) {
  const log = $("log");
  const left = log.scrollHeight - log.scrollTop - log.clientHeight;
  if (always || left < 120) log.scrollTop = log.scrollHeight;
}

// Text that tokens brought, drafted ones marked; neighbours of one kind share an element.
function append(where, pieces) {
  for (const { text, draft } of pieces) {
    const kind = draft ? "draft" : "own";
    if (where.lastChild?.className === kind) where.lastChild.append(text);
    else where.append(made("span", kind, text));
  }
}

function thinkingOf(view) {
  if (!view.thinking) {
    const box = made("details", "thinking");
    view.thought = made("div", "said");
    box.append(made("summary", "", "Thinking"), view.thought);
    view.article.insertBefore(box, view.said);
    view.thinking = box;
  }
  return view.thought;
}

function countsOf(timings) {
  const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} tok/s`];
  if (timings.draft_n) {
    const share = ((100 * timings.draft_n_accepted) / timings.draft_n).toFixed(0);
    parts.push(`${timings.draft_n_accepted} of ${timings.draft_n} drafts accepted (${share} %)`);
  }
  parts.push(`prompt ${timings.prompt_n} read, ${timings.cache_n} kept`);
  return parts.join(" · ");
}

function body() {
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const asked = { messages: sent, stream: true, token_origins: true, timings_per_token: true };
  for (const name of NUMBERS) if ($(name).value !== "") asked[name] = Number($(name).value);
  if ($("spec").value) asked.spec = $("spec").value;
  if ($("thinking").value) asked.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  return asked;
}

function take(chunk, reply, view) {
  if (chunk.timings) view.counts.textContent = countsOf(chunk.timings);
  for (const choice of chunk.choices) {
    const { content = "", reasoning_content: reasoning = "" } = choice.delta;
    const origins = choice.token_origins ?? {};
    if (reasoning) append(thinkingOf(view), origins.reasoning_content ?? [{ text: reasoning }]);
    if (content) append(view.said, origins.content ?? [{ text: content }]);
    reply.content += content;
    reply.reasoning_content += reasoning;
    if (choice.finish_reason === "length") reply.end = "cut off: no more tokens left";
  }
  toEnd();
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("new").disabled = on;
  $("again").disabled = on || messages.length < 2;
  if (!on && [$("stop"), document.body].includes(document.activeElement)) $("text").focus();
}

// Answer `messages`, whose last is the person's. False, with an error shown, if nothing came of it.
async function answer() {
  const view = addMessage("assistant");
  view.counts = made("p", "counts");
  view.article.append(view.counts);
  view.article.setAttribute("aria-busy", "true");
  const reply = { content: "", reasoning_content: "", end: "" };
  running = new AbortController();
  busy(true);
  $("status").textContent = "The model answers.";
  try {
    for await (const chunk of chunks(body(), $("key").value, running.signal)) take(chunk, reply, view);
    $("status").textContent = `The reply is complete. ${reply.end}`;
  } catch (error) {
    const stopped = running.signal.aborted;
    if (!stopped) {
      view.article.append(made("p", "failed", `Error: ${error.message}`));
      if (error.status === 401) askForKey();
    }
    $("status").textContent = stopped ? "The reply is stopped." : `Error: ${error.message}`;
    if (!stopped || !reply.content) return false;
  } finally {
    view.article.removeAttribute("aria-busy");
    running = null;
    busy(false);
  }
  const thought = reply.reasoning_content ? { reasoning_content: reply.reasoning_content } : {};
  messages.push({ role: "assistant", content: reply.content, ...thought });
  busy(false);
  return true;
}

async function send() {
  const text = $("text").value;
  if (running || !text.trim()) return;
  $("text").value = "";
  addMessage("user", text);
  messages.push({ role: "user", content: text });
  if (await answer()) return;
  messages.pop(); // as if it had not been sent: it can be sent again
  if (!$("text").value) $("text").value = text;
}

async function again() {
  if (running || messages.length < 2) return;
  const before = messages.pop();
  const old = $("log").querySelectorAll("article.assistant:not(:has(.failed))");
  if (await answer()) old[old.length - 1]?.remove();
  else messages.push(before);
  busy(false);
}

function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

async function greet() {
  try {
    const name = await modelName($("key").value);
    $("model").textContent = document.title = name;
    $("status").textContent = "Ready.";
  } catch (error) {
    $("status").textContent = `Error: ${error.message}`;
    if (error.status === 401) askForKey();
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", again);
$("new").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  $("status").textContent = "A new chat.";
  busy(false);
  $("text").focus();
});
$("key").addEventListener("change", greet);
$("tint").addEventListener("change", () => $("log").classList.toggle("tinted", $("tint").checked));
$("log").classList.toggle("tinted", $("tint").checked);
greet();
