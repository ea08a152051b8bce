"use strict";
// Draws a report: every plot is an SVG with a table of its figures below. Nothing is loaded, nothing is evaluated.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["data", "transfer", "forward", "backward", "communication", "update", "watching", "evaluation", "checkpoint", "start"];
const HUES = [35, 60, 205, 260, 350, 150, 90, 185, 310, 0];
const W = 480, H = 250, LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 34;
const hidden = new Set();
const redraws = [];

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const child of children) made.append(child);
  return made;
}

const color = (index) => `hsl(${(index * 137.5 + 210) % 360} var(--s) var(--l))`;
const phaseColor = (name) => `hsl(${HUES[PHASES.indexOf(name)] ?? 0} ${["watching", "start"].includes(name) ? "8%" : "var(--s)"} var(--l))`;
const DASHES = ["", "6 3", "2 2", "8 3 2 3"];
const known = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!known(value)) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
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
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(10)));
  return found;
}

function smoothed(points, weight) {
  if (!weight) return points;
  let mean = null;
  return points.map(([x, y]) => { if (known(y)) mean = mean === null ? y : weight * mean + (1 - weight) * y; return [x, known(y) ? mean : null]; });
}

function figure(section, title, unit, columns, rows) {
  const caption = element("figcaption", {}, title, " ", element("small", {}, unit));
  const holder = element("div"), told = element("output", { "aria-live": "polite" });
  const table = element("details", {}, element("summary", {}, "figures"));
  table.addEventListener("toggle", () => {
    if (!table.open || table.querySelector("table")) return;
    const body = element("table", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
    for (const row of rows()) body.append(element("tr", {}, ...row.map((cell) => element("td", {}, typeof cell === "number" ? short(cell) : String(cell ?? "")))));
    table.append(element("div", { tabindex: 0, role: "region", "aria-label": `figures of ${title}` }, body));
  });
  section.append(element("figure", { class: "plot" }, caption, holder, told, table));
  return { holder, told, done: () => holder.closest("figure").setAttribute("data-drawn", "yes") };
}

// series: {run, name, color, dash, points: [[x, y], …]}; x and y are numbers, y null for a gap.
function lines(section, title, unit, series, { loss = false, smooth = false, from0 = false, across = "step", format = short } = {}) {
  const rows = () => series.flatMap((one) => one.points.filter((_, i) => i % Math.ceil(one.points.length / 200) === 0).map(([x, y]) => [one.name, x, y]));
  const made = figure(section, title, unit, ["curve", across, unit || "value"], rows);
  redraws.push(() => { drawLines(made, title, series.filter((one) => !hidden.has(one.run)), { loss, smooth, from0, across, format }); made.done(); });
}

function drawLines({ holder, told }, title, series, { loss, smooth, from0, across, format }) {
  const weight = smooth ? Number(document.getElementById("smoothing").value) : 0;
  let shown = series.map((one) => ({ ...one, points: one.dots ? one.points : smoothed(one.points, weight) }));
  const positive = shown.flatMap((one) => one.points.map(([, y]) => y)).filter((y) => known(y) && y > 0);
  const logarithmic = loss && document.getElementById("logarithmic").checked && positive.length > 0;
  if (logarithmic) shown = shown.map((one) => ({ ...one, points: one.points.map(([x, y]) => [x, known(y) && y > 0 ? y : null]) }));
  const xs = shown.flatMap((one) => one.points.map(([x]) => x)), ys = shown.flatMap((one) => one.points.map(([, y]) => y)).filter(known);
  if (!ys.length) { holder.replaceChildren(element("p", { class: "none" }, "nothing to show yet")); return; }
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const x0 = least(xs), x1 = Math.max(most(xs), x0 + 1e-9);
  let y0 = from0 ? 0 : least(ys), y1 = most(ys);
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || (from0 ? 0 : 1); y1 += Math.abs(y1) * 0.1 || 1; }
  const scale = (y) => (logarithmic ? Math.log10(y) : y);
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const py = (y) => H - BOTTOM - ((scale(y) - scale(y0)) / (scale(y1) - scale(y0))) * (H - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `${title}: ${shown.length} curves; arrow keys read them` });
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
    const values = shown.map((one) => [one.name, one.points.reduce((best, point) => (known(point[1]) && point[0] <= x ? point : best), null)]).filter(([, point]) => point);
    told.textContent = `${across} ${short(x)}: ` + values.slice(0, 12).map(([name, point]) => `${name} ${format(point[1])}`).join(", ");
  };
  svg.addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? Math.ceil(places.length / 10) : 1;
    const to = { ArrowRight: at + stride, ArrowLeft: at - stride, Home: 0, End: places.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); read(to); }
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = x0 + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
    read(places.reduce((best, place, index) => (Math.abs(place - x) < Math.abs(places[best] - x) ? index : best), 0));
  });
  holder.replaceChildren(svg);
}

