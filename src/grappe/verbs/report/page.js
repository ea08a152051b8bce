// What a report shows, section by section; plots.js draws it.

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
    return [run.name, seconds(run.used.seconds), short(run.used.core_hours), short(run.used.cpu_hours), short(run.used.gpu_hours), joules.join("; "), waited(run.description.headspace)];
  });
  if (rows.length) table(grid.parentNode, ["run", "wall time, all starts", "core-hours lent", "core-hours busy", "GPU-hours lent", "energy", "waiting for data, last start"], rows);
  const off = (value) => (known(value) ? `${value < 0 ? "" : "+"}${(100 * value).toFixed(2)} %` : "");
  const told = (value) => (known(value) ? megabytes(value) : "");
  const took = (value) => (known(value) ? seconds(value) : "");
  const foreseen = DATA.runs.filter((run) => known(run.foreseen?.states)).map(({ name, foreseen: one }) => [name, told(one.states), told(one.states_measured), off(one.states_error), told(one.peak), told(one.peak_measured), off(one.peak_error), took(one.step), took(one.step_measured), off(one.step_error)]);
  if (foreseen.length) table(grid.parentNode, ["run", "states foreseen", "measured", "error", "peak foreseen", "measured", "error", "step foreseen", "measured", "error"], foreseen);
}

function waited(headspace) {
  if (!known(headspace?.share)) return "";
  const advice = headspace.advice ? `: ${headspace.advice}` : "";
  return `${short(100 * headspace.share)} % of the time${advice}`;
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
    if (good.some((point) => point.lost)) bars(grid, "efficiency lost", "to the first plan of the same batch", good.filter((point) => point.lost).map((point) => ({ name: title(point), parts: point.lost })), (part) => `hsl(${LOST[part] ?? 0} var(--s) var(--l))`, (value) => `${short(value * 100)} %`);
    waterfall(grid, one);
    const energy = good.filter((point) => known(point.joules_per_sample));
    if (energy.length) bars(grid, "energy", "J a sample", energy.map((point) => ({ name: title(point), parts: { "J a sample": point.joules_per_sample } })), () => color(3), short);
    const rows = one.points.map((point) => point.failure ? [title(point), `failed: ${point.failure}`] : [title(point), short(point.samples_per_second), short(point.speed_up), known(point.efficiency) ? `${Math.round(point.efficiency * 100)} %` : "", megabytes(point.memory), known(point.share_of_reachable) ? `${short(point.share_of_reachable * 100)} %` : "", known(point.joules_per_sample) ? short(point.joules_per_sample) : "not measurable here"]);
    table(grid.parentNode, ["plan", "samples/s", "speed-up", "efficiency", "memory", "of reachable", "J a sample"], rows);
  }
}

// Shares of a step, from what is lost to what is useful; useful compute has the colour of text, so that what is left of it is seen.
function waterfall(grid, one) {
  const whys = (one.why || []).filter((why) => why.parts);
  if (!whys.length) return;
  const names = Object.keys(whys[0].parts), title = (why) => `${why.plan || "one process"} (batch ${why.batch})`;
  const hue = (part) => (part === "useful compute" ? "var(--text)" : part === "not explained" ? "var(--line)" : `hsl(${(names.indexOf(part) * 137.5 + 35) % 360} var(--s) var(--l))`);
  bars(grid, "why: where a step's time goes", "shares; evaluations and saves spread over steps", whys.map((why) => ({ name: `${title(why)}, ${seconds(why.seconds)} a step`, parts: nonzero(why.parts, names) })), hue, (value) => `${short(value * 100)} %`);
  const rows = whys.flatMap((why) => why.remedies.map((remedy) => [title(why), remedy.part, known(why.parts[remedy.part]) ? `${short(100 * why.parts[remedy.part])} %` : "", remedy.word, remedy.saves ? `up to ${short(1 + remedy.gain)}x` : ""]));
  if (rows.length) table(grid.parentNode, ["plan", "part", "share", "what moves it", "gain"], rows);
}

function learningRates() {
  for (const one of DATA.learning_rates) {
    const grid = section(`Learning rates: ${one.task}`), linear = one.ramp?.kind === "linear", band = one.band;
    const found = band ? `Steepest ${short(band.steepest)}, largest stable ${short(band.largest_stable)}, suggested ${short(band.suggested)}.` : `No suggestion: ${one.reason}`;
    grid.before(element("p", {}, `${found} Plan: ${one.plan || "one process"}.`));
    const series = one.curves.map((curve, index) => ({ name: `seed ${curve.seed}`, color: color(index), points: curve.lr.map((rate, at) => [linear ? rate : Math.log10(rate), curve.loss[at]]) }));
    lines(grid, "loss while the learning rate rises", "", series, { smooth: true, across: linear ? "learning rate" : "log10 of the learning rate" });
  }
}

function studies() {
  for (const one of DATA.studies) {
    const grid = section(`Search: ${one.name}`), best = one.trials.find((trial) => trial.best);
    const count = (state) => one.trials.filter((trial) => trial.state === state).length;
    const told = ["complete", "paused", "failed", "open"].filter(count).map((state) => `${count(state)} ${state}`).join(", ");
    grid.before(element("p", {}, `${one.task}: ${told || "no trial yet"}.` + (best ? ` Best: trial ${best.number}, ${one.metric} ${short(best.value)}.` : "")));
    if (one.trials.length) parallel(grid, one);
    const shares = Object.entries(one.importance).sort((a, b) => b[1] - a[1]);
    if (shares.length) bars(grid, "importance", "share of what makes a trial good (PED-ANOVA)", shares.map(([name, share]) => ({ name, parts: { share } })), () => color(0), (value) => `${short(value * 100)} %`);
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
learningRates();
studies();
if (DATA.runs.length) configuration();
draw();
