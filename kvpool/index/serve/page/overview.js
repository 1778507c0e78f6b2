// The tiles, the hit rate and the tiers.

import { drawChart, drawTable, pointsOf } from "./chart.js";
import { byId, drawing, element, part, write } from "./dom.js";
import { bytes, compact, count, duration, percent, whole } from "./format.js";

export const HEALTHS = {
  healthy: ["Healthy", "good"],
  incomplete: ["Incomplete", "warn"],
  stale: ["Stale", "warn"],
  unreachable: ["Unreachable", "bad"],
  asleep: ["Asleep", "idle"],
  silent: ["No events", "idle"],
};

const TIERS = [
  ["device", "Device", "accelerator memory"],
  ["host", "Host", "main memory of workers"],
  ["disk", "Disk", "disks of workers"],
];
const WINDOWS = [["15m", "15 min"], ["1h", "1 h"], ["24h", "24 h"]];
const ALL_ONLY = "For tokens of all tenants only";
const MAX_SAMPLES = 720;

let history = { instance: "", next: 0, samples: [] };

// The number of samples here, so that only new ones are sent.
export const samplesHere = () => history.next;

export function showOverview(data) {
  keepSamples(data);
  showHead(data.index);
  showWorkers(data.fleet);
  showPool(data);
  showBehind(data.fleet);
  showReuse(data);
  showTraffic(data);
  showTiers(data);
  showQuotas(data);
  showAudits(data);
}

function keepSamples(data) {
  if (!data.history) {
    history = { instance: data.index.instance, next: 0, samples: [] };
    return;
  }
  const { first, samples } = data.history;
  const goesOn = data.index.instance === history.instance && first === history.next;
  history = {
    instance: data.index.instance,
    next: first + samples.length,
    samples: [...(goesOn ? history.samples : []), ...samples].slice(-MAX_SAMPLES),
  };
}

function showHead(index) {
  const pill = byId("serving");
  pill.hidden = false;
  pill.className = `pill ${index.serving ? "is-good" : "is-warn"}`;
  write(pill, index.serving ? "Serving" : "Not serving");
  write(byId("about"), `Version ${index.version}, up ${duration(index.uptime_s)}`);
}

function showWorkers(fleet) {
  byId("workers-figure").replaceChildren(whole(fleet.workers));
  const parts = Object.entries(HEALTHS)
    .filter(([name]) => fleet.health[name])
    .map(([name, [label]]) => `${whole(fleet.health[name])} ${label.toLowerCase()}`);
  write(byId("workers-note"), parts.join(", ") || "None has joined yet");
}

function showPool({ pool, totals }) {
  const [figure, note, meter] = [byId("pool-figure"), byId("pool-note"), byId("pool-meter")];
  meter.hidden = true;
  if (!totals) return fill(figure, note, "–", ALL_ONLY);
  if (!pool) return fill(figure, note, "None", "This index was started without --pool");
  const { servers, away, used_nbytes: used, capacity_nbytes: capacity, evicted_keys: evicted } = pool;
  const gone = evicted === null ? "" : `; ${count(evicted, "key", "keys")} evicted`; // null: a directory counts no others'
  if (!servers) return fill(figure, note, "–", "Not reached yet");
  if (away.length) return fill(figure, note, "Away", `${whole(away.length)} of ${count(servers, "server", "servers")} do not answer: ${away.join(", ")}`);
  if (used === null) return fill(figure, note, "–", "Its server does not let the index ask (INFO)");
  if (!capacity) return fill(figure, note, bytes(used), `No limit known${gone}`);
  meter.hidden = false;
  meter.replaceChildren(part("", used / capacity));
  meter.setAttribute("aria-valuenow", Math.round((100 * used) / capacity));
  fill(figure, note, percent(used / capacity), `${bytes(used)} of ${bytes(capacity)}${gone}`);
}

function fill(figure, note, value, text) {
  write(figure, value);
  write(note, text);
}

function showBehind(fleet) {
  write(byId("behind-figure"), fleet.workers ? duration(fleet.staleness_ms / 1000) : "–");
  write(byId("behind-note"), "Since the index last heard that it had missed nothing of that worker");
}

function showReuse({ totals }) {
  const [figure, note] = [byId("reuse-figure"), byId("reuse-note")];
  const points = pointsOf(history.samples);
  const last = points[points.length - 1];
  if (!totals) {
    fill(figure, note, "–", ALL_ONLY);
    write(byId("reuse-text"), "Shown to tokens of all tenants only.");
    byId("reuse-chart").replaceChildren();
    return;
  }
  const placedNow = Boolean(last) && last.chosen !== null;
  write(byId("reuse-name"), placedNow ? "Hit rate" : "Best holder");
  if (placedNow) fill(figure, note, percent(last.chosen), `Of prompt blocks, last minute. Best holder ${percent(last.best)}`);
  else fill(figure, note, last ? percent(last.best) : "–", "Of prompt blocks, last minute: held by the best worker or the pool");
  const text = sentence(last);
  write(byId("reuse-text"), text);
  const placed = points.some((point) => point.chosen !== null);
  legend(byId("reuse-legend"), [
    ["best", "Best holder: what the best worker or the pool had"],
    ...(placed ? [["chosen", "Hit rate: found where this index placed the request"]] : []),
  ]);
  drawChart(byId("reuse-chart"), points, `Hit rate over the last hour. ${text}`);
  drawTable(byId("reuse-table"), points);
}

