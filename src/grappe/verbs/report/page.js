// What a report shows, section by section; plots.js draws it.

const style = (index) => ({ color: color(index), dash: DATA.runs.length > 8 ? DASHES[Math.floor(index / 8) % DASHES.length] : "" });
const nonzero = (parts, names) => Object.fromEntries(names.filter((name) => parts?.[name]).map((name) => [name, parts[name]]));
const swatch = (index) => element("span", { class: "swatch", style: `background:${color(index)}` });

// The results' columns show what differs: a run without a name of its own is found again by its folder.
const nameOf = (index) => (DATA.runs[index].description.name ? DATA.results.rows[index].label : DATA.results.rows[index].run);

// The first thing that a meeting asks: which run is best, and at what price.
function results() {
  const { metric, lower, keys, rows, groups } = DATA.results, made = section(t("Results")).parentNode;
  const columns = [
    ["plan", t("plan"), (text) => t(text)], ...keys.map((key) => [key, key, String]),
    ["best", t("best {metric}", { metric }), four], ["loss", t("final loss"), four], ["training_loss", t("training loss"), four],
    ["test", t("test {metric}", { metric }), four], ["seconds", t("time"), seconds], ["gpu_hours", t("GPU-hours"), short], ["core_hours", t("core-hours"), short],
  ].filter(([key]) => keys.includes(key) || rows.some((row) => row[key] !== null && row[key] !== ""));
  const value = (row, key) => (keys.includes(key) ? row.differs[key] : row[key]);
  // Runs that differ by seed alone are one block, below the row of their means.
  const inGroup = new Map(groups.flatMap((group) => group.rows.map((row) => [row, group])));
  const blocks = [...groups.map((group) => ({ group, rows: group.rows })), ...rows.map((_, index) => ({ rows: [index] })).filter(({ rows: [index] }) => !inGroup.has(index))];
  const key = (block, name) => (block.group ? block.group.mean[name] ?? value(rows[block.rows[0]], name) : value(rows[block.rows[0]], name));
  const order = (a, b, sign) => {
    const missing = [a, b].map((item) => item === null || item === undefined || item === "");
    if (missing[0] || missing[1]) return missing[0] - missing[1];
    const [x, y] = [Number(a), Number(b)], numbers = Number.isFinite(x) && Number.isFinite(y);
    return sign * (numbers ? x - y : String(a).localeCompare(String(b), undefined, { numeric: true }));
  };
  const runCell = (index) => element("td", { title: rows[index].label }, swatch(index), nameOf(index), rows[index].status === "finished" ? "" : element("small", {}, ` ${t(rows[index].status)}`), rows[index].note ? element("small", { class: "note" }, rows[index].note) : "");
  const figures = (row) => columns.map(([name, , format]) => element("td", name === "test" ? { title: row.test_checkpoint } : {}, known(value(row, name)) || typeof value(row, name) === "string" ? format(value(row, name)) : ""));
  const meanOf = ({ group, rows: members }) => element("tr", { class: "mean" }, element("td", {}, t("mean ± standard deviation of {number} seeds", { number: members.length })),
    ...columns.map(([name, , format]) => element("td", {}, known(group.mean[name]) ? `${format(group.mean[name])} ± ${short(Number(group.deviation[name].toPrecision(2)))}` : name === "seed" ? "" : t(String(value(rows[members[0]], name) ?? "")))));
  const body = element("tbody");
  let sorted = ["best", lower ? 1 : -1];
  const fill = () => {
    const [name, sign] = sorted, by = (a, b) => order(a, b, sign);
    blocks.sort((a, b) => by(key(a, name), key(b, name)));
    body.replaceChildren(...blocks.flatMap((block) => [...(block.group ? [meanOf(block)] : []),
      ...[...block.rows].sort((a, b) => by(value(rows[a], name), value(rows[b], name))).map((index) => element("tr", block.group ? { class: "member" } : {}, runCell(index), ...figures(rows[index])))]));
    for (const head of made.querySelectorAll("th[data-key]")) head.setAttribute("aria-sort", head.dataset.key === name ? (sign > 0 ? "ascending" : "descending") : "none");
  };
  const heads = columns.map(([name, title]) => {
    const press = element("button", { type: "button" }, title);
    press.addEventListener("click", () => { sorted = [name, sorted[0] === name ? -sorted[1] : name === "best" && !lower ? -1 : 1]; fill(); });
    return element("th", { scope: "col", "data-key": name }, press);
  });
  made.querySelector("h2").append(button("CSV", t("save {title} as CSV", { title: t("Results") }), () => save("results.csv", "text/csv", csv(["run", ...columns.map(([name]) => name)], rows.map((row, index) => [nameOf(index), ...columns.map(([name]) => value(row, name))])))));
  made.append(element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": t("Results") }, element("table", { id: "results" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, t("run")), ...heads)), body)));
  fill();
  const numbers = (row) => Object.fromEntries(columns.map(([name]) => [name, value(row, name)]).filter(([, text]) => text !== null && text !== "").map(([name, text]) => [name, Number(text)]));
  made.append(element("div", { class: "grid", style: "max-width: 36rem; margin-top: 1rem" }));
  scatter(made.lastChild, columns.map(([name, title]) => [name, title]), rows.map((row, run) => ({ run, name: row.label, color: color(run), values: numbers(row) })));
}

function predictions() {
  for (const [index, run] of DATA.runs.entries()) {
    const made = run.predictions;
    if (!made) continue;
    const grid = section(t("Predictions of {run}", { run: run.label }));
    if (made.why) { grid.before(element("p", { class: "none" }, made.why)); continue; }
    grid.before(element("p", {}, t("{right} of {samples} samples of {split} are right, with {checkpoint}.", made)));
    if (made.matrix) confusion(grid, made);
    else table(grid, t("most frequent confusions"), [t("class"), t("predicted"), t("samples")], made.confusions);
    lines(grid, t("losses of samples"), t("samples"), [{ run: index, name: run.label, color: color(index), points: stairs(made.losses) }], { across: t("log10 of the loss"), from0: true });
    if (made.pictures.length) grid.append(element("figure", { "data-drawn": "yes" }, element("figcaption", {}, t("samples"), " ", element("small", {}, t("class → prediction (loss); the mistakes with the highest loss first"))), element("div", { class: "pictures" }, ...made.pictures.map((one) => picture(one, index)))));
  }
}

function stairs({ from, to, samples }, density = false) {
  const bin = (to - from) / samples.length, unit = density ? bin * samples.reduce((a, b) => a + b, 0) || 1 : 1;
  return samples.flatMap((number, at) => [[from + at * bin, number / unit], [from + (at + 1) * bin, number / unit]]);
}

function weights() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.weights ?? {})))];
  if (!names.length) return;
  const grid = section(t("Weights"));
  for (const name of names) {
    const series = DATA.runs.map((run, index) => ({ run: index, name: run.label, ...style(index), points: run.weights?.[name] ? stairs(run.weights[name], true) : [] })).filter((one) => one.points.length);
    lines(grid, name, t("density of the values"), series, { across: t("value"), from0: true });
  }
}

