"use strict";
// Draws plots: each is an SVG with a table of its figures below. Nothing is loaded, nothing is evaluated.

const DATA = JSON.parse(document.getElementById("data").textContent);
// A text of the page in its language. Names that the data brings are among those that t() has here.
const t = (text, values = {}) => (Object.hasOwn(DATA.words, text) ? DATA.words[text] : text).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const NAMES = [t("data"), t("transfer"), t("forward"), t("backward"), t("communication"), t("update"), t("watching"), t("evaluation"), t("checkpoint"),
  t("parameters"), t("gradients"), t("optimizer"), t("everything else at the peak"), t("imbalance"), t("computing"), t("rest"), t("share"),
  t("finished"), t("stopped"), t("paused"), t("interrupted"), t("running"), t("ended unexpectedly"), t("complete"), t("failed"), t("open")];
const PHASES = ["data", "transfer", "forward", "backward", "communication", "update", "watching", "evaluation", "checkpoint"];
const HUES = [35, 60, 205, 255, 0, 150, 95, 180, 305];
const W = 480, H = 250, LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 34;
const hidden = new Set();
let zoom = null; // of the x axis of all plots over steps: its ends, or null
const redraws = [];

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const child of children) made.append(child);
  return made;
}

const color = (index) => `hsl(${(index * 137.5 + 210) % 360} var(--s) var(--l))`;
const phaseColor = (name) => `hsl(${HUES[PHASES.indexOf(name)] ?? 0} ${name === "watching" ? "18%" : "var(--s)"} var(--l))`;
const DASHES = ["", "6 3", "2 2", "8 3 2 3"];
const known = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!known(value)) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
function four(value) { // as grappe.words.format_number
  if (!known(value)) return "";
  const size = Math.abs(value);
  return size >= 999.95 ? Math.round(value).toLocaleString("en") : size && size < 1e-4 ? value.toExponential(3) : value.toPrecision(4);
}
const seconds = (value) => (value >= 1 ? `${short(value)} s` : value >= 1e-3 ? `${short(value * 1e3)} ms` : `${short(value * 1e6)} µs`);
const megabytes = (value) => `${short(value / 1e6)} MB`;

function ticks(low, high, logarithmic) {
  if (logarithmic) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const times of [1, 2, 5]) { const at = times * 10 ** power; if (at >= low && at <= high) found.push(at); }
    return found.length > 8 ? found.filter((at) => Math.abs(Math.log10(at) % 1) < 1e-9) : found;
  }
  const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(10)));
  return found;
}

