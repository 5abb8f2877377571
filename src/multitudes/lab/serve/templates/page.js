"use strict";
const $ = (id) => document.getElementById(id);
const state = { about: null, token: "", image: null, asked: 0 };

// Insert everything from the network or its data as text, never as markup.
function element(tag, settings, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, settings || {});
  made.append(...children);
  return made;
}

function percent(value) {
  if (value === null) return "unknown";
  const whole = 100 * value;
  return `${whole > 99.9 && whole < 100 ? "> 99.9" : whole < 0.1 && whole > 0 ? "< 0.1" : whole.toFixed(whole < 10 || whole > 99 ? 1 : 0)} %`;
}

const number = (value) => (value === null ? "unbounded" : String(Number(value.toPrecision(5))));

function problem(sentence) {
  $("problem").textContent = sentence || "";
  $("problem").hidden = !sentence;
}

async function fetched(path, settings) {
  const headers = { ...((settings || {}).headers || {}) };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  let response;
  try {
    response = await fetch(path, { ...settings, headers });
  } catch {
    throw new Error("Cannot reach the server.");
  }
  const found = await response.json().catch(() => ({ error: `The server returned ${response.status}.` }));
  if (!response.ok) throw Object.assign(new Error(found.error), { status: response.status });
  return found;
}

// -- requests -------------------------------------------------------------------------------------------

function body() {
  const { about } = state;
  if (about.inputs === "images") {
    if (!state.image) throw new Error("Choose an image first.");
    return [state.image.type || "image/png", state.image];
  }
  if (about.inputs === "texts") return ["text/plain; charset=utf-8", $("words").value];
  const cells = [...document.querySelectorAll("#fields [data-column]")].map((each) => [about.columns[each.dataset.column].name, each.value.trim() || null]);
  return ["application/json", JSON.stringify({ rows: [Object.fromEntries(cells)] })];
}

async function ask() {
  const turn = ++state.asked;
  problem();
  try {
    const [kind, content] = body();
    const level = encodeURIComponent($("level").value);
    const found = await fetched(`/predict?level=${level}`, { method: "POST", headers: { "Content-Type": kind }, body: content });
    if (turn === state.asked) show(found);
  } catch (error) {
    if (turn === state.asked) problem(error.message);
  }
}

function take(file) {
  if (!file) return;
  state.image = file;
  if (state.address) URL.revokeObjectURL(state.address);
  state.address = URL.createObjectURL(file);
  $("preview").src = state.address;
  $("preview").hidden = false;
  $("drop-text").textContent = file.name || "An example. Drop another image here, or click to choose a file";
  ask();
}

function fill(row) {
  state.about.columns.forEach((column, at) => {
    const value = row[column.name];
    document.querySelector(`#fields [data-column="${at}"]`).value = value === null || value === undefined ? "" : value;
  });
}

function cells(line) {
  const separator = ["\t", ";", ","].find((each) => line.includes(each)) || ",";
  const found = [];
  let cell = "", quoted = false;
  for (const letter of line.trim()) {
    if (letter === '"') quoted = !quoted;
    else if (letter === separator && !quoted) { found.push(cell); cell = ""; }
    else cell += letter;
  }
  return [...found, cell].map((each) => each.trim());
}

function pasted() {
  const line = $("paste").value;
  if (!line.trim()) return;
  const values = cells(line), columns = state.about.columns;
  if (values.length !== columns.length) {
    problem(`The row must have ${columns.length} values, one per column; got ${values.length}.`);
    return;
  }
  fill(Object.fromEntries(columns.map((column, at) => [column.name, values[at]])));
  ask();
}

function fields(columns) {
  columns.forEach((column, at) => {
    const input = element("input", { id: `field-${at}`, autocomplete: "off", spellcheck: false });
    input.dataset.column = at;
    if (column.kind === "number") input.inputMode = "decimal";
    if (column.kind === "date") input.placeholder = "2026-01-31";
    const parts = [element("label", { htmlFor: input.id, textContent: column.name }), input];
    if (column.known.length) {
      const list = element("datalist", { id: `known-${at}` }, ...column.known.map((value) => element("option", { value })));
      input.setAttribute("list", list.id);
      parts.push(list);
    }
    $("fields").append(element("div", {}, ...parts));
  });
}

// -- examples -------------------------------------------------------------------------------------------

function sample(example) {
  const button = element("button", { type: "button" });
  button.setAttribute("aria-pressed", "false");
  const truth = element("small", { textContent: `truth: ${example.truth}` });
  if (example.image) {
    button.className = "of-image";
    button.append(element("img", { src: example.image, alt: `Image of ${example.truth}` }), truth);
  } else if (example.text !== undefined) {
    button.className = "wide";
    button.append(example.text.length > 160 ? `${example.text.slice(0, 160)} …` : example.text, truth);
  } else {
    const values = Object.entries(example.row).slice(0, 6).map(([name, value]) => `${name} ${value === null ? "missing" : value}`);
    button.className = "wide";
    button.append(values.join(", "), Object.keys(example.row).length > 6 ? ", …" : "", truth);
  }
  button.addEventListener("click", () => {
    document.querySelectorAll(".samples button").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
    if (example.image) take(imageOf(example.image));
    else {
      if (example.row) fill(example.row);
      else $("words").value = example.text;
      ask();
    }
  });
  return button;
}

