// On a page that shows a README beside the diff of its script: a heading in the README scrolls the
// diff to the first function that the text below the heading shows.
addEventListener("load", () => {
  const read = document.querySelector(".step > .read");
  if (!read) return;
  // An unchanged line is in the page once, on the right.
  for (const { cells } of document.querySelectorAll(".script tr"))
    if (!cells[1].className) cells[1].innerHTML = cells[3].innerHTML;

  function show(heading) {
    const section = heading.closest("section");
    const shown = section.textContent.match(/^@@ (\w+) @@$/m);
    const part = shown && document.querySelector(`[data-part="${shown[1]}"]`);
    if (!part) return;
    part.open = true;
    part.scrollIntoView({ block: "start" });
    heading.scrollIntoView({ block: "start" });
  }

  const headings = [...read.querySelectorAll("h2, h3")];
  for (const heading of headings) heading.addEventListener("click", () => show(heading));
  const first = headings.find((heading) => /^@@ \w+ @@$/m.test(heading.parentElement.textContent)
    && !heading.parentElement.querySelector("section"));
  if (first && !location.hash) show(first);
});