// rows: {run, name, parts: {part: value}}; below 0 a part is drawn to the left.
function bars(section, title, unit, rows, colorOf, format) {
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))];
  const made = figure(section, title, unit, ["", ...parts], () => rows.map((row) => [row.name, ...parts.map((part) => (known(row.parts[part]) ? format(row.parts[part]) : ""))]));
  redraws.push(() => {
    const shown = rows.filter((row) => !hidden.has(row.run));
    const ends = shown.map((row) => Object.values(row.parts).filter((value) => value > 0).reduce((a, b) => a + b, 0));
    const starts = shown.map((row) => Object.values(row.parts).filter((value) => value < 0).reduce((a, b) => a + b, 0));
    const most = Math.max(...ends, 1e-12), least = Math.min(...starts, 0), height = 40 * shown.length + 46;
    const px = (value) => 8 + ((value - least) / (most - least)) * (W - 16);
    const svg = element("svg", { viewBox: `0 0 ${W} ${height}`, role: "img", tabindex: 0, "aria-label": `${title}: ${shown.length} bars; arrow keys read them` });
    shown.forEach((row, index) => {
      const total = Object.values(row.parts).reduce((a, b) => a + b, 0);
      svg.append(element("text", { x: 8, y: 40 * index + 14 }, `${row.name}  ${format(total)}`.slice(0, 78)));
      let right = 0, left = 0;
      for (const part of parts) {
        const value = row.parts[part];
        if (!value) continue;
        const from = value > 0 ? right : left + value;
        if (value > 0) right += value; else left += value;
        svg.append(element("rect", { x: px(from), y: 40 * index + 19, width: Math.max(0.3, px(from + Math.abs(value)) - px(from)), height: 14, fill: colorOf(part, row), "fill-opacity": value < 0 ? 0.4 : 1 }, element("title", {}, `${part} ${format(value)}`)));
      }
    });
    let x = 8, y = height - 24;
    for (const part of parts.filter((name) => rows.some((row) => row.parts[name]))) {
      const width = part.length * 6.2 + 26;
      if (x + width > W) { x = 8; y += 15; }
      svg.append(element("rect", { x, y: y - 9, width: 10, height: 10, fill: colorOf(part, rows[0]) }), element("text", { x: x + 14, y }, part));
      x += width;
    }
    svg.setAttribute("viewBox", `0 0 ${W} ${y + 12}`);
    let at = -1;
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
      if (to === undefined || !shown.length) return;
      event.preventDefault();
      at = Math.max(0, Math.min(shown.length - 1, to));
      made.told.textContent = `${shown[at].name}: ` + parts.filter((part) => shown[at].parts[part]).map((part) => `${part} ${format(shown[at].parts[part])}`).join(", ");
    });
    made.holder.replaceChildren(shown.length ? svg : element("p", { class: "none" }, "no run is shown"));
    made.done();
  });
}

function section(title) {
  const grid = element("div", { class: "grid" });
  const made = element("section", {}, element("h2", {}, title), grid);
  document.getElementById("plots").append(made);
  return grid;
}

