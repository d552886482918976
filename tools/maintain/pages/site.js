// Views, walking, search, the planner's filter. The pages can be read without any of it.
const $ = (query) => document.querySelector(query), all = (query) => [...document.querySelectorAll(query)];
const parts = all(".part"), asked = new URLSearchParams(location.search), script = $("#script"), root = document.documentElement.dataset.root;

function show(view) {
  document.body.className = view;
  all("[data-view]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.view === view));
  if (view === "lessons") fold(true);
}

function fold(open) {
  all(".part > details").forEach((part) => (part.open = open || "changed" in part.dataset));
  $("#fold").setAttribute("aria-pressed", open);
}

// How far a part is below the top of what can be seen; on a phone, the whole page scrolls.
const scroller = () => (getComputedStyle(script).overflowY === "auto" ? script : document.scrollingElement);
const below = (part, side = "top") =>
  part.getBoundingClientRect()[side] - (scroller() === script ? script.getBoundingClientRect().top : 0);

function change(step) {
  const changed = parts.filter((part) => part.querySelector("[data-changed]"));
  const to = step > 0 ? changed.find((part) => below(part) > 1) : changed.findLast((part) => below(part) < -1);
  if (to) scroller().scrollBy(0, below(to));
}

// The place in the script: the part at the top, how much of it is above, and the parts before it,
// should the next chapter not have it.
function place() {
  const first = parts.findIndex((part) => below(part, "bottom") > 1), part = parts[first];
  const names = parts.slice(0, first + 1).map((part) => part.dataset.name).reverse();
  const above = part && below(part) < innerHeight ? -below(part) / part.offsetHeight : 0;
  return new URLSearchParams({ view: document.body.className, above: Math.max(above, 0), at: names.slice(0, 20) });
}

if (script) {
  show(asked.get("view") ?? "split");
  const there = (asked.get("at") ?? "").split(",").map((name) => $(`[data-name="${name}"]`)), to = there.find(Boolean);
  if (to && asked.get("at")) scroller().scrollBy(0, below(to) + (to === there[0]) * asked.get("above") * to.offsetHeight);
  all("[data-view]").forEach((button) => button.addEventListener("click", () => show(button.dataset.view)));
  all("nav a").forEach((link) => link.addEventListener("click", () => (link.search = place())));
  all('[href^="#f-"]').forEach((link) => link.addEventListener("click", () => ($(link.hash).parentElement.open = true)));
  $("#fold").addEventListener("click", () => fold($("#fold").ariaPressed === "false"));
  $("#walk").addEventListener("change", () => all("nav a")[$("#walk").value].click());
  $("#change-after").addEventListener("click", () => change(1));
  $("#change-before").addEventListener("click", () => change(-1));
}

addEventListener("keydown", (event) => {
  const button = all("[data-key]").find((button) => button.dataset.key === event.key);
  if (!button || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  event.preventDefault();
  button.click();
});

$("#find").addEventListener("click", () => {
  $("#search").showModal();
  if (!window.INDEX) document.body.append(Object.assign(document.createElement("script"), { src: root + "search.js" }));
});

$("#search input").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().match(/\S+/g) ?? [" "], rank = (entry) => entry[2].toLowerCase().includes(words[0]);
  const found = INDEX.filter((entry) => words.every((word) => entry.join(" ").toLowerCase().includes(word)));
  const items = found.sort((one, other) => rank(other) - rank(one)).slice(0, 40).map(([url, page, title, text]) => {
    const item = document.createElement("li"), at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
    item.append(Object.assign(document.createElement("a"), { href: root + url }), text.slice(at, at + 200));
    item.firstChild.textContent = `${title} · ${page}`;
    return item;
  });
  $("#search ol").replaceChildren(...items);
});

function filter() {
  const [model, nodes, setting, gpu, host, fits] = $("#plans").elements;
  const rows = all("#planned tbody tr").filter((row) => {
    const cells = [...row.cells].map((cell) => cell.textContent), yes = +cells[3] <= +gpu.value && +cells[4] <= +host.value;
    row.cells[5].textContent = yes ? "yes" : "no";
    const chosen = [model, nodes].every((select, n) => !select.value || select.value === cells[n]);
    row.hidden = !(chosen && cells[2].includes(setting.value) && (yes || !fits.checked));
    return !row.hidden;
  });
  $("#plans output").textContent = `${rows.length} rows`;
}
$("#plans")?.addEventListener("input", filter);
if ($("#plans")) filter();

const paint = (scheme) => (document.documentElement.style.colorScheme = localStorage.scheme = scheme);
if (localStorage.scheme) paint(localStorage.scheme);
$("#theme").addEventListener("click", () => paint(getComputedStyle(document.body).backgroundColor.endsWith("255)") ? "dark" : "light"));
