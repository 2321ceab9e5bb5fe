"use strict";

/* Conversations: trees of turns, kept in the browser's storage, one entry each. A turn is what was said and its answer; who
   edits or regenerates one adds a sibling. What is shown is a path: of each turn's children, the chosen one or the last. */
const STORE = `quire:${location.pathname}:`, TALK = `${STORE}talk:`;
const store = { // storage may be switched off, full, or hold what another version wrote
  read(key) { try { return JSON.parse(localStorage.getItem(key)); } catch { return null; } },
  write(key, value) {
    try { localStorage.setItem(key, JSON.stringify(value)); return true; } catch { return false; }
  },
  remove(key) { try { localStorage.removeItem(key); } catch { /* nothing was kept */ } },
  talks() { try { return Object.keys(localStorage).filter((key) => key.startsWith(TALK)); } catch { return []; } },
};
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
const newTalk = (kind) => ({ id: newId(), kind, title: "", updated: Date.now(), forgets: false, chosen: {}, turns: [] });
const current = { chat: newTalk("chat"), completion: newTalk("completion") };

const held = () => [...Object.values(current), ...(asked ? [asked.talk] : [])]; // those in memory
/* The turns with a parent ("": those that begin), in the order they came. */
const siblings = (talk, parent) => talk.turns.filter((turn) => turn.parent === parent);
function path(talk) {
  const found = [], children = new Map();
  for (const turn of talk.turns) {
    if (!children.has(turn.parent)) children.set(turn.parent, []);
    children.get(turn.parent).push(turn);
  }
  for (let at = children.get(""); at; at = children.get(found.at(-1).id)) {
    found.push(at.find((turn) => turn.id === talk.chosen[turn.parent]) ?? at.at(-1));
  }
  return found;
}
const turns = { get chat() { return path(current.chat); }, get completion() { return path(current.completion); } };
function addTurn(talk, parent, said, results) {
  const turn = { id: newId(), talk, parent, kind: talk.kind, said, results, answer: "", thoughts: "", calls: [], figures: {}, problem: "", skip: 0 };
  talk.turns.push(turn);
  talk.chosen[parent] = turn.id;
  return turn;
}
const titleOf = (talk) => talk.title || talk.turns[0]?.said.trim().slice(0, 60).replace(/\s+/g, " ") || "New conversation";

/* Keeping. */
function savedTurn(turn) {
  const { id, parent, said, results, answer, thoughts, calls, figures, problem, skip } = turn;
  const { first, last, start, usage, ending } = figures;
  return { id, parent, said, results, answer, thoughts, calls, problem, skip, figures: { first, last, start, usage, ending: turn.busy ? "interrupted" : ending } };
}
const saved = ({ id, kind, title, updated, forgets, chosen, turns: all }) => ({ id, kind, title, updated, forgets, chosen, turns: all.map(savedTurn) });
function keep(talk) {
  if (!talk.turns.length) return;
  const kept = store.write(TALK + talk.id, saved(talk));
  if (kept) $("note").hidden = true;
  else notify("The browser keeps no more: its storage is full, or switched off. Delete conversations, or ", ["export this one", () => download([talk])], ".");
  setText($("talks").firstChild, titleOf(current[mode] ?? current.chat));
}
function notify(...parts) {
  $("note").replaceChildren(...parts.map((part) => (Array.isArray(part) ? button(...part) : part)));
  $("note").hidden = false;
}
/* A conversation of a store or a file, of which nothing is believed; null if it is none. */
function revive(given) {
  if (!given || typeof given !== "object") return null;
  const list = Array.isArray(given) ? given : given.messages;
  if (Array.isArray(list)) return fromMessages(list, given.title);
  if (!Array.isArray(given.turns) || !["chat", "completion"].includes(given.kind)) return null;
  const text = (value) => (typeof value === "string" ? value : ""), object = (value) => (value && typeof value === "object" ? value : {});
  const talk = newTalk(given.kind), number = (value) => (Number.isFinite(value) ? value : undefined);
  Object.assign(talk, { id: text(given.id) || talk.id, title: text(given.title), updated: number(given.updated) ?? 0, forgets: Boolean(given.forgets) });
  const known = new Set([""]);
  for (const each of given.turns) {
    if (!text(each?.id) || known.has(each.id) || !known.has(each.parent)) continue;
    known.add(each.id);
    const { figures, usage } = { figures: object(each.figures), usage: object(object(each.figures).usage) };
    const turn = addTurn(talk, each.parent, text(each.said), Array.isArray(each.results) ? each.results.filter(Boolean).map((one) => ({ id: text(one.id), text: text(one.text) })) : undefined);
    const calls = Array.isArray(each.calls) ? each.calls.filter(Boolean).map((call) => ({ id: text(call.id), name: text(call.name), args: text(call.args) })) : [];
    Object.assign(turn, { id: each.id, answer: text(each.answer), thoughts: text(each.thoughts), calls, problem: text(each.problem), skip: number(each.skip) ?? 0 });
    turn.figures = { start: number(figures.start), first: number(figures.first), last: number(figures.last), ending: text(figures.ending) };
    if (number(usage.completion_tokens) !== undefined && number(usage.prompt_tokens) !== undefined) {
      turn.figures.usage = { ...usage, prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens };
    }
  }
  talk.chosen = Object.fromEntries(Object.entries(object(given.chosen)).filter(([parent, id]) => known.has(parent) && known.has(id)));
  return talk;
}
/* Messages as in a request, and as `quire chat` saves them. */
function fromMessages(list, title) {
  const talk = newTalk("chat");
  talk.title = typeof title === "string" ? title : "";
  for (const message of list) {
    if (typeof message?.content !== "string") continue;
    if (message.role === "user") addTurn(talk, talk.turns.at(-1)?.id ?? "", message.content);
    else if (message.role === "assistant" && talk.turns.length) talk.turns.at(-1).answer += message.content;
  }
  return talk.turns.length ? talk : null;
}
function keepChoices() {
  const fields = Object.fromEntries([...document.querySelectorAll("#fields [id], #tools, #tool-choice")].map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]));
  fields["p-model"] ||= wantedModel;
  store.write(`${STORE}choices`, { mode, chat: current.chat.id, completion: current.completion.id, fields });
}
function restore() {
  const choices = store.read(`${STORE}choices`) ?? {};
  for (const [id, value] of Object.entries(choices.fields ?? {})) {
    const field = $(id);
    if (id === "p-model") wantedModel = String(value);
    else if (field?.type === "checkbox") field.checked = Boolean(value);
    else if (field) field.value = String(value);
  }
  for (const kind of ["chat", "completion"]) {
    const talk = choices[kind] && revive(store.read(TALK + choices[kind]));
    if (talk?.kind === kind) current[kind] = talk;
  }
  addEventListener("storage", mergeFromTab);
  addEventListener("pagehide", () => { if (asked?.busy) keep(asked.talk); });
  return kinds.includes(choices.mode) ? choices.mode : "chat";
}
/* Another tab wrote a conversation that is shown here: its new turns come in, and none is lost. */
function mergeFromTab({ key, newValue }) {
  const mine = held().find((talk) => TALK + talk.id === key), theirs = mine && newValue && revive(store.read(key));
  if (!theirs) return;
  const known = new Map(mine.turns.map((turn) => [turn.id, turn]));
  for (const turn of theirs.turns) {
    const here = known.get(turn.id);
    if (!here) mine.turns.push(Object.assign(turn, { talk: mine }));
    else if (!here.busy) Object.assign(here, savedTurn(turn), { node: null });
  }
  Object.assign(mine, { title: theirs.title, forgets: theirs.forgets });
  if (asking) return;
  mine.chosen = theirs.chosen;
  showTalk(mine.kind);
}

