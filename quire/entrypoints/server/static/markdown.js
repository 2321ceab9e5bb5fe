"use strict";

/* Markdown as models write it, made into DOM nodes: what they write enters the page as text, whatever it looks like.
   While an answer streams, only its last block is made anew. Time is linear in the length, for hostile texts too. */
const MOST_NESTED = 8; // lists and quotes within each other; what lies deeper is text
const FENCE_END = /^ {0,3}(`{3,}|~{3,})\s*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*)|)$/, QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const isRule = (line) => line.length < 200 && /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/.test(line);
const isDelimiters = (line) => line.length < 2000 && line.includes("-") && /^[ \t|:-]+$/.test(line) && line.includes("|");
const isBlank = (line) => line.trim() === "";
/* The mark and the language of a line that begins code. */
function fenceOf(line) {
  const [, mark, rest] = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line) ?? [];
  return mark && !rest.includes("`") ? { mark, language: rest.trim().split(/\s/, 1)[0] } : null;
}
/* What ends a paragraph: of items, those that hold something, and of numbered ones the first. */
const interrupts = (line) => Boolean(fenceOf(line)) || HEADING.test(line) || QUOTE.test(line) || isRule(line) || /^ *([-*+]|1[.)]) +\S/.test(line);

/* A text that grows: `push` pieces, `draw` now and then. `node` holds nothing else. */
class Markdown {
  constructor(node) { this.node = node; this.begin(""); }
  begin(text) {
    this.text = text;
    this.settled = this.drawn = this.numSettled = 0; // characters and nodes before the last block; characters drawn
    this.code = null; // the text of the last block, where that is an open fence
    this.node.replaceChildren();
  }
  push(piece) { this.text += piece; }
  /* `whole`: nothing more comes. Else a last line that may yet become an item of the list before it is held back. */
  draw(whole = false) {
    const text = whole ? this.text : this.text.replace(/(?<=\n)[ \t]{0,9}\d{1,9}[.)]?$/, "");
    if (text.length <= this.drawn && !whole) return;
    const line = text.lastIndexOf("\n", this.drawn - 1) + 1;
    if (this.code && !whole && !text.slice(line).split("\n").some((each) => FENCE_END.test(each))) {
      this.code.appendData(text.slice(this.drawn));
    } else {
      while (this.node.childNodes.length > this.numSettled) this.node.lastChild.remove();
      const last = blocks(text.slice(this.settled).split("\n"), this.node, 0, whole);
      this.settled += last.offset;
      this.numSettled = this.node.childNodes.length - (last.any ? 1 : 0);
      this.code = last.code;
    }
    this.drawn = text.length;
  }
}
function markdown(text) {
  const node = make("div", "md"), made = new Markdown(node);
  made.push(text); made.draw(true);
  return node;
}

