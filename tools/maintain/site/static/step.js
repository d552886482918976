// On a page that shows a README beside the diff of its script: show the diff side by side if the
// window is wide, or if the reader has chosen it.
addEventListener("DOMContentLoaded", () => {
  const split = document.querySelector("#split");
  if (!split) return;
  // An unchanged line is in the page once, on the right.
  for (const right of document.querySelectorAll(".rows > [data-old]")) {
    const left = right.cloneNode(true);
    left.start = right.dataset.old;
    left.ariaHidden = "true";
    right.before(left);
  }
  const wide = matchMedia("(min-width: 1700px)");
  const show = () => { split.checked = localStorage.split ? localStorage.split === "yes" : wide.matches; };
  show();
  wide.addEventListener("change", show);
  split.addEventListener("change", () => { localStorage.split = split.checked ? "yes" : "no"; });
});
