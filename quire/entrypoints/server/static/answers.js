"use strict";

/* Asking and answering: a turn's request, its answer as it streams, and what can be done with it. */
let mode = "chat", asking = null, asked = null; // the AbortController of the answer under way, and the last turn that was asked
const endings = { stop: "", length: "cut off at its length", abort: "aborted", error: "failed" };

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
/* The turns before one, on its own path. */
function before(turn) {
  const found = [], by = new Map(turn.talk.turns.map((each) => [each.id, each]));
  for (let at = by.get(turn.parent); at; at = by.get(at.parent)) found.unshift(at);
  return found;
}
/* The messages of a turn's request; `skip` of the turns before it are forgotten. */
function messagesFor(turn, skip) {
  const system = $("p-system_prompt").value, answered = before(turn).slice(skip).filter((each) => each.answer || each.calls.length);
  return [...(system ? [{ role: "system", content: system }] : []), ...answered.flatMap(messagesOf), ...opening(turn)];
}
function requestFor(turn) {
  const body = { model: $("p-model").value || undefined }, probabilities = $("p-probabilities").checked;
  if (turn.kind === "chat") {
    body.messages = messagesFor(turn, turn.skip);
    const tools = jsonIn("tools", "the tools");
    if (tools) Object.assign(body, { tools, tool_choice: turn.results ? "auto" : $("tool-choice").value });
    if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  } else {
    body.prompt = turn.said;
    body.max_tokens = COMPLETION_TOKENS;
    if (probabilities) body.logprobs = 5;
  }
  const schema = jsonIn("p-schema", "the schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  Object.assign(body, parameters(), { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  return { path: turn.kind === "chat" ? "v1/chat/completions" : "v1/completions", body };
}
/* How many of the oldest turns have to be forgotten, for the rest to leave room for an answer in the context. */
async function fit(turn) {
  const most = before(turn).length, wanted = Number($("p-max_tokens").value) || Infinity;
  const fits = async (skip) => {
    const body = JSON.stringify({ model: $("p-model").value || undefined, messages: messagesFor(turn, skip) });
    const answer = await (await fetch(at("tokenize"), { method: "POST", headers: { "Content-Type": "application/json" }, body })).json();
    return !answer.count || answer.count + Math.min(wanted, answer.max_model_len / 4) <= answer.max_model_len;
  };
  let low = Math.min(most, before(turn).at(-1)?.skip ?? 0), high = most;
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (await fits(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

async function ask(turn) {
  Object.assign(turn, { answer: "", thoughts: "", calls: [], problem: "", full: false, tokens: [], busy: true, figures: { start: clock() } });
  const probable = $("p-probabilities").checked, box = $(`log-${turn.kind}`);
  setAsking(new AbortController());
  asked = turn;
  drawTurn(turn, probable);
  showTalk(turn.kind);
  box.scrollTop = box.scrollHeight;
  turn.talk.updated = Date.now();
  keep(turn.talk); keepChoices();
  try {
    if (turn.talk.forgets) { turn.skip = await fit(turn); markForgotten(turn.kind); }
    turn.request = requestFor(turn);
    turn.problem = await receive(turn, box, asking.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.figures.ending = "stopped";
    else if (error instanceof SyntaxError) turn.problem = error.message;
    else turn.problem = turn.answer ? "The connection was lost in mid-answer." : "The server can't be reached. It may have stopped, or be restarting.";
  }
  turn.busy = false;
  setAsking(null);
  const follows = isAtEnd(box);
  finish(turn);
  if (follows) box.scrollTop = box.scrollHeight;
  keep(turn.talk);
  const { usage } = turn.figures;
  setText($("said"), turn.problem ? "" : `Answer complete${usage ? `, ${count(usage.completion_tokens, "token")}` : ""}.`);
}
const isAtEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 48;
async function receive(turn, box, signal) {
  const { path: route, body } = turn.request, { figures } = turn;
  turn.requestId = `page-${newId()}`;
  own.add(turn.requestId);
  const post = () => fetch(at(route), { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, request_id: turn.requestId }), signal });
  let response = await post();
  if (!response.ok) {
    const error = await errorOf(response);
    // max_tokens is the most of an answer: where the context has less left, it gives what it has.
    const isLess = turn.kind === "chat" && error?.code === "context_length_exceeded" && error.param === "max_tokens";
    if (!isLess) return explain(response, error, turn);
    delete body.max_tokens;
    response = await post();
    if (!response.ok) return explain(response, await errorOf(response), turn);
  }
  let frame = 0, next = 0;
  const flush = () => {
    frame = 0;
    const begin = performance.now();
    if (begin < next) { frame = requestAnimationFrame(flush); return; }
    const follows = isAtEnd(box);
    turn.shown.draw();
    showFigures(turn);
    if (follows) box.scrollTop = box.scrollHeight;
    next = performance.now() + 4 * (performance.now() - begin); // an endless line is drawn less often
  };
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return "";
      const chunk = JSON.parse(data), choice = chunk.choices?.[0];
      if (chunk.error) return chunk.error.message;
      const text = choice?.delta?.content ?? choice?.text ?? "";
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      if (thought) { turn.thoughts += thought; turn.thought.hidden = false; turn.thought.lastChild.append(thought); }
      for (const piece of choice?.delta?.tool_calls ?? []) {
        const call = (turn.calls[piece.index] ??= { id: piece.id, name: piece.function.name, args: "" });
        call.args += piece.function.arguments ?? "";
      }
      const tokens = tokensOf(choice?.logprobs);
      turn.tokens.push(...tokens);
      if (text || thought || choice?.delta?.tool_calls) {
        figures.first ??= clock();
        figures.last = clock();
        turn.answer += text;
        turn.shown.push(text, tokens);
        frame ||= requestAnimationFrame(flush);
      }
      if (choice?.finish_reason) figures.ending = endings[choice.finish_reason] ?? choice.finish_reason;
      if (chunk.usage) figures.usage = chunk.usage;
      if (choice?.finish_reason === "length" && figures.usage?.total_tokens >= contextLength) { figures.ending = "cut off: the context is full"; turn.full = true; }
    }
  } finally { cancelAnimationFrame(frame); }
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
async function errorOf(response) {
  try { return (await response.json()).error; } catch { return null; } // no JSON: the status has to do
}
function explain(response, error, turn) {
  if (turn.kind === "chat" && error?.code === "context_length_exceeded") {
    const limit = contextLength ? ` of ${whole.format(contextLength)} tokens` : "";
    if (turn.skip >= before(turn).length) return `This message alone is longer than the model's context${limit}. Shorten it.`;
    turn.full = true;
    return `This conversation no longer fits in the model's context${limit}.`;
  }
  return error?.message ?? `The server answered with status ${response.status}.`;
}

/* A turn on the page. */
function drawTurn(turn, probable = false) {
  turn.node ??= make("article", `turn ${turn.kind}`);
  turn.node.setAttribute("aria-label", turn.results ? "Results and answer" : "Question and answer");
  turn.text = make("div", "text"); turn.foot = make("div", "foot");
  turn.thought = make("details", "thought"); turn.thought.hidden = !turn.thoughts;
  turn.thought.append(make("summary", "", "Thought"), make("div", "", turn.thoughts));
  turn.saidNode = make("div", "said", turn.said);
  turn.node.replaceChildren(turn.saidNode, turn.thought, turn.text, turn.foot);
  turn.node.classList.toggle("busy", Boolean(turn.busy));
  showAs(turn, probable);
  if (!turn.busy) finish(turn);
  else showFigures(turn);
}
function showAs(turn, probable) {
  turn.probable = probable && turn.tokens;
  turn.text.replaceChildren();
  turn.text.className = turn.probable ? "text tokens" : turn.kind === "chat" ? "text md" : "text";
  turn.shown = turn.probable ? new Tokens(turn.text) : turn.kind === "chat" ? new Markdown(turn.text) : new Plain(turn.text);
  turn.shown.push(turn.answer, turn.tokens);
  turn.shown.draw(!turn.busy);
}
class Plain {
  constructor(node) { this.node = node; this.pending = ""; }
  push(text) { this.pending += text; }
  draw() { if (this.pending) this.node.append(this.pending); this.pending = ""; }
}
function finish(turn) {
  turn.node.classList.remove("busy");
  turn.shown.draw(true);
  showFigures(turn);
  for (const node of turn.node.querySelectorAll(".error, .calls")) node.remove();
  if (turn.problem) turn.text.after(problemNote(turn));
  else if (turn.full && !turn.talk.forgets) turn.text.after(noteOf("The model's context is full, and the answer was cut off. ", ["Forget the oldest turns from now on", () => {
    beginToForget(turn.talk);
    $("input").focus();
  }]));
  if (turn.calls.length) turn.text.after(callForm(turn));
  const acts = make("span", "acts"), again = (action) => () => { if (!asking) action(); };
  const alone = !turn.answer && !turn.calls.length;
  const all = siblings(turn.talk, turn.parent);
  if (all.length > 1) turn.foot.prepend(branches(turn, all));
  if (!turn.results) acts.append(button("Edit", again(() => edit(turn))));
  if (turn.answer) acts.append(button("Copy", () => copy(turn.answer)));
  if (turn.tokens?.length) {
    const toggle = button("Tokens", () => { showAs(turn, !turn.probable); toggle.setAttribute("aria-pressed", String(Boolean(turn.probable))); });
    toggle.setAttribute("aria-pressed", String(Boolean(turn.probable)));
    acts.append(toggle);
  }
  if (turn.kind === "completion" && turn.answer) acts.append(button("Go on", () => fill(turn.said + turn.answer)));
  if (turn.request) acts.append(button("Copy as curl", () => curl(turn.request).then(copy)));
  // Where no answer came there is nothing to keep a branch for.
  turn.again = button(turn.problem ? "Try again" : "Regenerate", again(() => ask(alone ? turn : addTurn(turn.talk, turn.parent, turn.said, turn.results))));
  acts.append(turn.again);
  turn.foot.append(acts);
}
function noteOf(...parts) {
  const note = make("p", "error");
  note.append(...parts.map((part) => (Array.isArray(part) ? button(...part) : part)));
  note.classList.toggle("full", parts.length > 1);
  note.setAttribute("role", "alert");
  return note;
}
/* What was told of a full context is settled for the whole conversation. */
function beginToForget(talk) {
  talk.forgets = true;
  keep(talk);
  for (const turn of talk.turns) if (turn.full && !turn.busy) finish(turn);
}
function problemNote(turn) {
  if (turn.full && !turn.talk.forgets) return noteOf(`${turn.problem} `, ["Forget the oldest turns, and go on", () => { if (!asking) { beginToForget(turn.talk); ask(turn); } }]);
  if (turn.kind === "chat" && /chat template/i.test(turn.problem)) return noteOf(`${turn.problem} `, ["Use completion", () => { choose("completion"); fill(turn.said); }]);
  return noteOf(turn.problem);
}
function branches(turn, all) {
  const box = make("span", "branches"), index = all.indexOf(turn);
  const to = (other, text, label) => {
    const step = button(text, () => {
      turn.talk.chosen[turn.parent] = other.id;
      keep(turn.talk); showTalk(turn.kind);
      other.foot.querySelector(`.branches [aria-label="${label}"]:not(:disabled), .branches button:not(:disabled)`)?.focus();
    });
    step.setAttribute("aria-label", label); step.disabled = !other;
    return step;
  };
  box.append(to(all[index - 1], "‹", "Earlier branch"), make("span", "", `${index + 1}/${all.length}`), to(all[index + 1], "›", "Later branch"));
  return box;
}
function edit(turn) {
  const form = make("form", "edit"), area = make("textarea"), row = make("div");
  area.value = turn.said; area.rows = Math.min(12, turn.said.split("\n").length + 1); area.setAttribute("aria-label", "Edited text");
  const close = () => { form.replaceWith(turn.saidNode); };
  row.append(make("button", "main", "Send"), button("Cancel", close));
  form.append(area, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (asking || !area.value.trim()) return;
    close();
    ask(addTurn(turn.talk, turn.parent, area.value));
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { close(); event.stopPropagation(); turn.foot.querySelector(".acts button")?.focus(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) { event.preventDefault(); form.requestSubmit(); }
  });
  turn.saidNode.replaceWith(form);
  area.focus();
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
    if (asking || path(turn.talk).at(-1) !== turn) return;
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
  if (turn.busy && !first) parts.push(make("span", "queued", whereItWaits(turn)));
  if (ending) parts.push(make("span", "", ending));
  turn.foot.replaceChildren(...parts);
}
/* What the engine's view tells of a turn's request that has no token yet. */
function whereItWaits(turn) {
  const mine = latest?.sequences.find((sequence) => isOwn(sequence, turn.requestId));
  if (!mine) return "";
  if (mine.status === "running") return mine.num_computed_tokens < mine.num_prompt_tokens ? `Reading the prompt: ${whole.format(mine.num_computed_tokens)} of ${count(mine.num_prompt_tokens, "token")}` : "";
  const first = Number(/(\d+) requests? comes? first/.exec(mine.why)?.[1] ?? 0);
  return `Place ${whole.format(first + 1)} in the queue: ${mine.why}`;
}

/* Tokens with their probabilities, as [text, logprob, [text, logprob] of the likeliest]; of a chat's or a completion's chunk. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(({ token, logprob, top_logprobs: top }) => [token, logprob, top.map((each) => [each.token, each.logprob])]);
  return logprobs.tokens.map((token, index) => [token, logprobs.token_logprobs[index], Object.entries(logprobs.top_logprobs?.[index] ?? {})]);
}
const probability = (logprob) => share(Math.exp(logprob));
/* An answer token by token: the less likely, the stronger its ground; what else could have come is told on hover, and to the arrow keys. */
class Tokens {
  constructor(node) {
    Object.assign(this, { node, tokens: [], pending: [], at: -1 });
    node.tabIndex = 0; node.setAttribute("role", "group"); node.setAttribute("aria-label", "Answer token by token; the arrow keys go through them");
    node.addEventListener("pointerover", (event) => this.tell([...node.children].indexOf(event.target)));
    node.addEventListener("pointerleave", () => this.tell(-1));
    node.addEventListener("blur", () => this.tell(-1));
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); this.tell(Math.min(this.tokens.length - 1, Math.max(0, this.at + step))); }
    });
  }
  push(_, tokens) { this.tokens.push(...tokens); this.pending.push(...tokens); }
  draw() {
    for (const [text, logprob] of this.pending.splice(0)) {
      this.node.append(make("span", `t${[0.9, 0.5, 0.2, 0.05, 0].findIndex((least) => Math.exp(logprob) >= least)}`, text));
    }
  }
  tell(index) {
    const token = this.tokens[index], tip = $("tip");
    this.node.children[this.at]?.classList.remove("told");
    this.at = index;
    tip.hidden = !token;
    if (!token) return;
    const span = this.node.children[index], quoted = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣");
    span.classList.add("told");
    const likeliest = token[2].toSorted((a, b) => b[1] - a[1]);
    tip.replaceChildren(make("b", "", `${quoted(token[0])} ${probability(token[1])}`), ...likeliest.map(([text, logprob]) => {
      const row = make("div", text === token[0] ? "self" : "");
      row.append(make("span", "", quoted(text)), make("span", "", probability(logprob)));
      return row;
    }));
    const place = span.getBoundingClientRect(), below = place.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? place.bottom + 4 : place.top - tip.offsetHeight - 4}px`;
  }
}

function setAsking(controller) {
  asking = controller;
  $("send").textContent = controller ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(controller));
}
