// Draws curves on a canvas: hover readout, zoom by dragging, legend toggles, keyboard. Used by watch.js and report.js.
"use strict";

const NUM_COLORS = 10;
const MARGIN = { left: 54, right: 14, top: 16, bottom: 24 };
const SECOND_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const MARK_NAMES = { anomaly: "anomaly", restart: "restart", checkpoint: "checkpoint", best: "best checkpoint" };
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];

/** Returns an element; children that are text become text nodes, so nothing is read as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "color") made.style.setProperty("--color", value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each != null && each !== false));
  return made;
}

/** Replaces the children of an element; those that are false or null are left out. */
function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((each) => each != null && each !== false));
}

/** Returns a number with at most so many digits: 0.3125, 1,200, 12.4M, 3e-5. */
function numberText(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(digits))}${letter}`;
  }
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 10 ** (digits - 1) ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(digits)));
}

/** Returns a long text without its middle: names that differ often differ at their ends. */
function shortened(text, length) {
  const characters = [...text];
  if (characters.length <= length) return text;
  const end = Math.ceil(length * 0.6);
  return `${characters.slice(0, length - end - 1).join("")}…${characters.slice(-end).join("")}`;
}

/** Returns the texts of ticks; two that are equal with four digits have as many digits as tell them apart. */
function tickTexts(ticks, text) {
  for (let digits = 4; digits < 12; digits++) {
    const texts = ticks.map((value) => text(value, digits));
    if (new Set(texts).size === ticks.length) return texts;
  }
  return ticks.map((value) => text(value));
}

/** Returns a duration: 35 s, 12 min, 1 h 20 min, 2 d 3 h. */
function secondsText(value) {
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return value % 60 && value < 600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

/** Returns bytes: 512 MB, 1.2 GB. */
function bytesText(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "not finite";
  for (const [unit, letter] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(digits))} ${letter}`;
  }
  return `${Math.round(value)} B`;
}

/** Returns the value at x on the polyline through ascending xs and ys; beyond its ends it continues at its mean slope. */
function interpolate(xs, ys, x) {
  const last = xs.length - 1;
  if (last < 1) return ys.length ? ys[0] : 0;
  if (x >= xs[last]) return ys[last] + ((x - xs[last]) * (ys[last] - ys[0])) / (xs[last] - xs[0] || 1);
  const after = Math.max(1, firstAtLeast(xs, x));
  const span = xs[after] - xs[after - 1];
  return ys[after - 1] + (span ? ((x - xs[after - 1]) / span) * (ys[after] - ys[after - 1]) : 0);
}

/** Returns the index of the first of ascending values that is at least x; their number if there is none. */
function firstAtLeast(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(values, x) {
  const after = firstAtLeast(values, x);
  if (after === 0) return 0;
  return after === values.length || x - values[after - 1] < values[after] - x ? after - 1 : after;
}

/** Returns about `number` round values between low and high. */
function roundTicks(low, high, number, isTime) {
  const rough = (high - low) / number;
  let step;
  if (isTime && rough > 0.5) {
    step = SECOND_STEPS.find((each) => each >= rough) || Math.ceil(rough / 86400) * 86400;
  } else {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  }
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && ticks.length < 50; index++) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((last - first) / 6));
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  return ticks.filter((each) => each >= low * 0.999 && each <= high * 1.001);
}

/**
 * One plot. `show` receives what it draws:
 *   series: [{ keys, label, color, dash, x, y, sx, sy, best, unit }]  color: 0 to 9, keys: names of the legend that hide it
 *   marks: [{ kind, x, text }]; legend: [{ key, label, color, dash }]; unit: "bytes" or null
 *   log, clip: of the y-axis; view: [low, high] of x or null, then extent; axis: "step", "time" or "tokens"
 */
