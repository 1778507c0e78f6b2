// The hit rate that a pool of each size would have had, and today's size in it.

import { byId, drawing, element, write } from "./dom.js";
import { bytes, compact, percent } from "./format.js";

const HEIGHT = 208, TOP = 18, LEFT = 46, BOTTOM = 24, RIGHT = 12;
const LEAST = 1 / 4096; // of the largest size is drawn
const SIZES = [[0.25, "A quarter"], [0.5, "Half"], [1, "Today's size"], [2, "Twice"], [4, "Four times"]];

let tenant = "";

// Whose curve is wanted; empty: of all tenants.
export const curveQuery = () => ({ curve: tenant });

export function startCurve(refresh) {
  byId("curve-of").addEventListener("change", (event) => {
    tenant = event.target.value;
    refresh();
  });
}

export function showCurve({ curve }) {
  byId("curve-card").hidden = !curve;
  if (!curve) return;
  showTenants(curve);
  const text = sentence(curve);
  write(byId("curve-text"), text);
  draw(byId("curve-chart"), curve, text);
  table(byId("curve-table"), curve);
}

function showTenants({ tenant: shown, tenants }) {
  const select = byId("curve-of");
  byId("curve-field").hidden = tenants.length < 2;
  if ([...select.options].map((one) => one.value).join() !== tenants.join() || !select.options.length) {
    select.replaceChildren(...tenants.map((name) => element("option", { value: name }, name || "All tenants")));
  }
  select.value = shown;
}

// The last point that is not larger.
function at(points, blocks) {
  let rate = 0;
  for (const [size, of] of points) {
    if (size > blocks) break;
    rate = of;
  }
  return rate;
}

function nbytesOf(curve, blocks) {
  return curve.block_nbytes ? ` (${bytes(blocks * curve.block_nbytes)})` : "";
}

function sentence(curve) {
  const [most, all] = curve.points[curve.points.length - 1];
  const since = new Date(curve.since_s * 1000).toLocaleString("sv").slice(0, 16);
  const from = `Since ${since}: of ${compact(curve.requested_blocks)} blocks that the engines were asked for, `;
  const ofAny = `a pool that keeps all ${compact(most)} distinct ones${nbytesOf(curve, most)} has ${percent(all)}`;
  const today = curve.pool_blocks
    ? `one of today's size, ${compact(curve.pool_blocks)} blocks${nbytesOf(curve, curve.pool_blocks)}, ${percent(at(curve.points, curve.pool_blocks))}.`
    : "today's size is not known.";
  return `${from}${ofAny}; ${today}`;
}

function draw(node, curve, description) {
  const width = Math.max(280, node.clientWidth);
  const chart = drawing("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `Hit rate by the pool's size. ${description}` });
  const points = curve.points, largest = Math.max(points[points.length - 1][0], 1.5 * curve.pool_blocks, 2);
  const least = Math.max(1, largest * LEAST);
  const x = (size) => LEFT + (Math.log(Math.max(size, least) / least) / Math.log(largest / least)) * (width - LEFT - RIGHT);
  const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);

  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(
      drawing("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share), y2: y(share) }),
      drawing("text", { x: LEFT - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    );
  }
  const ticks = Math.max(2, Math.floor(width / 130));
  for (let tick = 0; tick <= ticks; tick += 1) {
    const size = least * (largest / least) ** (tick / ticks);
    const anchor = tick === 0 ? "start" : tick === ticks ? "end" : "middle";
    chart.append(drawing("text", { x: x(size), y: HEIGHT - 5, "text-anchor": anchor }, curve.block_nbytes ? bytes(size * curve.block_nbytes) : compact(Math.round(size))));
  }
  const shown = [[least, at(points, least)], ...points.filter(([size]) => size > least), [largest, points[points.length - 1][1]]];
  const path = shown.map(([size, share], place) => `${place ? "L" : "M"}${x(size).toFixed(1)},${y(share).toFixed(1)}`).join("");
  chart.append(drawing("path", { class: "chosen", d: path, "stroke-linejoin": "round" }));
  if (curve.pool_blocks > least) {
    const place = x(curve.pool_blocks);
    chart.append(
      drawing("line", { class: "today", x1: place, x2: place, y1: TOP, y2: y(0) }),
      drawing("text", { x: place, y: TOP - 6, "text-anchor": place < width / 2 ? "start" : "end" }, "today"),
    );
  }
  node.replaceChildren(chart);
}

function table(node, curve) {
  const [most, all] = curve.points[curve.points.length - 1];
  const known = curve.pool_blocks ? SIZES : [];
  const rows = [
    ...known.map(([size, label]) => [label, size * curve.pool_blocks, at(curve.points, size * curve.pool_blocks)]),
    ["Every block", most, all],
  ];
  const head = element("tr", {}, ...["Pool", "Blocks", "Memory", "Hit rate"].map((label) => element("th", { scope: "col" }, label)));
  node.replaceChildren(
    element("thead", {}, head),
    element("tbody", {}, ...rows.map(([label, blocks, share]) => element(
      "tr", {},
      element("th", { scope: "row" }, label),
      element("td", {}, compact(Math.round(blocks))),
      element("td", {}, curve.block_nbytes ? bytes(blocks * curve.block_nbytes) : "–"),
      element("td", {}, percent(share)),
    ))),
  );
}
