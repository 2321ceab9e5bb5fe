"use strict";

/* The block pool as a map: a cell's colour mixes those of free, cached and used by their shares. */
let shades = [], map = null; // `map`: what is drawn, for the pointer
function mixShades() {
  const probe = document.createElement("canvas").getContext("2d");
  const parse = (text) => { probe.fillStyle = text; return [1, 3, 5].map((at) => parseInt(probe.fillStyle.slice(at, at + 2), 16)); };
  const [free, cached, used] = [colour.free, colour.cached, colour.used].map(parse);
  const mix = (from, to, part) => from.map((value, index) => value + (to[index] - value) * part);
  const seen = (part) => (part ? 0.3 + 0.7 * part / 15 : 0);
  shades = Array.from({ length: 256 }, (_, byte) => {
    const [r, g, b] = mix(mix(free, cached, seen(byte & 15)), used, seen(byte >> 4));
    return `rgb(${Math.round(r)} ${Math.round(g)} ${Math.round(b)})`;
  });
}
function drawBlocks() {
  const canvas = $("blocks"), width = canvas.clientWidth;
  if (!latest || !width) return;
  const cells = Uint8Array.from(atob(latest.blocks.cells), (c) => c.charCodeAt(0));
  const size = [16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4].find((s) => Math.ceil(cells.length / Math.floor(width / s)) * s <= 176) ?? 3;
  const columns = Math.floor(width / size), pitch = width / columns, gap = size > 4 ? 1 : 0.5;
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  const [context] = prepare(canvas, height);
  cells.forEach((byte, index) => {
    context.fillStyle = shades[byte];
    const left = Math.round(index % columns * pitch), right = Math.round((index % columns + 1) * pitch);
    context.fillRect(left, Math.floor(index / columns) * size, right - left - gap, size - gap);
  });
  map = { size, pitch, columns, cells };
}
function noteBlocks(event) {
  if (!latest) return;
  const { blocks, block_size } = latest, per = blocks.blocks_per_cell;
  const total = blocks.num_used + blocks.num_cached + blocks.num_free;
  let text = `${count(total, "block")} of ${block_size} tokens${per > 1 ? `; a cell is ${per} of them` : ""}`;
  const cell = event && map ? Math.floor(event.offsetY / map.size) * map.columns + Math.floor(event.offsetX / map.pitch) : -1;
  if (cell >= 0 && cell < map.cells.length) {
    const byte = map.cells[cell], state = byte >> 4 ? "used" : byte ? "cached" : "free";
    const group = blocks.groups.findLast((g) => g.first_cell <= cell) ?? { first_cell: 0, num_blocks: total };
    const first = (cell - group.first_cell) * per;
    text = per > 1 ? `blocks ${first} to ${Math.min(group.num_blocks, first + per) - 1}` : `block ${first}: ${state}`;
    if (blocks.groups.length) text += group.window === null ? " (full attention)" : ` (window of ${group.window} tokens)`;
  }
  setText($("blocks-note"), text);
}