function picture({ width, height, pixels, target, predicted, loss, sample }) {
  const canvas = element("canvas", { width, height, role: "img", "aria-label": t("sample {sample}", { sample }) });
  canvas.getContext("2d").putImageData(new ImageData(Uint8ClampedArray.from(atob(pixels), (letter) => letter.charCodeAt(0)), width, height), 0, 0);
  return element("div", target === predicted ? {} : { class: "wrong" }, canvas, `${target} → ${predicted} (${short(Number(loss.toPrecision(2)))})`);
}

function confusion(grid, { matrix }) {
  const title = t("confusion matrix"), size = matrix.length, side = Math.min(64, 400 / size), most = Math.max(1, ...matrix.flatMap((row, at) => row.filter((_, column) => column !== at)));
  const made = figure(grid, title, t("rows: class; columns: prediction; darker: more samples"), ["", ...matrix.keys()], () => matrix.map((row, at) => [at, ...row]));
  const svg = element("svg", { viewBox: `0 0 ${W} ${size * side + 34}`, role: "img", tabindex: 0, "aria-label": title });
  matrix.forEach((row, at) => {
    const total = row.reduce((a, b) => a + b, 0) || 1, y = 24 + at * side;
    if (side >= 12 || at % 5 === 0) svg.append(element("text", { x: 34, y: y + side * 0.7, "text-anchor": "end" }, at), element("text", { x: 40 + (at + 0.5) * side, y: 18, "text-anchor": "middle" }, at));
    row.forEach((count, column) => {
      const depth = column === at ? (0.85 * count) / total : count ? 0.15 + (0.85 * count) / most : 0;
      svg.append(element("rect", { x: 40 + column * side, y, width: side - 1, height: side - 1, fill: `hsl(${column === at ? 205 : 0} 68% 50%)`, "fill-opacity": depth || 0.03 }, element("title", {}, `${at} → ${column}: ${count}`)));
      if (count && side >= 20) svg.append(element("text", { x: 40 + (column + 0.5) * side - 0.5, y: y + side * 0.65, "text-anchor": "middle", class: "count" }, count));
    });
  });
  made.holder.append(svg);
  made.done();
}

