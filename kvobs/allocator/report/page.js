// The page, from top to bottom.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GOOD = ["SERVED", "GROW", "RECLAIM"];
const WASTE_COLOURS = {requested: "activation", rounding: "workspace", gaps: "kv", cached: "free",
  "other pools": "gradient", pending: "optimizer", unexplained: "bad"};

function header() {
  const settings = DATA.settings === null ? "The file does not tell the allocator's settings; the defaults are assumed."
    : `Allocator settings: ${DATA.settings}.`;
  return [element("h1", {}, `What happened to memory in ${DATA.file}`),
    paragraph(`${DATA.schema}. ${settings}`, "quiet"),
    ...(DATA.notes.length ? [element("details", {open: ""}, element("summary", {},
      `${DATA.notes.length} ${DATA.notes.length === 1 ? "note" : "notes"} about the file`),
    element("ul", {}, DATA.notes.map((note) => element("li", {}, note))))] : [])];
}

function verdicts(device, jump) {
  const parts = [element("h3", {}, "Verdicts"), paragraph(device.score, "score")];
  if (!device.ooms_total) return [...parts, paragraph("No out-of-memory event is recorded on this device.")];
  for (const oom of device.ooms) {
    const free = oom.device_free === null ? "" : `; the device had ${size(oom.device_free)} left`;
    const by = oom.asker === null ? "" : `by ${oom.asker} `;
    const can = jump && device.map.moments.includes(oom.event);
    parts.push(element("section", {class: "card"},
      element("strong", {class: GOOD.includes(oom.verdict) ? "good" : "bad"}, oom.verdict ?? "not judged"),
      element("span", {title: exact(oom.requested)},
        `${size(oom.requested)} requested ${by}at event ${count(oom.event)}${free}.`),
      can ? element("button", {type: "button", on: {click: () => jump(oom.event)}}, "Show on the map") : null,
      paragraph(oom.sentence),
      oom.facts.length ? element("details", {}, element("summary", {}, "Evidence in bytes"),
        table("Evidence", [["what", ""], ["bytes", "number"], ["exactly", "number"]],
          oom.facts.map(([name, value]) => [name, size(value), exact(value)]))) : null));
  }
  if (device.ooms_total > device.ooms.length) {
    parts.push(paragraph(`The first ${device.ooms.length} of ${count(device.ooms_total)} are shown.`, "quiet"));
  }
  parts.push(element("p", {}, "What other settings would have done (modelled), the best of them included: ",
    element("code", {}, "kvobs whatif FILE --search"), "."));
  return parts;
}

function waste(device) {
  const {reserved, parts} = device.waste;
  const sum = parts.reduce((total, part) => total + part[1], 0);
  return [element("h3", {}, "Where the reserved bytes are"),
    paragraph("The file's last state; every reserved byte is in exactly one class. "
      + `The classes sum to ${exact(sum)} of ${exact(reserved)} reserved.`, "score"),
    element("div", {class: "bar", role: "img", "aria-label": parts.map(([name, value]) =>
      `${name} ${size(value)}`).join(", ")}, parts.filter((part) => part[1] > 0).map(([name, value]) =>
      element("span", {title: `${name}: ${size(value)}`, style: {width: `${100 * value / Math.max(reserved, sum, 1)}%`,
        background: `var(--${WASTE_COLOURS[name]})`}}))),
    table("Where the reserved bytes are", [["class", "name"], ["bytes", "number"], ["share", "number"], ["what it is", ""]],
      parts.map(([name, value, meaning]) => [element("span", {}, swatch(WASTE_COLOURS[name]), name), sized(value),
        reserved ? `${(100 * value / reserved).toFixed(1)} %` : "-", meaning])),
    ...(device.pins.length ? [element("h4", {}, "What keeps free bytes from being returned"),
      table("Pinned segments", [["segment", "name"], ["its bytes", "number"], ["held back", "number"],
        ["by blocks", "number"], ["smallest of them", "number"], ["allocated by", "label"]],
      device.pins.map(([address, bytes, held, blocks, block, frame]) => [`0x${address}`, sized(bytes), sized(held),
        count(blocks), sized(block), frame]))] : [])];
}

