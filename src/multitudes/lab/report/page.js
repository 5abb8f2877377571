"use strict";
// Highlight methods on the whole page, show tooltips, sort tables, and select views of figures.
(() => {
  const all = (selector, inside = document) => Array.from(inside.querySelectorAll(selector));
  const number = (each) => Number(each.dataset.method);

  // -- highlighting: the most recently selected methods, as many as initially ------------------------------------

  const buttons = all(".legend button");
  let chosen = buttons.filter((button) => button.getAttribute("aria-pressed") === "true").map(number);
  const most = chosen.length;

  function highlight() {
    all(".m").forEach((each) => each.classList.toggle("on", chosen.includes(number(each))));
    buttons.forEach((button) => button.setAttribute("aria-pressed", chosen.includes(number(button))));
    all(".chart > .m.on").forEach(raise);
  }

  // Above the others, but below the names.
  const raise = (group) => group.parentNode.insertBefore(group, group.parentNode.querySelector(":scope > .label"));

  function toggle(method) {
    chosen = chosen.includes(method) ? chosen.filter((each) => each !== method) : [...chosen, method].slice(-most);
    highlight();
  }

  // Colour a method while it is hovered.
  let near;

  function point(method) {
    if (method === near) return;
    all(".near").forEach((each) => each.classList.remove("near"));
    near = method;
    if (method === undefined) return;
    all(`.m[data-method="${method}"]`).forEach((each) => each.classList.add("near"));
    all(".chart > .m.near").forEach(raise);
  }

  // -- tooltips of the point nearest to the pointer -----------------------------------------------------------

  const tip = document.getElementById("tip");
  const names = new Map(buttons.map((button) => [number(button), button.textContent]));

  function nearest(chart, event) {
    const matrix = chart.getScreenCTM();
    if (!matrix) return undefined;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    let found;
    all("[data-tips]", chart).forEach((group) => {
      const points = group.querySelector("polyline").points;
      for (let index = 0; index < points.numberOfItems; index += 1) {
        const each = points.getItem(index);
        const far = Math.hypot(each.x - at.x, each.y - at.y) - (group.classList.contains("on") ? 4 : 0);
        if (far < 30 && (!found || far < found.far)) found = { far, group, index };
      }
    });
    return found;
  }

  function explain(chart, event) {
    const found = nearest(chart, event);
    tip.hidden = !found;
    if (!found) return point(undefined);
    const method = found.group.dataset.method;
    point(method === undefined ? undefined : Number(method));
    const name = names.get(Number(method));
    tip.replaceChildren(...(name ? [Object.assign(document.createElement("b"), { textContent: name })] : []));
    tip.append(found.group.dataset.tips.split("\n")[found.index]);
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 6);
    const above = event.clientY - box.height - 12;
    tip.style.left = `${Math.max(left, 6)}px`;
    tip.style.top = `${above < 4 ? event.clientY + 18 : above}px`;
    return undefined;
  }

  function leave() {
    tip.hidden = true;
    point(undefined);
  }

  // -- tables: sort the best values first, and on the next click the worst ------------------------------------

  function sort(button) {
    const heading = button.closest("th");
    const column = heading.cellIndex;
    const body = heading.closest("table").tBodies[0];
    const { order } = heading.dataset;
    const again = heading.getAttribute("aria-sort") === (order === "zero" ? "other" : order);
    const value = (row) => row.cells[column].dataset.value;
    const rows = Array.from(body.rows);
    const known = rows.filter((row) => value(row) !== undefined);
    const numeric = known.every((row) => !Number.isNaN(Number(value(row))));
    const size = (row) => (order === "zero" ? Math.abs(value(row)) : Number(value(row)));
    const sign = (order === "descending") === again ? 1 : -1;
    known.sort((a, b) => sign * (numeric ? size(a) - size(b) : value(a).localeCompare(value(b))));
    body.append(...known, ...rows.filter((row) => value(row) === undefined)); // what is not known comes last
    all("th[aria-sort]", heading.parentElement).forEach((each) => each.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", order === "zero" && !again ? "other" : sign > 0 ? "ascending" : "descending");
  }

  // -- views, and collapsed sections, which are expanded for printing -----------------------------------------

  function choose(select) {
    select.dataset.plots.split(" ").forEach((name) => {
      all(".view", document.getElementById(name)).forEach((view, index) => { view.hidden = index !== Number(select.value); });
    });
  }

  function unfold(button) {
    const open = button.getAttribute("aria-expanded") !== "true";
    all(".fold").forEach((each) => { each.open = open; });
    button.setAttribute("aria-expanded", open);
    button.textContent = open ? "Fold all sections" : "Unfold all sections";
  }

  let unfolded = [];

  function print(begins) {
    if (begins) unfolded = all("details:not([open])");
    unfolded.forEach((each) => { each.open = begins; });
  }

  const on = (selector, event, action) => all(selector).forEach((each) => each.addEventListener(event, (what) => action(each, what)));
  buttons.forEach((button) => button.addEventListener("click", () => toggle(number(button))));
  on(".legend button, tr[data-method], .panel", "pointerenter", (each) => point(number(each)));
  on(".legend button, tr[data-method], .panel", "pointerleave", leave);
  on(".chart", "pointermove", explain);
  on(".chart", "pointerdown", explain);
  on(".chart", "pointerleave", leave);
  on("th[aria-sort] button", "click", sort);
  on("select[data-plots]", "change", choose);
  on(".unfold", "click", unfold);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