/* Requests. */
const columns = [
  ["Request", "id l", (s) => s.request_id + (s.index ? ` ·${s.index}` : "")],
  ["State", "state l", (s) => s.status],
  ["Tokens", "tokens l", null],
  ["Prompt", "n", (s) => whole.format(s.num_prompt_tokens), "prompt"],
  ["Cached", "n", (s) => whole.format(s.num_cached_tokens), "cached"],
  ["Computed", "n", (s) => whole.format(s.num_computed_tokens), "computed"],
  ["Output", "n", (s) => whole.format(s.num_output_tokens), "output"],
  ["Blocks", "n", (s) => whole.format(s.num_blocks), "blocks"],
  ["Age", "age", (s) => duration(s.seconds)],
  ["Why it waits", "why l", (s) => s.why ?? ""],
];
const MOST_ROWS = 200;
const rows = new Map(), own = new Set(); // `own`: the ids of the page's requests, as it gave them
const isOwn = ({ request_id: id }, which) => (which ? id.replace(/^[a-z]+-/, "") === which || id === which : own.has(id) || own.has(id.replace(/^[a-z]+-/, "")));
function buildTable() {
  for (const [title, kind] of columns) {
    const cell = make("th", kind.includes(" l") ? "l" : "", title);
    cell.setAttribute("role", "columnheader"); cell.scope = "col";
    $("requests").tHead.rows[0].append(cell);
  }
}
function makeRow(sequence) {
  const row = make("tr");
  row.setAttribute("role", "row");
  for (const [, kind, , label] of columns) {
    const cell = make("td", kind);
    cell.setAttribute("role", "cell");
    if (label) cell.dataset.label = label;
    row.append(cell);
  }
  const bar = make("div", "bar");
  bar.setAttribute("aria-hidden", "true");
  bar.append(make("i"), make("i"), make("i"));
  row.cells[2].append(bar);
  row.cells[0].title = sequence.request_id;
  return row;
}
function updateRow(row, sequence, longest) {
  row.className = sequence.status;
  columns.forEach(([, , show], index) => { if (show) setText(row.cells[index], show(sequence)); });
  row.cells[0].classList.toggle("own", isOwn(sequence));
  const { num_cached_tokens: cached, num_computed_tokens: computed, num_prompt_tokens: prompt, num_output_tokens: output } = sequence;
  const widths = [Math.min(cached, computed), Math.max(0, Math.min(computed, prompt) - cached), output];
  widths.forEach((tokens, index) => { row.cells[2].firstChild.children[index].style.width = `${tokens / longest * 100}%`; });
}
function updateTable() {
  const { num_sequences: total, stats } = latest;
  // The page's own come first, however many wait before them; those of other pages beyond the first few hundred are left out.
  const mine = latest.sequences.filter((sequence) => isOwn(sequence));
  const sequences = [...mine, ...latest.sequences.slice(0, MOST_ROWS).filter((sequence) => !isOwn(sequence))];
  const longest = Math.max(1, ...sequences.map((s) => s.num_prompt_tokens + s.num_output_tokens));
  const body = $("requests").tBodies[0], present = new Set();
  sequences.forEach((sequence, index) => {
    const key = `${sequence.request_id}\n${sequence.index}`;
    present.add(key);
    if (!rows.has(key)) rows.set(key, makeRow(sequence));
    const row = rows.get(key);
    updateRow(row, sequence, longest);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  for (const [key, row] of rows) if (!present.has(key)) { row.remove(); rows.delete(key); }
  $("requests").hidden = !total;
  $("tokens-legend").hidden = !total;
  $("idle").hidden = total > 0;
  const rest = total - sequences.length;
  setText($("requests-note"), `${whole.format(stats.num_requests_running)} running, ${whole.format(stats.num_requests_waiting)} waiting` +
    (rest > 0 ? `; ${whole.format(rest)} of them not shown` : "") +
    (stats.limits ? `. At most ${whole.format(stats.limits.max_num_seqs)} run at once, ${whole.format(stats.limits.max_num_batched_tokens)} tokens a step; policy: ${stats.limits.policy}` : ""));
}
/* What a map of the device's blocks does not show: who shares them, what stays, what was moved elsewhere. */
function updateTiers() {
  const { stats } = latest, tiers = stats.tiers;
  const parts = [
    stats.kv_blocks_shared ? `${count(stats.kv_blocks_shared, "block")} shared` : "",
    stats.num_forks_total ? `${count(stats.num_forks_total, "fork")} since the start` : "",
    stats.kv_blocks_pinned ? `${count(stats.kv_blocks_pinned, "block")} pinned` : "",
    stats.prefix_cache_evictions_total ? `${count(stats.prefix_cache_evictions_total, "cached block")} evicted` : "",
  ];
  if (tiers) {
    const moved = `${count(tiers.swapped_out_blocks_total, "block")} out and ${whole.format(tiers.swapped_in_blocks_total)} back`;
    parts.push(`host memory: ${share(tiers.host_cache_usage_perc)} held by swapped sequences, ${moved}, ${count(tiers.host_hits_total, "hit")}`);
    if (tiers.disk_written_blocks_total || tiers.disk_hits_total || tiers.disk_damaged_files_total)
      parts.push(`disk: ${count(tiers.disk_written_blocks_total, "block")} written, ${count(tiers.disk_hits_total, "hit")}` +
        (tiers.disk_damaged_files_total ? `, ${count(tiers.disk_damaged_files_total, "damaged file")} ignored` : ""));
  }
  setText($("tiers"), upper(parts.filter(Boolean).join("; ")));
}
function updateTotals() {
  const { stats, finished } = latest, queries = stats.prefix_cache_queries_total;
  const ended = Object.values(finished).reduce((sum, number) => sum + number, 0);
  const parts = [
    `${count(ended, "answer")}`, `${count(latest.num_prompt_tokens, "prompt token")}`, `${count(latest.num_generation_tokens, "token")} generated`,
    queries ? `${share(stats.prefix_cache_hits_total / queries)} of prompt tokens found in the prefix cache` : "",
    count(stats.num_preemptions_total, "preemption"),
  ];
  setText($("totals"), `Since the start: ${parts.filter(Boolean).join(", ")}.`);
}

/* The event stream. */
let stream = null, retry = 0, heard = 0;
function say(state, text) {
  $("status").dataset.state = state;
  setText($("status"), text);
}
function connect() {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource(at(several ? `live?model=${encodeURIComponent($("p-model").value)}` : "live"));
  stream.addEventListener("history", (event) => {
    if (latest && !several) listModels(); // the server may be another one than before
    seconds = flatten(JSON.parse(event.data).seconds);
    drawCharts();
  });
  stream.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data), rests = snapshot.stats.sleep_state !== "awake" ? "Asleep" : snapshot.is_paused && "Paused";
    heard = Date.now();
    say(rests ? "wait" : "live", rests || "Live");
    show(snapshot);
  });
  stream.addEventListener("ended", (event) => again(upper(JSON.parse(event.data).message)));
  stream.addEventListener("error", () => again("Server gone, trying again"));
}
function again(text) {
  stream?.close();
  say("gone", text);
  clearTimeout(retry);
  retry = setTimeout(connect, 2000);
}
function show(snapshot) {
  latest = snapshot;
  const last = seconds.length ? seconds[seconds.length - 1][SECOND] : -1;
  const fresh = flatten(snapshot.seconds).filter((row) => row[SECOND] > last);
  if (fresh.length) seconds = [...seconds, ...fresh].slice(-WINDOW);
  drawCharts();
  setText($("num-used"), whole.format(snapshot.blocks.num_used));
  setText($("num-cached"), whole.format(snapshot.blocks.num_cached));
  setText($("num-free"), whole.format(snapshot.blocks.num_free));
  drawBlocks();
  if (!$("blocks").matches(":hover")) noteBlocks();
  updateTiers();
  updateTable();
  updateTotals();
  for (const turn of [...current.chat.turns, ...current.completion.turns]) if (turn.busy && !turn.figures.first) showFigures(turn);
}
function redraw() { readColours(); mixShades(); drawCharts(); drawBlocks(); }
setInterval(() => { if (stream?.readyState === 1 && heard && Date.now() - heard > 5000) say("wait", "The engine is in a long step"); }, 1000);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { clearTimeout(retry); stream?.close(); stream = null; } else if (!stream) connect();
});
