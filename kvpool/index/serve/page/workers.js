// The table of workers: a page at a time, which the index picks by health and name.

import { byId, element, part, tableHead, tableRow, write } from "./dom.js";
import { compact, count, duration, percent, whole } from "./format.js";
import { HEALTHS } from "./overview.js";

const COLUMNS = [
  ["Worker", "name"],
  ["Health", "state"],
  ["Model", "wrap"],
  ["Requests", "tight"],
  ["KV cache", "tight"],
  ["Device blocks", "number"],
  ["Host blocks", "number"],
  ["Disk blocks", "number"],
  ["Behind", "number"],
];
const FIND_MS = 250;

let pages = [""]; // where this page and those before it begin
let next = "";

export function workersQuery() {
  return { after: pages[pages.length - 1], health: byId("health").value, find: byId("find").value.trim() };
}

export function startWorkers(refresh) {
  const options = Object.entries(HEALTHS).map(([name, [label]]) => element("option", { value: name }, label));
  byId("health").replaceChildren(element("option", { value: "" }, "All"), ...options);
  tableHead(byId("workers-table"), COLUMNS);
  let timer;
  const changed = () => {
    pages = [""];
    refresh();
  };
  byId("health").addEventListener("change", changed);
  byId("find").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(changed, FIND_MS);
  });
  byId("workers-form").addEventListener("submit", (event) => {
    event.preventDefault();
    changed();
  });
  byId("next").addEventListener("click", () => {
    if (!next) return;
    pages.push(next);
    refresh();
  });
  byId("previous").addEventListener("click", () => {
    if (pages.length > 1) pages.pop();
    refresh();
  });
}

export function showWorkers(workers, fleet, byToken) {
  next = workers.next;
  const several = new Set(fleet.models.map((one) => one.tenant)).size > 1;
  byId("workers-table").tBodies[0].replaceChildren(...workers.rows.map((worker) => row(worker, several)));
  byId("workers-table").hidden = !workers.rows.length;
  // Disabling a focused button would lose the focus.
  for (const [id, goes] of [["previous", pages.length > 1], ["next", Boolean(next)]]) {
    byId(id).disabled = !goes && document.activeElement !== byId(id);
    byId(id).setAttribute("aria-disabled", String(!goes));
  }
  write(byId("workers-count"), shown(workers, fleet, byToken));
}

function shown({ matching, before, rows }, fleet, byToken) {
  if (!fleet.workers) return `No worker has joined this index${byToken ? " that this token may see" : ""}.`;
  if (!matching) return "No worker matches.";
  if (!rows.length) return `No more of ${count(matching, "worker", "workers")}.`;
  return `${whole(before + 1)} to ${whole(before + rows.length)} of ${count(matching, "worker", "workers")}`;
}

function row(worker, several) {
  const [label, level] = HEALTHS[worker.health] || [worker.health, "idle"];
  const notes = [several ? worker.tenant : "", worker.address, worker.ranks > 1 ? `${worker.ranks} ranks` : ""];
  return tableRow(COLUMNS, [
    [worker.name, quiet(notes.filter(Boolean).join(" · "))],
    [element("span", { className: `pill is-${level}` }, label), quiet(worker.problem || events(worker))],
    worker.model,
    worker.running === null ? unknown() : [`${whole(worker.running)} running`, quiet(`${whole(worker.waiting)} waiting`)],
    worker.kv_usage === null ? unknown() : [percent(worker.kv_usage), bar(worker.kv_usage)],
    compact(worker.device_blocks),
    compact(worker.host_blocks),
    compact(worker.disk_blocks),
    worker.health === "silent" ? unknown() : duration(worker.staleness_ms / 1000),
  ]);
}

function events({ gaps, resets }) {
  return [gaps ? count(gaps, "gap", "gaps") : "", resets ? count(resets, "reset", "resets") : ""].filter(Boolean).join(", ");
}

function bar(share) {
  return element("div", { className: "meter", "aria-hidden": "true" }, part("", share));
}

const quiet = (text) => (text ? element("span", { className: "quiet" }, text) : null);
const unknown = () => element("span", {}, element("span", { "aria-hidden": "true" }, "–"), element("span", { className: "visually-hidden" }, "not known"));
