// What the planner reads from the scripts and from runs on fake tensors: here, from form.json.
const ExpertShape = class extends Array {};
const SCHEDULES = { gpipe: [null, 1], "1f1b": [null, 1], "interleaved-1f1b": [null, 2] };
const newest_chapter = () => ({ SCHEDULES, experts_of: (built) => built });
const active_numbers = (model) => model.facts.active;
const CHUNK_SIZE = FACTS.chunk_size, TERMS = 4, KINDS = ["activations", "logits", "gradients"];

function modelFrom(facts, layers, layer, root) {
  const shape = (sizes) => sizes[0] === "experts" ? ExpertShape.from(sizes.slice(1)) : sizes;
  const model = { facts, config: facts.config, layers: Array(layers).fill(layer.map(shape)) };
  model.root = root.map(shape);
  model.shapes = [...model.layers.flat(), ...model.root];
  model.weights = numbers(model.shapes);
  model.built = model.shapes.filter((shape) => shape instanceof ExpertShape);
  return model;
}

// Return a Model for each rank of a pipeline; without a pipeline, there is one.
const stageCache = new Map();
function stages_of(setting) {
  const { facts } = setting.model, tensor = setting.tensor_parallel_size;
  const pipeline = setting.pipeline_parallel_size;
  const key = `${tensor} ${pipeline} ${setting.num_stages}`;
  if (!stageCache.has(facts)) stageCache.set(facts, {});
  const found = stageCache.get(facts);
  if (!found[key]) {
    if (!facts.shapes[tensor]) throw new UnsupportedModelError();
    const [layer, root] = facts.shapes[tensor];
    const stages = pipeline > 1 ? facts.stages[key] : [[facts.layers, root]];
    if (!stages) throw new UnsupportedModelError();
    found[key] = stages.map(([layers, root]) => modelFrom(facts, layers, layer, root));
  }
  return found[key];
}

function segmentsKey(setting) {
  const kind = setting.chapter === "02" ? "02" : setting.chapter < "05" ? "04" : "05";
  const style = setting.context_parallel_size > 1 ? setting.context_parallel_style : "gather";
  const alone = setting.tensor_parallel_size > 1 && setting.micro_batch_size === 1;
  return [kind, setting.tensor_parallel_size, setting.context_parallel_size, style,
    setting.expert_parallel_size, setting.recompute, alone ? 1 : "more"].join(" ");
}

// Return the bytes of tensors in each segment of a step, by the formulas that were recorded.
function segments_of(setting) {
  const { facts } = setting.model, tokens = setting.micro_batch_size * setting.seq_length;
  const segments = facts.segments[segmentsKey(setting)];
  if (!segments) throw new UnsupportedModelError();
  const split = setting.tensor_parallel_size * setting.context_parallel_size;
  const chunk = Math.min(CHUNK_SIZE, tokens / split);
  const values = [1, setting.seq_length, tokens, chunk];
  const bytes = (formula) => Counter(dict(KINDS.map((kind, number) => [kind, values.reduce(
    (size, value, term) => size + value * (formula[number * TERMS + term] ?? 0), 0)])));
  const fullest = (moments) => max(moments, (moment) => methods.total(moment));
  // The loss of several chunks has other moments, which are relative to the start of a segment.
  const chunks = Math.ceil(tokens / split / chunk);
  const head = chunks > 1 && facts.heads[`${setting.tensor_parallel_size} ${setting.context_parallel_size}`];
  const more = head && setting.chapter >= "05" ? head[Math.min(chunks, 3) - 2] : {};
  const relativeTo = (origin) => (formula) => {
    const start = bytes(segments[origin][0]), change = bytes(formula);
    return Counter(dict(KINDS.map((kind) => [kind, start[kind] + change[kind]])));
  };
  return dict(Object.keys(segments).map((name) => {
    let [start, ...moments] = segments[name].map(bytes);
    if (more[name]) [start, ...moments] = more[name].map(relativeTo(name));
    if (more[name] && name === "head")
      moments.push(...more.chunks.slice(1).map(relativeTo("head backward")));
    const most = fullest(moments);
    return [name, { start, most, most_besides_gradients: most }];
  }));
}