function curves() {
  const words = { loss: t("loss"), lr: t("learning rate"), norm: t("gradient norm"), noise_scale: t("gradient noise scale") };
  const drawn = (grid, title, unit, pointsOf, options) => {
    const series = DATA.runs.map((run, index) => ({ run: index, name: run.label, points: pointsOf(run) || [], ...style(index), dots: options.dots })).filter((one) => one.points.length);
    if (series.length) lines(grid, title, unit, series, options);
  };
  const names = (kind) => [...new Set(DATA.runs.flatMap((run) => Object.keys(run[kind])))];
  const steps = names("training").filter((name) => !(name in words) || name === "loss"), scores = names("validation");
  if (!steps.length && !scores.length) section(t("Curves")).append(element("p", { class: "none" }, t("no step has been taken yet")));
  if (scores.length) {
    const grid = section(t("Validation"));
    for (const name of scores) drawn(grid, name === "noise_scale" ? words[name] : t("validation {name}", { name: words[name] ?? name }), "", (run) => run.validation[name], { loss: name.startsWith("loss"), dots: true });
  }
  if (!steps.length) return;
  const grid = section(t("Training"));
  for (const name of steps) drawn(grid, t("training {name}", { name: words[name] ?? name.replace("training_", "") }), "", (run) => run.training[name], { loss: name.includes("loss"), smooth: true });
  for (const name of ["lr", "norm"]) drawn(grid, words[name], "", (run) => run.training[name], { smooth: name === "norm" });
  const sources = DATA.runs.flatMap((run) => Object.entries(run.description.drawn_until ?? {}).map(([step, counts]) => [run.label, step, Object.entries(counts).map(([name, count]) => `${name}: ${count}`).join("; ")]));
  if (sources.length) table(grid.parentNode, t("Samples drawn from each source, up to a step"), [t("run"), t("step"), t("samples")], sources);
  drawn(grid, t("throughput"), t("samples/s, of steps"), (run) => run.speed, { from0: true });
  drawn(grid, t("processes"), t("of each start"), (run) => run.sizes, { from0: true });
}

function elapsed(run) {
  let clock = 0;
  return run.usage.map((line) => [(clock += Math.max(0, (line.seconds || 0) - (line.phases.start || 0))), line]);
}

function time() {
  const grid = section(t("Time"));
  const rows = DATA.runs.flatMap((run, index) => run.processes.filter((one, at) => (DATA.runs.length === 1 || at === 0) && one.timing)
    .map((one) => ({ run: index, name: DATA.runs.length > 1 ? run.label : one.timing.clock === "device" ? t("process {rank} (on the GPU's clock)", one) : t("process {rank}", one), parts: nonzero(one.timing.means, PHASES) })));
  if (rows.length) bars(grid, t("where a step's time goes"), t("mean, warm-up left out"), rows, phaseColor, seconds);
  const whole = DATA.runs.map((run, index) => {
    const parts = {};
    for (const line of run.usage) for (const [name, value] of Object.entries(line.phases)) parts[name] = (parts[name] || 0) + value;
    return { run: index, name: run.label, parts: nonzero(parts, PHASES) };
  }).filter((row) => Object.keys(row.parts).length);
  if (whole.length) bars(grid, t("where all of the time went"), t("process 0, without its start"), whole, phaseColor, seconds);
  for (const [index, run] of DATA.runs.entries()) if (elapsed(run).at(-1)?.[0] > 0 && DATA.runs.length <= 4) timeline(grid, run, index);
}