const style = (index) => ({ color: color(index), dash: DATA.runs.length > 8 ? DASHES[Math.floor(index / 8) % DASHES.length] : "" });
const nonzero = (parts, names) => Object.fromEntries(names.filter((name) => parts?.[name]).map((name) => [name, parts[name]]));

function curves() {
  const grid = section("Curves");
  const names = [...new Set(DATA.runs.flatMap((run) => [...Object.keys(run.training), ...Object.keys(run.validation)]))];
  if (!names.length) grid.append(element("p", { class: "none" }, "no step has been taken yet"));
  for (const name of names) {
    const series = DATA.runs.flatMap((run, index) => {
      const both = run.training[name] && run.validation[name], found = [];
      if (run.training[name]) found.push({ run: index, name: `${run.name}${both ? " training" : ""}`, points: run.training[name], ...style(index), faint: both });
      if (run.validation[name]) found.push({ run: index, name: `${run.name}${both ? " validation" : ""}`, points: run.validation[name], ...style(index), dots: true });
      return found;
    });
    const title = { lr: "learning rate", norm: "gradient norm" }[name] || name;
    lines(grid, title, name === "loss" ? "dots: validation" : "", series, { loss: name === "loss", smooth: true });
  }
}

function elapsed(run) {
  let clock = 0;
  return run.usage.map((line) => [(clock += line.seconds || 0), line]);
}

function time() {
  const grid = section("Time");
  const rows = DATA.runs.flatMap((run, index) => run.processes.filter((one, at) => (DATA.runs.length === 1 || at === 0) && one.timing)
    .map((one) => ({ run: index, name: DATA.runs.length > 1 ? run.name : `process ${one.rank}${one.timing.clock === "device" ? " (on the GPU's clock)" : ""}`, parts: nonzero(one.timing.means, PHASES) })));
  if (rows.length) bars(grid, "where a step's time goes", "mean, warm-up left out", rows, phaseColor, seconds);
  const whole = DATA.runs.map((run, index) => {
    const parts = {};
    for (const line of run.usage) for (const [name, value] of Object.entries(line.phases)) parts[name] = (parts[name] || 0) + value;
    return { run: index, name: run.name, parts: nonzero(parts, PHASES) };
  }).filter((row) => Object.keys(row.parts).length);
  if (whole.length) bars(grid, "where all of the time went", "process 0", whole, phaseColor, seconds);
  for (const [index, run] of DATA.runs.entries()) if (run.usage.length && DATA.runs.length <= 4) timeline(grid, run, index);
  const speed = DATA.runs.map((run, index) => ({ run: index, name: run.name, ...style(index), points: elapsed(run).filter(([, line]) => line.steps).map(([at, line]) => [at, line.steps / Math.max(1e-9, line.seconds - (line.phases.start || 0))]) })).filter((one) => one.points.length);
  if (speed.length) lines(grid, "steps a second", "evaluation and saving counted", speed, { from0: true, across: "seconds" });
}

function timeline(grid, run, index) {
  const rows = () => elapsed(run).map(([at, line]) => [at, ...PHASES.map((name) => line.phases[name] || 0)]);
  const made = figure(grid, `timeline of ${run.name}`, "shares of process 0's time", ["seconds", ...PHASES], rows);
  redraws.push(() => {
    const places = elapsed(run), end = places[places.length - 1][0], px = (x) => LEFT + (x / end) * (W - LEFT - RIGHT);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `timeline of ${run.name}; arrow keys read it` });
    let before = 0;
    for (const [at, line] of places) {
      const total = PHASES.reduce((sum, name) => sum + (line.phases[name] || 0), 0);
      let y = H - BOTTOM;
      for (const name of PHASES) {
        const height = total ? ((line.phases[name] || 0) / total) * (H - TOP - BOTTOM) : 0;
        if (height > 0.2) svg.append(element("rect", { x: px(before), y: (y -= height), width: Math.max(0.5, px(at) - px(before)), height, fill: phaseColor(name) }));
      }
      before = at;
    }
    for (const at of ticks(0, end, false)) svg.append(element("text", { x: px(at), y: H - BOTTOM + 16, "text-anchor": "middle" }, short(at)));
    svg.append(element("text", { x: W / 2, y: H - 4, "text-anchor": "middle" }, "seconds"));
    let place = -1;
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: places.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      place = Math.max(0, Math.min(places.length - 1, to));
      const [at, line] = places[place];
      made.told.textContent = `until ${seconds(at)}: ` + PHASES.filter((name) => line.phases[name]).map((name) => `${name} ${seconds(line.phases[name])}`).join(", ");
    });
    made.holder.replaceChildren(hidden.has(index) ? element("p", { class: "none" }, "hidden") : svg);
    made.done();
  });
}