/* Append the blocks of some lines, each one node. Returns where the last one begins, and its text if it is an open fence. */
function blocks(lines, parent, depth, whole = true) {
  let at = 0, offset = 0, counted = 0, code = null, any = false;
  const begin = () => { for (; counted < at; counted++) offset += lines[counted].length + 1; };
  const take = (belongs) => { const from = at; while (at < lines.length && belongs(lines[at], at)) at++; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at];
    if (isBlank(line)) { at++; continue; }
    begin(); any = true; code = null;
    const fence = fenceOf(line), heading = HEADING.exec(line), nests = depth < MOST_NESTED;
    if (fence) {
      const { mark, language } = fence, indent = line.search(/\S/);
      at++;
      const ends = (each) => { const end = FENCE_END.exec(each); return end && end[1][0] === mark[0] && end[1].length >= mark.length; };
      const body = take((each) => !ends(each)).map((each) => each.slice(Math.min(indent, Math.max(0, each.search(/\S|$/)))));
      const closed = at < lines.length;
      at++;
      const content = codeBlock(parent, language, body.join("\n"), closed || whole);
      if (!closed && !indent && !depth && counted + 1 < lines.length) code = content;
    } else if (heading) {
      at++;
      inline(heading[2]?.trim().replace(/ {1,20}#{1,20}$/, "") ?? "", add(parent, `h${heading[1].length}`));
    } else if (isRule(line)) {
      at++; add(parent, "hr");
    } else if (nests && QUOTE.test(line)) {
      blocks(take((each) => QUOTE.test(each)).map((each) => each.replace(QUOTE, "")), add(parent, "blockquote"), depth + 1);
    } else if (nests && ITEM.test(line)) {
      at = list(lines, at, parent, depth);
    } else if (line.includes("|") && isDelimiters(lines[at + 1] ?? "")) {
      const head = cells(line), aligns = cells(lines[at + 1]).map((each) => `${each.startsWith(":") ? "l" : ""}${each.endsWith(":") ? "r" : ""}`);
      at += 2;
      table(head, aligns, take((each) => !isBlank(each) && !interrupts(each)).map(cells), parent);
    } else {
      const from = at;
      const goesOn = (each, index) => index === from || !(isBlank(each) || (nests ? interrupts(each) : fenceOf(each))
        || (each.includes("|") && isDelimiters(lines[index + 1] ?? "")));
      inline(take(goesOn).map((each) => each.trimStart()).join("\n").trimEnd(), add(parent, "p"));
    }
  }
  return { offset, code, any };
}
function add(parent, tag, className) {
  const node = make(tag, className);
  parent.append(node);
  return node;
}
function list(lines, at, parent, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]), ordered = /\d/.test(mark);
  const nested = indent.length + 2; // models indent by two where CommonMark wants three, too
  const node = add(parent, ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length >= nested || isRule(lines[at]) || /\d/.test(item[2]) !== ordered) break;
    const width = item[0].length - (item[3].length > 4 ? item[3].length - 1 : 0), body = [lines[at].slice(width)];
    let blank = false, fenced = false;
    for (at++; at < lines.length; at++) {
      const line = lines[at], by = line.search(/\S/);
      if (by >= nested || (fenced && by < 0)) {
        if (fenced ? FENCE_END.test(line.trim()) : fenceOf(line.trim())) fenced = !fenced;
        body.push(line.slice(Math.min(by, width)));
      } else if (by < 0) {
        // Blank lines belong to the item where it goes on behind them.
        let next = at;
        while (next < lines.length && isBlank(lines[next])) next++;
        if (next === lines.length || lines[next].search(/\S/) < nested) { at = next; break; }
        for (; at + 1 < next; at++) body.push("");
        body.push("");
      } else if (blank || ITEM.test(line) || interrupts(line)) break;
      else body.push(line);
      blank = by < 0;
    }
    const task = /^\[([ xX])\] /.exec(body[0]), entry = add(node, "li", task ? "task" : "");
    if (task) { body[0] = body[0].slice(4); entry.append(make("span", "box", task[1] === " " ? "☐ " : "☑ ")); }
    blocks(body, entry, depth + 1);
  }
  return at;
}
function cells(line) {
  const parts = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
  if (parts.length > 1 && !parts.at(-1)) parts.pop();
  return parts;
}
function table(head, aligns, rows, parent) {
  const node = add(add(parent, "div", "table"), "table");
  node.parentNode.tabIndex = 0; node.parentNode.setAttribute("role", "group"); node.parentNode.setAttribute("aria-label", "Table");
  const addRow = (section, tag, texts) => {
    const row = add(section, "tr");
    head.forEach((_, index) => inline(texts[index] ?? "", add(row, tag, { r: "right", lr: "centre" }[aligns[index]] ?? "")));
  };
  addRow(add(node, "thead"), "th", head);
  const body = add(node, "tbody");
  for (const row of rows) addRow(body, "td", row);
}