function timeline(grid, run, index) {
  const rows = () => elapsed(run).map(([at, line]) => [at, ...PHASES.map((name) => line.phases[name] || 0)]);
  const made = figure(grid, t("timeline of {run}", { run: run.label }), t("shares of process 0's time"), [t("seconds"), ...PHASES.map((name) => t(name))], rows);
  redraws.push(() => {
    const places = elapsed(run), end = places[places.length - 1][0], px = (x) => LEFT + (x / end) * (W - LEFT - RIGHT);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": t("timeline of {run}; arrow keys read it", { run: run.label }) });
    svg.legend = PHASES.filter((name) => places.some(([, line]) => line.phases[name])).map((name) => [t(name), phaseColor(name)]);
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
    svg.append(element("text", { x: W / 2, y: H - 4, "text-anchor": "middle" }, t("seconds")));
    let place = -1;
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: places.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      place = Math.max(0, Math.min(places.length - 1, to));
      const [at, line] = places[place];
      made.told.textContent = `${seconds(at)}: ` + PHASES.filter((name) => line.phases[name]).map((name) => `${t(name)} ${seconds(line.phases[name])}`).join(", ");
    });
    made.holder.replaceChildren(hidden.has(index) ? element("p", { class: "none" }, t("hidden")) : svg);
    made.done();
  });
}

function memory() {
  const grid = section(t("Memory, power and energy"));
  const held = DATA.runs.flatMap((run, index) => run.processes.filter((_, at) => DATA.runs.length === 1 || at === 0).map((one) => {
    const kinds = nonzero(one.held, ["parameters", "gradients", "optimizer"]), sum = Object.values(kinds).reduce((a, b) => a + b, 0);
    const peak = one.peak?.device || one.peak?.host || 0;
    return { run: index, name: DATA.runs.length > 1 ? run.label : t("process {rank}", one), share: sum / peak, parts: { ...kinds, "everything else at the peak": Math.max(0, peak - sum) } };
  })).filter((row) => row.share > 0.02); // a bar of the rest alone shows nothing
  const KINDS = { parameters: 210, gradients: 30, optimizer: 280 };
  if (held.length) bars(grid, t("peak memory by kind"), t("everything else: activations, libraries, buffers"), held, (part) => (part in KINDS ? `hsl(${KINDS[part]} var(--s) var(--l))` : "var(--line)"), megabytes);
  const level = (title, unit, value, format) => {
    const series = DATA.runs.map((run, index) => ({ run: index, name: run.label, ...style(index), points: run.usage.map((line) => [line.step, value(line)]).filter(([step, y]) => known(step) && known(y)) })).filter((one) => one.points.length);
    if (series.length) lines(grid, title, unit, series, { from0: true, format });
  };
  level(t("most memory so far"), t("process 0"), (line) => line.memory?.device ?? line.memory?.host, megabytes);
  level(t("cores in use"), t("process 0"), (line) => line.cores, short);
  level(t("power"), t("W, of what can be measured"), (line) => (line.watts ? Object.values(line.watts).reduce((a, b) => a + b, 0) : null), short);
  level(t("GPU utilisation"), t("share of time with a kernel"), (line) => line.gpu, short);
  const rows = DATA.runs.filter((run) => run.used?.seconds).map((run) => {
    const joules = Object.entries(run.used.joules || {}).map(([name, value]) => known(value) ? `${name}: ${short(value)} J (${short(value / Math.max(1, run.used.samples))} J/${t("sample")})` : `${name}: ${t("not measurable here")}`);
    const peak = Math.max(0, ...run.processes.map((one) => one.peak?.device || one.peak?.host || 0)), begin = run.usage.reduce((sum, line) => sum + (line.phases.start || 0), 0);
    return [run.label, seconds(run.used.seconds), begin ? seconds(begin) : "", peak ? megabytes(peak) : "", short(run.used.core_hours), short(run.used.cpu_hours), run.used.gpu_hours ? short(run.used.gpu_hours) : "", joules.join("; "), waited(run.description.headspace)];
  });
  if (rows.length) table(grid.parentNode, t("Cost of each run"), [t("run"), t("wall time, all starts"), t("start"), t("peak memory of a process"), t("core-hours reserved"), t("core-hours busy"), t("GPU-hours reserved"), t("energy"), t("waiting for data, last start")], rows);
  const off = (value) => (known(value) ? `${value < 0 ? "" : "+"}${(100 * value).toFixed(2)} %` : "");
  const size = (value) => (known(value) ? megabytes(value) : ""), took = (value) => (known(value) ? seconds(value) : "");
  const foreseen = DATA.runs.filter((run) => run.foreseen).map(({ label, foreseen: one }) => [label, size(one.states), size(one.states_measured), off(one.states_error), size(one.peak), size(one.peak_measured), off(one.peak_error), took(one.step), took(one.step_measured), off(one.step_error), one.why || one.step_why]);
  if (foreseen.length) table(grid.parentNode, t("Memory and step: forecast and measurement"), [t("run"), t("states: forecast"), t("measured"), t("error"), t("peak: forecast"), t("measured"), t("error"), t("step: forecast"), t("measured"), t("error"), t("why not")], foreseen);
}