function sentence(last) {
  if (!last || last.best === null) return "Nothing was asked in the last minute.";
  const asked = `Last minute: of ${compact(last.asked)} prompt blocks that were asked for, the best worker or the pool held ${percent(last.best)}`;
  if (last.chosen === null) return `${asked}.`;
  return `${asked}; requests that this index placed found ${percent(last.chosen)} where they went.`;
}

// The engines' own counts, of windows with requests.
function showTraffic({ traffic }) {
  const windows = WINDOWS.filter(([name]) => traffic?.[name]).map(([name, label]) => `${percent(traffic[name].hit_ratio)} in the last ${label}`);
  byId("traffic-text").hidden = !windows.length;
  if (windows.length) write(byId("traffic-text"), `Hit rate of all tokens that the engines were asked for: ${windows.join(", ")}.`);
}

function legend(list, entries) {
  list.replaceChildren(...entries.map(([name, label]) => element(
    "li", {},
    drawing("svg", { width: 26, height: 8, "aria-hidden": "true" }, drawing("line", { class: `swatch ${name}`, x1: 0, x2: 26, y1: 4, y2: 4 })),
    label,
  )));
}

function showTiers({ fleet, totals }) {
  const tiers = TIERS.map(([name, label, where]) => [label, where, fleet.tiers[name]]);
  if (totals?.near_blocks) tiers.push(["Near pools", "each shared by the workers of a host", totals.near_blocks]);
  if (totals) tiers.push(["Pool", "shared by all workers", totals.pool_blocks]);
  const most = Math.max(1, ...tiers.map(([, , blocks]) => blocks));
  byId("tiers").tBodies[0].replaceChildren(...tiers.map(([label, where, blocks]) => {
    const bar = element("div", { className: "meter", "aria-hidden": "true" }, part("", blocks / most));
    return element(
      "tr", {},
      element("th", { scope: "row" }, label, element("span", { className: "quiet" }, where), bar),
      element("td", { className: "number" }, whole(blocks)),
    );
  }));
  const note = totals
    ? `${whole(totals.blocks)} distinct blocks; the index uses ${bytes(totals.memory_nbytes)} for them` +
      (totals.evicted_blocks ? `, and forgot ${whole(totals.evicted_blocks)} to make room` : "")
    : "Once for each rank that holds one";
  write(byId("tiers-note"), note);
}

function showQuotas({ quotas }) {
  byId("quotas-card").hidden = !quotas.length;
  byId("quotas").tBodies[0].replaceChildren(...quotas.map(({ tenant, quota_nbytes: quota, held_nbytes: held }) => {
    const used = held === null ? null : quota ? held / quota : 1;
    const says = held === null ? `of ${bytes(quota)}: not counted yet` : `${bytes(held)} of ${bytes(quota)}`;
    const bar = element("div", { className: "meter", "aria-hidden": "true" }, part("", used ?? 0));
    return element(
      "tr", {},
      element("th", { scope: "row" }, tenant, element("span", { className: "quiet" }, says), bar),
      element("td", { className: "number" }, percent(used)),
    );
  }));
}

// One line for the fleet, and a row for each engine with something to say.
function showAudits({ audits }) {
  byId("audits-card").hidden = !audits;
  if (!audits) return;
  const judged = audits.same + audits.differing;
  const differ = audits.differing ? `${whole(audits.differing)} are not what they compute` : "all are what they compute";
  write(byId("audits-text"), judged
    ? `${count(audits.engines, "engine", "engines")} computed ${count(judged, "block", "blocks")} of hits again, and ${differ}.`
    : `${count(audits.engines, "engine audits", "engines audit")} hits, and could judge none yet.`);
  const wrong = audits.rows.filter((row) => row.doubts || row.differing);
  byId("audits").tBodies[0].replaceChildren(...wrong.map((row) => element(
    "tr", {},
    element("th", { scope: "row" }, `${row.writer.slice(16, 24)} on ${row.host}`, element("span", { className: "quiet" }, finding(row))),
    element("td", { className: "number" }, whole(row.differing)),
  )));
}

function finding({ doubts, found_s: foundAt, found_writers: writers }) {
  if (doubts) return `doubts itself, and goes without the pool: ${doubts}`;
  const when = foundAt ? `the last ${duration(Math.max(0, Date.now() / 1000 - foundAt))} ago` : "";
  return [when, writers.length ? `written by ${writers.join(" or ")}` : ""].filter(Boolean).join(", ");
}
