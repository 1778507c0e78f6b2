// Two lines over the last hour: the best holder's share, and that of requests placed by the index.

import { drawing, element } from "./dom.js";
import { percent, whole } from "./format.js";

export const WINDOW_S = 60; // a point is about the minute before it
const MIN_SPAN_S = 300;
const MAX_POINTS = 240;
const TOP = 10, LEFT = 46, BOTTOM = 24, RIGHT = 10;

// Positions in a sample.
const AT = 0, ASKED = 2, HELD = 3, PLACED = 5, CHOSEN = 6;

// A point for each sample: seconds, requested blocks, shares; null for a minute without requests.
export function pointsOf(samples) {
  const points = [];
  let begin = 0;
  samples.forEach((sample, place) => {
    while (samples[begin + 1] && samples[begin + 1][AT] <= sample[AT] - WINDOW_S) begin += 1;
    if (place === 0) return;
    const before = samples[begin];
    const asked = sample[ASKED] - before[ASKED];
    const placed = sample[PLACED] - before[PLACED];
    points.push({
      at: sample[AT],
      asked,
      best: asked > 0 ? Math.min(1, (sample[HELD] - before[HELD]) / asked) : null,
      chosen: placed > 0 ? Math.min(1, (sample[CHOSEN] - before[CHOSEN]) / placed) : null,
    });
  });
  return points;
}

export function drawChart(node, points, description) {
  const width = Math.max(280, node.clientWidth), height = 208;
  const chart = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description });
  const now = points.length ? points[points.length - 1].at : 0;
  const span = Math.max(MIN_SPAN_S, points.length ? now - points[0].at : 0);
  const x = (at) => LEFT + (1 - (now - at) / span) * (width - LEFT - RIGHT);
  const y = (share) => TOP + (1 - share) * (height - TOP - BOTTOM);

  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(
      drawing("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share), y2: y(share) }),
      drawing("text", { x: LEFT - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    );
  }
  const minutes = [1, 2, 5, 10, 15, 20].find((step) => span / 60 / step <= width / 110) || 30;
  for (let ago = 0; ago * 60 <= span; ago += minutes) {
    const at = x(now - ago * 60);
    const anchor = ago === 0 ? "end" : at < LEFT + 30 ? "start" : "middle";
    chart.append(drawing("text", { x: at, y: height - 5, "text-anchor": anchor }, ago ? `−${ago} min` : "now"));
  }
  const step = Math.max(1, Math.ceil(points.length / MAX_POINTS));
  const drawn = points.filter((_, place) => (points.length - 1 - place) % step === 0);
  for (const name of ["best", "chosen"]) {
    const path = pathOf(drawn, name, x, y);
    if (path) chart.append(drawing("path", { class: name, d: path, "stroke-linejoin": "round", "stroke-linecap": "round" }));
  }
  if (!points.some((point) => point.best !== null)) {
    chart.append(drawing("text", { class: "empty", x: (LEFT + width) / 2, y: height / 2 - 8 }, "Nothing was asked yet"));
  }
  node.replaceChildren(chart);
}

function pathOf(points, name, x, y) {
  let path = "";
  let goesOn = false;
  for (const point of points) {
    // A zero-length segment draws a point between two gaps.
    if (point[name] !== null) path += `${goesOn ? "L" : "M"}${x(point.at).toFixed(1)},${y(point[name]).toFixed(1)}${goesOn ? "" : "h0"}`;
    goesOn = point[name] !== null;
  }
  return path;
}

// As a table, one row a minute, the last minute first.
export function drawTable(table, points) {
  const head = element("tr", {}, ...["Minutes ago", "Best holder", "Reused where placed", "Blocks asked for"].map(
    (label) => element("th", { scope: "col" }, label),
  ));
  const rows = [];
  let wanted = Infinity;
  for (let place = points.length - 1; place >= 0; place -= 1) {
    const point = points[place];
    if (point.at > wanted) continue;
    const ago = Math.round((points[points.length - 1].at - point.at) / 60);
    const cells = [percent(point.best), percent(point.chosen), whole(point.asked)];
    rows.push(element("tr", {}, element("th", { scope: "row" }, String(ago)), ...cells.map((cell) => element("td", {}, cell))));
    wanted = point.at - WINDOW_S;
  }
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}