function waited(headspace) {
  if (!known(headspace?.share)) return "";
  return `${short(100 * headspace.share)} %${headspace.advice ? `: ${headspace.advice}` : ""}`;
}

// The proof of scaling that a proposal for many nodes has.
function proposals() {
  for (const one of DATA.proposals ?? []) {
    const grid = section(t("Proof of scaling")), made = grid.parentNode, { run } = one;
    const applied = one.applied_for ? t("{applied_for}, for {steps} steps on {nodes} nodes, without evaluations and checkpoints", one) : t("not known: give --training-steps");
    const pairs = (values, sign) => Object.entries(values).map(([name, value]) => `${name}${sign}${value}`).join(", ");
    table(made, "", ["", ""], [[t("site"), one.site], [t("rule"), one.rule], [t("test case"), `${run.task}: ${pairs(run.fields, "=")}`], [t("software"), pairs(run.versions, " ")], [t("device"), one.device], [t("plan"), run.plan || t("one process")], [t("applied for"), applied]]);
    table(made, t("Rules"), [t("state"), t("rule"), t("measured")], one.checks.map((check) => [mark(check.state), check.rule, check.measured]));
    table(made, t("Measured node counts"), one.columns, one.table);
    const names = { strong: t("strong scaling"), weak: t("weak scaling") }, base = one.rows[0], counts = [...new Set(one.rows.map((row) => row.nodes))].sort((a, b) => a - b);
    const series = (key, rule, value) => [...Object.keys(names).map((kind, index) => ({ name: names[kind], color: color(index), dots: true, points: [base, ...one.rows.filter((row) => row.kind === kind && row !== base)].map((row) => [row.nodes, row[key]]) })).filter((each) => each.points.length > 1),
      { name: rule, color: "var(--faint)", dash: "4 3", points: counts.map((count) => [count, value(count)]) }];
    made.append(element("h3", {}, t("Plots"), element("small", { class: "key" }, ...Object.keys(names).flatMap((kind, index) => [swatch(index), names[kind]]), ` (${t("dashed: ideal, rule")})`)), grid);
    lines(grid, t("speed-up"), t("to the fewest nodes"), series("speed_up", t("ideal"), (count) => count / base.nodes), { from0: true, across: t("nodes") });
    lines(grid, t("efficiency"), t("to the fewest nodes"), series("efficiency", t("rule"), () => one.efficiency), { from0: true, across: t("nodes") });
    bars(grid, t("where a step's time goes"), t("shares"), one.rows.map((row) => ({ name: `${names[row.kind]}, ${t("nodes")}: ${row.nodes}`, parts: nonzero(row.shares, PHASES) })), phaseColor, (value) => `${short(value * 100)} %`);
    bars(grid, t("efficiency lost"), t("to the fewest nodes"), one.rows.filter((row) => row.lost).map((row) => ({ name: `${names[row.kind]}, ${t("nodes")}: ${row.nodes}`, parts: row.lost })), (part) => `hsl(${LOST[part] ?? 0} var(--s) var(--l))`, (value) => `${short(value * 100)} %`);
    if (one.script.length) made.append(element("h3", {}, t("Batch script on {nodes} nodes", one)), element("pre", { class: "script" }, one.script.join("\n")));
  }
}