function memory() {
  const grid = section("Memory, power and energy");
  const held = DATA.runs.flatMap((run, index) => run.processes.filter((_, at) => DATA.runs.length === 1 || at === 0).map((one) => {
    const kinds = nonzero(one.held, ["parameters", "gradients", "optimizer"]), sum = Object.values(kinds).reduce((a, b) => a + b, 0);
    const peak = one.peak?.device || one.peak?.host || 0;
    return { run: index, name: DATA.runs.length > 1 ? run.name : `process ${one.rank}`, parts: { ...kinds, "everything else at the peak": Math.max(0, peak - sum) } };
  })).filter((row) => Object.values(row.parts).some((value) => value));
  const KINDS = { parameters: 210, gradients: 30, optimizer: 280 };
  if (held.length) bars(grid, "peak memory by kind", "everything else: activations, libraries, buffers", held, (part) => (part in KINDS ? `hsl(${KINDS[part]} var(--s) var(--l))` : "var(--line)"), megabytes);
  const level = (title, unit, value, format) => {
    const series = DATA.runs.map((run, index) => ({ run: index, name: run.name, ...style(index), points: elapsed(run).map(([at, line]) => [at, value(line)]).filter(([, y]) => known(y)) })).filter((one) => one.points.length);
    if (series.length) lines(grid, title, unit, series, { from0: true, across: "seconds", format });
  };
  level("most memory so far", "process 0", (line) => line.memory?.device ?? line.memory?.host, megabytes);
  level("cores in use", "process 0", (line) => line.cores, short);
  level("power", "W, of what can be measured", (line) => (line.watts ? Object.values(line.watts).reduce((a, b) => a + b, 0) : null), short);
  level("GPU utilisation", "share of time with a kernel", (line) => line.gpu, short);
  const rows = DATA.runs.filter((run) => run.used?.seconds).map((run) => {
    const joules = Object.entries(run.used.joules || {}).map(([name, value]) => `${name}: ${known(value) ? `${short(value)} J (${short(value / Math.max(1, run.used.samples))} J a sample)` : `not measurable here${run.used.why?.[name] ? `: ${run.used.why[name]}` : ""}`}`);
    return [run.name, seconds(run.used.seconds), short(run.used.core_hours), short(run.used.cpu_hours), short(run.used.gpu_hours), joules.join("; ")];
  });
  if (rows.length) table(grid.parentNode, ["run", "wall time, all starts", "core-hours lent", "core-hours busy", "GPU-hours lent", "energy"], rows);
}

