"use strict";

/* The playground's controls, and the page's beginning. */
const kinds = ["chat", "completion", "tools"];
const exampleTools = [{ type: "function", function: { name: "get_weather", description: "The weather of a place.",
  parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"], additionalProperties: false } } }];
const starters = {
  chat: ["Tell me a short story about a lighthouse.", "Why is the sky blue?", "Write a letter to a friend who has moved away."],
  completion: ["The old house stood at the edge of the wood, and", "It was a bright morning in spring when", "Nobody in the village knew why"],
};

/* The conversation of a kind, as it is now: nodes that are there stay. */
function showTalk(kind) {
  const list = turns[kind], log = $(`log-${kind}`);
  for (const turn of list) if (!turn.node) drawTurn(turn);
  const nodes = list.length ? list.map((turn) => turn.node) : [emptyNote(kind)];
  nodes.forEach((node, index) => { if (log.children[index] !== node) log.insertBefore(node, log.children[index] ?? null); });
  while (log.children.length > nodes.length) log.lastChild.remove();
  for (const turn of list) {
    const all = siblings(turn.talk, turn.parent), shown = turn.foot.querySelector(".branches");
    if (!turn.busy && all.length > 1 && shown?.children[1].textContent.split("/")[1] !== String(all.length)) finish(turn);
  }
  markForgotten(kind);
  setText($("talks").firstChild, titleOf(current[mode] ?? current.chat));
}
/* What the model no longer sees is told where it begins to see. */
function markForgotten(kind) {
  const list = turns[kind], skip = list.at(-1)?.skip ?? 0;
  $(`log-${kind}`).querySelector(".forgotten")?.classList.remove("forgotten");
  if (skip) list[Math.min(skip, list.length - 1)].node.classList.add("forgotten");
}
function showEnd(kind) { const log = $(`log-${kind}`); if (log) log.scrollTop = log.scrollHeight; }
function emptyNote(kind) {
  const box = make("div", "empty");
  box.append(make("p", "", kind === "chat" ? "Talk with the model, or begin with:" : "The model goes on from your text. Begin with:"));
  for (const text of starters[kind]) box.append(button(text, () => fill(text)));
  return box;
}
function fill(text) { $("input").value = text; fitInput(); $("input").focus(); }
function send(said, results) {
  if (mode === "tools") choose("chat");
  const talk = current[mode];
  ask(addTurn(talk, path(talk).at(-1)?.id ?? "", said, results));
}

/* Copying. */
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

/* Controls. */
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
  $("talks").hidden = kind === "tools";
  setText($("new"), kind === "tools" ? "Clear" : "New");
  setText($("talks").firstChild, titleOf(current[kind] ?? current.chat));
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
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("history").matches(":popover-open")) asking?.abort(); });
for (const kind of kinds) {
  $(`tab-${kind}`).addEventListener("click", () => choose(kind));
  $(`tab-${kind}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    choose(kinds.at((kinds.indexOf(mode) + (event.key === "ArrowRight" ? 1 : -1)) % kinds.length));
    $(`tab-${mode}`).focus();
  });
}
$("new").addEventListener("click", () => {
  if (mode === "tools") { $("tools").value = ""; noteParameters(); } else startNew();
});
$("talks").addEventListener("click", () => { listTalks(); $("history").showPopover(); });
$("history").addEventListener("toggle", (event) => { $("talks").setAttribute("aria-expanded", String(event.newState === "open")); });
$("export-all").addEventListener("click", () => download(listTalks()));
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) importTalks(await file.text());
  $("file").value = "";
});
$("tool-choice").addEventListener("change", keepChoices);
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
const wanted = restore();
showTalk("chat");
showTalk("completion");
choose(wanted);
viewFromAddress();
showEnd(mode);
if (matchMedia("(hover: hover)").matches || !matchMedia("(pointer: coarse)").matches) $("input").focus();
listModels();
connect();
