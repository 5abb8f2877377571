"use strict";
// Draws the plots, in the colours of the style sheet; sorts tables; hides and shows methods in all plots at once.
(() => {
  const all = (selector, inside = document) => Array.from(inside.querySelectorAll(selector));
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hidden = new Set();
  const plots = all(".plot").map((place) => ({
    place,
    views: JSON.parse(place.querySelector("script").textContent),
    shown: 0,
    width: undefined,
  }));

  // -- plots: colours in figures are variables of the style sheet ------------------------------------------------

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function coloured(value) {
    if (typeof value === "string") return value.startsWith("var(") ? variable(value.slice(4, -1)) : value;
    if (Array.isArray(value)) return value.some((each) => typeof each === "object") ? value.map(coloured) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each)]));
  }

  function laidOut(layout, width) {
    const quiet = { gridcolor: variable("--grid"), zeroline: false, linecolor: variable("--edge"), automargin: true };
    quiet.fixedrange = coarse; // else a finger that scrolls the page would zoom the plot
    return {
      ...layout,
      width,
      autosize: width === undefined,
      showlegend: false,
      dragmode: coarse ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: variable("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 50, r: 16, t: 16, b: 44 },
      hoverlabel: { bgcolor: variable("--card"), font: { color: variable("--ink") }, align: "left" },
      xaxis: { ...quiet, ...layout.xaxis },
      yaxis: { ...quiet, ...layout.yaxis },
    };
  }

  function draw(plot) {
    const [traces, layout] = plot.views[plot.shown];
    const data = traces.map((trace) => ({ ...coloured(trace), visible: !hidden.has(trace.meta) }));
    const config = { responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover" };
    return Plotly.react(plot.place, data, laidOut(coloured(layout), plot.width), config);
  }

  const drawAll = () => plots.forEach(draw);

  // -- what can be chosen ------------------------------------------------------------------------------------

  function choose(select) {
    const names = select.dataset.plots.split(" ");
    plots.filter((plot) => names.includes(plot.place.id)).forEach((plot) => {
      plot.shown = Number(select.value);
      draw(plot);
    });
  }

  function show() {
    all(".legend button").forEach((button) => button.setAttribute("aria-pressed", !hidden.has(Number(button.dataset.method))));
    all("[data-panel]").forEach((panel) => panel.classList.toggle("off", hidden.has(Number(panel.dataset.panel))));
    drawAll();
  }

  function toggle(method) {
    if (!hidden.delete(method)) hidden.add(method);
    show();
  }

  // -- tables ------------------------------------------------------------------------------------------------

  function sort(button) {
    const heading = button.closest("th");
    const column = heading.cellIndex;
    const body = heading.closest("table").tBodies[0];
    const ascending = heading.getAttribute("aria-sort") !== "ascending";
    const value = (row) => row.cells[column].dataset.value;
    const rows = Array.from(body.rows);
    const known = rows.filter((row) => value(row) !== undefined);
    const numeric = known.every((row) => !Number.isNaN(Number(value(row))));
    known.sort((a, b) => {
      const order = numeric ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b));
      return ascending ? order : -order;
    });
    body.append(...known, ...rows.filter((row) => value(row) === undefined)); // what is not known comes last
    all("th[aria-sort]", heading.parentElement).forEach((each) => each.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  }

  // -- paper: light, as wide as a page, and nothing folded away ----------------------------------------------

  let unfolded = [];

  function print(begins) {
    document.documentElement.classList.toggle("printing", begins);
    if (begins) unfolded = all("details:not([open])");
    unfolded.forEach((each) => { each.open = begins; });
    plots.forEach((plot) => {
      plot.width = begins ? (plot.place.closest(".row") ? 320 : 660) : undefined;
      draw(plot);
    });
  }

  all("select[data-plots]").forEach((select) => select.addEventListener("change", () => choose(select)));
  all(".legend button").forEach((button) => button.addEventListener("click", () => toggle(Number(button.dataset.method))));
  all("th[aria-sort] button").forEach((button) => button.addEventListener("click", () => sort(button)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  drawAll();
})();
