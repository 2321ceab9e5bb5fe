"use strict";

/* Playground: parameters. */
const numbers = [
  ["temperature", 0, 2, "Higher is more random; 0 always takes the likeliest token"],
  ["top_p", 0, 1, "Sample from the likeliest tokens that make up this share of the probability"],
  ["top_k", 0, null, "Sample from the k likeliest tokens; 0 for all"],
  ["min_p", 0, 1, "Drop tokens less likely than this share of the likeliest one"],
  ["max_tokens", 1, null, "Most tokens of the answer"],
  ["seed", null, null, "The same seed gives the same answer"],
  ["presence_penalty", -2, 2, "Against tokens that have come already"],
  ["frequency_penalty", -2, 2, "Against tokens by how often they have come"],
  ["repetition_penalty", 0, 2, "Against tokens of the prompt and the answer; 1 is none"],
];
const COMPLETION_TOKENS = 200; // where none are given: the API's own default is 16
const labels = { system_prompt: "system prompt", probabilities: "token probabilities, shown on hover" };
function addField(name, control, kind, title) {
  const label = make("label", kind, labels[name] ?? name);
  control.id = `p-${name}`;
  control.title = title;
  control.addEventListener("input", noteParameters);
  label.append(control);
  $("fields").append(label);
}
function buildFields() {
  addField("model", make("select"), "two", "The name to send");
  for (const [name, least, most, title] of numbers) {
    const control = make("input");
    control.type = "number"; control.step = "any"; control.inputMode = "decimal"; control.placeholder = "default";
    if (least !== null) control.min = least;
    if (most !== null) control.max = most;
    addField(name, control, "", title);
  }
  const stop = make("textarea"), system = make("textarea");
  stop.rows = 1; system.rows = 2;
  stop.placeholder = "one a line"; system.placeholder = "Instructions for the model, if any";
  addField("stop", stop, "", "The answer ends before any of these texts; \\n stands for a new line");
  addField("system_prompt", system, "wide", "Sent as the first message of a chat");
  const schema = make("textarea");
  schema.rows = 2; schema.spellcheck = false; schema.placeholder = '{"type": "object", "properties": { ... }}';
  addField("schema", schema, "wide", "A JSON schema that the answer keeps to, whatever the model would say");
  const probabilities = make("input"), reset = button("Back to defaults", () => {
    for (const field of document.querySelectorAll("#fields :is(input, textarea)")) { field.value = ""; field.checked = false; }
    noteParameters();
  });
  probabilities.type = "checkbox";
  addField("probabilities", probabilities, "wide check", "Ask for each token's probability, and for those that could have come in its place");
  $("fields").append(reset);
}
function parameters() {
  const chosen = {};
  for (const [name] of numbers) {
    const value = $(`p-${name}`).value.trim();
    if (value !== "") chosen[name] = Number(value);
  }
  const stop = $("p-stop").value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
  if (stop.length) chosen.stop = stop;
  return chosen;
}
function noteParameters() {
  const parts = Object.entries(parameters()).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  if ($("p-system_prompt").value && mode === "chat") parts.unshift("system prompt");
  if ($("p-schema").value.trim()) parts.push("schema");
  if ($("p-probabilities").checked) parts.push("token probabilities");
  if ($("tools").value.trim() && mode !== "completion") parts.push("tools");
  setText($("chosen"), parts.join(", "));
  keepChoices();
}
/* The models: their names, or, where the server loads and unloads them, their states too, asked for again and again. */
let several = false, wantedModel = "", contextLength = 0; // `wantedModel`: of an earlier visit; the context of the chosen one, in tokens
async function listModels() {
  if (several && document.hidden) return void setTimeout(listModels, 3000);
  try {
    const answer = await fetch(at("v1/models")), models = (await answer.json()).data;
    const chosen = models.find((model) => model.id === ($("p-model").value || wantedModel)) ?? models[0];
    const before = several;
    several = Boolean(chosen.state);
    $("p-model").replaceChildren(...models.map(({ id, state }) => Object.assign(make("option", "", state ? `${id} (${state})` : id), { value: id })));
    $("p-model").value = chosen.id;
    const { id, max_model_len: length, state } = chosen;
    contextLength = length ?? 0;
    $("facts").replaceChildren(id, make("span", "more", `${state ? `, ${state}` : ""}${length ? `, context of ${whole.format(length)} tokens` : ""}`));
    document.title = `${id} · Quire`;
    $("models").hidden = !several;
    if (several) showModels(models);
    if (several && !before) connect(); // to the engine of this one, which need not be the first
    if (several) setTimeout(listModels, 2000);
  } catch { setTimeout(listModels, 3000); }
}
const bytes = (value) => (value ? `${short.format(value)}B`.replace("K", "k").replace("BB", "GB") : "–");
function showModels(models) {
  setText($("models-note"), "A request loads the model that it names; without work it is unloaded again.");
  const focused = document.activeElement?.dataset.model;
  $("models-rows").replaceChildren(...models.map((model) => {
    const row = make("tr", model.state === "ready" ? "" : "waiting"), name = make("td", "l"), choice = button(model.id, () => chooseModel(model.id));
    choice.dataset.model = model.id;
    choice.setAttribute("aria-pressed", String(model.id === $("p-model").value));
    choice.title = "Choose this model, here and in the playground";
    name.append(choice);
    const cells = [["l state", model.state, ""], ["", whole.format(model.num_requests), "requests"], ["", bytes(model.size), "on disk"], ["", bytes(model.memory), "in memory"], ["l why", model.error ?? "", ""]];
    row.append(name, ...cells.map(([kind, text, label]) => { const cell = make("td", kind, text); if (label) cell.dataset.label = label; return cell; }));
    return row;
  }));
  if (focused) document.querySelector(`#models-rows [data-model="${CSS.escape(focused)}"]`)?.focus();
}
function chooseModel(id) {
  $("p-model").value = id;
  seconds = []; own.clear();
  say("wait", "Connecting");
  drawCharts();
  connect();
  for (const choice of document.querySelectorAll("#models-rows button")) choice.setAttribute("aria-pressed", String(choice.dataset.model === id));
}
