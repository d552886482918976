// The search page: rank the sections of all pages, and the rows of tables with errors or questions,
// by the words of the query.
const MOST = 30, AROUND = 110;
const entries = Object.entries(SEARCH_INDEX).flatMap(([page, [pageTitle, sections]]) =>
  sections.map(([anchor, inner, text]) => {
    const titles = [pageTitle, ...inner];
    // Readers usually search for an error, and these pages explain errors.
    const weight = /^docs\/questions|^diagnosing-errors/.test(page) ? 2 : 1;
    return {
      url: `${page}#${anchor}`, titles, text, weight,
      title: titles.at(-1).toLowerCase(), words: text.toLowerCase(),
    };
  }));
const mean = entries.reduce((sum, { text }) => sum + text.length, 0) / entries.length;

// Match a word at its start and without its ending, so that "hangs" finds "hang". Short words must
// match in full.
function pattern(word) {
  const stem = word.replace(/(?<=.{3})(?:ing|ed|s)$/, "");
  return new RegExp(`(?<![a-z0-9])${stem}${stem.length > 3 ? "" : "s?(?![a-z0-9])"}`, "g");
}
const count = (text, word) => text.match(word)?.length ?? 0;

// BM25 with twice the weight for titles, and a bonus for the exact phrase.
function rank(query) {
  const phrase = query.toLowerCase().trim();
  const words = (phrase.match(/[\p{L}\d_-]+/gu) ?? []).map(pattern);
  const scores = entries.map(() => 0), found = entries.map(() => 0);
  for (const word of words) {
    const counts = entries.map(({ title, words }) => [count(title, word), count(words, word)]);
    const rarity = Math.log(1 + entries.length / (1 + counts.filter(([a, b]) => a + b).length));
    counts.forEach(([inTitle, inText], index) => {
      if (!inTitle && !inText) return;
      found[index] += 1;
      const { text } = entries[index];
      scores[index] += rarity * ((inTitle ? 2 : 0) + inText / (inText + 0.5 + text.length / mean));
    });
  }
  return entries.map((entry, index) => {
    const exact = [entry.title, entry.words].filter((text) => text.includes(phrase)).length;
    const share = found[index] / words.length;
    return { ...entry, score: scores[index] * share ** 2 * (1 + exact) * entry.weight };
  }).filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
}

function element(tag, parent, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), { textContent: text }, properties);
  parent.append(made);
  return made;
}

// Show the text around the phrase or the first found word, with all found words marked.
function excerpt(item, { text }, query) {
  const any = new RegExp(query.match(/[\p{L}\d_-]+/gu).map((word) => pattern(word).source + "[a-z]*").join("|"), "gi");
  const exact = text.toLowerCase().indexOf(query.toLowerCase().trim());
  const start = Math.max(0, (exact < 0 ? text.search(any) : exact) - AROUND), end = start + 2 * AROUND;
  const part = (start ? "… " : "") + text.slice(start, end) + (end < text.length ? " …" : "");
  const paragraph = element("p", item);
  let last = 0;
  for (const match of part.matchAll(any)) {
    paragraph.append(part.slice(last, match.index));
    element("mark", paragraph, match[0]);
    last = match.index + match[0].length;
  }
  paragraph.append(part.slice(last));
}

const field = document.querySelector("#query"), results = document.querySelector("#results");
function show() {
  results.replaceChildren();
  const found = field.value.trim() ? rank(field.value) : [];
  document.querySelector("#count").textContent = field.value.trim() && `${found.length} results`;
  for (const entry of found.slice(0, MOST)) {
    const item = element("li", results);
    element("a", item, entry.titles.at(-1), { href: entry.url });
    element("small", item, entry.titles.slice(0, -1).join(" › "));
    excerpt(item, entry, field.value);
  }
}
field.value = new URLSearchParams(location.search).get("q") ?? "";
field.addEventListener("input", show);
show();