function history(device) {
  const map = mapOf(device.map, DATA.kinds, `Device ${device.device}`);
  const chart = device.timeline === null ? null : chartOf(device.timeline, `Device ${device.device}: bytes over its history`);
  const last = map.moments.length - 1;
  const said = element("output", {"aria-live": "polite"});
  const slider = element("input", {type: "range", min: "0", max: String(last), value: String(last), step: "1",
    "aria-label": `Moment of device ${device.device}'s history`, on: {input: () => show(Number(slider.value))}});

  function words(moment) {
    const event = map.moments[moment];
    const since = map.since[moment];
    const {reserved, used, blocks} = map.totals();
    const when = moment === last ? "The file's last state" : event < 0 ? "Before the first event"
      : `After event ${count(event)} of ${count(device.events)}${since === null ? "" : ` (+${seconds(since)})`}`;
    const sizes = moment === last ? "exact" : "block sizes as the allocator rounds";
    return `${when}: ${size(reserved)} reserved, ${size(used)} in ${count(blocks)} blocks in use (${sizes}).`;
  }

  function show(moment) {
    slider.value = String(moment);
    map.show(moment);
    if (chart) chart.mark(map.moments[moment]);
    said.textContent = words(moment);
    slider.setAttribute("aria-valuetext", said.textContent);
  }

  const jump = (event) => {
    show(map.moments.indexOf(event));
    map.node.scrollIntoView({block: "start"});
  };
  const buttons = [["First", -1], ["Peak", device.peak_event], ...device.ooms.slice(0, 4).map((oom, index) =>
    [device.ooms.length > 1 ? `OOM ${index + 1}` : "OOM", oom.event])]
    .filter(([, event]) => event !== null && map.moments.includes(event))
    .map(([name, event]) => element("button", {type: "button", on: {click: () => show(map.moments.indexOf(event))}}, name));
  const nodes = [element("h3", {}, "Reserved, active, allocated and unused bytes over the history"),
    paragraph(device.score, "score"),
    chart ? chart.node : paragraph("There is no history to draw."),
    element("h3", {}, "Memory map"),
    paragraph(device.score, "score"),
    last > 0 ? element("div", {class: "controls"}, element("label", {}, "Moment"), slider, buttons,
      element("button", {type: "button", on: {click: () => show(last)}}, "Last")) : null,
    element("p", {}, said), map.node];
  return {nodes, start: () => show(last), jump: last > 0 ? jump : null};
}

function holdings(device) {
  const one = (title, found, note) => [element("h4", {}, title), paragraph(note, "quiet"),
    element("div", {class: "bar", role: "img", "aria-label": found.kinds.map(([kind, value]) =>
      `${kind} ${size(value)}`).join(", ") || "nothing is allocated"}, found.kinds.map(([kind, value]) =>
      element("span", {title: `${kind}: ${size(value)}`,
        style: {width: `${100 * value / Math.max(found.allocated, 1)}%`, background: `var(--${kind})`}}))),
    element("ul", {class: "legend"}, found.kinds.map(([kind, value]) => element("li", {}, swatch(kind),
      `${kind}: ${size(value)} (${(100 * value / Math.max(found.allocated, 1)).toFixed(1)} %)`))),
    table(title, [["allocated by", "label"], ["kind", ""], ["decided by", ""], ["bytes", "number"], ["blocks", "number"],
      ["share", "share"]], [...found.top.map(([label, kind, rule, bytes, blocks]) =>
      [label, kind, rule, sized(bytes), count(blocks), share(bytes, found.allocated, kind)]),
    ...(found.rest ? [[`${count(found.rest)} others`, "", "", sized(found.rest_bytes), "",
      share(found.rest_bytes, found.allocated, "unknown")]] : [])])];
  const {last, peak} = device.holders;
  return [element("h3", {}, "Who holds memory"),
    paragraph("Kinds are estimated from stack frames; each row names the rule that decided.", "score"),
    ...one("In the file's last state", last, "Bytes of blocks."),
    ...(peak ? one(`At the peak, after event ${count(device.peak_event)}`, peak,
      `Requested bytes, since a history tells no block sizes. ${device.score}`) : [])];
}