/* Code, with its language and a button that copies it. Returns its text node. */
function codeBlock(parent, language, text, coloured) {
  const box = add(parent, "div", "code"), head = add(box, "div", "code-head"), pre = add(box, "pre"), code = add(pre, "code");
  head.append(make("span", "", language || "code"), button("Copy", () => copy(code.textContent)));
  head.lastChild.setAttribute("aria-label", `Copy the code${language ? `, ${language}` : ""}`);
  pre.tabIndex = 0; pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  pre.setAttribute("role", "group");
  if (coloured && text.length < 50_000 && !/^(|te?xt|plain|markdown|md|console|output|html|xml)$/i.test(language)) return void colourCode(code, text, language);
  code.append(document.createTextNode(text));
  return code.firstChild;
}
/* Comments, strings, numbers and words that most languages keep: enough to read by. */
const KEPT = new Set(("abstract and as assert async await break case catch class const continue def default defer del do elif else end enum except export extends false False "
  + "final finally fn for from func function global go if impl import in instanceof interface is lambda let match mod module mut namespace new nil None nonlocal not null or package pass private "
  + "protected pub public raise return select self static struct super switch then this throw trait true True try type typeof undefined union unless until use using var void when where while with yield "
  + "SELECT FROM WHERE JOIN ON GROUP BY ORDER LIMIT INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE AND OR NOT NULL AS").split(" "));
const HASHES = /^(py|python|sh|bash|shell|zsh|ya?ml|toml|rb|ruby|perl|r|make|makefile|dockerfile|ini|conf|elixir)$/i;
function colourCode(node, text, language) {
  const comment = HASHES.test(language) ? "(?<![^\\s])#[^\\n]*" : /^(sql|lua|haskell|ada)$/i.test(language) ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  const pattern = new RegExp(`(${comment})|("""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?|\`[^\`]*\`?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  let done = 0;
  for (const part of text.matchAll(pattern)) {
    const kind = part[1] ? "comment" : part[2] ? "string" : part[3] ? "number" : KEPT.has(part[4]) ? "kept" : "";
    if (!kind) continue;
    node.append(text.slice(done, part.index), make("span", kind, part[0]));
    done = part.index + part[0].length;
  }
  node.append(text.slice(done));
}

/* Inline: one pass, with a stack of what was opened. A mark that finds no partner stays the text it was; each kind of mark
   is open at most once, as a second opening makes text of the first. */
const INLINE = new RegExp([
  // 1: mathematics, which stays the text that it is, marks and all
  /(\\\([^\n]{1,300}?\\\)|\\\[[^]{1,500}?\\\]|\$\$[^]{1,500}?\$\$|\$(?![\s\d])[^\n$]{1,300}?(?<!\s)\$(?!\w))/,
  /\\([!-/:-@[-`{-~])/, // 2: escaped
  /(`+)/, // 3: code
  /(\*+|_+|~~)/, // 4: emphasis
  /(!?\[)|(\])/, // 5, 6: a link's text
  /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/, // 7: an address in brackets
  /((?:https?:\/\/)[^\s<>"`|]{1,2000})/, // 8: a bare one
].map((each) => each.source).join("|"), "g");
const TARGET = /\(\s{0,9}<?([^\s()<>]{0,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500}){0,4})>?(?:\s{1,9}"[^"]{0,300}")?\s{0,9}\)/y;
const TAGS = { "*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del" };

