// The memory map: packed address space in rows, at the moment that the slider says.

const ROW = 14;
const GAP = 2;
const LEFT = 76;
const PENDING = 1;

function mapOf(told, kinds, name) {
  const blocks = columns(told.blocks);
  const segments = columns(told.segments);
  const rowBytes = told.row;
  const rows = told.rows;
  const state = {moment: told.moments.length - 1, by: "kind", shown: [], held: [], chosen: -1};
  const canvas = element("canvas", {tabindex: "0", role: "img", "aria-label":
    `${name}: memory map. The arrow keys go from block to block; the table below lists the largest.`});
  const hint = element("div", {class: "hint", hidden: ""});
  const said = element("p", {class: "said", "aria-live": "polite"});
  const box = element("div", {class: "drawing map"}, canvas, hint);
  const legend = element("ul", {class: "legend"});
  const largest = element("div");

  function columns(found) {
    return {count: found.count, at: column(Float64Array, found.at), size: column(Float64Array, found.size),
      first: column(Uint16Array, found.first), end: column(Uint16Array, found.end),
      group: column(Uint16Array, found.group), state: column(Uint8Array, found.state)};
  }

  const present = (spans) => {
    const found = [];
    for (let index = 0; index < spans.count; index++) {
      if (spans.first[index] <= state.moment && state.moment < spans.end[index]) found.push(index);
    }
    return found;
  };
  const group = (index) => told.groups[blocks.group[index]] ?? ["other", "unknown"];
  const pending = (index) => blocks.state[index] === PENDING;
  const colourName = (index) => state.by === "kind" ? group(index)[1] : pending(index) ? "optimizer" : "weights";

  function width() {
    return Math.max(box.clientWidth, 320) - LEFT;
  }

  // The rectangles of a stretch of bytes: it goes on in the next row where one ends.
  function* rectangles(at, bytes) {
    const scale = width() / rowBytes;
    let start = at;
    const end = Math.min(at + bytes, rows * rowBytes);
    while (start < end) {
      const row = Math.floor(start / rowBytes);
      const stop = Math.min(end, (row + 1) * rowBytes);
      yield [LEFT + (start - row * rowBytes) * scale, row * (ROW + GAP), Math.max((stop - start) * scale, .6), ROW];
      start = stop;
    }
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    const height = rows * (ROW + GAP);
    canvas.width = (width() + LEFT) * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width() + LEFT, height);
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillStyle = colour("quiet");
    for (let row = 0; row < rows; row += rows > 12 ? 4 : 1) {
      context.fillText(size(row * rowBytes), LEFT - 8, row * (ROW + GAP) + 11);
    }
    context.fillStyle = colour("free");
    for (const index of state.held) {
      for (const part of rectangles(segments.at[index], segments.size[index])) context.fillRect(...part);
    }
    for (const index of state.shown) {
      context.fillStyle = colours[colourName(index)];
      for (const part of rectangles(blocks.at[index], blocks.size[index])) {
        context.fillRect(part[0], part[1], Math.max(part[2] - (part[2] > 4 ? .7 : 0), .6), part[3]);
        if (pending(index)) hatch(context, part);
      }
    }
    context.fillStyle = colour("edge");
    for (const index of state.held) {
      const [first] = rectangles(segments.at[index], segments.size[index]);
      if (first) context.fillRect(first[0], first[1], 1, ROW);
    }
    if (state.chosen >= 0 && state.shown.includes(state.chosen)) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      for (const [x, y, wide, high] of rectangles(blocks.at[state.chosen], blocks.size[state.chosen])) {
        context.strokeRect(x - 1, y, wide + 2, high);
      }
    }
  }

  function hatch(context, [x, y, wide, high]) {
    context.save();
    context.beginPath();
    context.rect(x, y, wide, high);
    context.clip();
    context.strokeStyle = colours.hatch;
    context.lineWidth = 1;
    context.beginPath();
    for (let at = x - high; at < x + wide; at += 6) {
      context.moveTo(at, y + high);
      context.lineTo(at + high, y);
    }
    context.stroke();
    context.restore();
  }

  let colours = {};
  function paint() {
    colours = Object.fromEntries([...kinds, "hatch"].map((kind) => [kind, colour(kind)]));
    draw();
  }

  function addressOf(at) {
    const range = told.ranges.findLast((one) => one[2] <= at);
    return range && at < range[2] + range[1] ? `0x${(BigInt(`0x${range[0]}`) + BigInt(at - range[2])).toString(16)}` : "not known";
  }

  function describe(index) {
    const [label, kind] = group(index);
    return [`${size(blocks.size[index])} ${pending(index) ? "pending: freed, but a stream may still use it" : "allocated"}`,
      `kind (estimated): ${kind}`, label, `address ${addressOf(blocks.at[index])}`].join("\n");
  }

  function under(x, y) {
    if (x < LEFT) return null;
    const row = Math.floor(y / (ROW + GAP));
    const at = row * rowBytes + (x - LEFT) / width() * rowBytes;
    const reach = rowBytes / width();
    const near = state.shown.filter((index) => blocks.at[index] <= at + reach
      && at - reach <= blocks.at[index] + blocks.size[index]);
    const inside = near.find((index) => blocks.at[index] <= at && at < blocks.at[index] + blocks.size[index]);
    if (inside !== undefined || near.length) return describe(inside ?? near[0]);
    const segment = state.held.find((index) => segments.at[index] <= at
      && at < segments.at[index] + segments.size[index]);
    return segment === undefined ? "not reserved at this moment"
      : `free, in a segment of ${size(segments.size[segment])}\naddress ${addressOf(segments.at[segment])}`;
  }

  function point(x, y, text) {
    hint.textContent = text;
    hint.hidden = text === null;
    hint.style.left = `${Math.min(x + 14, Math.max(box.clientWidth - 340, 0))}px`;
    hint.style.top = `${y + 18}px`;
  }

  canvas.addEventListener("mousemove", (event) => point(event.offsetX, event.offsetY,
    under(event.offsetX, event.offsetY)));
  canvas.addEventListener("mouseleave", () => { hint.hidden = true; });
  canvas.addEventListener("blur", () => { hint.hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10}[event.key];
    if (step === undefined || !state.shown.length) return;
    event.preventDefault();
    const now = state.shown.indexOf(state.chosen);
    state.chosen = state.shown[Math.min(Math.max(now + step, 0), state.shown.length - 1)];
    draw();
    const [part] = rectangles(blocks.at[state.chosen], blocks.size[state.chosen]);
    point(part[0], part[1], describe(state.chosen));
    said.textContent = describe(state.chosen).replaceAll("\n", "; ");
  });

  function keys() {
    const sums = new Map();
    for (const index of state.shown) {
      const key = state.by === "kind" ? group(index)[1] : pending(index) ? "pending" : "allocated";
      sums.set(key, (sums.get(key) ?? 0) + blocks.size[index]);
    }
    const order = state.by === "kind" ? kinds : ["allocated", "pending"];
    const names = {allocated: "weights", pending: "optimizer"};
    const free = totals().reserved - totals().used;
    legend.replaceChildren(...order.filter((key) => sums.has(key)).map((key) => element("li", {},
      swatch(state.by === "kind" ? key : names[key]), `${key}: ${size(sums.get(key))}`)),
    element("li", {}, swatch("free"), `free in segments: ${size(Math.max(free, 0))}`),
    element("li", {}, swatch("absent"), "not reserved at this moment"));
    const ordered = [...state.shown].sort((a, b) => blocks.size[b] - blocks.size[a] || blocks.at[a] - blocks.at[b]);
    largest.replaceChildren(table("The largest blocks at this moment",
      [["address", "name"], ["bytes", "number"], ["state", ""], ["kind", ""], ["allocated by", "label"]],
      ordered.slice(0, 10).map((index) => [addressOf(blocks.at[index]), sized(blocks.size[index]),
        pending(index) ? "pending" : "allocated", group(index)[1], group(index)[0]])));
  }

  function totals() {
    return {reserved: state.held.reduce((sum, index) => sum + segments.size[index], 0),
      used: state.shown.reduce((sum, index) => sum + blocks.size[index], 0), blocks: state.shown.length};
  }

  function show(moment) {
    state.moment = moment;
    state.shown = present(blocks);
    state.held = present(segments);
    state.chosen = -1;
    said.textContent = "";
    keys();
    paint();
  }

  const radio = ["kind", "state"].map((by) => element("label", {}, element("input", {type: "radio",
    name: `by-${name}`, value: by, ...(by === "kind" ? {checked: ""} : {}), on: {change: () => {
      state.by = by;
      keys();
      draw();
    }}}), ` ${by}`));
  redrawing(box, paint);
  return {
    node: element("div", {},
      element("div", {class: "controls"}, element("fieldset", {}, element("legend", {}, "Colour by"), radio)),
      legend, box, said,
      paragraph(`Each row is ${size(rowBytes)} of address space, lowest address first; addresses that were never `
        + "reserved are left out, a thin upright line begins a segment, and what is hatched is pending."
        + (told.outside ? ` ${count(told.outside)} blocks lie outside every known segment and are not drawn.` : ""),
      "quiet"),
      element("h4", {}, "The largest blocks at this moment"), largest),
    show, totals, moments: told.moments, since: told.since_us,
  };
}
