// The live page: lists the runs, asks the server for what is visible, and draws it with plot.js.
"use strict";

const BUSY_MS = 2000, IDLE_MS = 5000;
const TABS = { curves: "Curves", media: "Media", settings: "Settings", log: "Log", about: "About" };
const AXES = { step: "step", time: "time", tokens: "tokens" };
const MARKS = { anomaly: ["⚠", "anomalies"], restart: ["↻", "restarts"], checkpoint: ["▲", "checkpoints"] };
const SMOOTHING = [0, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25];
const MAX_FIRST_RUNS = 6;
const MAX_SETTINGS_RUNS = 12;

const state = {
  runs: [], selected: null, focused: null, tab: "curves", axis: "step", smoothing: 0, log: false, clip: false,
  marks: new Set(Object.keys(MARKS)), filter: "", metrics: "", sort: "recent", zoom: null,
};
const colors = new Map(); // run → number of its color
let described = {}; // run → the answer of /api/describe
let describedVersion = new Map();
let plots = new Map(); // title → { plot, names, key, isVisible }
let tabKey = "";
let paused = null;
const byId = (id) => document.getElementById(id);

/** Returns the answer of a request; the browser asks with the ETag, so an unchanged answer is not sent again. */
async function ask(path, query = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}

// The address contains the selection, so that the view can be reloaded and shared.

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("runs")) {
    try { state.selected = new Set(JSON.parse(given.get("runs"))); } catch { state.selected = null; }
  }
  state.focused = given.get("run") || state.focused;
  if (given.get("tab") in TABS) state.tab = given.get("tab");
  if (given.get("axis") in AXES) state.axis = given.get("axis");
  state.smoothing = Math.min(Math.max(Number(given.get("smoothing")) || 0, 0), SMOOTHING.length - 1);
  state.log = given.get("log") === "1";
  state.clip = given.get("clip") === "1";
  state.metrics = given.get("metrics") || "";
}

function writeAddress() {
  const shown = new URLSearchParams({ runs: JSON.stringify([...(state.selected || [])]), tab: state.tab });
  if (state.focused) shown.set("run", state.focused);
  if (state.axis !== "step") shown.set("axis", state.axis);
  if (state.smoothing) shown.set("smoothing", state.smoothing);
  if (state.log) shown.set("log", "1");
  if (state.clip) shown.set("clip", "1");
  if (state.metrics) shown.set("metrics", state.metrics);
  history.replaceState(null, "", `#${shown}`);
}

// The list of runs.

function selectedRuns() {
  return state.runs.filter((run) => state.selected.has(run.name)).reverse();
}

function focusedRun() {
  return state.runs.find((run) => run.name === state.focused) || state.runs.find((run) => state.selected.has(run.name)) || state.runs[0];
}

/** Gives each selected run the least used color; a run keeps its color while it is selected. */
function assignColors() {
  for (const name of [...colors.keys()]) if (!state.selected.has(name)) colors.delete(name);
  const uses = Array(NUM_COLORS).fill(0);
  for (const color of colors.values()) uses[color]++;
  for (const { name } of selectedRuns().reverse()) {
    if (colors.has(name)) continue;
    const color = uses.indexOf(Math.min(...uses));
    uses[color]++;
    colors.set(name, color);
  }
}

