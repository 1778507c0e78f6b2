// What axe-core finds in the theme: its search has no name, and tables that are wider than the page scroll in a box that
// a keyboard does not reach.
const mend = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) box.tabIndex = 0;
};
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
