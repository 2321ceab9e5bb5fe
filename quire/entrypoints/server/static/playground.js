"use strict";

/* Playground: asking and answering. A turn is { said, answer, request, node, ... }; only the last one can be asked anew. */
const kinds = ["chat", "completion", "tools"];
const exampleTools = [{ type: "function", function: { name: "get_weather", description: "The weather of a place.",
  parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"], additionalProperties: false } } }];
let mode = "chat", asking = null; // `asking`: the AbortController of the answer under way
const turns = { chat: [], completion: [] };
const starters = {
  chat: ["Tell me a short story about a lighthouse.", "Why is the sky blue?", "Write a letter to a friend who has moved away."],
  completion: ["The old house stood at the edge of the wood, and", "It was a bright morning in spring when", "Nobody in the village knew why"],
};
const endings = { stop: "", length: "cut off at its length", abort: "aborted", error: "failed" };
const log = () => $(`log-${mode}`);

function showEmpty(kind) {
  const box = make("div", "empty");
  box.append(make("p", "", kind === "chat" ? "Talk with the model, or begin with:" : "The model goes on from your text. Begin with:"));
  for (const text of starters[kind]) {
    box.append(button(text, () => { $("input").value = text; fitInput(); $("input").focus(); }));
  }
  $(`log-${kind}`).replaceChildren(box);
}
/* The value of a box of JSON, or undefined where it is empty. */
function jsonIn(id, what) {
  const text = $(id).value.trim();
  try { return text ? JSON.parse(text) : undefined; } catch (error) { throw new SyntaxError(`No JSON in the box of ${what}: ${error.message}`); }
}
/* A turn of a chat as messages: what was said, or what tools gave, and the answer. */
function messagesOf(turn) {
  const calls = turn.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  return [...opening(turn), { role: "assistant", content: turn.answer || null, ...(calls.length ? { tool_calls: calls } : {}) }];
}
function opening({ said, results }) {
  return results ? results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text })) : [{ role: "user", content: said }];
}
function requestFor(kind, turn) {
  const body = { model: $("p-model").value || undefined };
  if (kind === "chat") {
    const system = $("p-system_prompt").value;
    body.messages = system ? [{ role: "system", content: system }] : [];
    for (const earlier of turns.chat) {
      if (earlier === turn) break;
      if (earlier.answer || earlier.calls.length) body.messages.push(...messagesOf(earlier));
    }
    body.messages.push(...opening(turn));
    const tools = jsonIn("tools", "the tools");
    if (tools) Object.assign(body, { tools, tool_choice: turn.results ? "auto" : $("tool-choice").value });
  } else {
    body.prompt = turn.said;
    body.max_tokens = COMPLETION_TOKENS;
  }
  const schema = jsonIn("p-schema", "the schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  Object.assign(body, parameters(), { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  return { path: kind === "chat" ? "v1/chat/completions" : "v1/completions", body };
}
function send(said, results) {
  if (mode === "tools") choose("chat");
  if (!turns[mode].length) log().replaceChildren();
  const turn = { said, results, kind: mode, calls: [], node: make("article", `turn ${mode}`) };
  turns[mode].push(turn);
  log().append(turn.node);
  ask(turn);
}
async function ask(turn) {
  const list = turns[turn.kind], box = $(`log-${turn.kind}`);
  for (const other of list) other.again?.remove();
  turn.text = make("div", turn.kind === "chat" ? "text md" : "text"); turn.foot = make("div", "foot"); turn.answer = ""; turn.calls = [];
  turn.shown = turn.kind === "chat" ? new Markdown(turn.text) : { push: (text) => turn.text.append(text), draw() {} };
  turn.thought = make("details", "thought"); turn.thought.hidden = true;
  turn.thought.append(make("summary", "", "Thought"), make("div"));
  turn.node.replaceChildren(make("div", "said", turn.said), turn.thought, turn.text, turn.foot);
  turn.node.classList.add("busy");
  turn.figures = { start: performance.now() };
  try {
    turn.request = requestFor(turn.kind, turn);
  } catch (error) { return finish(turn, box, error.message); }
  setAsking(new AbortController());
  box.scrollTop = box.scrollHeight;
  let problem = "";
  try {
    problem = await receive(turn, box, asking.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.figures.ending = "stopped";
    else problem = turn.answer ? "The connection was lost in mid-answer." : "The server can't be reached. It may have stopped, or be restarting.";
  }
  setAsking(null);
  finish(turn, box, problem);
}
async function receive(turn, box, signal) {
  const { path, body } = turn.request, { figures } = turn;
  const response = await fetch(at(path), { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!response.ok) return explain(response);
  let pending = "", frame = 0;
  const flush = () => {
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    turn.shown.push(pending); turn.shown.draw();
    pending = ""; frame = 0;
    showFigures(turn);
    if (follows) box.scrollTop = box.scrollHeight;
  };
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return "";
      const chunk = JSON.parse(data), choice = chunk.choices?.[0];
      if (chunk.error) return chunk.error.message;
      if (chunk.id) own.add(chunk.id.replace(/^\w+-/, ""));
      const text = choice?.delta?.content ?? choice?.text ?? "";
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      if (thought) { turn.thought.hidden = false; turn.thought.lastChild.append(thought); }
      for (const piece of choice?.delta?.tool_calls ?? []) {
        const call = (turn.calls[piece.index] ??= { id: piece.id, name: piece.function.name, args: "" });
        call.args += piece.function.arguments ?? "";
      }
      if (text || thought || choice?.delta?.tool_calls) {
        figures.first ??= performance.now();
        figures.last = performance.now();
        turn.answer += text; pending += text;
        frame ||= requestAnimationFrame(flush);
      }
      if (choice?.finish_reason) figures.ending = endings[choice.finish_reason] ?? choice.finish_reason;
      if (chunk.usage) figures.usage = chunk.usage;
    }
  } finally { cancelAnimationFrame(frame); flush(); }
  throw new Error("no end");
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
async function explain(response) {
  let error = null;
  try { error = (await response.json()).error; } catch { /* no JSON: the status has to do */ }
  return error?.message ?? `The server answered with status ${response.status}.`;
}
function finish(turn, box, problem) {
  turn.node.classList.remove("busy");
  turn.shown.draw(true);
  showFigures(turn);
  if (problem) {
    const note = make("p", "error", problem);
    note.setAttribute("role", "alert");
    turn.text.after(note);
    if (turn.kind === "chat" && /chat template/i.test(problem)) {
      note.append(" ", button("Use completion", () => { choose("completion"); $("input").value = turn.said; fitInput(); $("input").focus(); }));
    }
  }
  if (turn.calls.length) turn.text.after(callForm(turn));
  const acts = make("span", "acts");
  if (turn.answer) acts.append(button("Copy", () => copy(turn.answer)));
  if (turn.kind === "completion" && turn.answer) {
    acts.append(button("Go on", () => { $("input").value = turn.said + turn.answer; fitInput(); $("input").focus(); }));
  }
  if (turn.request) acts.append(button("Copy as curl", () => curl(turn.request).then(copy)));
  turn.again = button(problem ? "Try again" : "Regenerate", () => { if (!asking) ask(turn); });
  if (turns[turn.kind].at(-1) === turn) acts.append(turn.again);
  turn.foot.append(acts);
  box.scrollTop = box.scrollHeight;
  const { usage } = turn.figures;
  setText($("said"), problem ? "" : `Answer complete${usage ? `, ${count(usage.completion_tokens, "token")}` : ""}.`);
}
/* The calls of an answer, with a box for what each gives. */
function callForm(turn) {
  const form = make("form", "calls");
  const boxes = turn.calls.map(({ name, args }) => {
    const call = make("div", "call"), box = make("input");
    box.placeholder = "Result"; box.setAttribute("aria-label", `Result of ${name}`);
    call.append(make("code", "", `${name}(${args})`), box);
    form.append(call);
    return box;
  });
  form.append(make("button", "plain", "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (asking || turns.chat.at(-1) !== turn) return;
    const results = turn.calls.map(({ id }, index) => ({ id, text: boxes[index].value }));
    send(turn.calls.map(({ name }, index) => `${name}: ${boxes[index].value}`).join("\n"), results);
  });
  return form;
}
function showFigures(turn) {
  const { start, first, last, usage, ending } = turn.figures, parts = [];
  const add = (value, label) => { const part = make("span"); part.append(make("b", "", value), label); parts.push(part); };
  if (usage) {
    add(whole.format(usage.completion_tokens), usage.completion_tokens === 1 ? " token" : " tokens");
    if (usage.completion_tokens > 1 && last > first) add(rate((usage.completion_tokens - 1) / (last - first) * 1000), " tokens/s");
  }
  if (first) add(duration((first - start) / 1000), " to the first");
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    add(whole.format(usage.prompt_tokens), ` of prompt${cached ? `, ${whole.format(cached)} cached` : ""}`);
  }
  if (ending) parts.push(make("span", "", ending));
  turn.foot.replaceChildren(...parts);
}
function setAsking(controller) {
  asking = controller;
  $("send").textContent = controller ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(controller));
}