function inline(text, node) {
  const stack = [{ mark: "", node }], runs = backticks(text);
  let done = 0, at = 0;
  const top = () => stack.at(-1).node;
  const put = (upTo) => { if (upTo > done) top().append(text.slice(done, upTo)); };
  const open = (mark, tag) => {
    const before = stack.findIndex((each) => each.mark === mark);
    if (before > 0) dissolve(stack, before);
    stack.push({ mark, node: add(top(), tag) });
  };
  const close = (index) => { while (stack.length > index + 1) dissolve(stack, index + 1); stack.pop(); };
  while (at < text.length) {
    INLINE.lastIndex = at;
    const part = INLINE.exec(text);
    if (!part) break;
    const [all, math, escaped, ticks, marks, opens, closes, bracketed, bare] = part, until = part.index;
    at = until + all.length;
    if (math) { put(until); add(top(), "span", "math").textContent = math; done = at; }
    else if (escaped) { put(until); done = until + 1; }
    else if (ticks) {
      const end = runs(ticks.length, until);
      if (end < 0) continue;
      put(until);
      const code = text.slice(at, end);
      add(top(), "code").textContent = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") ? code.slice(1, -1) : code;
      done = at = end + ticks.length;
    } else if (marks) {
      put(until); done = at;
      emphasis(marks, text[until - 1] ?? " ", text[at] ?? " ", stack, open, close);
    } else if (opens) { put(until); done = at; open("[", "a"); stack.at(-1).text = opens; }
    else if (closes) {
      const index = stack.findIndex((each) => each.mark === "[");
      TARGET.lastIndex = at;
      const target = index > 0 ? TARGET.exec(text) : null, address = target && safe(target[1]);
      if (!address) continue;
      put(until);
      const link = stack[index].node;
      close(index);
      pointTo(link, address);
      if (!link.textContent) link.textContent = target[1];
      done = at = TARGET.lastIndex;
    } else {
      const written = bracketed ?? bare.replace(/(?:[.,:;!?'"*_~]|&\w+;)+$/, "").replace(/^([^(]*)\)+$/, "$1"), address = safe(written);
      if (!address) continue;
      put(until);
      at = done = bracketed ? at : until + written.length;
      const link = add(top(), "a");
      link.textContent = written;
      pointTo(link, address);
    }
  }
  put(text.length);
  while (stack.length > 1) dissolve(stack, 1);
}
/* Where the run of so many backticks behind a place begins, or -1. */
function backticks(text) {
  const places = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!places.has(run[0].length)) places.set(run[0].length, { at: 0, all: [] });
    places.get(run[0].length).all.push(run.index);
  }
  return (length, after) => {
    const found = places.get(length);
    while (found.at < found.all.length && found.all[found.at] <= after) found.at++;
    return found.all[found.at] ?? -1;
  };
}
function emphasis(marks, before, after, stack, open, close) {
  const kind = marks[0], word = /[\p{L}\p{N}]/u;
  let left = marks.length;
  const within = kind === "_" && word.test(before) && word.test(after);
  const closes = before.trim() && !within && left < 4, opens = after.trim() && !within && left < 4;
  while (closes && left) {
    const index = stack.findLastIndex(({ mark }) => mark[0] === kind && mark.length <= left);
    if (index < 1) break;
    left -= stack[index].mark.length;
    close(index);
  }
  if (!left) return;
  if (!opens) return stack.at(-1).node.append(kind.repeat(left));
  const pieces = kind === "~" ? ["~~"] : { 1: [kind], 2: [kind + kind], 3: [kind + kind, kind] }[left];
  for (const piece of pieces) open(piece, TAGS[piece]);
}
/* Something opened was never closed: its mark is text, and what it holds is its parent's. */
function dissolve(stack, index) {
  const [{ node, mark, text }] = stack.splice(index, 1), holds = document.createDocumentFragment();
  holds.append(text ?? mark);
  while (node.firstChild) holds.append(node.firstChild);
  node.replaceWith(holds);
}
/* An address that may be followed, or null: of the web or mail, and absolute, as others would lead into this server. */
function safe(written) {
  if (!/^(https?:\/\/|mailto:)/i.test(written)) return null;
  try { return new URL(written).href; } catch { return null; }
}
function pointTo(link, address) {
  link.href = link.title = address;
  link.rel = "noopener noreferrer nofollow"; link.target = "_blank";
}