function mark(state) {
  return element("span", { class: state === "failed" ? "mark wrong" : "mark" }, `${{ passed: "✓", failed: "✗" }[state] ?? "–"} ${t(state)}`); // t("passed"), t("not compared")
}

const LOST = { data: 35, communication: 350, imbalance: 310, computing: 205, rest: 90 };

function scaling() {
  for (const one of DATA.measurements) {
    const good = one.points.filter((point) => !point.failure);
    const grid = section(t("Scaling: {task}", one));
    grid.before(element("ul", {}, ...(one.verdict || []).map((line) => element("li", {}, line))));
    const title = (point) => `${point.plan || t("one process")} (${t("batch")} ${point.batch})`;
    const first = good[0], byProcesses = good.filter((point) => point.origin === "asked" && point.batch / first.batch === (one.weak ? point.slices / first.slices : 1)).sort((a, b) => a.processes - b.processes);
    if (new Set(byProcesses.map((point) => point.processes)).size > 1) {
      const ideal = byProcesses.map((point) => [point.processes, (first.samples_per_second / first.processes) * point.processes]);
      lines(grid, t("speed by processes"), "samples/s", [{ name: t("measured"), color: color(0), dots: true, points: byProcesses.map((point) => [point.processes, point.samples_per_second]) }, { name: t("ideal"), color: "var(--faint)", dash: "4 3", points: ideal }], { from0: true, across: t("processes") });
    }
    bars(grid, t("speed"), "samples/s", good.map((point) => ({ name: title(point), parts: { "samples/s": point.samples_per_second } })), () => color(0), short);
    bars(grid, t("where a step's time goes"), t("shares"), good.map((point) => ({ name: title(point), parts: nonzero(point.shares, PHASES) })), phaseColor, (value) => `${short(value * 100)} %`);
    if (good.some((point) => point.lost)) bars(grid, t("efficiency lost"), t("to the first plan of the same batch"), good.filter((point) => point.lost).map((point) => ({ name: title(point), parts: point.lost })), (part) => `hsl(${LOST[part] ?? 0} var(--s) var(--l))`, (value) => `${short(value * 100)} %`);
    waterfall(grid, one);
    const energy = good.filter((point) => known(point.joules_per_sample));
    if (energy.length) bars(grid, t("energy"), t("J per sample"), energy.map((point) => ({ name: title(point), parts: { [t("J per sample")]: point.joules_per_sample } })), () => color(3), short);
    const rows = one.points.map((point) => point.failure ? [title(point), `${t("failed")}: ${point.failure}`] : [title(point), short(point.samples_per_second), short(point.speed_up), known(point.efficiency) ? `${Math.round(point.efficiency * 100)} %` : "", megabytes(point.memory), known(point.share_of_reachable) ? `${short(point.share_of_reachable * 100)} %` : "", known(point.joules_per_sample) ? short(point.joules_per_sample) : t("not measurable here")]);
    table(grid.parentNode, t("Measured plans"), [t("plan"), "samples/s", t("speed-up"), t("efficiency"), t("memory"), t("of reachable"), t("J per sample")], rows);
  }
}