function scaling() {
  for (const one of DATA.measurements) {
    const good = one.points.filter((point) => !point.failure);
    const grid = section(`Scaling: ${one.task}`);
    grid.before(element("ul", {}, ...(one.verdict || []).map((line) => element("li", {}, line))));
    const title = (point) => `${point.plan || "one process"} (batch ${point.batch})`;
    const first = good[0], byProcesses = good.filter((point) => point.origin === "asked" && point.batch / first.batch === (one.weak ? point.slices / first.slices : 1)).sort((a, b) => a.processes - b.processes);
    if (new Set(byProcesses.map((point) => point.processes)).size > 1) {
      const ideal = byProcesses.map((point) => [point.processes, (first.samples_per_second / first.processes) * point.processes]);
      lines(grid, "speed by processes", "samples/s", [{ name: "measured", color: color(0), dots: true, points: byProcesses.map((point) => [point.processes, point.samples_per_second]) }, { name: "ideal", color: "var(--faint)", dash: "4 3", points: ideal }], { from0: true, across: "processes" });
    }
    bars(grid, "speed", "samples/s", good.map((point) => ({ name: title(point), parts: { "samples/s": point.samples_per_second } })), () => color(0), short);
    bars(grid, "where a step's time goes", "shares", good.map((point) => ({ name: title(point), parts: nonzero(point.shares, PHASES) })), phaseColor, (value) => `${short(value * 100)} %`);
    const LOST = { data: 35, communication: 350, imbalance: 310, computing: 205, rest: 90 };
    if (good.length > 1) bars(grid, "efficiency lost", `beside ${title(first)}`, good.slice(1).map((point) => ({ name: title(point), parts: point.lost })), (part) => `hsl(${LOST[part] ?? 0} var(--s) var(--l))`, (value) => `${short(value * 100)} %`);
    const energy = good.filter((point) => known(point.joules_per_sample));
    if (energy.length) bars(grid, "energy", "J a sample", energy.map((point) => ({ name: title(point), parts: { "J a sample": point.joules_per_sample } })), () => color(3), short);
    const rows = one.points.map((point) => point.failure ? [title(point), `failed: ${point.failure}`] : [title(point), short(point.samples_per_second), short(point.speed_up), `${Math.round(point.efficiency * 100)} %`, megabytes(point.memory), known(point.share_of_reachable) ? `${short(point.share_of_reachable * 100)} %` : "", known(point.joules_per_sample) ? short(point.joules_per_sample) : "not measurable here"]);
    table(grid.parentNode, ["plan", "samples/s", "speed-up", "efficiency", "memory", "of reachable", "J a sample"], rows);
  }
}

function table(parent, head, rows, differs = () => false) {
  parent.append(element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": head.join(", ") }, element("table", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name))),
    ...rows.map((row) => element("tr", differs(row) ? { class: "differs" } : {}, ...row.map((cell) => element("td", {}, cell ?? "")))))));
}

function configuration() {
  const made = section("Configuration and environment").parentNode;
  const flat = (value, prefix) => value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([name, one]) => flat(one, prefix ? `${prefix}.${name}` : name)) : [[prefix, value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value)]];
  const columns = DATA.runs.map((run) => new Map([["status", run.status], ["last step", String(run.step)], ...flat(run.description, "")]));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const rows = names.map((name) => [name, ...columns.map((column) => column.get(name) ?? "")]);
  const differs = (row) => DATA.runs.length > 1 && new Set(row.slice(1)).size > 1;
  table(made, ["", ...DATA.runs.map((run) => run.name)], [...rows.filter(differs), ...rows.filter((row) => !differs(row))], differs);
}

function legend() {
  const box = document.getElementById("legend");
  if (DATA.runs.length < 2) { box.remove(); return; }
  DATA.runs.forEach((run, index) => {
    const check = element("input", { type: "checkbox", checked: "" });
    check.addEventListener("change", () => { if (check.checked) hidden.delete(index); else hidden.add(index); draw(); });
    box.append(element("label", {}, check, element("span", { class: "swatch", style: `background:${color(index)}` }), `${run.name} (${run.status}, step ${run.step})`));
  });
}

const draw = () => redraws.forEach((one) => one());
document.getElementById("theme").addEventListener("change", (event) => {
  if (event.target.value === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = event.target.value;
});
document.getElementById("smoothing").addEventListener("input", draw);
document.getElementById("logarithmic").addEventListener("change", draw);
document.getElementById("summary").textContent = DATA.runs.map((run) => `${run.name}: ${run.status}, step ${run.step}`).slice(0, 3).join("; ") + (DATA.runs.length > 3 ? `; and ${DATA.runs.length - 3} more` : "");
legend();
if (DATA.runs.length) { curves(); time(); memory(); }
scaling();
if (DATA.runs.length) configuration();
draw();
