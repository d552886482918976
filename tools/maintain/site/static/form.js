// The planner's form: read the fields, and show all ways to split the run, the fastest first.
const form = document.querySelector("#planner-form"), shown = document.querySelector("#planner-layouts");
const { models, defaults, gpus } = planner.FACTS;
for (const name of Object.keys(models)) form.model.add(new Option(name));
for (let length = 1024; length <= 131072; length *= 2)
  form.seq_length.add(new Option(length.toLocaleString("en-US"), length));
for (const kind of Object.keys(gpus)) form.gpu.add(new Option(kind));
form.gpu.value = "H100-80GB";
form.model.value = "Llama 3.1 70B";
form.seq_length.value = 4096;
for (const field of form) if (field.type === "number") field.value ||= defaults[field.name];

function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

function copy(pre) {
  getSelection().selectAllChildren(pre);
  document.execCommand("copy");
}

function show() {
  shown.replaceChildren();
  if (!form.checkValidity()) return element("p", "A field has no valid value.", shown);
  const values = Object.fromEntries([...form].filter((field) => field.name)
    .map(({ name, value }) => [name, ["model", "gpu"].includes(name) ? value : Number(value)]));
  values.tokens *= 1e9;
  const layouts = planner.layouts(values);
  const none = "No layout: the samples per step cannot be shared equally among the GPUs.";
  element("p", layouts.length ? layouts[0].checkpoint : none, shown);
  for (const { way, fits, text, speed, command } of layouts) {
    const box = element("article", "", shown);
    box.className = fits ? "fits" : "";
    element("strong", way, box);
    element("p", text, box);
    if (!fits) continue;
    element("p", speed, box);
    const pre = element("pre", command, box);
    element("button", "copy", box).addEventListener("click", () => copy(pre));
  }
}

// Let the browser show the new value first, because large models take a moment.
let timer = 0;
function plan() {
  shown.textContent = "Computing …";
  clearTimeout(timer);
  timer = setTimeout(show, 200);
}
form.gpu.addEventListener("input", () => {
  for (const [name, value] of Object.entries(gpus[form.gpu.value])) form[name].value = value;
});
form.addEventListener("input", plan);
form.addEventListener("submit", (event) => event.preventDefault());
plan();