function ageText(seconds) {
  if (seconds < 10) return "now";
  if (seconds < 3600) return seconds < 60 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

/** Returns true if a text has all words of a filter. */
function hasWords(text, filter) {
  return filter.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function listedRuns() {
  const found = state.runs.filter((run) => hasWords(`${run.name} ${run.state}`, state.filter));
  if (state.sort === "name") found.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
  if (state.sort === "loss") found.sort((one, other) => (one.loss ?? Infinity) - (other.loss ?? Infinity));
  return found;
}

function drawList() {
  const list = byId("list"), listed = listedRuns(), now = Date.now() / 1000;
  const focused = focusedRun(), active = document.activeElement && document.activeElement.dataset.run;
  const kind = document.activeElement && document.activeElement.tagName;
  fill(list, ...listed.map((run) => {
    const isSelected = state.selected.has(run.name);
    const share = run.max_steps && run.step != null ? Math.min(run.step / run.max_steps, 1) : null;
    const steps = run.step == null ? "no step yet" : `${run.step.toLocaleString("en-US")}${run.max_steps ? ` / ${run.max_steps.toLocaleString("en-US")}` : ""}`;
    return element("li", {
      class: `run${isSelected ? " selected" : ""}${focused && run.name === focused.name ? " focused" : ""}`, color: `var(--c${colors.get(run.name) ?? 0})`,
      title: [run.name, run.best && `best ${run.best}`, run.last_write && `last write ${ageText(now - run.last_write)}`, ...run.problems].filter(Boolean).join("\n"),
      onclick: (event) => { if (event.target.tagName !== "INPUT" && event.target.tagName !== "BUTTON") focusRun(run.name); },
    },
    element("input", { type: "checkbox", checked: isSelected, "aria-label": `Show ${run.name}`, "data-run": run.name, onchange: () => toggleRun(run.name) }),
    element("button", { type: "button", class: "title", "data-run": run.name, onclick: () => focusRun(run.name) }, shortened(run.name, 48)),
    element("span", { class: `state ${run.state}` }, run.state),
    element("div", { class: "facts" }, element("span", {}, steps), element("span", {}, run.is_finite === false ? element("b", { class: "alarm" }, "loss not finite") : run.loss == null ? "" : `loss ${numberText(run.loss)}`)),
    share != null && element("progress", { value: share, max: 1, "aria-label": `${Math.round(share * 100)} % of the steps` }));
  }));
  if (active) {
    const again = [...list.querySelectorAll(kind)].find((each) => each.dataset.run === active);
    if (again) again.focus({ preventScroll: true });
  }
  byId("count").textContent = `${state.selected.size} of ${state.runs.length} shown`;
}

function toggleRun(name) {
  if (state.selected.has(name)) state.selected.delete(name);
  else state.selected.add(name);
  update();
}

function focusRun(name) {
  state.focused = name;
  if (!state.selected.has(name)) state.selected.add(name);
  byId("runs").classList.remove("open");
  byId("menu").setAttribute("aria-expanded", "false");
  update();
}

// The views.

function drawTabs() {
  fill(byId("tabs"), ...Object.entries(TABS).map(([key, title]) => element("button", {
    type: "button", role: "tab", "aria-selected": String(state.tab === key), tabindex: state.tab === key ? "0" : "-1", id: `tab-${key}`,
    onclick: () => { state.tab = key; update(); },
    onkeydown: (event) => {
      const keys = Object.keys(TABS), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      state.tab = keys[(keys.indexOf(key) + by + keys.length) % keys.length];
      update();
      byId(`tab-${state.tab}`).focus();
    },
  }, title)));
}

function toggle(title, isOn, change, sign) {
  return element("button", {
    type: "button", class: "switch", "aria-pressed": String(isOn),
    onclick: (event) => { event.currentTarget.setAttribute("aria-pressed", String(change())); update(); },
  }, sign && element("span", { class: `sign ${sign[0]}`, "aria-hidden": "true" }, sign[1]), title);
}

function drawTools() {
  const tools = byId("tools");
  if (state.tab !== "curves") {
    const run = focusedRun();
    fill(tools, ...(state.tab === "settings" || !run ? [] : [element("span", { class: "faint" }, "run"), element("b", {}, shortened(run.name, 60))]));
    return;
  }
  const smoothingText = () => (SMOOTHING[state.smoothing] ? `${Number((SMOOTHING[state.smoothing] * 100).toPrecision(2))} %` : "off");
  const output = element("output", {}, smoothingText());
  fill(tools,
    element("input", { id: "metrics", type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", value: state.metrics, oninput: (event) => { state.metrics = event.target.value; update(); } }),
    element("label", {}, "axis", element("select", { id: "axis", onchange: (event) => { state.axis = event.target.value; state.zoom = null; update(); } },
      ...Object.entries(AXES).map(([key, title]) => element("option", { value: key, selected: state.axis === key }, title)))),
    element("label", { title: "The mean over a window of so many percent of the points" }, "smoothing", element("input", {
      id: "smoothing", type: "range", min: 0, max: SMOOTHING.length - 1, step: 1, value: state.smoothing,
      oninput: (event) => { state.smoothing = Number(event.target.value); output.textContent = smoothingText(); update(); },
    }), output),
    toggle("log", state.log, () => (state.log = !state.log)),
    toggle("clip outliers", state.clip, () => (state.clip = !state.clip)),
    ...Object.entries(MARKS).map(([kind, [sign, title]]) => toggle(title, state.marks.has(kind), () => {
      if (!state.marks.delete(kind)) state.marks.add(kind);
      return state.marks.has(kind);
    }, [kind, sign])),
    element("button", { type: "button", id: "reset", hidden: !state.zoom, onclick: () => setZoom(null) }, "reset zoom"),
  );
}

function setZoom(zoom) {
  state.zoom = zoom;
  byId("reset").hidden = !zoom;
  for (const entry of plots.values()) {
    entry.plot.show({ view: zoom });
    entry.key = "";
  }
  fillPlots();
}

function plotRuns() {
  return selectedRuns().filter((run) => described[run.name]).map((run) => ({ name: run.name, color: colors.get(run.name) ?? 0, described: described[run.name], version: run.version.curves }));
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    for (const entry of plots.values()) if (entry.plot.card === target) entry.isVisible = isIntersecting;
  }
  fillPlots();
}, { rootMargin: "200px" });

/** Lays out a plot for each group of names. Plots that stay keep their element, zoom and hidden curves. */
function drawCurves() {
  const view = byId("view"), runs = plotRuns();
  const names = [...new Set(runs.flatMap((run) => run.described.names.map((each) => each.name)))];
  const sets = [...new Set(runs.flatMap((run) => run.described.sets))];
  if (!names.length) {
    const wanted = state.selected.size;
    fill(view, emptyText(!state.runs.length ? "There is no run yet. Start one in another terminal:" : wanted ? "No metric has been written yet." : "Select a run on the left.", !state.runs.length && "trainwright train run.yaml"));
    plots.clear();
    tabKey = "";
    return;
  }
  const sections = layOut(names.filter((name) => hasWords(name, state.metrics)), sets), key = JSON.stringify(sections);
  if (!sections.length) {
    fill(view, emptyText(`None of the ${names.length.toLocaleString("en-US")} metrics has “${state.metrics}” in its name.`));
    plots.clear();
    tabKey = "";
    return;
  }
  if (key !== tabKey || !plots.size) {
    tabKey = key;
    const before = plots;
    plots = new Map();
    seen.disconnect();
    fill(view, ...sections.map(({ title, plots: own }) => element("section", { class: `group${title === "Loss" ? " wide" : ""}` }, element("h2", {}, title),
      element("div", { class: "grid" }, ...own.map((each) => {
        const id = `${title}/${each.title}`, known = before.get(id);
        const plot = known ? known.plot : new Plot(each.title, {
          onZoom: setZoom,
          onHover: (x, source) => { for (const other of plots.values()) if (other.plot !== source && other.isVisible) other.plot.setCursor(x); },
        });
        plots.set(id, { plot, names: each.names, key: "", isVisible: false });
        seen.observe(plot.card);
        return plot.card;
      })))));
  }
  fillPlots();
}

/** Requests the points of visible plots whose runs, range or smoothing have changed, and redraws the others. */
function fillPlots() {
  if (state.tab !== "curves") return;
  const runs = plotRuns();
  for (const entry of plots.values()) {
    const look = { log: state.log, clip: state.clip, view: state.zoom };
    if (!entry.isVisible) continue;
    const width = Math.round(entry.plot.frame.clientWidth / 50) * 50 || 600;
    const query = { runs: JSON.stringify(runs.map((run) => run.name)), names: JSON.stringify(entry.names), points: Math.round(width * 1.5), ...stepRange(runs) };
    if (SMOOTHING[state.smoothing]) query.smoothing = SMOOTHING[state.smoothing];
    const key = JSON.stringify([query, runs.map((run) => run.version)]);
    const arrangement = () => arrange(entry.names, runs, entry.curves || {}, state);
    if (key === entry.key) {
      if (entry.curves) entry.plot.show({ ...look, ...arrangement() });
      continue;
    }
    entry.key = key;
    entry.isWaiting = true;
    ask("api/curves", query).then((curves) => {
      if (entry.key !== key) return; // a later request
      entry.curves = curves;
      entry.isWaiting = false;
      entry.plot.show({ ...look, view: state.zoom, ...arrangement() });
    }, () => { entry.key = ""; entry.isWaiting = false; });
  }
}

/** Returns the steps of all runs that the zoomed range may show. */
function stepRange(runs) {
  if (!state.zoom) return {};
  const [low, high] = state.zoom;
  if (state.axis === "step") return { low, high };
  const maps = runs.map((run) => run.described.axes[state.axis === "time" ? "seconds" : "tokens"]).filter(Boolean);
  if (!maps.length) return {};
  const steps = maps.map(([xs, ys]) => [low, high].map((each) => interpolate(ys, xs, each)));
  return { low: Math.min(...steps.map((each) => each[0])), high: Math.max(...steps.map((each) => each[1])) };
}

function emptyText(text, code) {
  return element("p", { class: "empty" }, text, code && element("code", {}, code));
}

async function drawMedia(run) {
  const found = await ask("api/media", { run: run.name });
  const parts = [];
  const positions = new Map([...document.querySelectorAll(".media input")].filter((each) => each.value !== each.max).map((each) => [each.dataset.id, Number(each.value)]));
  for (const [kind, title] of [["images", "Images"], ["histograms", "Histograms"], ["texts", "Texts"]]) {
    const names = Object.keys(found[kind]);
    if (names.length) {
      parts.push(element("h2", { class: "part" }, title), element("div", { class: "grid media" },
        ...names.map((name) => mediaCard(kind, name, found[kind][name], run, positions.get(`${kind} ${name}`)))));
    }
  }
  return parts.length ? parts : [emptyText("This run has put no images, histograms or texts.", 'get_event_storage().put_image("sample", image)')];
}

function mediaCard(kind, name, items, run, position) {
  const shown = element("div"), step = element("span");
  const slider = element("input", { type: "range", min: 0, max: items.length - 1, value: position ?? items.length - 1, "aria-label": `Step of ${name}`, "data-id": `${kind} ${name}` });
  const show = () => {
    const item = items[Number(slider.value)];
    step.textContent = `step ${item.step.toLocaleString("en-US")}`;
    slider.setAttribute("aria-valuetext", step.textContent);
    if (kind === "images") {
      fill(shown, element("img", { src: `image?${new URLSearchParams({ run: run.name, file: item.file })}`, alt: `${name} at step ${item.step}`, class: item.width < 160 ? "small" : "" }));
    } else if (kind === "texts") fill(shown, element("pre", {}, item.text));
    else fill(shown, histogram(item, run));
  };
  slider.addEventListener("input", show);
  show();
  return element("section", { class: "card" }, element("header", {}, element("h3", {}, name)), shown,
    element("div", { class: "steps" }, slider, step));
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function histogram({ low, high, counts, num_values, num_not_finite, mean, deviation }, run) {
  const highest = Math.max(...counts, 1), width = 100 / counts.length;
  const bars = counts.map((count, index) => svg("rect", { x: index * width + width * 0.06, y: 100 - (100 * count) / highest, width: width * 0.88, height: (100 * count) / highest }));
  return element("div", { color: `var(--c${colors.get(run.name) ?? 0})` },
    svg("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": `from ${numberText(low)} to ${numberText(high)}` }, ...bars),
    element("div", { class: "steps apart" }, element("span", {}, numberText(low)), element("span", {}, `mean ${numberText(mean)} ± ${numberText(deviation)} · ${numberText(num_values)} values${num_not_finite ? ` · ${num_not_finite} not finite` : ""}`), element("span", {}, numberText(high))));
}

async function drawSettings() {
  const runs = selectedRuns().slice(0, MAX_SETTINGS_RUNS);
  if (!runs.length) return [emptyText("Select a run on the left.")];
  const settings = await ask("api/settings", { runs: JSON.stringify(runs.map((run) => run.name)) });
  const names = [...new Set(runs.flatMap((run) => Object.keys(settings[run.name] || {})))];
  const before = document.querySelector("#settings-filter"), beforeDiff = document.querySelector("#only-diff");
  const filter = element("input", { id: "settings-filter", type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", value: before ? before.value : "" });
  const onlyDiff = element("input", { id: "only-diff", type: "checkbox", checked: beforeDiff ? beforeDiff.checked : false });
  const textOf = (run, name) => { const value = (settings[run.name] || {})[name]; return value === undefined ? "–" : String(value); };
  const body = element("tbody");
  const fillBody = () => {
    fill(body, ...names.filter((name) => name.toLowerCase().includes(filter.value.toLowerCase())).map((name) => {
      const texts = runs.map((run) => textOf(run, name)), differs = new Set(texts).size > 1;
      if (onlyDiff.checked && !differs) return null;
      return element("tr", { class: differs ? "differs" : "" }, element("th", { scope: "row", class: "mono" }, name), ...texts.map((text) => element("td", { class: "mono" }, text)));
    }));
    if (!body.children.length) body.append(element("tr", {}, element("td", { colspan: runs.length + 1, class: "faint" }, "All of these settings are the same.")));
  };
  filter.addEventListener("input", fillBody);
  onlyDiff.addEventListener("change", fillBody);
  fillBody();
  return [element("div", { class: "tools above" }, filter, runs.length > 1 && element("label", {}, onlyDiff, "only differences"),
    state.selected.size > runs.length && element("span", { class: "faint" }, `the first ${runs.length} of ${state.selected.size} runs`)),
  element("div", { class: "card scroll" }, element("table", { class: "settings" },
    element("thead", {}, element("tr", {}, element("th", {}, ""), ...runs.map((run) => element("th", { scope: "col", color: `var(--c${colors.get(run.name) ?? 0})` }, element("span", { class: "swatch" }), run.name)))), body))];
}

let logText = { run: null, text: "", offset: null };
async function drawLog(run) {
  const isSame = logText.run === run.name;
  const query = { run: run.name };
  if (isSame && logText.offset != null) query.offset = logText.offset;
  const answer = await ask("api/log", query);
  const continues = isSame && answer.begins === logText.offset;
  logText = { run: run.name, text: ((continues ? logText.text : "") + answer.text).slice(-500000), offset: answer.offset };
  const before = document.querySelector(".log"), isAtEnd = !before || before.scrollTop + before.clientHeight >= before.scrollHeight - 30;
  const top = before ? before.scrollTop : 0;
  if (!logText.text) return [emptyText("The log is empty.")];
  const log = element("pre", { class: "log mono", tabindex: "0", "aria-label": `Log of ${run.name}` }, ...logText.text.split(/(?<=\n)/).map((line) => {
    const level = /^\S+ \S+ (WARNING|ERROR|CRITICAL) /.exec(line);
    return level ? element("span", { class: level[1] }, line) : line;
  }));
  requestAnimationFrame(() => { log.scrollTop = isAtEnd ? log.scrollHeight : top; });
  return [element("div", { class: "card" }, log)];
}

function table(header, rows, { numbers = [], moments = [] } = {}) {
  const kind = (index) => (numbers.includes(index) ? "number" : moments.includes(index) ? "moment" : "");
  return element("div", { class: "scroll" }, element("table", {},
    header && element("thead", {}, element("tr", {}, ...header.map((text, index) => element("th", { scope: "col", class: kind(index) }, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, index) => element(index || header ? "td" : "th", { class: kind(index) }, text)))))));
}

async function drawAbout(run) {
  const { environment, model, checkpoints, best, anomalies, starts } = await ask("api/about", { run: run.name });
  const card = (title, ...content) => element("section", { class: "card" }, element("h3", {}, title), ...content);
  const moment = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB");
  const metrics = [...new Set(checkpoints.flatMap((each) => Object.keys(each.metrics)))].slice(0, 6);
  return [element("div", { class: "columns" },
    run.problems.length > 0 && card("Problems", ...run.problems.map((text) => element("p", { class: "alert" }, text))),
    anomalies.length > 0 && card("Anomalies", ...anomalies.map((each) => element("p", { class: "alert" }, each.message || `${each.kind} at step ${each.step}`))),
    card("Checkpoints", checkpoints.length ? table(["step", ...metrics, "size", "written"], checkpoints.map((each) => [
      `${each.step.toLocaleString("en-US")}${each.step === best ? " ★" : ""}`, ...metrics.map((name) => (each.metrics[name] == null ? "–" : numberText(each.metrics[name]))), bytesText(each.size), each.created ? moment(each.created) : "",
    ]), { numbers: Array.from({ length: metrics.length + 2 }, (_, index) => index), moments: [metrics.length + 2] }) : element("p", { class: "faint" }, "There is none yet.")),
    starts.length > 0 && card("Starts", table(["time", "after step"], starts.map(([step, time]) => [moment(time), step.toLocaleString("en-US")]), { numbers: [1], moments: [0] })),
    Object.keys(environment).length > 0 && card("Environment", table(null, Object.entries(environment))),
    model.class && card("Model", element("p", {}, element("b", {}, model.class), `: ${model.num_parameters.toLocaleString("en-US")} parameters${model.num_frozen ? `, ${model.num_frozen.toLocaleString("en-US")} of them frozen` : ""}`),
      table(["module", "class", "parameters"], model.modules.map(([name, kind, size, trained]) => [name, kind, size.toLocaleString("en-US") + (size && !trained ? " ❄" : "")]), { numbers: [2] })),
  )];
}

const VIEWS = { media: ["media", drawMedia], settings: ["about", drawSettings], log: ["log", drawLog], about: ["about", drawAbout] };

async function drawView() {
  if (state.tab === "curves") {
    if (!plots.size) tabKey = "";
    drawCurves();
    return;
  }
  plots.clear();
  seen.disconnect();
  const [part, draw] = VIEWS[state.tab], run = focusedRun();
  const versions = state.tab === "settings" ? selectedRuns().map((each) => [each.name, each.version[part]]) : run && [run.name, run.version[part]];
  const key = JSON.stringify([state.tab, versions]);
  if (key === tabKey) return;
  tabKey = key;
  try {
    const content = run ? await draw(run) : [emptyText("There is no run yet.")];
    if (tabKey === key) fill(byId("view"), ...content);
  } catch (error) {
    if (tabKey === key) { tabKey = ""; fill(byId("view"), emptyText(String(error.message || error))); }
  }
}

let toolsKey = "";
function update() {
  assignColors();
  writeAddress();
  drawList();
  drawTabs();
  // The slider is being dragged while this runs, so the element is kept.
  const key = JSON.stringify([state.tab, state.tab === "curves" || focusedRun()?.name, state.axis]);
  if (key !== toolsKey) { toolsKey = key; drawTools(); }
  describe().then(drawView);
}

/** Requests the descriptions of the runs that have changed. */
async function describe() {
  const changed = selectedRuns().filter((run) => describedVersion.get(run.name) !== run.version.curves);
  if (state.tab !== "curves" || !changed.length) return;
  try {
    const found = await ask("api/describe", { runs: JSON.stringify(changed.map((run) => run.name)) });
    for (const run of changed) if (found[run.name]) describedVersion.set(run.name, run.version.curves);
    described = { ...described, ...found };
  } catch (error) { /* the next poll asks again */ }
}

async function poll() {
  clearTimeout(paused);
  const status = byId("status");
  let wait = IDLE_MS;
  try {
    const { folder, runs } = await ask("api/runs");
    const isSame = JSON.stringify(runs) === JSON.stringify(state.runs);
    state.runs = runs;
    byId("folder").textContent = folder;
    const running = runs.filter((run) => run.state === "running").length;
    if (running) wait = BUSY_MS;
    status.className = running ? "live" : "";
    status.textContent = running ? `${running} running` : "up to date";
    if (!state.selected) state.selected = new Set(runs.slice(0, MAX_FIRST_RUNS).map((run) => run.name));
    if (!isSame || !plots.size) update();
    if (selectedRuns().some((run) => run.version.loading)) wait = 500;
    document.title = running ? `● ${running} running – trainwright` : "trainwright watch";
  } catch (error) {
    status.className = "lost";
    status.textContent = error instanceof TypeError ? "no connection" : error.message;
  }
  if (!document.hidden) paused = setTimeout(poll, wait);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; drawList(); });
byId("sort").addEventListener("change", (event) => { state.sort = event.target.value; drawList(); });
byId("all").addEventListener("click", () => { for (const run of listedRuns()) state.selected.add(run.name); update(); });
byId("none").addEventListener("click", () => { state.selected.clear(); update(); });
byId("menu").addEventListener("click", () => {
  const isOpen = byId("runs").classList.toggle("open");
  byId("menu").setAttribute("aria-expanded", String(isOpen));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const entry of plots.values()) entry.plot.draw(); });
window.addEventListener("hashchange", () => { readAddress(); update(); });
readAddress();
poll();