// Shares of a step, from what is lost to what is useful; useful compute has the colour of text, so that what is left of it is seen.
function waterfall(grid, one) {
  const whys = (one.why || []).filter((why) => !why.failure);
  if (!whys.length) return;
  const names = Object.keys(whys[0].parts), title = (why) => `${why.plan || t("one process")} (${t("batch")} ${why.batch})`;
  const hue = (part) => (part === "useful compute" ? "var(--text)" : part === "not explained" ? "var(--line)" : `hsl(${(names.indexOf(part) * 137.5 + 35) % 360} var(--s) var(--l))`);
  bars(grid, t("why: where a step's time goes"), t("shares"), whys.map((why) => ({ name: t("{plan}, {seconds} per step", { plan: title(why), seconds: seconds(why.seconds) }), parts: nonzero(why.parts, names) })), hue, (value) => `${short(value * 100)} %`);
  const rows = whys.flatMap((why) => why.remedies.map((remedy) => [title(why), remedy.part, known(why.parts[remedy.part]) ? `${short(100 * why.parts[remedy.part])} %` : "", remedy.word, remedy.saves ? t("up to {gain}x", { gain: short(1 / Math.max(0.001, 1 - remedy.saves)) }) : ""]));
  if (rows.length) table(grid.parentNode, t("What would make steps faster"), [t("plan"), t("part"), t("share"), t("remedy"), t("gain")], rows);
}

function learningRates() {
  for (const one of DATA.learning_rates) {
    const grid = section(t("Learning rates: {task}", one)), linear = one.ramp?.kind === "linear", band = one.band;
    const rates = band && { steepest: short(band.steepest), largest: short(band.largest_stable), suggested: short(band.suggested) };
    grid.before(element("p", {}, `${band ? t("Steepest {steepest}, largest stable {largest}, suggested {suggested}.", rates) : t("No suggestion: {reason}", one)} ${t("Plan:")} ${one.plan || t("one process")}.`));
    const series = one.curves.map((curve, index) => ({ name: t("seed {seed}", curve), color: color(index), points: curve.lr.map((rate, at) => [linear ? rate : Math.log10(rate), curve.loss[at]]) }));
    lines(grid, t("loss while the learning rate rises"), "", series, { smooth: true, across: linear ? t("learning rate") : t("log10 of the learning rate") });
  }
}

function studies() {
  for (const one of DATA.studies) {
    const grid = section(t("Search: {name}", one)), best = one.trials.find((trial) => trial.best);
    const count = (state) => one.trials.filter((trial) => trial.state === state).length;
    const counts = ["complete", "paused", "failed", "open"].filter(count).map((state) => `${count(state)} ${t(state)}`).join(", ");
    grid.before(element("p", {}, `${one.task}: ${counts || t("no trial yet")}.` + (best ? ` ${t("Best: trial {number}, {metric} {value}.", { number: best.number, metric: one.metric, value: short(best.value) })}` : "")));
    if (one.trials.length) parallel(grid, one);
    const values = (trial) => ({ best: trial.value, ...Object.fromEntries(one.axes.map((axis, index) => [`=${axis.name}`, Number(trial.texts[index])])) });
    scatter(grid, [["best", one.metric], ...one.axes.map(({ name }) => [`=${name}`, name])], one.trials.map((trial) => ({ name: `${t("trial")} ${trial.number}${trial.state === "paused" ? ` (${t("paused")})` : ""}`, color: color(trial.best ? 1 : 0), values: values(trial) })));
    const shares = Object.entries(one.importance).sort((a, b) => b[1] - a[1]);
    if (shares.length) bars(grid, t("importance"), t("share of what makes a trial good (PED-ANOVA)"), shares.map(([name, share]) => ({ name, parts: { share } })), () => color(0), (value) => `${short(value * 100)} %`);
  }
}

function table(parent, title, head, rows, differs = () => false) {
  const kept = head.map((_, column) => rows.some((row) => (row[column] ?? "") !== "")), filter = (row) => row.filter((_, column) => kept[column]);
  const columns = filter(head);
  if (title) parent.append(element("h3", {}, title, button("CSV", t("save {title} as CSV", { title }), () => save(`${title}.csv`, "text/csv", csv(columns, rows.map(filter))))));
  parent.append(element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title || columns.join(", ") }, element("table", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))),
    ...rows.map((row) => element("tr", differs(row) ? { class: "differs" } : {}, ...filter(row).map((cell) => element("td", {}, cell ?? "")))))));
}

