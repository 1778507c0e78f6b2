// The status page: reads the index's state every few seconds, and shows it. The token stays in this tab.

import { curveQuery, showCurve, startCurve } from "./curve.js";
import { byId, write } from "./dom.js";
import { samplesHere, showOverview } from "./overview.js";
import { showModels, startPrompt } from "./prompt.js";
import { showWorkers, startWorkers, workersQuery } from "./workers.js";

const EVERY_MS = 5000;
const TIMEOUT_MS = 10000;
const TOKEN = "kvpool-token";

let timer;
let asking = 0; // which question was asked last: an answer to an earlier one is late
let paused = false;
let needsToken = false;

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new Refusal(0, "The index does not answer; asking again.");
  }
  const answer = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refusal(reply.status, answer.error || `The index answers with status ${reply.status}.`);
  return answer;
}

async function refresh() {
  clearTimeout(timer);
  const number = ++asking;
  const query = new URLSearchParams({ ...workersQuery(), ...curveQuery(), since: samplesHere() });
  try {
    const data = await call(`status/data?${query}`);
    if (number !== asking) return;
    byId("sign-in").hidden = true;
    byId("content").hidden = false; // before the chart is drawn, which is as wide as its place
    showOverview(data);
    showCurve(data);
    showWorkers(data.workers, data.fleet, Boolean(sessionStorage.getItem(TOKEN)));
    showModels(data.fleet);
    say("");
    write(byId("updated"), `· as of ${new Date().toTimeString().slice(0, 8)}${paused ? ", paused" : ""}`);
    byId("sign-out").hidden = !sessionStorage.getItem(TOKEN);
  } catch (error) {
    if (number !== asking) return;
    if (!(error instanceof Refusal)) throw error;
    if (error.status === 401 || error.status === 403) return askForToken(error);
    say(error.message);
  } finally {
    if (number === asking && !paused && !needsToken) timer = setTimeout(refresh, EVERY_MS);
  }
}

function askForToken(error) {
  needsToken = true;
  const hadOne = Boolean(sessionStorage.getItem(TOKEN));
  sessionStorage.removeItem(TOKEN);
  byId("content").hidden = byId("sign-out").hidden = true;
  byId("serving").hidden = true;
  write(byId("about"), "");
  write(byId("updated"), "");
  byId("sign-in").hidden = false;
  write(byId("token-error"), hadOne ? `${error.message}.` : "");
  byId("token").focus();
}

function say(text) {
  const notice = byId("notice");
  write(notice, text);
  notice.hidden = !text;
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    write(byId("token-error"), "A token has letters, digits and signs, and no spaces.");
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  needsToken = false;
  refresh();
});
byId("sign-out").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload();
});
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) clearTimeout(timer);
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!paused && !needsToken) refresh();
});

startCurve(refresh);
startWorkers(refresh);
startPrompt((question) => call("status/prompt", {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(question),
}));
refresh();