class Plot {
  constructor(title, { onZoom = () => {}, onHover = () => {} } = {}) {
    this.title = title;
    this.onZoom = onZoom;
    this.onHover = onHover;
    this.hidden = new Set();
    this.shown = { series: [], marks: [], legend: [], view: null, axis: "step" };
    this.cursor = null;
    this.drag = null;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.readout = element("div", { class: "readout", hidden: true });
    this.spoken = element("div", { class: "unseen", "aria-live": "polite" });
    this.legend = element("div", { class: "legend" });
    this.value = element("span", { class: "value" });
    this.frame = element("div", { class: "frame" }, this.canvas, this.readout);
    this.heading = element("h3", {}, title);
    this.card = element("section", { class: "card plot", "aria-label": title },
      element("header", {}, this.heading, this.value), this.legend, this.frame, this.spoken);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  show(shown) {
    this.shown = { ...this.shown, ...shown };
    this.drawLegend();
    this.draw();
  }

  get visible() {
    return this.shown.series.filter((each) => !each.keys.some((key) => this.hidden.has(key)));
  }

  // Drawing.

  color(number) {
    return this.style.getPropertyValue(`--c${number % NUM_COLORS}`).trim();
  }

  text(value, digits) {
    return this.shown.unit === "bytes" ? bytesText(value, digits) : numberText(value, digits);
  }

  textX(value) {
    return this.shown.axis === "time" ? secondsText(value) : numberText(Math.round(value));
  }

  /** Returns the ranges of x and y that are drawn, or null without a finite point. */
  ranges() {
    const { view, log, clip } = this.shown;
    let lowX = Infinity, highX = -Infinity;
    for (const { x } of this.visible) {
      if (x.length) { lowX = Math.min(lowX, x[0]); highX = Math.max(highX, x[x.length - 1]); }
    }
    if (view || this.shown.extent) [lowX, highX] = view || this.shown.extent;
    if (!(lowX <= highX)) return null;
    if (lowX === highX) { lowX -= 0.5; highX += 0.5; }
    const values = [];
    for (const { x, y, sx, sy } of this.visible) {
      for (const [xs, ys] of sx && sx.length ? [[x, y], [sx, sy]] : [[x, y]]) {
        for (let index = 0; index < xs.length; index++) {
          const value = ys[index];
          if (value == null || xs[index] < lowX || xs[index] > highX || (log && value <= 0)) continue;
          values.push(value);
        }
      }
    }
    if (!values.length) return null;
    let lowY = Infinity, highY = -Infinity;
    if (clip && values.length > 20) {
      values.sort((one, other) => one - other);
      lowY = values[Math.floor(values.length * 0.02)];
      highY = values[Math.ceil(values.length * 0.98) - 1];
    } else {
      for (const value of values) { lowY = Math.min(lowY, value); highY = Math.max(highY, value); }
    }
    if (log) {
      const margin = (highY / lowY) ** 0.04;
      return lowY === highY ? [lowX, highX, lowY / 2, highY * 2] : [lowX, highX, lowY / margin, highY * margin];
    }
    const margin = (highY - lowY) * 0.05 || Math.abs(lowY) * 0.1 || 1;
    // Without space below zero for values that are never negative.
    return [lowX, highX, lowY >= 0 && lowY < margin ? 0 : lowY - margin, highY + margin];
  }

  /** Returns why nothing is drawn, which may be the first sign of a run that has diverged. */
  reasonForNothing() {
    const { series, log } = this.shown;
    if (!series.length) return "loading…";
    if (!this.visible.length) return "all curves are hidden";
    const values = this.visible.flatMap((each) => each.y).filter((value) => value != null);
    if (log && values.length && values.every((value) => value <= 0)) return "no value above zero: a log scale cannot show it";
    return values.length || this.shown.view ? "no value in this range" : "no finite value";
  }

  draw() {
    const width = this.frame.clientWidth, height = this.frame.clientHeight;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.style = getComputedStyle(this.card);
    const context = (this.context = this.canvas.getContext("2d"));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11px system-ui, sans-serif";
    const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const ranges = this.ranges();
    this.drawn = [];
    this.scale = null;
    if (!ranges) {
      context.fillStyle = this.style.getPropertyValue("--faint");
      context.textAlign = "center";
      context.fillText(this.reasonForNothing(), width / 2, height / 2);
      this.describe();
      return;
    }
    const [lowX, highX, lowY, highY] = ranges;
    const { log } = this.shown;
    const toY = log ? Math.log10 : (value) => value;
    const spanY = toY(highY) - toY(lowY);
    this.scale = {
      box, lowX, highX,
      x: (value) => box.left + ((value - lowX) / (highX - lowX)) * (box.right - box.left),
      y: (value) => box.bottom - ((toY(value) - toY(lowY)) / spanY) * (box.bottom - box.top),
      invert: (pixel) => lowX + ((pixel - box.left) / (box.right - box.left)) * (highX - lowX),
    };
    this.drawGrid(box, ranges);
    context.save();
    context.beginPath();
    context.rect(box.left - 4, box.top - 4, box.right - box.left + 8, box.bottom - box.top + 5);
    context.clip();
    for (const each of this.visible) this.drawSeries(each);
    for (const each of this.visible) this.drawBest(each);
    context.restore();
    this.drawMarks(box);
    if (this.drag) this.drawDrag(box);
    if (this.cursor != null) this.drawCursor(box);
    this.describe();
  }

  drawGrid(box, [lowX, highX, lowY, highY]) {
    const { context, scale } = this;
    const { log, axis } = this.shown;
    context.strokeStyle = this.style.getPropertyValue("--grid");
    context.fillStyle = this.style.getPropertyValue("--faint");
    context.lineWidth = 1;
    context.textAlign = "right";
    const wanted = Math.max(2, Math.floor((box.bottom - box.top) / 40));
    let ticks = log ? logTicks(lowY, highY) : roundTicks(lowY, highY, wanted);
    if (ticks.length < 2) ticks = roundTicks(lowY, highY, wanted).filter((each) => !log || each > 0);
    const texts = tickTexts(ticks, (value, digits) => this.text(value, digits));
    for (const [index, value] of ticks.entries()) {
      const y = Math.round(scale.y(value)) + 0.5;
      context.beginPath();
      context.moveTo(box.left, y);
      context.lineTo(box.right, y);
      context.stroke();
      context.fillText(texts[index], box.left - 7, y + 3.5, box.left - 9);
    }
    context.textAlign = "center";
    for (const value of roundTicks(lowX, highX, Math.max(2, Math.floor((box.right - box.left) / 90)), axis === "time")) {
      if (axis === "step" && !Number.isInteger(value)) continue;
      const x = scale.x(value), half = context.measureText(this.textX(value)).width / 2;
      context.fillText(this.textX(value), Math.min(x, box.right + MARGIN.right - half - 1), box.bottom + 16);
    }
  }

  drawSeries(each) {
    const isSmooth = each.sx && each.sx.length > 0;
    const number = this.trace(each, each.x, each.y, isSmooth ? 0.3 : 1, isSmooth ? 1 : 1.6);
    if (isSmooth) this.trace(each, each.sx, each.sy, 1, 1.9);
    this.drawn.push({ label: each.label, color: this.color(each.color), points: number, smooth: isSmooth });
  }

  trace(each, xs, ys, opacity, lineWidth) {
    const { context, scale } = this;
    const { log } = this.shown;
    context.globalAlpha = opacity;
    context.strokeStyle = context.fillStyle = this.color(each.color);
    context.lineWidth = lineWidth;
    context.lineJoin = "round";
    context.setLineDash(opacity < 1 ? [] : DASHES[each.dash % DASHES.length]);
    context.beginPath();
    const alone = [];
    let length = 0, number = 0, before = null;
    for (let index = 0; index <= xs.length; index++) {
      const value = index < xs.length ? ys[index] : null;
      if (value == null || (log && value <= 0)) {
        if (length === 1) alone.push(before);
        length = 0;
        continue;
      }
      const point = [scale.x(xs[index]), scale.y(value)];
      if (length) context.lineTo(...point);
      else context.moveTo(...point);
      if (xs[index] >= scale.lowX && xs[index] <= scale.highX) number++;
      before = point;
      length++;
    }
    context.stroke();
    context.setLineDash([]);
    const dots = number <= 40 && opacity === 1
      ? xs.map((x, index) => [x, ys[index]]).filter(([, value]) => value != null && (!log || value > 0))
        .map(([x, value]) => [scale.x(x), scale.y(value)])
      : alone;
    for (const [x, y] of dots) {
      context.beginPath();
      context.arc(x, y, 2.4, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
    return number;
  }

  drawBest({ best, color }) {
    if (!best || (this.shown.log && best.y <= 0)) return;
    const { context, scale } = this, x = scale.x(best.x), y = scale.y(best.y);
    context.beginPath();
    for (let corner = 0; corner < 10; corner++) {
      const radius = corner % 2 ? 3 : 6.5, angle = (corner * Math.PI) / 5 - Math.PI / 2;
      context.lineTo(x + radius * Math.cos(angle), y + radius * Math.sin(angle));
    }
    context.closePath();
    context.fillStyle = this.style.getPropertyValue("--gold");
    context.strokeStyle = this.color(color);
    context.lineWidth = 1.2;
    context.fill();
    context.stroke();
  }

  drawMarks(box) {
    const { context, scale } = this;
    const inView = this.shown.marks.filter((mark) => mark.x >= scale.lowX && mark.x <= scale.highX);
    // With hundreds of checkpoints, the ticks would merge into a bar.
    const step = Math.max(1, Math.ceil(inView.filter((mark) => mark.kind === "checkpoint").length / 60));
    let number = 0;
    for (const { kind, x } of inView) {
      const at = Math.round(scale.x(x)) + 0.5;
      context.strokeStyle = context.fillStyle = this.style.getPropertyValue(`--${kind}`);
      context.lineWidth = 1;
      if (kind === "anomaly" || kind === "restart") {
        context.globalAlpha = 0.75;
        context.setLineDash(kind === "anomaly" ? [] : [3, 3]);
        context.beginPath();
        context.moveTo(at, box.top);
        context.lineTo(at, box.bottom);
        context.stroke();
        context.setLineDash([]);
        context.globalAlpha = 1;
        context.textAlign = "center";
        if (kind === "anomaly") this.triangle(at, box.top - 12, 5, 10);
        else {
          context.font = "13px system-ui, sans-serif";
          context.fillText("↻", at, box.top - 3);
          context.font = "11px system-ui, sans-serif";
        }
      } else if (kind === "best" || number++ % step === 0) {
        this.triangle(at, box.bottom - (kind === "best" ? 9 : 6), kind === "best" ? 5 : 3.2, kind === "best" ? 9 : 6);
      }
    }
    this.drawnMarks = inView;
  }

  triangle(x, top, halfWidth, height) {
    const { context } = this;
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x + halfWidth, top + height);
    context.lineTo(x - halfWidth, top + height);
    context.fill();
  }

  drawDrag(box) {
    const { context } = this, [one, other] = this.drag;
    context.fillStyle = this.style.getPropertyValue("--select");
    context.fillRect(Math.min(one, other), box.top, Math.abs(other - one), box.bottom - box.top);
  }

  drawCursor(box) {
    const { context, scale } = this;
    const x = scale.x(this.cursor);
    if (x < box.left - 1 || x > box.right + 1) return;
    context.strokeStyle = this.style.getPropertyValue("--faint");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, box.top);
    context.lineTo(x, box.bottom);
    context.stroke();
    for (const row of this.rowsAt(this.cursor)) {
      if (row.value == null || (this.shown.log && row.value <= 0)) continue;
      context.fillStyle = this.color(row.color);
      context.strokeStyle = this.style.getPropertyValue("--card");
      context.lineWidth = 1.5;
      context.beginPath();
      context.arc(scale.x(row.x), scale.y(row.value), 4, 0, 7);
      context.fill();
      context.stroke();
    }
  }

  /** Puts what is drawn on the canvas element, for readers of the page without eyes: screen readers and tests. */
  describe() {
    const marks = this.drawnMarks && this.scale ? this.drawnMarks : [];
    this.canvas.dataset.drawn = JSON.stringify({ series: this.drawn, marks: marks.map(({ kind, x }) => ({ kind, x })) });
    const lines = this.visible.slice(0, 8).map((each) => {
      const last = each.y.length ? each.y[each.y.length - 1] : null;
      return `${each.label}: ${last == null ? "no value" : `last ${this.text(last)}`}${each.best ? `, best ${this.text(each.best.y)} at ${this.textX(each.best.x)}` : ""}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}. ${lines.join("; ")}. Arrow keys move the cursor, plus and minus zoom, 0 resets.`);
  }

  drawLegend() {
    const { legend, series } = this.shown;
    fill(this.legend, ...legend.slice(0, 10).map(({ key, label, color, dash }) => element("button", {
      type: "button", class: "entry", "aria-pressed": String(!this.hidden.has(key)), title: `Show or hide ${label}`,
      color: color == null ? "var(--faint)" : `var(--c${color % NUM_COLORS})`, "data-dash": String(dash || 0),
      onclick: () => {
        if (this.hidden.has(key)) this.hidden.delete(key);
        else this.hidden.add(key);
        this.drawLegend();
        this.draw();
      },
    }, element("span", { class: "line" }), element("span", { class: "name" }, label))),
    legend.length > 10 && element("span", { class: "faint" }, `+${legend.length - 10}`));
    this.legend.hidden = legend.length < 2;
    const [only] = series;
    const text = only && only.last !== undefined && (series.length === 1 || new Set(series.map((each) => each.keys[0])).size === 1) ? this.text(only.last) : "";
    this.value.textContent = text;
    this.value.classList.toggle("alarm", Boolean(text) && only.last == null);
  }

  // The readout.

  rowsAt(x) {
    const rows = [];
    for (const each of this.visible) {
      const [xs, ys] = each.sx && each.sx.length ? [each.sx, each.sy] : [each.x, each.y];
      if (!xs.length || x < xs[0] - (this.scale.highX - this.scale.lowX) * 0.02) continue;
      const index = nearest(xs, x);
      if (Math.abs(xs[index] - x) > (this.scale.highX - this.scale.lowX) * 0.05 && xs.length > 20) continue;
      rows.push({ label: each.label, color: each.color, dash: each.dash, x: xs[index], value: ys[index] });
    }
    return rows;
  }

  setCursor(x, { speaks = false, pointerY = null } = {}) {
    this.cursor = x;
    this.draw();
    if (x == null || !this.scale) {
      this.readout.hidden = true;
      return;
    }
    if (pointerY == null && !speaks) return; // another plot has the pointer
    const rows = this.rowsAt(x);
    const close = this.scale.box, reach = ((this.scale.highX - this.scale.lowX) / (close.right - close.left)) * 6;
    const marks = (this.drawnMarks || []).filter((mark) => Math.abs(mark.x - x) <= reach);
    if (pointerY != null) {
      rows.sort((one, other) => Math.abs(this.scale.y(one.value) - pointerY) - Math.abs(this.scale.y(other.value) - pointerY));
    }
    const at = rows.length ? rows.reduce((one, other) => (Math.abs(other.x - x) < Math.abs(one.x - x) ? other : one)).x : x;
    const prefix = { step: "step ", tokens: "", time: "" }[this.shown.axis], suffix = this.shown.axis === "tokens" ? " tokens" : "";
    fill(this.readout,
      element("div", { class: "at" }, `${prefix}${this.textX(at)}${suffix}`),
      ...rows.slice(0, 8).map((row, number) => element("div", { class: number ? "row" : "row first", color: `var(--c${row.color % NUM_COLORS})`, "data-dash": String(row.dash || 0) },
        element("span", { class: "line" }), element("span", { class: "name" }, shortened(row.label, 44)), element("b", {}, this.text(row.value)))),
      rows.length > 8 && element("div", { class: "faint" }, `and ${rows.length - 8} more`),
      ...marks.slice(0, 4).map((mark) => element("div", { class: `mark ${mark.kind}` }, `${mark.kind === "checkpoint" || mark.kind === "best" ? "▲" : mark.kind === "anomaly" ? "⚠" : "↻"} ${mark.text}`)),
    );
    this.readout.hidden = false;
    const left = this.scale.x(x), width = this.readout.offsetWidth;
    const isRight = left + width + 20 > this.frame.clientWidth;
    this.readout.style.left = `${Math.max(0, isRight ? left - width - 14 : left + 14)}px`;
    if (speaks) {
      this.spoken.textContent = [`${prefix}${this.textX(at)}${suffix}`, ...rows.slice(0, 5).map((row) => `${row.label} ${this.text(row.value)}`), ...marks.map((mark) => mark.text)].join(", ");
    }
  }

  // Pointer and keyboard.

  listen() {
    const { canvas } = this;
    const position = (event) => {
      const bounds = canvas.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };
    const clamp = (x) => Math.min(Math.max(x, this.scale.box.left), this.scale.box.right);
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.scale || event.button || event.pointerType === "touch") return;
      canvas.setPointerCapture(event.pointerId);
      const x = clamp(position(event)[0]);
      this.drag = [x, x];
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      const [x, y] = position(event);
      if (this.drag) this.drag[1] = clamp(x);
      this.setCursor(this.scale.invert(clamp(x)), { pointerY: y });
      this.onHover(this.cursor, this);
    });
    canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (!drag || !this.scale) return;
      if (Math.abs(drag[1] - drag[0]) > 6) {
        const ends = drag.map((each) => this.scale.invert(each)).sort((one, other) => one - other);
        this.setCursor(null);
        this.onZoom(ends);
      } else this.draw();
    });
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("pointerleave", () => { if (!this.drag) { this.setCursor(null); this.onHover(null, this); } });
    canvas.addEventListener("blur", () => { this.setCursor(null); this.onHover(null, this); });
    canvas.addEventListener("dblclick", () => this.onZoom(null));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    if (!this.scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const { lowX, highX } = this.scale, span = highX - lowX;
    const [first] = this.visible;
    const xs = first ? (first.sx && first.sx.length ? first.sx : first.x) : [];
    const middle = this.cursor == null ? (lowX + highX) / 2 : this.cursor;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves && xs.length) {
      const by = moves[event.key] * (event.shiftKey ? 10 : 1);
      const from = this.cursor == null ? (by > 0 ? firstAtLeast(xs, lowX) - 1 : firstAtLeast(xs, highX)) : nearest(xs, this.cursor);
      const to = xs[Math.min(Math.max(from + by, 0), xs.length - 1)];
      this.setCursor(Math.min(Math.max(to, lowX), highX), { speaks: true });
      this.onHover(this.cursor, this);
    } else if (event.key === "+" || event.key === "=") this.onZoom([middle - span / 4, middle + span / 4]);
    else if (event.key === "-") this.onZoom([middle - span, middle + span]);
    else if (event.key === "0" || event.key === "Escape") this.onZoom(null);
    else return;
    event.preventDefault();
  }
}