function smoothed(points, weight) {
  if (!weight) return points;
  let mean = null;
  return points.map(([x, y]) => { if (known(y)) mean = mean === null ? y : weight * mean + (1 - weight) * y; return [x, known(y) ? mean : null]; });
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name.replace(/[^\p{L}\p{N}.-]+/gu, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// A cell that a spreadsheet would take for a formula begins with an apostrophe.
const cell = (value) => (typeof value === "number" ? String(value) : `"${String(value ?? "").replace(/^\s*[=+\-@]/, "'$&").replaceAll('"', '""')}"`);
const csv = (columns, rows) => [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";

// The plot as a file of its own: with its title, its legend and the colours of the theme.
function svgFile(svg, title) {
  const copy = svg.cloneNode(true), [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number), legend = svg.legend || [];
  const from = [...svg.querySelectorAll("*")], to = [...copy.querySelectorAll("*")];
  from.forEach((node, index) => { for (const name of ["fill", "stroke", "font-size", "font-family", "visibility"]) to[index].style.setProperty(name, getComputedStyle(node).getPropertyValue(name)); });
  const line = (text, y, color) => element("text", { x: LEFT, y, fill: color, "font-size": 12, "font-family": "sans-serif" }, text);
  copy.append(line(title, -8, getComputedStyle(document.body).color), ...legend.map(([name, color], index) => line(name, height + 16 * (index + 1), color)));
  const total = height + 24 + 16 * legend.length + 8;
  copy.setAttribute("viewBox", `0 -24 ${width} ${total}`);
  copy.setAttribute("width", width); copy.setAttribute("height", total);
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  return new XMLSerializer().serializeToString(copy).replaceAll("var(--s)", "68%").replaceAll("var(--l)", "42%");
}

function button(name, what, action) {
  const made = element("button", { type: "button", class: "save", "aria-label": what }, name);
  made.addEventListener("click", action);
  return made;
}

function figure(section, title, unit, columns, rows) {
  const holder = element("div"), told = element("output", { "aria-live": "polite" });
  const caption = element("figcaption", {}, title, " ", element("small", {}, unit),
    button("SVG", t("save {title} as SVG", { title }), () => { const svg = holder.querySelector("svg"); if (svg) save(`${title}.svg`, "image/svg+xml", svgFile(svg, title)); }),
    button("CSV", t("save {title} as CSV", { title }), () => save(`${title}.csv`, "text/csv", csv(columns, rows()))));
  const table = element("details", {}, element("summary", {}, t("figures")));
  table.addEventListener("toggle", () => {
    if (!table.open || table.querySelector("table")) return;
    const body = element("table", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
    const all = rows();
    for (const row of all.filter((_, index) => index % Math.ceil(all.length / 400) === 0)) body.append(element("tr", {}, ...row.map((cell) => element("td", {}, typeof cell === "number" ? short(cell) : String(cell ?? "")))));
    table.append(element("div", { tabindex: 0, role: "region", "aria-label": t("figures of {title}", { title }) }, body));
  });
  section.append(element("figure", { class: "plot" }, caption, holder, told, table));
  return { holder, told, done: () => holder.closest("figure").setAttribute("data-drawn", "yes") };
}

// Where a step of a run is on the x axis; null: the run does not have it.
function place(run, step, axis) {
  const { axes, description } = DATA.runs[run];
  if (axis === "step") return step;
  if (axis === "epoch") return known(description.start?.steps_per_epoch) ? step / description.start.steps_per_epoch : null;
  const column = axis === "samples" ? 1 : 2;
  let low = -1, high = axes.length;
  while (high - low > 1) { const middle = (low + high) >> 1; if (axes[middle][0] <= step) low = middle; else high = middle; }
  const [step0, ...before] = axes[low] || [0, 0, 0], [step1, ...after] = axes[high] || [step0, ...before];
  return before[column - 1] + (step1 > step0 ? ((step - step0) / (step1 - step0)) * (after[column - 1] - before[column - 1]) : 0);
}

// series: {run, name, color, dash, points: [[x, y], …]}; x and y are numbers, y null for a gap. Without `across`, x is the step of a run.
function lines(section, title, unit, series, { loss = false, smooth = false, from0 = false, across = "", format = short } = {}) {
  const rows = () => series.flatMap((one) => one.points.map(([x, y]) => [one.name, x, y]));
  const made = figure(section, title, unit, [t("curve"), across || t("step"), unit || t("value")], rows);
  redraws.push(() => {
    const axis = document.getElementById("across"), name = across || axis.selectedOptions[0].textContent;
    let shown = series.filter((one) => !hidden.has(one.run));
    if (!across) shown = shown.map((one) => ({ ...one, points: one.points.map(([x, y]) => [place(one.run, x, axis.value), y]).filter(([x]) => known(x)) }));
    drawLines(made, title, shown, { loss, smooth, from0, across: name, format, zooms: !across });
    made.done();
  });
}

function drawLines({ holder, told }, title, series, { loss, smooth, from0, across, format, zooms, alone }) {
  const weight = smooth ? Number(document.getElementById("smoothing").value) : 0;
  let shown = series.map((one) => ({ ...one, points: one.dots ? one.points : smoothed(one.points, weight) }));
  if (zoom && zooms) shown = shown.map((one) => ({ ...one, points: one.points.filter(([x]) => x >= zoom[0] && x <= zoom[1]) }));
  const positive = shown.flatMap((one) => one.points.map(([, y]) => y)).filter((y) => known(y) && y > 0);
  const logarithmic = loss && document.getElementById("logarithmic").checked && positive.length > 0;
  if (logarithmic) shown = shown.map((one) => ({ ...one, points: one.points.map(([x, y]) => [x, known(y) && y > 0 ? y : null]) }));
  const xs = shown.flatMap((one) => one.points.map(([x]) => x)), ys = shown.flatMap((one) => one.points.map(([, y]) => y)).filter(known);
  if (!ys.length) { holder.replaceChildren(element("p", { class: "none" }, t("nothing to show yet"))); return; }
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const x0 = least(xs), x1 = Math.max(most(xs), x0 + 1e-9);
  let y0 = from0 ? 0 : least(ys), y1 = most(ys);
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || (from0 ? 0 : 1); y1 += Math.abs(y1) * 0.1 || 1; }
  const scale = (y) => (logarithmic ? Math.log10(y) : y);
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const py = (y) => H - BOTTOM - ((scale(y) - scale(y0)) / (scale(y1) - scale(y0))) * (H - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": t("{title}: {number} curves; arrow keys read them", { title, number: shown.length }) });
  svg.legend = shown.map((one) => [one.name, one.color]);
  for (const at of ticks(y0, y1, logarithmic)) svg.append(element("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: py(at), y2: py(at) }), element("text", { x: LEFT - 6, y: py(at) + 4, "text-anchor": "end" }, format(at)));
  for (const at of ticks(x0, x1, false)) svg.append(element("text", { x: px(at), y: H - BOTTOM + 16, "text-anchor": "middle" }, short(at)));
  svg.append(element("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, across));
  for (const one of shown) {
    let path = "", pen = "M";
    for (const [x, y] of one.points) { if (!known(y)) { pen = "M"; continue; } path += `${pen}${px(x).toFixed(1)} ${py(y).toFixed(1)}`; pen = "L"; }
    svg.append(element("path", { d: path, fill: "none", stroke: one.color, "stroke-width": one.faint ? 1 : 1.6, "stroke-dasharray": one.dash || "" }, element("title", {}, one.name)));
    if (one.dots || one.points.length === 1) for (const [x, y] of one.points) if (known(y)) svg.append(element("circle", { cx: px(x), cy: py(y), r: 2.5, fill: one.color }));
  }
  const cursor = element("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const places = [...new Set(xs)].sort((a, b) => a - b);
  let at = -1;
  const read = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); cursor.setAttribute("visibility", "visible");
    const values = shown.map((one) => [one.name, one.points.reduce((best, point) => (known(point[1]) && point[0] <= x && !(alone && point[0] < x) ? point : best), null)]).filter(([, point]) => point);
    told.textContent = `${across} ${short(x)}: ` + values.slice(0, 12).map(([name, point]) => `${name} ${format(point[1])}`).join(", ");
  };
  svg.addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? Math.ceil(places.length / 10) : 1;
    const to = { ArrowRight: at + stride, ArrowLeft: at - stride, Home: 0, End: places.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); read(to); }
    if (zooms && event.key === "+") { const x = places[Math.max(0, at)], part = (x1 - x0) / 4; zoomTo([x - part, x + part]); }
    if (zooms && event.key === "-") zoomTo(null);
  });
  const under = (event) => { const box = svg.getBoundingClientRect(); return x0 + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (x1 - x0); };
  let from = null;
  if (zooms) {
    svg.addEventListener("pointerdown", (event) => { from = under(event); });
    svg.addEventListener("pointerup", (event) => { const ends = [from, under(event)].sort((a, b) => a - b); if (from !== null && px(ends[1]) - px(ends[0]) > 8) zoomTo(ends); from = null; });
    svg.addEventListener("dblclick", () => zoomTo(null));
  }
  svg.addEventListener("pointermove", (event) => {
    const x = under(event);
    read(places.reduce((best, place, index) => (Math.abs(place - x) < Math.abs(places[best] - x) ? index : best), 0));
  });
  holder.replaceChildren(svg);
}

// A point for each row of values over two columns, which the reader chooses. An x axis over a factor of 50 and more is logarithmic.
function scatter(section, columns, rows) {
  const varied = columns.filter(([name]) => new Set(rows.map((row) => row.values[name]).filter(known)).size > 1);
  if (rows.length < 3 || varied.length < 2) return;
  const made = figure(section, t("comparison"), "", ["", ...varied.map(([, name]) => name)], () => rows.map((row) => [row.name, ...varied.map(([name]) => row.values[name])]));
  const choice = (label, [name]) => {
    const select = element("select", { "aria-label": label }, ...varied.map(([value, text]) => element("option", { value }, text)));
    select.value = name;
    select.addEventListener("change", draw);
    return select;
  };
  const y = choice(t("vertical axis"), varied.find(([name]) => name === "best") ?? varied.at(-1)), x = choice(t("horizontal axis"), varied.find(([name]) => name !== y.value));
  made.holder.before(y, ` ${t("against")} `, x);
  redraws.push(() => {
    const shown = rows.filter((row) => !hidden.has(row.run) && known(row.values[x.value]) && known(row.values[y.value]));
    const xs = shown.map((row) => row.values[x.value]), wide = Math.min(...xs) > 0 && Math.max(...xs) >= 50 * Math.min(...xs), name = x.selectedOptions[0].textContent;
    const series = shown.map((row) => ({ ...row, points: [[wide ? Math.log10(row.values[x.value]) : row.values[x.value], row.values[y.value]]] }));
    drawLines(made, t("comparison"), series, { across: wide ? t("log10 of {name}", { name }) : name, format: short, alone: true });
    made.done();
  });
}

function zoomTo(ends) {
  zoom = ends;
  const label = document.activeElement?.getAttribute("aria-label"), index = [...document.querySelectorAll("svg")].indexOf(document.activeElement);
  draw();
  if (label && index >= 0) document.querySelectorAll("svg")[index]?.focus();
}

// rows: {run, name, parts: {part: value}}; below 0 a part is drawn to the left.
function bars(section, title, unit, rows, colorOf, format) {
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))];
  const made = figure(section, title, unit, ["", ...parts.map((part) => t(part))], () => rows.map((row) => [row.name, ...parts.map((part) => (known(row.parts[part]) ? format(row.parts[part]) : ""))]));
  redraws.push(() => {
    const shown = rows.filter((row) => !hidden.has(row.run));
    const ends = shown.map((row) => Object.values(row.parts).filter((value) => value > 0).reduce((a, b) => a + b, 0));
    const starts = shown.map((row) => Object.values(row.parts).filter((value) => value < 0).reduce((a, b) => a + b, 0));
    const most = Math.max(...ends, 1e-12), least = Math.min(...starts, 0), height = 40 * shown.length + 46;
    const px = (value) => 8 + ((value - least) / (most - least)) * (W - 16);
    const svg = element("svg", { viewBox: `0 0 ${W} ${height}`, role: "img", tabindex: 0, "aria-label": t("{title}: {number} bars; arrow keys read them", { title, number: shown.length }) });
    shown.forEach((row, index) => {
      const total = Object.values(row.parts).reduce((a, b) => a + b, 0);
      svg.append(element("text", { x: 8, y: 40 * index + 14 }, `${row.name}  ${format(total)}`.slice(0, 78)));
      let right = 0, left = 0;
      for (const part of parts) {
        const value = row.parts[part];
        if (!value) continue;
        const from = value > 0 ? right : left + value;
        if (value > 0) right += value; else left += value;
        svg.append(element("rect", { x: px(from), y: 40 * index + 19, width: Math.max(0.3, px(from + Math.abs(value)) - px(from)), height: 14, fill: colorOf(part, row), "fill-opacity": value < 0 ? 0.4 : 1 }, element("title", {}, `${t(part)} ${format(value)}`)));
      }
    });
    let x = 8, y = height - 24;
    for (const part of parts.filter((name) => rows.some((row) => row.parts[name]))) {
      const width = t(part).length * 6.2 + 26;
      if (x + width > W) { x = 8; y += 15; }
      svg.append(element("rect", { x, y: y - 9, width: 10, height: 10, fill: colorOf(part, rows[0]) }), element("text", { x: x + 14, y }, t(part)));
      x += width;
    }
    svg.setAttribute("viewBox", `0 0 ${W} ${y + 12}`);
    let at = -1;
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
      if (to === undefined || !shown.length) return;
      event.preventDefault();
      at = Math.max(0, Math.min(shown.length - 1, to));
      made.told.textContent = `${shown[at].name}: ` + parts.filter((part) => shown[at].parts[part]).map((part) => `${t(part)} ${format(shown[at].parts[part])}`).join(", ");
    });
    made.holder.replaceChildren(shown.length ? svg : element("p", { class: "none" }, t("no run is shown")));
    made.done();
  });
}

