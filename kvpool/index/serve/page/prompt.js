// Holders of a prompt.

import { byId, drawing, element, part, tableHead, tableRow, write } from "./dom.js";
import { compact, count, whole } from "./format.js";

const COLUMNS = [
  ["Worker", "name"],
  ["Of the prompt", "bar"],
  ["Device blocks", "number"],
  ["Local blocks", "number"],
  ["Pool blocks", "number"],
  ["Left to compute", "number"],
  ["Cost in tokens", "number"],
];
const LABELS = { token_ids: "Token ids, between spaces or commas", text: "Text, as in “prompt” of /v1/completions" };
const MAX_U32 = 0xffffffff;

let models = [];

export function startPrompt(ask) {
  tableHead(byId("prompt-table"), COLUMNS);
  byId("prompt-legend").replaceChildren(...[
    ["device", "On its device"],
    ["local", "In its other tiers or near pool"],
    ["pool", "From the pool"],
  ].map(([name, label]) => element(
    "li", {},
    drawing("svg", { width: 12, height: 12, "aria-hidden": "true" }, drawing("rect", { class: `swatch ${name}`, width: 12, height: 12, rx: 3 })),
    label,
  )));
  byId("prompt-form").addEventListener("change", showForm);
  byId("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    write(byId("prompt-answer"), "Asking …");
    try {
      showAnswer(await ask(question()));
    } catch (error) {
      showNothing();
      write(byId("prompt-answer"), error.message);
    }
  });
}

// Updates the list of models; the choice stays.
export function showModels(fleet) {
  if (JSON.stringify(fleet.models) === JSON.stringify(models)) return;
  const select = byId("model");
  const chosen = models[select.selectedIndex];
  models = fleet.models;
  select.replaceChildren(...models.map((one) => element("option", {}, `${one.model}, tenant ${one.tenant}`)));
  const place = models.findIndex((one) => chosen && one.model === chosen.model && one.tenant === chosen.tenant);
  select.selectedIndex = Math.max(0, place);
  showForm();
}

const form = () => document.querySelector('input[name="form"]:checked').value;

function showForm() {
  const model = models[byId("model").selectedIndex];
  write(byId("prompt-label"), LABELS[form()]);
  const needs = model && form() === "text" && !model.tokenizer;
  write(byId("prompt-hint"), needs ? "This index has no tokenizer for this model: start it with --tokenizer, or give token ids." : "");
}

function question() {
  const model = models[byId("model").selectedIndex];
  if (!model) throw new Error("No worker has joined this index, so there is no model to ask about.");
  const asked = { model: model.model, tenant: model.tenant };
  const text = byId("prompt").value;
  return form() === "text" ? { ...asked, text } : { ...asked, token_ids: numbers(text) };
}

function numbers(text) {
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  const wrong = words.find((word) => !/^[0-9]{1,10}$/.test(word) || Number(word) > MAX_U32);
  if (wrong !== undefined) throw new Error(`“${wrong.slice(0, 40)}” is no token id: give whole numbers.`);
  if (!words.length) throw new Error("Give at least one token id.");
  return words.map(Number);
}

function showNothing() {
  byId("prompt-table").hidden = byId("prompt-legend").hidden = true;
}

function showAnswer({ tokens, ranks, holding, rows }) {
  const best = rows[0];
  if (!best || !holding) {
    showNothing();
    write(byId("prompt-answer"), `${count(tokens, "token", "tokens")}: none of ${count(ranks, "rank", "ranks")} holds any of it, nor does the pool.`);
    return;
  }
  const ofBest = `${named(best, rows)} can reuse ${whole(best.loadable_blocks)} of ${count(best.prompt_blocks, "full block", "full blocks")}`;
  const more = rows.length < ranks ? ` The first ${whole(rows.length)} are shown.` : "";
  const first = rows.find((one) => one.first);
  const goes = first ? ` A request would go to ${named(first, rows)} now.` : "";
  write(byId("prompt-answer"), `${count(tokens, "token", "tokens")}: ${ofBest}; ${whole(holding)} of ${count(ranks, "rank", "ranks")} can reuse some.${goes}${more}`);
  byId("prompt-table").tBodies[0].replaceChildren(...rows.map((one) => row(one, rows, tokens)));
  byId("prompt-table").hidden = byId("prompt-legend").hidden = false;
}

function named(one, rows) {
  const several = rows.filter((other) => other.worker === one.worker).length > 1 || one.dp_rank > 0;
  return several ? `${one.worker} rank ${one.dp_rank}` : one.worker;
}

function row(one, rows, tokens) {
  const of = (blocks) => Math.max(0, blocks) / Math.max(1, one.prompt_blocks);
  const bars = element(
    "div", { className: "bars", "aria-hidden": "true" },
    part("device", of(one.device_blocks)),
    part("local", of(one.local_blocks - one.device_blocks)),
    part("pool", of(one.loadable_blocks - one.local_blocks)),
  );
  const notes = [one.first ? "a request would go here now" : "", away(one)].filter(Boolean).join("; ");
  return tableRow(COLUMNS, [
    [named(one, rows), notes ? element("span", { className: "quiet" }, notes) : null],
    [bars, element("span", { className: "quiet" }, `${whole(one.loadable_blocks)} of ${count(one.prompt_blocks, "block", "blocks")}`)],
    whole(one.device_blocks),
    whole(one.local_blocks),
    whole(one.pool_blocks),
    `${whole(Math.max(0, tokens - one.loadable_blocks * one.block_tokens))} tokens`,
    compact(one.cost),
  ]);
}

// Why a rank has no credit, or gets no requests.
function away(one) {
  if (one.unreachable) return "unreachable: comes last";
  if (one.asleep) return "asleep: comes last";
  if (one.stale) return "stale: what it holds itself is not credited";
  return one.trust === "fallback" ? "no events: nothing is known of it" : "";
}