/* Playground: copying. */
async function curl({ path, body }) {
  const { stream_options: _, ...plain } = body;
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  // Asked without the password that the browser keeps: a refusal means that curl needs a key.
  const open = await fetch(at("v1/models"), { credentials: "omit" }).then((answer) => answer.ok, () => true);
  return `curl -N ${quoted(at(path))} \\\n  -H 'Content-Type: application/json' \\\n` +
    (open ? "" : '  -H "Authorization: Bearer $QUIRE_API_KEY" \\\n') + `  -d ${quoted(JSON.stringify(plain, null, 1))}`;
}
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    setText($("said"), "Copied.");
  } catch { // not over plain HTTP from afar
    const area = $("shown").querySelector("textarea");
    area.value = text;
    $("shown").showModal();
    area.select();
  }
}

/* Playground: controls. */
function choose(kind) {
  mode = kind;
  for (const other of kinds) {
    const chosen = other === kind, tab = $(`tab-${other}`);
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(`log-${other}`).hidden = !chosen;
  }
  $("p-system_prompt").parentElement.hidden = kind === "completion";
  $("p-max_tokens").placeholder = kind === "completion" ? String(COMPLETION_TOKENS) : "default";
  $("input").placeholder = kind === "completion" ? "Text to go on from" : "Message";
  setText($("input-label"), kind === "completion" ? "Prompt" : "Message");
  noteParameters();
}
function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}
function viewFromAddress() {
  const view = location.hash === "#engine" ? "engine" : "playground";
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  redraw();
}
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) return asking.abort();
  const said = $("input").value;
  if (!said.trim()) return;
  $("input").value = "";
  fitInput();
  send(said);
});
$("input").addEventListener("input", fitInput);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!asking) $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") asking?.abort(); });
for (const kind of kinds) {
  $(`tab-${kind}`).addEventListener("click", () => choose(kind));
  $(`tab-${kind}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    choose(kinds.at((kinds.indexOf(mode) + (event.key === "ArrowRight" ? 1 : -1)) % kinds.length));
    $(`tab-${mode}`).focus();
  });
}
$("clear").addEventListener("click", () => {
  if (mode === "tools") { $("tools").value = ""; noteParameters(); return; }
  asking?.abort(); turns[mode] = []; showEmpty(mode); $("input").focus();
});
$("tools").addEventListener("input", noteParameters);
$("tools-example").addEventListener("click", () => { $("tools").value = JSON.stringify(exampleTools, null, 1); noteParameters(); });
$("shown").querySelector("button").addEventListener("click", () => $("shown").close());
$("blocks").addEventListener("pointermove", noteBlocks);
$("blocks").addEventListener("pointerleave", () => noteBlocks());
addEventListener("hashchange", viewFromAddress);
addEventListener("resize", redraw);
dark.addEventListener("change", redraw);

buildCharts();
buildTable();
buildFields();
$("p-model").addEventListener("change", () => { if (several) chooseModel($("p-model").value); });
showEmpty("chat");
showEmpty("completion");
choose("chat");
viewFromAddress();
listModels();
connect();