// Parallel coordinates: an axis for each field, the last for the metric; a line for each trial, the better the darker.
function parallel(section, study) {
  const names = [...study.axes.map((axis) => axis.name), study.metric], ends = [...study.axes.map((axis) => axis.ends), study.ends.map(short)];
  const rows = study.trials.map((trial) => ({ ...trial, at: [...trial.at, trial.at_value], good: known(trial.at_value) ? (study.maximize ? trial.at_value : 1 - trial.at_value) : 0 }));
  const words = (row) => [...study.axes.map((axis, index) => `${axis.name}=${row.texts[index]}`), row.state === "failed" ? `${t("failed")}: ${row.reason}` : `${study.metric} ${short(row.value)}`].join(", ");
  const made = figure(section, t("trials"), t("better ones are darker"), [t("trial"), ...names, t("state"), t("rungs")], () => rows.map((row) => [row.number, ...row.texts, row.value, row.state, row.rungs]));
  redraws.push(() => {
    const px = (index) => 40 + (index / Math.max(1, names.length - 1)) * (W - 80), py = (place) => H - BOTTOM - place * (H - TOP - BOTTOM - 14);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": t("trials: {number} lines over {axes} axes; arrow keys read them", { number: rows.length, axes: names.length }) });
    names.forEach((name, index) => svg.append(element("line", { class: "axis", x1: px(index), x2: px(index), y1: py(0), y2: py(1) }), element("text", { x: px(index), y: H - 4, "text-anchor": "middle" }, name.slice(0, 14)),
      element("text", { x: px(index), y: py(0) + 14, "text-anchor": "middle" }, String(ends[index][0]).slice(0, 12)), element("text", { x: px(index), y: py(1) - 5, "text-anchor": "middle" }, String(ends[index][1]).slice(0, 12))));
    const drawn = [...rows].sort((a, b) => a.good - b.good).map((row) => {
      let path = "", pen = "M";
      row.at.forEach((place, index) => { if (!known(place)) { pen = "M"; return; } path += `${pen}${px(index).toFixed(1)} ${py(place).toFixed(1)}`; pen = "L"; });
      const line = element("path", { d: path, fill: "none", stroke: color(row.best ? 1 : 0), "stroke-width": row.best ? 2.5 : 1.2, "stroke-opacity": row.best ? 1 : 0.15 + 0.7 * row.good, "stroke-dasharray": row.state === "paused" ? "4 3" : "" }, element("title", {}, `${t("trial")} ${row.number}: ${words(row)}`));
      svg.append(line);
      return line;
    });
    let at = -1;
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (to === undefined || !drawn.length) return;
      event.preventDefault();
      at = Math.max(0, Math.min(rows.length - 1, to));
      made.told.textContent = `${t("trial")} ${rows[at].number}: ${words(rows[at])}`;
    });
    made.holder.replaceChildren(svg);
    made.done();
  });
}

function section(title) {
  const grid = element("div", { class: "grid" });
  const made = element("section", {}, element("h2", {}, title), grid);
  document.getElementById("plots").append(made);
  return grid;
}
