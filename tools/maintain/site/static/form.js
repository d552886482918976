// The planner's form: read the fields, and show all ways to split the run, the fastest first.
const form = document.querySelector("#planner-form"), shown = document.querySelector("#planner-layouts");
const { models, defaults, gpus } = planner.FACTS;
for (const name of models) form.model.add(new Option(name));
for (let length = 1024; length <= 131072; length *= 2)
  form.seq_length.add(new Option(length.toLocaleString("en-US"), length));
for (const kind of Object.keys(gpus)) form.gpu.add(new Option(kind));
form.gpu.value = "H100-80GB";
form.model.value = "Llama 3.1 70B";
form.seq_length.value = 4096;
for (const field of form) if (field.type === "number") field.value ||= defaults[field.name] ?? "";

function element(tag, text, parent, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  parent.append(made);
  return made;
}

// Return what is wrong with a field, or an empty text.
function problemOf(field) {
  const { min, max, step, type, validity, labels } = field;
  const isEmpty = !field.value.trim() && !validity.badInput;
  const wrong = isEmpty ? !("empty" in field.dataset) : !validity.valid;
  field.setAttribute("aria-invalid", wrong);
  if (!wrong || type !== "number") return "";
  const range = max ? `between ${min} and ${max}` : `of at least ${min}`;
  return `${labels[0].firstChild.textContent.trim()} must be a ${step ? "number" : "whole number"} ${range}.`;
}

// A browser may refuse the clipboard to a page without a server; then copy the selected text.
async function copy(pre, button) {
  getSelection().selectAllChildren(pre);
  const copied = await navigator.clipboard?.writeText(pre.textContent).then(() => true, () => false);
  button.textContent = copied || document.execCommand("copy") ? "copied" : "press Ctrl+C";
}

const gib = (size) => (size / 2 ** 30).toLocaleString("en-US", { maximumFractionDigits: 1 });

// Show the parts of a GPU's memory at its fullest moment. The text has the same numbers as the bar.
function showMemory({ parts, room, gpu_needs }, box) {
  const bar = element("div", "", box, "bar"), legend = element("p", "", box, "legend");
  bar.ariaHidden = true;
  bar.style.setProperty("--room", `${100 * room / Math.max(room, gpu_needs)}%`);
  for (const [name, size] of parts) {
    const kind = name.split(" ")[0];
    element("span", "", bar, kind).style.width = `${100 * size / Math.max(room, gpu_needs)}%`;
    element("span", `${name} ${gib(size)}`, legend, kind);
  }
  element("span", `of ${gib(room)} GiB per GPU`, legend);
}

// Return text as a shell needs it, because a command names folders, and a number as a number.
const quoted = (word) => /^[\w@%+=:,./-]*$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
const valueOf = ({ type, value }) =>
  type === "text" ? quoted(value.trim()) : isNaN(value) ? value : value && Number(value);

async function show() {
  const problems = [...form].map(problemOf).filter(Boolean);
  if (problems.length) return shown.replaceChildren(...problems.map((text) => element("p", text, shown)));
  const fields = [...form].filter((field) => field.name);
  const values = Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
  const layouts = (await planner.layouts)({ ...values, tokens: Math.round(values.tokens * 1e9) });
  const none = "No layout: the samples per step cannot be shared equally among the GPUs.";
  shown.replaceChildren();
  element("p", layouts.length ? layouts[0].checkpoint : none, shown);
  for (const layout of layouts) {
    const box = element("article", "", shown, layout.fits ? "fits" : "");
    element("strong", layout.way, box);
    element("p", layout.text, box);
    showMemory(layout, box);
    if (!layout.fits) continue;
    element("p", layout.speed, box);
    const pre = element("pre", "", box), button = element("button", "copy", box);
    // Each word is an element, because lines would break at the hyphens of a flag.
    for (const part of layout.command.split(/(\s+)/)) pre.append(part.trim() ? element("span", part, pre) : part);
    button.addEventListener("click", () => copy(pre, button));
  }
}

// Let the browser show the new value first, because large models take a moment.
let timer = 0;
function plan() {
  shown.textContent = "Computing …";
  clearTimeout(timer);
  timer = setTimeout(() => show().catch((error) => shown.textContent = `No plan: ${error.message}`), 300);
}

// A link keeps the values of the form behind its #.
function restore() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    if (form.elements[name]) form.elements[name].value = value;
  plan();
}

form.gpu.addEventListener("input", () => {
  for (const [name, value] of Object.entries(gpus[form.gpu.value])) form[name].value = value;
});
form.addEventListener("input", plan);
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", restore);
restore();