/* The list. */
function openTalk(talk) {
  current[talk.kind] = talk;
  showTalk(talk.kind);
  choose(talk.kind);
  showEnd(talk.kind);
  $("history").hidePopover();
  $("input").focus();
}
function startNew() { openTalk(newTalk(mode === "completion" ? "completion" : "chat")); }
function listTalks() {
  const stored = store.talks().map((key) => held().find((talk) => TALK + talk.id === key) ?? revive(store.read(key)));
  const all = stored.filter((talk) => talk?.turns.length).sort((a, b) => b.updated - a.updated);
  $("talks-list").replaceChildren(...all.map((talk) => {
    const row = make("li"), open = button("", () => openTalk(talk)), title = titleOf(talk);
    const when = new Date(talk.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(make("b", "", title), make("span", "", `${count(path(talk).length, "turn")}, ${when}${talk.kind === "completion" ? ", completion" : ""}`));
    open.className = "open";
    if (Object.values(current).some(({ id }) => id === talk.id)) open.setAttribute("aria-current", "true");
    const acts = [["Rename", () => rename(talk, row)], ["Export", () => download([talk])], ["Delete", () => remove(talk)]].map(([label, action]) => {
      const act = button(label, action);
      act.setAttribute("aria-label", `${label} ${title}`);
      return act;
    });
    row.append(open, ...acts);
    return row;
  }));
  $("no-talks").hidden = all.length > 0;
  $("export-all").hidden = !all.length;
  return all;
}
function rename(talk, row) {
  const form = make("form"), input = make("input");
  input.value = titleOf(talk); input.maxLength = 200; input.setAttribute("aria-label", "Title");
  form.append(input, make("button", "plain", "Save"));
  form.addEventListener("submit", (event) => { event.preventDefault(); talk.title = input.value.trim(); keep(talk); listTalks(); });
  row.replaceChildren(form);
  input.select();
}
function remove(talk) {
  if (!confirm(`Delete “${titleOf(talk)}”?`)) return;
  if (asking && talk.turns.some((turn) => turn.busy)) asking.abort();
  talk.turns = [];
  store.remove(TALK + talk.id);
  for (const kind of ["chat", "completion"]) if (current[kind].id === talk.id) { current[kind] = newTalk(kind); showTalk(kind); }
  $("note").hidden = true;
  listTalks();
}
function download(talks) {
  const link = make("a"), file = new Blob([JSON.stringify({ quire: 1, conversations: talks.map(saved) }, null, 1)], { type: "application/json" });
  link.href = URL.createObjectURL(file);
  link.download = `${talks.length === 1 ? titleOf(talks[0]).replace(/[^\p{L}\p{N} _-]/gu, "").trim() || "conversation" : "conversations"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
/* Conversations of a file's text: as exported here, or a list of messages. Those that are here already come in as copies. */
function importTalks(text) {
  let given;
  try { given = JSON.parse(text); } catch { given = null; }
  const talks = (Array.isArray(given?.conversations) ? given.conversations : [given]).map(revive).filter((talk) => talk?.turns.length);
  if (!talks.length) return notify("No conversation is in this file: it is neither an export of this page nor a list of messages.");
  const taken = new Set(store.talks());
  for (const talk of talks) {
    if (taken.has(TALK + talk.id)) talk.id = newId();
    keep(talk);
  }
  openTalk(talks.at(-1));
}
