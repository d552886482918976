// On all pages: a keyboard can scroll wide blocks, and a reader can filter the table of families.
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll(".highlight pre, .table-wrapper")) {
    if (block.scrollWidth <= block.clientWidth) continue;
    block.tabIndex = 0;
    block.role = "group";
    block.ariaLabel = block.tagName === "PRE" ? "code" : "table";
  }

  const families = document.querySelector("#the-table table");
  if (!families) return;
  for (const cell of families.querySelectorAll("td + td"))
    cell.className = cell.textContent.trim() === "yes" ? "yes" : "no";
  const field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: "name of a model", ariaLabel: "Filter the table" });
  families.parentElement.before(field);
  field.addEventListener("input", () => {
    for (const row of families.tBodies[0].rows)
      row.hidden = !row.cells[0].textContent.includes(field.value.toLowerCase().trim());
  });
});
