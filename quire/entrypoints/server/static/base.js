"use strict";

/* Whatever comes from a model, a request or the server enters the page as text, never as HTML. */
const $ = (id) => document.getElementById(id);
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }
function button(label, action) {
  const node = make("button", "plain", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const rate = (value) => (value < 100 ? value.toFixed(1) : whole.format(value));
const share = (value) => `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 2 : 1)}%`;
function duration(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}
const clock = () => performance.timeOrigin + performance.now(); // in ms, and the same after a reload
const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);
// Relative, as a proxy may show the page under a path; and without a password that the address may hold.
const at = (path) => new URL(path, location.origin + location.pathname).href;
const count = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
