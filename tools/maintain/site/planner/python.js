// The parts of Python that the translated planner needs: see tools/maintain/javascript.py.
const callable = (type) => new Proxy(type, { apply: (target, _, args) => new target(...args) });
class PythonObject { constructor(...args) { this.__init__?.(...args); } }
const SimpleNamespace = class { constructor(values) { Object.assign(this, values); } };
const Exception = class extends Error {};
// A dictionary is an object. A tuple is an array, and as a key, a text.
const keyOf = (key) => Array.isArray(key) ? key.join("\0") : key;
const dict = (pairs) => Object.fromEntries(pairs.map(([key, value]) => [keyOf(key), value]));
const CounterType = class { constructor(values) { Object.assign(this, values); } };
const Counter = callable(CounterType);
const isDict = (value) => value instanceof CounterType || value?.constructor === Object;
const iterate = (values) => Array.isArray(values) || !isDict(values) ? values : Object.keys(values);

function truth(value) {
  if (Array.isArray(value)) return value.length > 0;
  if (value instanceof Set) return value.size > 0;
  return isDict(value) ? Object.keys(value).length > 0 : Boolean(value);
}
const or = (value, other) => truth(value) ? value : other();
const and = (value, other) => truth(value) ? other() : value;

function at(values, key) {
  if (typeof key === "number" && key < 0) return values[values.length + key];
  const value = values[keyOf(key)];
  if (value === undefined && values instanceof CounterType) return 0;
  if (value === undefined) throw new Error(`no ${key}`);
  return value;
}
const put = (values, key, value) => { values[key < 0 ? values.length + key : key] = value; };
const contains = (values, item) =>
  values instanceof Set ? values.has(item) : isDict(values) ? item in values : values.includes(item);
const union = (left, right) => ({ ...left, ...right });
const modulo = (left, right) => left - right * Math.floor(left / right);

function add(left, right) {
  if (typeof left !== "object") return left + right;
  if (Array.isArray(left)) return [...left, ...right];
  const sums = Counter(left);
  for (const name in right) sums[name] = at(sums, name) + right[name];
  for (const name in sums) if (sums[name] <= 0) delete sums[name];
  return sums;
}
const subtract = (left, right) => left instanceof CounterType
  ? add(left, Counter(dict(Object.entries(right).map(([name, value]) => [name, -value]))))
  : left - right;

const methods = {
  add: (values, item) => values.add(item),
  append: (values, item) => values.push(item),
  bit_length: (value) => value ? Math.floor(Math.log2(value)) + 1 : 0,
  get: (values, key, other = null) => values[keyOf(key)] ?? other,
  items: (values) => Object.entries(values)
    .map(([key, value]) => [key.includes("\0") ? key.split("\0") : key, value]),
  join: (between, texts) => [...texts].join(between),
  pop: (values, key) => { const value = values[key]; delete values[key]; return value; },
  remove: (values, item) => values.delete(item),
  replace: (text, old, other) => text.replaceAll(old, other),
  split: (text) => text.split(/\s+/).filter(Boolean),
  total: (values) => sum(Object.values(values)),
  update: (values, others) => {
    for (const [key, value] of Object.entries(others))
      values[key] = values instanceof CounterType ? at(values, key) + value : value;
  },
  values: Object.values,
};

const sum = (values) => values.reduce((total, value) => total + Number(value), 0);
const any = (values) => values.some(truth), all = (values) => values.every(truth);
const len = (values) => values.length ?? values.size ?? Object.keys(values).length;
const map = (change, values) => [...iterate(values)].map((value) => change(value));
const zip = (first, ...others) => first.map((value, i) => [value, ...others.map((list) => list[i])]);
const isinstance = (value, type) => value instanceof type;
const getattr = (value, name, other) => value[name] ?? other;
const set = (values = []) => new Set(iterate(values)), abs = Math.abs, int = Math.trunc, list = (values) => [...iterate(values)];
function range(start, end, step = 1) {
  if (end === undefined) [start, end] = [0, start];
  return Array.from({ length: Math.max(0, Math.ceil((end - start) / step)) }, (_, i) => start + i * step);
}
const compare = (left, right) => (left > right) - (left < right);
function sorted(values, key = (value) => value, reverse = false) {
  return [...values].sort((left, right) => compare(key(left), key(right)) * (reverse ? -1 : 1));
}
const best = (values, key = (value) => value, other, sign) => {
  const list = [...iterate(values)];
  if (!list.length) return other;
  return list.reduce((most, value) => sign * compare(key(value), key(most)) > 0 ? value : most);
};
const max = (values, key, other) => best(values, key, other, 1);
const min = (values, key, other) => best(values, key, other, -1);
const math = { ceil: Math.ceil, prod: (values) => values.reduce((product, value) => product * value, 1) };
const itertools = {
  chain: (...lists) => lists.flat(),
  product: (...lists) => lists.reduce(
    (rows, list) => rows.flatMap((row) => list.map((value) => [...row, value])), [[]]),
};

// Format a number as an f-string does: with "," for thousands, a precision and a type.
function format(value, layout) {
  const [, comma, digits, type] = layout.match(/^(,?)(?:\.(\d+))?([fg%]?)$/);
  if (!type && !comma) return String(value);
  const text = type === "g" ? String(Number(Number(value).toPrecision(digits || 6)))
    : (type === "%" ? value * 100 : value).toFixed(digits || 0);
  const [whole, ...fraction] = text.split(".");
  const grouped = comma ? whole.replace(/\B(?=(\d{3})+$)/g, ",") : whole;
  return [grouped, ...fraction].join(".") + (type === "%" ? "%" : "");
}