function imageOf(address) {
  const bytes = Uint8Array.from(atob(address.slice(address.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: "image/png" });
}

// -- answers --------------------------------------------------------------------------------------------

const called = () => (state.about.draws ? "draws" : "members");

function agreement(answer) {
  const votes = new Map();
  answer.members.forEach(({ label }) => votes.set(label, (votes.get(label) || 0) + 1));
  const total = answer.members.length;
  if (total === 1) return ["One member", "there is no disagreement to measure."];
  if (votes.size === 1) {
    const apart = answer.mutual_information > 0.1;
    return [`The ${called()} agree${apart ? " on the class" : ""}`, `all ${total} predict ${answer.label}${apart ? ", with different confidence" : ""}.`];
  }
  const sorted = [...votes].sort((one, two) => two[1] - one[1]);
  const counts = sorted.slice(0, 4).map(([label, count], at) => `${count}${at ? "" : ` of ${total}`} predict${count === 1 ? "s" : ""} ${label}`);
  return [`The ${called()} disagree`, `${counts.join(", ")}${sorted.length > 4 ? ", …" : ""}.`];
}

function sureness(answer) {
  const share = answer.entropy / Math.log(Math.max(2, state.about.classes.length));
  return share < 0.1 ? "sure" : share < 0.4 ? "rather sure" : share < 0.7 ? "unsure" : "very unsure";
}

function meter(rows) {
  const box = element("div", { className: "meter" });
  rows.forEach(([name, value, inside]) => {
    const fill = element("span", { className: inside ? "fill inside" : "fill" });
    fill.style.width = `${100 * (value || 0)}%`;
    box.append(
      element("span", { textContent: name, title: name, className: inside ? "in" : "" }),
      element("span", { className: "track" }, fill),
      element("span", { className: "number", textContent: percent(value) }),
    );
  });
  return box;
}

function fact(strong, rest) {
  return element("p", { className: "fact" }, element("b", { textContent: `${strong}: ` }), rest);
}

function ofClasses(answer, found) {
  const level = percent(found.level), set = answer.set;
  const ranked = Object.entries(answer.probabilities).sort((one, two) => two[1] - one[1]);
  const inside = new Set(set || []);
  const parts = [
    element("p", { className: "verdict" }, answer.label, " ", element("small", { textContent: `${percent(answer.confidence)}, ${sureness(answer)}` })),
    fact(...agreement(answer)),
  ];
  if (set && set.length) parts.push(fact(`Set at ${level}`, `${set.join(", ")}. It contains the true class for ${level} of inputs from the same distribution${set.length === ranked.length ? "; here, it contains every class" : ""}.`));
  else if (set) parts.push(fact(`Set at ${level}`, "empty: no class fits well."));
  parts.push(element("h3", { textContent: set ? "Probabilities (blue: classes in the set)" : "Probabilities" }));
  parts.push(meter(ranked.slice(0, 10).map(([name, value]) => [name, value, inside.has(name)])));
  if (ranked.length > 10) parts.push(element("p", { className: "note", textContent: `and ${ranked.length - 10} more classes` }));
  parts.push(element("h3", { textContent: `Predictions of the ${answer.members.length} ${called()}${state.about.calibrated ? ", before calibration" : ""}` }));
  parts.push(element("ul", { className: "votes" }, ...answer.members.slice(0, 64).map((member) =>
    element("li", { className: member.label === answer.label ? "" : "other" }, member.label, " ", element("small", { textContent: percent(member.confidence) })))));
  const most = Math.log(Math.max(2, state.about.classes.length)).toFixed(2);
  parts.push(element("h3", { textContent: "Uncertainty" }), element("dl", {},
    element("dt", { textContent: "entropy" }), element("dd", { textContent: `${number(answer.entropy)} of ${most} nats: total uncertainty${state.about.calibrated ? ", calibrated" : ""}` }),
    element("dt", { textContent: "mutual information" }), element("dd", { textContent: `${number(answer.mutual_information)} nats${state.about.calibrated ? " before calibration" : ""}: disagreement between the ${called()}, which more data could reduce` })));
  return parts;
}

function range(answer) {
  const space = "http://www.w3.org/2000/svg";
  const values = [answer.low, answer.high, answer.mean, ...answer.members.map(({ mean }) => mean)].filter((each) => each !== null);
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const x = (value) => 50 + 500 * (value - low) / span;
  const svg = document.createElementNS(space, "svg");
  const draw = (tag, settings, text) => {
    const made = document.createElementNS(space, tag);
    Object.entries(settings).forEach(([name, value]) => made.setAttribute(name, value));
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.setAttribute("viewBox", "0 0 600 80");
  svg.setAttribute("class", "range");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Interval, mean, and the members' predictions");
  draw("line", { x1: 0, x2: 600, y1: 40, y2: 40, class: "axis" });
  const left = answer.low === null ? 0 : x(answer.low), right = answer.high === null ? 600 : x(answer.high);
  draw("rect", { x: left, width: Math.max(1, right - left), y: 22, height: 36, rx: 4, class: "band" });
  draw("line", { x1: x(answer.mean), x2: x(answer.mean), y1: 16, y2: 64, class: "middle" });
  answer.members.slice(0, 64).forEach(({ mean }) => mean !== null && draw("circle", { cx: x(mean), cy: 40, r: 6, class: "member" }));
  if (answer.low !== null) draw("text", { x: Math.max(0, left - 40), y: 76 }, number(answer.low));
  if (answer.high !== null) draw("text", { x: Math.min(600, right + 40), y: 76, "text-anchor": "end" }, number(answer.high));
  return svg;
}

function ofNumbers(answer, found) {
  const level = percent(found.level), share = answer.std ? (answer.std_between_members / answer.std) ** 2 : 0;
  const many = answer.members.length > 1;
  const held = found.conformal ? `It contains the true value for ${level} of inputs from the same distribution.` : "";
  const parts = [element("p", { className: "verdict" }, number(answer.mean), " ", element("small", { textContent: `± ${number(answer.std)}` }))];
  if (many) parts.push(fact(share < 0.25 ? `The ${called()} agree` : `The ${called()} disagree`, `the standard deviation between them is ${number(answer.std_between_members)}, which explains ${percent(share)} of the variance.`));
  parts.push(fact(`Interval at ${level}`, `${number(answer.low)} to ${number(answer.high)}. ${held}`), range(answer));
  parts.push(element("p", { className: "note", textContent: `Band: interval. Line: mean. Dots: predictions of the ${called()}.` }));
  parts.push(element("h3", { textContent: `Predictions of the ${answer.members.length} ${called()}` }));
  parts.push(element("ul", { className: "votes" }, ...answer.members.slice(0, 64).map(({ mean }) => element("li", { textContent: number(mean) }))));
  return parts;
}

function show(found) {
  const [answer] = found.answers;
  const parts = state.about.classes.length ? ofClasses(answer, found) : ofNumbers(answer, found);
  found.notes.forEach((note) => parts.push(element("p", { className: "warning" }, note)));
  parts.push(element("details", {}, element("summary", { textContent: "Response as JSON" }), element("pre", { textContent: JSON.stringify(found, null, 1) })));
  $("result").replaceChildren(...parts);
  $("result").hidden = false;
  $("empty").hidden = true;
  const { top, bottom } = $("answer").getBoundingClientRect();
  if (bottom < 0 || top > innerHeight - 60 || (top < 0 && innerWidth <= 760)) $("answer").scrollIntoView();
}

// -- start ----------------------------------------------------------------------------------------------

async function open() {
  try {
    state.about = await fetched("/about");
  } catch (error) {
    $("login").hidden = error.status !== 401;
    problem(error.status === 401 && !state.token ? "" : error.message);
    return;
  }
  const { about } = state;
  problem();
  $("login").hidden = true;
  $("desk").hidden = false;
  $("kicker").textContent = `multitudes serve · ${about.job}`;
  $("title").textContent = about.classes.length ? `${about.data}: predict one of ${about.classes.length} classes` : `${about.data}: predict a number`;
  document.title = `${about.job} on ${about.data}`;
  $("level").value = about.level;
  $("level-of").textContent = about.classes.length ? "set" : "interval";
  $("asking-title").textContent = { images: "Image", rows: "Row", texts: "Text" }[about.inputs];
  $("drop").hidden = about.inputs !== "images";
  $("row").hidden = about.inputs !== "rows";
  $("text").hidden = about.inputs !== "texts";
  fields(about.columns);
  for (const name of ["sure", "unsure"]) $(name).replaceChildren(...about.examples[name].map(sample));
  $("examples").hidden = !about.examples.sure.length;
}

$("login").addEventListener("submit", (event) => { event.preventDefault(); state.token = $("token").value; open(); });
$("send").addEventListener("click", ask);
for (const id of ["row", "text"]) $(id).addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("words").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(); });
$("paste").addEventListener("change", pasted);
$("level").addEventListener("change", () => { if (!$("result").hidden) ask(); });
$("file").addEventListener("change", () => take($("file").files[0]));
// Handle drops anywhere on the page: browsers open a file that is dropped outside of the box.
for (const name of ["dragenter", "dragover"]) document.addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
for (const name of ["dragleave", "drop"]) document.addEventListener(name, () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (state.about && state.about.inputs === "images") take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file && state.about && state.about.inputs === "images") take(file);
});
open();
