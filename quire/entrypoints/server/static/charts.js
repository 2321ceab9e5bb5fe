"use strict";

/* Colours for the canvases: those of the style sheet, in the scheme that holds. */
const colour = {};
const names = ["paper", "desk", "ink", "soft", "line", "accent", "second", "used", "cached", "free"];
const dark = matchMedia("(prefers-color-scheme: dark)");
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of names) colour[name] = style.getPropertyValue(`--${name}`).trim();
}
function prepare(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width];
}

/* Charts: one for each figure, all over the same five minutes. */
const WINDOW = 300;
// Places in a second's row, as the server's `Second` has them; of the last the parts.
const [SECOND, PROMPT, GENERATION, ERRORS, PREEMPTIONS, RUNNING, WAITING, USAGE, HITS, ITL50, ITL99, TTFT50, TTFT99, QUEUE50, QUEUE99] = Array(15).keys();
const flatten = (rows) => rows.map((row) => row.flat());
let seconds = [], latest = null, pointed = null; // `pointed`: how many seconds ago the reader points at
const axis = { count: short.format, time: (v) => (v >= 1 ? `${short.format(v)} s` : `${short.format(v * 1000)} ms`), share: (v) => `${Math.round(v * 100)}%` };
const brief = (v) => (v < 0.01 ? `${(v * 1000).toFixed(2)} ms` : duration(v));
const charts = [
  { title: "Generation", unit: "tokens/s", keys: [GENERATION], show: whole.format, axis: axis.count, least: 10 },
  { title: "Prompt", unit: "tokens/s", keys: [PROMPT], show: whole.format, axis: axis.count, least: 10 },
  { title: "Between tokens", unit: "", keys: [ITL50, ITL99], labels: ["p50", "p99"], show: brief, axis: axis.time, decades: true },
  { title: "To the first token", unit: "", keys: [TTFT50, TTFT99], labels: ["p50", "p99"], show: brief, axis: axis.time, decades: true },
  { title: "In the queue", unit: "", keys: [QUEUE50, QUEUE99], labels: ["p50", "p99"], show: brief, axis: axis.time, decades: true },
  { title: "Requests", unit: "", keys: [RUNNING, WAITING], labels: ["running", "waiting"], show: whole.format, axis: axis.count, least: 4 },
  { title: "KV cache in use", unit: "", keys: [USAGE], show: share, axis: axis.share, least: 1 },
  { title: "Failed and preempted", unit: "", keys: [ERRORS, PREEMPTIONS], labels: ["failed", "preempted"], show: whole.format, axis: axis.count, least: 4 },
  { title: "Prefix cache hits", unit: "", keys: [HITS], show: share, axis: axis.share, least: 1 },
];
function scaleOf(chart) { // values at the lines, and how high a value lies between the first line (0) and the last (1)
  const values = seconds.flatMap((row) => chart.keys.map((key) => row[key] ?? 0));
  if (chart.decades) {
    const exponent = (value) => Math.max(-4, Math.log10(value)), positive = values.filter(Boolean);
    const low = Math.floor(exponent(Math.min(...positive, 0.01))), high = Math.ceil(exponent(Math.max(...positive, 0.011)));
    const lines = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
    return [lines, (value) => (exponent(value) - low) / (high - low)];
  }
  const largest = Math.max(...values, chart.least), power = 10 ** Math.floor(Math.log10(largest));
  const most = [1, 2, 4, 5, 10].find((step) => step * power >= largest * 0.999) * power;
  return [[0, most / 2, most], (value) => value / most];
}
function buildCharts() {
  for (const chart of charts) {
    const figure = make("figure", "chart"), caption = make("figcaption"), now = make("span", "now");
    chart.values = chart.keys.map((_, index) => {
      const entry = make("span", chart.labels ? `key k${index}` : ""), value = make("b", "", "–");
      if (chart.labels) entry.append(`${chart.labels[index]} `);
      entry.append(value);
      now.append(entry);
      return value;
    });
    caption.append(make("span", "", chart.unit ? `${chart.title}, ${chart.unit}` : chart.title), now);
    chart.canvas = make("canvas");
    chart.canvas.setAttribute("role", "img");
    figure.append(caption, chart.canvas);
    $("charts").append(figure);
    chart.canvas.addEventListener("pointermove", (event) => {
      const span = chart.right - chart.left;
      point(Math.round((chart.right - event.offsetX) / span * (WINDOW - 1)));
    });
    chart.canvas.addEventListener("pointerleave", () => point(null));
  }
  $("charts").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (step) { event.preventDefault(); point((pointed ?? 0) + step * (event.shiftKey ? 10 : 1)); }
    if (event.key === "Escape") point(null);
  });
  $("charts").addEventListener("blur", () => point(null));
}
function point(ago) {
  pointed = ago === null ? null : Math.min(WINDOW - 1, Math.max(0, ago));
  drawCharts();
}
function drawCharts() {
  const newest = seconds.length ? seconds[seconds.length - 1][SECOND] : 0;
  let row = seconds.find((entry) => entry[SECOND] === newest - (pointed ?? 0));
  if (row && pointed === null && latest) { // what the blocks and the table below show
    const { num_requests_running: running, num_requests_waiting: waiting, kv_cache_usage_perc: usage } = latest.stats;
    row = row.with(RUNNING, running).with(WAITING, waiting).with(USAGE, usage);
  }
  for (const chart of charts) {
    const texts = chart.keys.map((key) => (row && row[key] !== null ? chart.show(row[key]) : "–"));
    chart.values.forEach((node, index) => { setText(node, texts[index]); node.classList.toggle("none", texts[index] === "–"); });
    const said = texts.map((text, index) => (chart.labels ? `${chart.labels[index]} ${text}` : text)).join(", ");
    chart.canvas.setAttribute("aria-label", `${chart.title}: ${said} ${chart.unit}`);
    if (chart.canvas.clientWidth) drawChart(chart, newest);
  }
}
function drawChart(chart, newest) {
  const height = 92, top = 6, bottom = height - 17;
  const [context, width] = prepare(chart.canvas, height);
  const [lines, place] = scaleOf(chart);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const left = chart.left = 44, right = chart.right = width - 3;
  const x = (second) => right - (newest - second) / (WINDOW - 1) * (right - left);
  const y = (value) => bottom - place(value) * (bottom - top);

  context.fillStyle = colour.soft;
  context.strokeStyle = colour.line;
  context.lineWidth = 1;
  for (const value of lines) {
    const line = Math.round(y(value)) + 0.5;
    context.beginPath(); context.moveTo(left, line); context.lineTo(right, line); context.stroke();
    context.textAlign = "right"; context.textBaseline = "middle";
    context.fillText(chart.axis(value), left - 6, line);
  }
  context.textBaseline = "alphabetic";
  if (pointed === null) {
    context.textAlign = "left"; context.fillText("5 min ago", left, height - 3);
    context.textAlign = "right"; context.fillText("now", right, height - 3);
  }
  [...chart.keys].reverse().forEach((key) => drawSeries(context, key, chart, x, y, bottom));
  if (pointed !== null) drawPointer(context, chart, newest - pointed, x, y, [left, right, top, bottom, height]);
}
function drawSeries(context, key, chart, x, y, bottom) {
  const first = key === chart.keys[0];
  context.strokeStyle = context.fillStyle = first ? colour.accent : colour.second;
  context.lineWidth = 1.5; context.lineJoin = "round";
  let run = [];
  const flush = () => {
    if (run.length === 1) { context.beginPath(); context.arc(run[0][0], run[0][1], 1.5, 0, 7); context.fill(); }
    if (run.length > 1) {
      context.beginPath();
      run.forEach(([px, py], index) => (index ? context.lineTo(px, py) : context.moveTo(px, py)));
      context.stroke();
      if (first && !chart.decades) {
        context.lineTo(run[run.length - 1][0], bottom); context.lineTo(run[0][0], bottom);
        context.globalAlpha = 0.1; context.fill(); context.globalAlpha = 1;
      }
    }
    run = [];
  };
  for (const row of seconds) {
    if (row[key] === null) flush();
    else if (x(row[SECOND]) >= chart.left) run.push([x(row[SECOND]), y(row[key])]);
  }
  flush();
}
function drawPointer(context, chart, second, x, y, [left, right, top, bottom, height]) {
  const px = Math.round(x(second)) + 0.5, row = seconds.find((entry) => entry[SECOND] === second);
  context.strokeStyle = colour.soft; context.lineWidth = 1;
  context.beginPath(); context.moveTo(px, top); context.lineTo(px, bottom); context.stroke();
  chart.keys.forEach((key, index) => {
    if (!row || row[key] === null) return;
    context.fillStyle = index ? colour.second : colour.accent;
    context.beginPath(); context.arc(px, y(row[key]), 3, 0, 7); context.fill();
  });
  const label = pointed ? `${pointed} s ago` : "now", half = context.measureText(label).width / 2;
  context.fillStyle = colour.ink; context.textAlign = "center";
  context.fillText(label, Math.min(right - half, Math.max(left + half, px)), height - 3);
}