/**
 * Returns series, legend and marks of a plot of some names of some runs.
 * runs: [{ name, color, described }], described: the answer of /api/describe; curves: run → name → { x, y, sx, sy }, in steps.
 */
function arrange(names, runs, curves, { axis, marks: shownMarks }) {
  const series = [], marks = [];
  let last = 0; // all plots have the same range of x, so a step is at the same position in each
  const present = names.filter((name) => runs.some((run) => curves[run.name] && curves[run.name][name]));
  const isAlone = runs.length === 1;
  for (const run of runs) {
    const map = axis === "step" ? null : run.described.axes[axis === "time" ? "seconds" : "tokens"];
    if (axis !== "step" && !map) continue;
    const convert = map ? (step) => interpolate(map[0], map[1], step) : (step) => step;
    last = Math.max(last, ...run.described.names.map((each) => (each.last ? convert(each.last[0]) : 0)));
    const facts = new Map(run.described.names.map((each) => [each.name, each]));
    present.forEach((name, number) => {
      const curve = (curves[run.name] || {})[name];
      if (!curve) return;
      const { best, last: latest } = facts.get(name) || {};
      series.push({
        keys: [`run ${run.name}`, `name ${name}`], label: isAlone ? name : present.length > 1 ? `${run.name} · ${name}` : run.name,
        color: isAlone ? number + run.color : run.color, dash: isAlone ? 0 : number,
        x: curve.x.map(convert), y: curve.y, sx: curve.sx ? curve.sx.map(convert) : null, sy: curve.sy,
        best: best && best[1] != null ? { x: convert(best[0]), y: best[1] } : null, last: latest ? latest[1] : undefined,
      });
    });
    for (const mark of run.described.marks) {
      if (!shownMarks.has(mark.kind === "best" ? "checkpoint" : mark.kind)) continue;
      marks.push({ kind: mark.kind, x: convert(mark.step), text: `${isAlone ? "" : `${run.name}: `}${mark.text}${mark.kind === "anomaly" && !mark.text ? `anomaly at ${mark.step}` : ""}` });
    }
  }
  const legend = isAlone
    ? present.map((name, number) => ({ key: `name ${name}`, label: name, color: number + runs[0].color, dash: 0 }))
    : present.map((name, number) => ({ key: `name ${name}`, label: name, color: null, dash: number })); // runs are in the list
  return { series, legend, marks, axis, extent: last ? [0, last] : null, unit: present.length && present.every((name) => /^system\/.*memory/.test(name)) ? "bytes" : null };
}

