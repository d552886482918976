// The search page: rank the sections of all pages, and the rows of tables with errors or questions,
// by the words of the query.
const entries = Object.entries(SEARCH_INDEX).flatMap(([page, [pageTitle, sections]]) =>
  sections.map(([anchor, inner, text]) => ({
    url: `${page}#${anchor}`, titles: [pageTitle, ...inner], text,
    title: (inner.at(-1) ?? pageTitle).toLowerCase(), words: text.toLowerCase(),
    // Readers usually search for an error, and these pages explain errors.
    weight: /^docs\/questions|^diagnosing-errors/.test(page) ? 2 : 1,
  })));
const mean = entries.reduce((sum, { text }) => sum + text.length, 0) / entries.length;

// Match a word at its start and without its ending, so that "hangs" finds "hang". Short words must
// match in full.
function pattern(word) {
  const stem = word.replace(/(?<=.{3})(?:ing|ed|s)$/, "");
  return new RegExp(`(?<![a-z0-9&#])${stem}${stem.length > 3 ? "[a-z]*" : "s?(?![a-z0-9])"}`, "gi");
}

// BM25 with twice the weight for titles, and a bonus for the exact phrase.
function rank(phrase, patterns) {
  const scores = entries.map(() => 0), found = entries.map(() => 0);
  for (const pattern of patterns) {
    const counts = entries.map(({ title, words }) =>
      [title, words].map((text) => text.match(pattern)?.length ?? 0));
    const rarity = Math.log(1 + entries.length / (1 + counts.filter(([a, b]) => a + b).length));
    counts.forEach(([inTitle, inText], index) => {
      const length = entries[index].text.length / mean;
      found[index] += inTitle || inText ? 1 : 0;
      scores[index] += rarity * ((inTitle ? 2 : 0) + inText / (inText + 0.5 + length));
    });
  }
  return entries.map((entry, index) => {
    const exact = [entry.title, entry.words].filter((text) => text.includes(phrase)).length;
    const share = found[index] / patterns.length;
    return { ...entry, score: scores[index] * share ** 2 * (1 + exact) * entry.weight };
  }).filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
}

const html = (text) => text.replace(/[&<>]/g, (char) => `&#${char.charCodeAt()};`);

// Return the text around the phrase or the first found word, with all found words marked.
function excerpt(text, phrase, patterns) {
  const any = new RegExp(patterns.map(({ source }) => source).join("|"), "gi");
  const exact = text.toLowerCase().indexOf(phrase);
  const start = Math.max(0, (exact < 0 ? text.search(any) : exact) - 110), end = start + 220;
  const part = html(text.slice(start, end)).replace(any, "<mark>$&</mark>");
  return `${start ? "… " : ""}${part}${end < text.length ? " …" : ""}`;
}

const field = document.querySelector("#query");
function show() {
  const phrase = field.value.toLowerCase().trim();
  const patterns = (phrase.match(/[\p{L}\d_-]+/gu) ?? []).map(pattern);
  const found = rank(phrase, patterns);
  document.querySelector("#count").textContent = phrase && `${found.length} results`;
  document.querySelector("#results").innerHTML = found.slice(0, 30).map(({ url, titles, text }) =>
    `<li><a href="${url}">${html(titles.at(-1))}</a>
    <small>${html(titles.slice(0, -1).join(" › "))}</small>
    <p>${excerpt(text, phrase, patterns)}</p>`).join("");
}
field.value = new URLSearchParams(location.search).get("q") ?? "";
field.addEventListener("input", show);
show();
