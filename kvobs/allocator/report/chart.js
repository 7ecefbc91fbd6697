// Bytes over events or time. Each interval shows its least and its largest value, so no peak is lost.

const LINE_STYLES = [["weights", ""], ["kv", "7 3"], ["activation", "2 2"], ["unknown", "10 3 2 3"],
  ["optimizer", "5 2"], ["gradient", "3 3"], ["workspace", "8 2"], ["communication", "1 2"], ["weights", "4 4"],
  ["kv", "1 3"], ["activation", "9 3"]];

function chartOf(told, name, one = "event") {
  const lines = Object.entries(told.lines).map(([title, line], index) => ({
    title, style: LINE_STYLES[index % LINE_STYLES.length],
    low: column(Float64Array, line.low), high: column(Float64Array, line.high)}));
  const first = column(Float64Array, told.first);
  const times = column(Float64Array, told.time_us);
  const timed = times.length > 0 && times[0] >= 0 && times[times.length - 1] > times[0];
  const state = {byTime: false, event: null};
  const most = Math.max(1, ...lines.map((line) => line.high.reduce((a, b) => Math.max(a, b), 0)));
  const svg = drawn("svg", {role: "img", "aria-label": name});
  const hint = element("div", {class: "hint", hidden: ""});
  const box = element("div", {class: "drawing chart"}, svg, hint);
  const margin = {left: 76, right: 12, top: 18, bottom: 24};
  const height = 300;

  const intervalOf = (event) => {
    let low = 0;
    let high = first.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (first[middle] <= event) low = middle; else high = middle - 1;
    }
    return low;
  };
  const at = (index) => state.byTime ? times[index] - times[0] : first[index + 1];
  const span = () => [state.byTime ? 0 : first[0], Math.max(at(first.length - 2), 1)];

  function draw() {
    const width = Math.max(box.clientWidth, 320);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const [begin, end] = span();
    const x = (value) => margin.left + (value - begin) / (end - begin || 1) * (width - margin.left - margin.right);
    const y = (value) => height - margin.bottom - value / most * (height - margin.top - margin.bottom);
    const parts = [];
    const power = 2 ** Math.floor(Math.log2(most / 4));
    for (let value = 0; value <= most; value += power) {
      if (most / power >= 6 && (value / power) % 2) continue;
      parts.push(drawn("line", {x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value),
        stroke: "var(--rule)"}));
      parts.push(drawn("text", {x: margin.left - 6, y: y(value) + 4, "text-anchor": "end"}, size(value)));
    }
    for (let step = 0; step <= 4; step++) {
      const value = begin + (end - begin) * step / 4;
      parts.push(drawn("text", {x: x(value), y: height - 6,
        "text-anchor": step === 0 ? "start" : step === 4 ? "end" : "middle"},
      state.byTime ? `+${seconds(value)}` : `${step === 4 ? `${one} ` : ""}${count(Math.round(value))}`));
    }
    for (const line of lines) {
      const above = [];
      const below = [];
      for (let index = 0; index < line.high.length; index++) {
        for (const place of [x(index ? at(index - 1) : begin).toFixed(1), x(at(index)).toFixed(1)]) {
          above.push(`${place},${y(line.high[index]).toFixed(1)}`);
          below.push(`${place},${y(line.low[index]).toFixed(1)}`);
        }
      }
      parts.push(drawn("polygon", {points: [...above, ...below.reverse()].join(" "), fill: `var(--${line.style[0]})`,
        "fill-opacity": ".3"}));
      parts.push(drawn("polyline", {points: above.join(" "), fill: "none", stroke: `var(--${line.style[0]})`,
        "stroke-width": "1.8", "stroke-dasharray": line.style[1], "data-line": line.title}));
    }
    for (const event of told.ooms) {
      const place = x(at(intervalOf(event)));
      parts.push(drawn("line", {x1: place, x2: place, y1: margin.top, y2: height - margin.bottom, class: "oom",
        stroke: "var(--bad)", "stroke-width": "2", "stroke-dasharray": "4 3"}));
      parts.push(drawn("text", {x: place, y: 12, "text-anchor": place > width - 60 ? "end" : "middle",
        class: "marked"}, "OOM"));
    }
    if (state.event !== null) {
      const place = x(state.event < 0 ? begin : at(intervalOf(state.event)));
      parts.push(drawn("line", {x1: place, x2: place, y1: margin.top, y2: height - margin.bottom, class: "cursor",
        stroke: "var(--ink)", "stroke-width": "1.5"}));
    }
    svg.replaceChildren(...parts);
  }

  svg.addEventListener("mousemove", (event) => {
    const width = Math.max(box.clientWidth, 320);
    const [begin, end] = span();
    const wanted = begin + (event.offsetX - margin.left) / (width - margin.left - margin.right) * (end - begin);
    let index = 0;
    while (index < first.length - 2 && at(index) < wanted) index++;
    hint.textContent = [`${one[0].toUpperCase()}${one.slice(1)}s ${count(first[index])} to ${count(first[index + 1] - 1)}`
      + (timed ? `, +${seconds(times[index] - times[0])}` : ""),
    ...lines.map((line) => `${line.title}: ${size(line.low[index])} to ${size(line.high[index])}`)].join("\n");
    hint.hidden = false;
    hint.style.left = `${Math.min(event.offsetX + 14, Math.max(width - 260, 0))}px`;
    hint.style.top = `${margin.top + 6}px`;
  });
  svg.addEventListener("mouseleave", () => { hint.hidden = true; });
  redrawing(box, draw);

  const legend = element("ul", {class: "legend"}, lines.map((line) => element("li", {},
    drawn("svg", {viewBox: "0 0 32 12", "aria-hidden": "true"}, drawn("line", {x1: 0, x2: 32, y1: 6, y2: 6,
      stroke: `var(--${line.style[0]})`, "stroke-width": 3, "stroke-dasharray": line.style[1]})), line.title)));
  const over = timed ? element("label", {}, "Over ", element("select", {on: {change: (event) => {
    state.byTime = event.target.value === "time";
    draw();
  }}}, element("option", {value: "events"}, `${one}s`), element("option", {value: "time"}, "time"))) : null;
  return {
    node: element("div", {}, element("div", {class: "controls"}, legend, over), box),
    mark: (event) => { state.event = event; draw(); },
  };
}

function spark(values) {
  const most = Math.max(1, ...values);
  const points = values.map((value, index) =>
    `${(100 * index / Math.max(values.length - 1, 1)).toFixed(1)},${(20 - 18 * value / most).toFixed(1)}`);
  return drawn("svg", {class: "spark", viewBox: "0 0 100 21", preserveAspectRatio: "none", role: "img",
    "aria-label": `from ${size(values[0])} to ${size(values[values.length - 1])}; the drawing's top is ${size(most)}`},
  drawn("polyline", {points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": "1.5",
    "vector-effect": "non-scaling-stroke"}));
}
