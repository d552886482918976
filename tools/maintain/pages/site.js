const $ = (query) => document.querySelector(query), all = (query) => [...document.querySelectorAll(query)];
const on = (query, event, act) => all(query).forEach((node) => node.addEventListener(event, () => act(node)));
const parts = all(".part"), script = $("#script"), root = document.documentElement.dataset.root, asked = new URLSearchParams(location.search);

let unfolded = asked.get("unfolded") === "true";
function show(view) {
  if ([view, document.body.className].includes("lessons")) fold(view === "lessons" || unfolded);
  document.body.className = view;
  all("[data-view]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.view === view));
}
function fold(open) {
  all(".part > details").forEach((part) => (part.open = open || "changed" in part.dataset));
  $("#fold").setAttribute("aria-pressed", open);
}
// How far a part is below the top of what can be seen; on a phone, the whole page scrolls
const scroller = () => (getComputedStyle(script).overflowY === "auto" ? script : document.scrollingElement);
const edge = () => (scroller() === script ? script.getBoundingClientRect().top : 0);
const below = (part, side = "top") => part.getBoundingClientRect()[side] - edge();

// The part at the top, how much of it is above, and those before it, should the next chapter lack it
function place() {
  const first = parts.findIndex((part) => below(part, "bottom") > 1), part = parts[first];
  const names = parts.slice(0, first + 1).map((part) => part.dataset.name).reverse();
  const above = part && below(part) < innerHeight ? Math.max(-below(part) / part.offsetHeight, 0) : 0;
  return new URLSearchParams({ view: document.body.className, unfolded, above, open: !!part?.querySelector("[open]"), at: names.slice(0, 9) });
}
if (script) {
  all("#script pre > div > span").forEach((line) => line.before(Object.assign(document.createElement("b"), { innerHTML: line.innerHTML })));
  fold(unfolded), show(asked.get("view") ?? "split");
  const there = (asked.get("at") ?? "").split(",").map((name) => $(`[data-name="${name}"]`)), to = there.find(Boolean);
  if (to && to === there[0]) to.querySelector("details").open ||= asked.get("open") === "true";
  if (to) scroller().scrollBy(0, below(to) + (to === there[0]) * asked.get("above") * to.offsetHeight);
  on("[data-view]", "click", (button) => show(button.dataset.view));
  on("nav a", "click", (link) => (link.search = place()));
  const reach = (hash) => hash.startsWith("#f-") && ($(hash).parentElement.open = true);
  on('[href^="#f-"]', "click", (link) => reach(link.hash)), onhashchange = () => reach(location.hash);
  reach(location.hash) || $("article").focus({ preventScroll: true }); // for keys that scroll
  on("#fold", "click", (button) => fold((unfolded = button.ariaPressed === "false")));
  on("#walk", "change", (slider) => all("nav a")[slider.value].click());
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("#menu")?.removeAttribute("open");
  const button = all("[data-key]").find((button) => button.dataset.key === event.key);
  if (!button || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  event.preventDefault(), button.click();
});
on("#find", "click", () => {
  $("#search").showModal();
  const onload = () => $("#search input").dispatchEvent(new Event("input")), src = root + "search.js";
  if (!window.INDEX) document.body.append(Object.assign(document.createElement("script"), { src, onload }));
});
on("#search ol", "click", () => $("#search").close());
on("#search input", "input", (input) => {
  const words = input.value.toLowerCase().match(/\S+/g) ?? [" "], rank = (entry) => entry[2].toLowerCase().includes(words[0]);
  const found = (window.INDEX ?? []).filter((entry) => words.every((word) => entry.join(" ").toLowerCase().includes(word)));
  const items = found.sort((one, other) => rank(other) - rank(one)).slice(0, 40).map(([url, page, title, text]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
    item.append(Object.assign(link, { href: root + url, textContent: `${title} · ${page}` }), text.slice(at, at + 200));
    return item;
  });
  $("#search ol").replaceChildren(...items);
});
const paint = (scheme) => (document.documentElement.style.colorScheme = localStorage.scheme = scheme);
if (localStorage.scheme) paint(localStorage.scheme);
on("#theme", "click", () => paint(getComputedStyle(document.documentElement).backgroundColor.endsWith("255)") ? "dark" : "light"));