// ---- the layouts that the form compares ------------------------------------------------------
const words_without_layout = (args, chapter) =>
  args.words.filter((word) => word !== "--checkpoint-async" || chapter >= "04");

// Return the setting, the command and the speed of a layout, or null if a script refuses it.
function layout_of(args, chapter, words, line) {
  const flags = { ...FACTS.flags };
  line.forEach((word, i) => {
    if (!word.startsWith("--")) return;
    const name = word.slice(2).replace(/^no-/, "").replaceAll("-", "_"), next = line[i + 1] ?? "--";
    const value = next.startsWith("--") ? !word.startsWith("--no-") : next;
    flags[name] = isNaN(value) ? value : typeof value === "string" ? Number(value) : value;
  });
  const group = flags.tensor_parallel_size * flags.context_parallel_size;
  const data_ranks = args.ranks / group / flags.pipeline_parallel_size;
  const samples = args.global_batch_size / data_ranks;
  const copy = args.ranks / flags.pipeline_parallel_size / flags.replicas;
  const whole = [args.seq_length / group, data_ranks, samples, data_ranks / flags.replicas];
  if (![...whole, copy / flags.expert_parallel_size].every(Number.isInteger)) return null;
  const sizes = range(1, flags.batch_size + 1).filter((size) => samples % size === 0);
  const micro_batch_size = Math.max(...sizes), accumulation = samples / micro_batch_size;
  const stages = flags.pipeline_parallel_size;
  const multiple = flags.pipeline_schedule === "interleaved-1f1b" ? stages : 1;
  if (accumulation < stages || accumulation % multiple) return null;
  const checkpoint_async = args.checkpoint_async && chapter >= "04";
  const reshard_after_forward = flags.reshard_after_forward && stages === 1;
  const derived = { micro_batch_size, accumulation, checkpoint_async, reshard_after_forward };
  const setting = Setting({ ...args, ...flags, ...derived, chapter: chapter === "03" ? "02" : chapter });
  const traced = args.model.facts.segments[segmentsKey(setting)];
  if (chapter >= "05" && flags.context_parallel_size === 1 && !traced) return null;
  try {
    const script = [FACTS.scripts[chapter], ...words].join(" ");
    const command = [launcher(args), script, line.join(" ")].join(" \\\n    ");
    return { setting, command, speed: speed_of(setting) };
  } catch (error) {
    if (error instanceof UnsupportedModelError) return null;
    throw error;
  }
}

// Return the best layout of each way to split a run, as the command line's --layouts does.
function layouts({ model, tokens, ...chosen }) {
  const facts = FACTS.models[model];
  const args = { ...FACTS.defaults, batch_size: facts.batch, ...chosen };
  args.ranks = args.nodes * args.gpus_per_node;
  args.compile = facts.words.includes("--compile");
  args.checkpoint_async = facts.words.includes("--checkpoint-async");
  args.kernels = args.compile ? "compiled" : "eager";
  const values = { "--seq-length": args.seq_length, "--global-batch-size": args.global_batch_size };
  if (tokens) values["--num-steps"] = Math.ceil(tokens / args.global_batch_size / args.seq_length);
  args.words = facts.words.map((word, i) => String(values[facts.words[i - 1]] ?? word));
  const steps = Number(facts.words[facts.words.indexOf("--num-steps") + 1]);
  args.tokens = tokens || steps * args.global_batch_size * args.seq_length;
  args.model = modelFrom(facts, facts.layers, ...facts.shapes[1]);
  return best_layouts(args).map((layout) => {
    const needs = ["gpu", "host"].map((name) => `${text_of(layout[`${name}_needs`])} per ${name}`);
    const text = `${verdict(layout, true)}; ${needs.join(", ").replace("gpu", "GPU")}`;
    const speed = layout.fits ? speed_text(args, layout) : "";
    const { way, fits, command, gpu_needs, host_needs } = layout;
    const checkpoint = checkpoint_text(args, layout);
    return { way, fits, text, speed, command, checkpoint, gpu_needs, host_needs, numbers: layout.speed };
  });
}
