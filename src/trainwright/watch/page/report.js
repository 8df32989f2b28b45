// Draws the curves of report.html, whose data is in the page.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const look = { axis: "step", log: false, clip: false, smooth: false, view: null, marks: new Set(["anomaly", "restart", "checkpoint"]) };
const run = { name: data.name, color: 0, described: data.described };
const reportPlots = [];

function drawAll() {
  const curves = {};
  for (const [name, { x, y, sx, sy }] of Object.entries(data.curves)) curves[name] = look.smooth ? { x, y, sx, sy } : { x, y };
  for (const { plot, names } of reportPlots) plot.show({ ...arrange(names, [run], { [data.name]: curves }, look), log: look.log, clip: look.clip, view: look.view });
}

function zoom(view) {
  look.view = view;
  drawAll();
}

function button(title, key) {
  return element("button", {
    type: "button", class: "switch", "aria-pressed": String(look[key]),
    onclick: (event) => { look[key] = !look[key]; event.currentTarget.setAttribute("aria-pressed", String(look[key])); drawAll(); },
  }, title);
}

const axes = ["step", ...(data.described.axes.seconds ? ["time"] : []), ...(data.described.axes.tokens ? ["tokens"] : [])];
fill(document.getElementById("tools"),
  element("label", {}, "axis", element("select", { onchange: (event) => { look.axis = event.target.value; zoom(null); } }, ...axes.map((axis) => element("option", { value: axis }, axis)))),
  button("smooth", "smooth"), button("log", "log"), button("clip outliers", "clip"),
  element("button", { type: "button", onclick: () => zoom(null) }, "reset zoom"));
fill(document.getElementById("plots"), ...layOut(Object.keys(data.curves), data.described.sets).map(({ title, plots }) => element("section", { class: `group${title === "Loss" ? " wide" : ""}` },
  element("h2", {}, title), element("div", { class: "grid" }, ...plots.map((each) => {
    const plot = new Plot(each.title, {
      onZoom: zoom,
      onHover: (x, source) => { for (const other of reportPlots) if (other.plot !== source) other.plot.setCursor(x); },
    });
    reportPlots.push({ plot, names: each.names });
    return plot.card;
  })))));
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