function growth(device) {
  if (!device.growth.length) return [];
  const rows = [...device.growth].sort((a, b) => Number(b[2]) - Number(a[2])).map(([label, kind, grew, points]) =>
    [label, kind, grew ? element("strong", {}, "grew") : "did not only grow", sized(points[0]),
      sized(points[points.length - 1]), spark(points)]);
  return [element("h3", {}, "Holders over the history"), paragraph(device.score, "score"),
    paragraph("“Grew” means that the least value per interval never fell over the second half, and ended "
      + "higher. So looks a leak, and so does a cache that fills. Requested bytes; each line has its own scale."),
    table("Holders over the history", [["allocated by", "label"], ["kind", ""], ["second half", ""], ["at first", "number"],
      ["at last", "number"], ["over events", ""]], rows)];
}

function forced(device) {
  if (!device.forced.length) return [];
  return [element("h3", {}, "Allocations that went to the device"), paragraph(device.score, "score"),
    paragraph(`${count(device.forced_total)} allocations found no free block`
      + (device.forced_total > device.forced.length ? `; the ${device.forced.length} that took most are shown.` : ".")),
    table("Allocations that went to the device", [["event", "number"], ["requested", "number"],
      ["taken from the device", "number"], ["kind", ""], ["allocated by", "label"]],
    device.forced.map(([event, requested, taken, kind, frame]) =>
      [count(event), sized(requested), sized(taken), kind, frame]))];
}

function definitions(device) {
  const shown = (value, unit, reason) => value === null ? reason || "no value"
    : unit === "By" ? sized(value) : value.toFixed(4);
  return [element("h3", {}, "Published definitions of fragmentation, and why none decides"),
    paragraph("Of the file's last state; peaks are of the replay.", "score"),
    table("Definitions", [["name", ""], ["owner", ""], ["formula", ""], ["value", ""], ["why it does not decide", "label"]],
      device.definitions.map(([name, owner, formula, value, unit, reason, objection]) =>
        [name, owner, formula, shown(value, unit, reason), objection]))];
}

function deviceSection(device) {
  const past = history(device);
  if (!DATA.whole) return {section: element("section", {}, past.nodes), start: past.start};
  const section = element("section", {id: `device-${device.device}`},
    element("h2", {}, `Device ${device.device}`),
    element("ul", {class: "figures"}, device.numbers.map(([name, value]) => element("li", {},
      element("b", {title: exact(value)}, size(value)), name)),
    element("li", {}, element("b", {}, count(device.segments)), "segments"),
    element("li", {}, element("b", {}, count(device.events)), "events recorded")),
    verdicts(device, past.jump), waste(device), past.nodes, holdings(device), growth(device), forced(device),
    definitions(device));
  return {section, start: past.start};
}

function usage(one) {
  const parts = [element("h2", {}, `${one.device}, as a profiler saw it`)];
  if (one.timeline === null) return element("section", {}, parts, paragraph("The profiler recorded no bytes."));
  const chart = chartOf(one.timeline, `${one.device}: bytes over samples`, "sample");
  return element("section", {}, parts, paragraph("Counted in samples of the profiler, not in events of the allocator.",
    "quiet"), chart.node);
}

function calls() {
  if (!DATA.calls.length) return [];
  return [element("section", {}, element("h2", {}, "Calls for device memory"),
    paragraph("As the profiler recorded them; the first call of a process may contain the making of its context.", "quiet"),
    table("Calls for device memory", [["call", "label"], ["times", "number"], ["in all", "number"], ["median", "number"],
      ["95th percentile", "number"], ["longest", "number"], ["the first", "number"]],
    DATA.calls.map(([name, times, ...durations]) => [name, count(times),
      ...durations.map((nanos) => seconds(nanos / 1e3))])))];
}

const page = document.getElementById("page");
const devices = DATA.devices.map(deviceSection);
page.append(...(DATA.whole ? header() : []), ...(devices.length || DATA.usage.length || DATA.calls.length ? []
  : [paragraph("The file tells nothing about an allocator's state.")]),
...(devices.length > 1 && DATA.whole ? [element("nav", {"aria-label": "Devices"}, DATA.devices.map((device) =>
  element("a", {href: `#device-${device.device}`, class: "controls"}, `Device ${device.device}`)))] : []),
...devices.map((device) => device.section), ...DATA.usage.map(usage), ...(DATA.whole ? calls() : []));
for (const device of devices) device.start();