function configuration() {
  const made = section(t("Configuration and environment")).parentNode;
  const flat = (value, prefix) => value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([name, one]) => flat(one, prefix ? `${prefix}.${name}` : name)) : [[prefix, value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value)]];
  const columns = DATA.runs.map((run) => new Map([["folder", run.name], ["status", run.status], ["last step", String(run.step)], ...flat(run.description, "")]));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const rows = names.map((name) => [name, ...columns.map((column) => column.get(name) ?? "")]);
  const differs = (row) => DATA.runs.length > 1 && new Set(row.slice(1)).size > 1;
  const heads = [" ", ...DATA.runs.map((run) => run.label)], differing = rows.filter(differs);
  if (differing.length) table(made, t("What differs"), heads, differing, differs);
  const rest = element("details", { id: "configuration" }, element("summary", {}, t("all {number} entries", { number: rows.length })));
  table(rest, "", heads, rows);
  made.append(rest);
}

// What changed in the code from the first run that has some: as text, in the form of diff -u.
function code() {
  if (!DATA.code.length) return;
  const made = section(t("Code")).parentNode;
  for (const { from, to, lines: changed, all } of DATA.code) {
    const kind = (line) => ({ "+": "added", "-": "removed" })[line[0]] ?? "", shown = changed.slice(2).map((line) => element("span", { class: kind(line) }, `${line}\n`));
    made.append(element("details", { open: "" }, element("summary", {}, t("from {from} to {to}", { from, to })), element("pre", { class: "diff" }, ...shown, all > changed.length ? t("and {number} more lines", { number: all - changed.length }) : "")));
  }
}

function legend() {
  const box = document.getElementById("legend");
  if (DATA.runs.length < 2) { box.remove(); return; }
  DATA.runs.forEach((run, index) => {
    const check = element("input", { type: "checkbox", checked: "" });
    check.addEventListener("change", () => { if (check.checked) hidden.delete(index); else hidden.add(index); draw(); });
    const name = nameOf(index);
    box.append(element("label", {}, check, swatch(index), run.label.includes(name) ? run.label : `${name} (${run.label})`));
  });
}

// A page that loads itself again keeps what was chosen on it.
function remember() {
  const controls = ["across", "smoothing", "theme", "logarithmic"].map((name) => document.getElementById(name));
  const key = `grappe ${location.pathname}`, value = (control) => (control.type === "checkbox" ? "checked" : "value");
  try {
    JSON.parse(sessionStorage.getItem(key) || "[]").forEach((kept, index) => { controls[index][value(controls[index])] = kept; });
    addEventListener("pagehide", () => sessionStorage.setItem(key, JSON.stringify(controls.map((control) => control[value(control)]))));
  } catch { /* a browser that keeps nothing for files */ }
}

const draw = () => redraws.forEach((one) => one());
const themed = () => { const { value } = document.getElementById("theme"); if (value === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = value; };
document.getElementById("theme").addEventListener("change", themed);
document.getElementById("smoothing").addEventListener("input", draw);
document.getElementById("logarithmic").addEventListener("change", draw);
document.getElementById("across").addEventListener("change", () => { zoom = null; draw(); });
const states = Object.entries(Object.groupBy(DATA.runs, (run) => t(run.status))).map(([state, runs]) => (DATA.runs.length > 1 ? `${runs.length} ${state}` : `${state}, ${t("step")} ${runs[0].step}`));
document.getElementById("summary").textContent = states.join(", ");
remember();
themed();
legend();
const bar = document.getElementById("bar");
if (DATA.proposals) for (const control of bar.querySelectorAll("#controls label")) control.hidden = !control.querySelector("#theme");
if (DATA.runs.length) { results(); bar.parentNode.append(bar); predictions(); weights(); curves(); time(); memory(); }
proposals();
scaling();
learningRates();
studies();
if (DATA.runs.length) { code(); configuration(); }
draw();