/** Returns the sections of plots for these names: [{ title, plots: [{ title, names }] }]. */
function layOut(names, sets) {
  const isEvaluated = (name) => name.includes("/") && sets.includes(name.slice(0, name.indexOf("/")));
  const metricOf = (name) => (isEvaluated(name) ? name.slice(name.indexOf("/") + 1) : name);
  const sections = new Map(["Loss", "Evaluation", "Optimization", "Metrics", "Speed", "System", "Progress"].map((title) => [title, new Map()]));
  const evaluated = new Set(names.filter(isEvaluated).map(metricOf));
  for (const name of names) {
    const metric = metricOf(name);
    let section = "Metrics", title = metric;
    if (name.startsWith("system/")) {
      section = "System";
      title = /device_memory/.test(name) ? "device memory" : name.slice(7).replaceAll("_", " ");
    } else if (metric === "loss") section = "Loss";
    else if (evaluated.has(metric)) section = "Evaluation";
    else if (/^(lr|grad_norm|weight_norm|momentum|loss_scale|beta|temperature|kl)($|\/)/.test(name)) section = "Optimization";
    else if (/per_second|per_step|^mfu$|^slowest_rank_share$|utilization/.test(name)) section = "Speed";
    else if (/^(samples_seen|tokens_seen|hours|anomalies|epoch|empty_updates)$|^samples\//.test(name)) section = "Progress";
    const plots = sections.get(section);
    plots.set(title, [...(plots.get(title) || []), name]);
  }
  return [...sections].filter(([, plots]) => plots.size)
    .map(([title, plots]) => ({ title, plots: [...plots].map(([each, own]) => ({ title: each, names: own })) }));
}
