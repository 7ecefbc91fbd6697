"use strict";
// What the other parts share. Texts of the file only ever become text nodes.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "style") for (const [property, set] of Object.entries(value)) made.style.setProperty(property, set);
    else made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function column(Type, encoded) {
  const text = atob(encoded);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return new Type(bytes.buffer);
}

function count(value) {
  return value.toLocaleString("en-US");
}

function size(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  let shown = value;
  while (Math.abs(shown) >= 1024 && step < units.length - 1) { shown /= 1024; step++; }
  return `${step ? shown.toFixed(2) : shown} ${units[step]}`;
}

function exact(value) {
  return `${count(value)} B`;
}

function seconds(micros) {
  return micros < 1e6 ? `${(micros / 1e3).toFixed(1)} ms` : `${(micros / 1e6).toFixed(3)} s`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function swatch(name) {
  return element("span", {class: "swatch", "aria-hidden": "true", style: {background: `var(--${name})`}});
}

// Rows are arrays of texts, numbers-as-texts or nodes; a column is [title, "number" | "name" | "share" | "label" | ""]; a label may be one long word.
function table(label, columns, rows) {
  const head = element("tr", {}, columns.map(([title, kind]) => element("th", {scope: "col", class: kind}, title)));
  const body = rows.map((row) => element("tr", {}, row.map((cell, index) =>
    element("td", {class: columns[index][1]}, cell))));
  return element("div", {class: "table", tabindex: "0", role: "region", "aria-label": label},
    element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
}

function sized(value) {
  return value === null ? "not recorded" : element("span", {title: exact(value)}, size(value));
}

function share(part, whole, name) {
  const percent = whole ? 100 * part / whole : 0;
  return [`${percent.toFixed(1)} %`, element("i", {"aria-hidden": "true",
    style: {width: `${Math.max(Math.min(percent, 100), 0)}%`, background: `var(--${name})`}})];
}

function paragraph(text, name = "") {
  return element("p", name ? {class: name} : {}, text);
}

// Draw again when the width or the colours change.
function redrawing(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth !== width) { width = node.clientWidth; draw(); }
  }).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
