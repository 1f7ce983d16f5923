"use strict";
// The live page: one snapshot a second from /fleet, drawn without a library. Text becomes text nodes, never markup.

const STAGES = { read: "client", render: "client", queue: "wait", prefill_wait: "wait", prefill: "compute", decode_wait: "wait",
  kv_move: "move", transit: "transit", stream: "stream", send: "client" }; // and how each is drawn
const KINDS = { client: "read, render, send", wait: "waits", compute: "prefill", move: "KV move", transit: "transit", stream: "stream" };
const NOW = ["read", "render", "queue", "prefill", "decode_wait", "stream"]; // the others are known only afterwards
const STATES = { ready: "good", warming: "warn", new: "warn", silent: "warn" }; // of a worker; all others are bad
const EVENTS = { lost: "bad", cut: "bad", refused: "bad", full: "warn", recovered: "good", restored: "good", joined: "good" };
const MOST_WORKERS = 32; // of a role; the rest is one line
const STALE_MS = 3500;
const $ = (id) => document.getElementById(id);
const words = (name) => name.replaceAll("_", " ").replace("kv ", "KV ");
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function element(tag, attributes = {}, ...children) {
  const made = tag === "svg" || tag === "path" ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 5400) return `${(value / 3600).toFixed(1)}\u00a0h`; // a number stays beside its unit
  if (value >= 90) return `${Math.round(value / 60)}\u00a0min`;
  return value >= 1 ? `${value.toFixed(value < 10 ? 2 : 1)}\u00a0s` : `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)}\u00a0ms`;
}

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10));

function headers() {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function replace(id, children) { // unless the reader is selecting text there
  const selection = getSelection(), target = $(id);
  if (selection.isCollapsed || !target.contains(selection.anchorNode)) target.replaceChildren(...children);
}

// --- the fleet ---

function meter(name, used, most, text) {
  const bar = element("i");
  bar.style.setProperty("--share", most ? Math.min(1, used / most) : 0);
  return element("div", { class: "meter" }, element("span", {}, name), bar, element("span", {}, text));
}

function card(worker) {
  const look = STATES[worker.state] ?? "bad";
  const made = element("div", { class: `worker is-${look}`, id: `worker-${worker.worker_id}`, "data-state": worker.state });
  made.append(element("span", { class: `state ${look}` }, worker.state), element("strong", {}, worker.name));
  if (worker.num_running !== null) {
    const places = worker.places === null ? `${worker.num_running}` : `${worker.num_running} of ${worker.places}`;
    made.append(meter("running", worker.num_running, worker.places, worker.num_waiting ? `${places}, ${worker.num_waiting} wait` : places));
  }
  if (worker.kv_blocks) made.append(meter("KV", worker.kv_used_blocks, worker.kv_blocks, `${worker.kv_used_blocks} of ${worker.kv_blocks}`));
  const guesses = worker.tokens_per_step === null ? "" : `${worker.tokens_per_step.toFixed(1)} tokens/step`;
  const place = [worker.host, worker.pid && `pid ${worker.pid}`, worker.state === "lost" ? "" : `up ${seconds(worker.age_s)}`].filter(Boolean).join(", ");
  made.append(element("small", { title: worker.engine }, [worker.reason, worker.engine.split(" ")[0], guesses, place].filter(Boolean).join(" · ")));
  return made;
}

function drawWorkers(workers, models) {
  for (const role of ["prefill", "decode"]) {
    const mine = workers.filter((worker) => worker.role === role), ready = mine.filter((worker) => worker.state === "ready").length;
    const cards = [element("h3", {}, `${words(role[0].toUpperCase() + role.slice(1))}: ${ready} of ${counted(mine.length, "worker")} ready`)];
    cards.push(...mine.slice(0, MOST_WORKERS).map(card));
    if (mine.length > MOST_WORKERS) cards.push(element("p", { class: "empty" }, `and ${mine.length - MOST_WORKERS} more`));
    if (!mine.length) cards.push(element("p", { class: "empty" }, role === "decode" ? "No decode worker: requests cannot be served." : "No prefill worker: decode workers compute the prompts."));
    replace(role, cards);
  }
  const away = workers.filter((worker) => worker.state !== "ready").length;
  const well = away ? `serving, ${counted(away, "worker")} not ready` : "serving";
  $("status").textContent = models.length ? well : "not serving";
  $("status").className = models.length ? (away ? "warn" : "good") : "bad";
}

const paths = new Map(); // kept between snapshots, so that their animation goes on

function drawPairs(pairs, workers) {
  const origin = $("drawing").getBoundingClientRect(), drawn = new Set();
  const end = (id, side) => {
    const box = $(`worker-${id}`)?.getBoundingClientRect();
    return box && [box[side] - origin.left, (box.top + box.bottom) / 2 - origin.top].map(Math.round);
  };
  for (const pair of pairs) {
    const from = end(pair.prefill, "right"), to = end(pair.decode, "left"), key = `${pair.prefill} ${pair.decode}`;
    if (!from || !to || from[0] > to[0]) continue;
    const middle = (from[0] + to[0]) / 2, line = paths.get(key) ?? element("path");
    line.setAttribute("d", `M${from} C${middle},${from[1]} ${middle},${to[1]} ${to}`);
    line.setAttribute("class", pair.state === "ready" && pair.num_handoffs ? "moves" : pair.state);
    paths.set(key, line);
    drawn.add(key);
    if (!line.parentNode) $("flows").append(line);
  }
  for (const [key, line] of paths) if (!drawn.has(key)) { line.remove(); paths.delete(key); }
  const named = Object.fromEntries(workers.map((worker) => [worker.worker_id, worker.name]));
  const unwell = pairs.filter((pair) => !["ready", "away"].includes(pair.state)).slice(0, 8);
  $("pairs").textContent = unwell.map((pair) => `${named[pair.prefill]} to ${named[pair.decode]}: ${pair.state}, no KV moves`).join("; ");
  $("pairs").hidden = !unwell.length;
  const rate = pairs.reduce((sum, pair) => sum + pair.num_handoffs, 0) / 5;
  $("handoffs").textContent = pairs.length ? `${number(rate)} handoffs/s` : "";
}

// --- figures over time ---

function rounded(value) { // up, to 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => value <= step * power * 1.0001);
}

const point = (values) => Object.fromEntries(["at_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"].map((name, index) => [name, values[index]]));

function plot(id, points, name, now_s) {
  const columns = ["p50", "p99"], of = (point, column) => point[`${name}_${column}_s`];
  const found = points.map(point).filter((point) => of(point, "p50") !== null && now_s - point.at_s <= 300);
  const top = rounded(Math.max(...found.map((point) => of(point, "p99")), 0.001));
  const svg = element("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none" });
  for (const column of columns.toReversed()) {
    let drawn = "", last_s = 0;
    for (const point of found) {
      const at = `${(300 - (now_s - point.at_s)).toFixed(1)},${(100 - (100 * of(point, column)) / top).toFixed(1)}`;
      drawn += point.at_s - last_s <= 2 ? `L${at}` : `M${at}h.01`; // a lone point is a dot
      last_s = point.at_s;
    }
    svg.append(element("path", { d: drawn, class: column }));
  }
  const box = element("div", { class: "plot" }, svg, element("small", {}, seconds(top)));
  if (!found.length) box.append(element("p", { class: "empty" }, "No tokens in the last five minutes."));
  const latest = columns.map((column) => [element("i", { class: `key ${column === "p50" ? "stream" : "client"}` }), element("b", {}, `${column} ${seconds(found.length ? of(found.at(-1), column) : null)}`)]);
  $(id).replaceChildren(box, element("figcaption", {}, "5 minutes ago", element("span", {}, ...latest.flat()), "now"));
  return found.length ? of(found.at(-1), "p50") : null;
}

// --- requests and events ---

function bar(stages, share = 1) {
  const made = element("div", { class: "bar" });
  made.style.width = `${100 * share}%`;
  for (const name of Object.keys(STAGES)) {
    if (!stages[name]) continue;
    const part = element("i", { class: STAGES[name], title: `${words(name)} ${seconds(stages[name])}` });
    part.style.flexGrow = 1e6 * stages[name]; // parts that add up to less than 1 do not fill the bar
    made.append(part);
  }
  return made;
}

function named(stages, least_s = 0.0005) {
  return Object.keys(STAGES).filter((name) => stages[name] >= least_s).map((name) => `${words(name)} ${seconds(stages[name])}`).join(" · ");
}

function slow(request, index, all) {
  const status = request.status >= 400 ? [element("span", { class: "bad" }, `${request.status} `)] : [];
  const text = element("small", {}, named(request.stages, request.duration_s / 200));
  if (request.verdict) text.prepend(element("span", { class: "bad" }, `${request.verdict}: `));
  const id = request.request_id === null ? element("small", {}, "id hidden") : element("code", { title: request.request_id }, request.request_id);
  return element("li", {}, id, bar(request.stages, request.duration_s / all[0].duration_s), element("b", {}, ...status, seconds(request.duration_s)), text);
}

function happened(event) {
  const at = new Date(event.at_s * 1000), lasted = event.lasted_s ? ` ${event.kind === "full" ? "for" : "after"} ${seconds(event.lasted_s)}` : "";
  const kind = element("span", { class: EVENTS[event.kind] ?? "" }, `${words(event.kind)}${lasted}`);
  return element("li", {}, element("time", { datetime: at.toISOString() }, at.toTimeString().slice(0, 8)), `${event.what} `, kind, element("small", {}, event.detail ? ` ${event.detail}` : ""));
}

let model = "", drawn_ms = 0, trouble = "";

function draw(fleet) {
  model = fleet.models[0] ?? "";
  $("model").textContent = fleet.models.join(", ");
  drawWorkers(fleet.workers, fleet.models);
  drawPairs(fleet.pairs, fleet.workers);
  replace("stages", NOW.map((name) => element("li", fleet.stages[name] ? {} : { class: "none" }, element("b", {}, number(fleet.stages[name] ?? 0)), words(name))));
  const first = plot("ttft", fleet.points, "ttft", fleet.at_s), between = plot("itl", fleet.points, "itl", fleet.at_s);
  const totals = { "tokens/s": number(fleet.tokens_per_s), "requests/s": number(fleet.requests_per_s), running: number(fleet.num_running),
    "in the queue": number(fleet.num_queued), "refused/s": number(fleet.refused_per_s), "first token": seconds(first), "between tokens": seconds(between) };
  $("totals").replaceChildren(...Object.entries(totals).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const nothing = (text) => [element("li", { class: "empty" }, text)];
  replace("slowest", fleet.slowest.length ? fleet.slowest.map(slow) : nothing("No request has ended in the last five minutes."));
  replace("events", fleet.events.length ? fleet.events.map(happened) : nothing("Nothing has happened to the fleet."));
  drawn_ms = Date.now();
}

async function* events(answer) { // the data of a stream's events
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

let watching = new AbortController(), shown_ms = 0;

async function watch() {
  for (;;) {
    // A browser has six connections to a server: a tab that is not seen gives its own back.
    while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    watching = new AbortController();
    try {
      const answer = await fetch("fleet", { cache: "no-store", signal: watching.signal, headers: { accept: "text/event-stream", ...headers() } });
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      for await (const data of events(answer)) draw(JSON.parse(data));
    } catch (error) {
      trouble = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

setInterval(() => {
  const age_ms = Date.now() - drawn_ms, is_stale = age_ms > STALE_MS && Date.now() - shown_ms > STALE_MS;
  $("problem").hidden = !is_stale;
  if (!is_stale) return;
  const age = drawn_ms ? `these figures are ${seconds(age_ms / 1000)} old` : "there are no figures yet";
  $("problem").textContent = `The frontend does not answer; ${age}. ${trouble}`;
  $("status").textContent = "no answer";
  $("status").className = "bad";
}, 500);

// --- chat ---

const TOOL = { type: "function", function: { name: "get_system_health",
  description: "Returns the current health status of the LLM runtime—use before critical operations to verify the service is live.",
  parameters: { type: "object", properties: {} } } };
const messages = [];

function say(kind, who, ...children) {
  const body = element("div", {}, ...children);
  $("turns").querySelector(".empty")?.remove();
  $("turns").append(element("li", { class: kind, "data-who": who }, body));
  $("turns").scrollTop = $("turns").scrollHeight;
  return body;
}

async function answer() { // one answer of the model; returns its message
  const message = { role: "assistant", content: "" }, calls = [], shown = {};
  const body = { model, messages, tools: [TOOL], stream: true, reasoning_effort: "low", temperature: 0, max_tokens: 600, stream_options: { include_usage: true, include_timings: true } };
  const reply = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers() } });
  if (!reply.ok) throw new Error((await reply.json()).error?.message ?? reply.statusText);
  const write = (kind, who, text) => {
    (shown[kind] ??= say(kind, who, "")).firstChild.data += text;
    $("turns").scrollTop = $("turns").scrollHeight;
  };
  for await (const data of events(reply)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data), delta = chunk.choices?.[0]?.delta ?? {};
    if (chunk.error) throw new Error(chunk.error.message);
    if (delta.reasoning_content) write("reasoning", "reasoning", delta.reasoning_content);
    if (delta.content) { write("answer", "answer", delta.content); message.content += delta.content; }
    for (const call of delta.tool_calls ?? []) {
      const mine = (calls[call.index] ??= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } });
      mine.function.arguments += call.function.arguments ?? "";
    }
    const timings = chunk.timings && Object.fromEntries(Object.entries(chunk.timings.stages).map(([name, value_ms]) => [name, value_ms / 1000]));
    if (timings) say("stages", seconds(chunk.timings.duration_ms / 1000), bar(timings), element("small", {}, named(timings)));
  }
  return calls.length ? { ...message, tool_calls: calls } : message;
}

async function converse(question) {
  say("user", "you", question);
  messages.push({ role: "user", content: question });
  for (let round = 0; round < 5; round++) {
    const message = await answer();
    messages.push(message);
    if (!message.tool_calls) return;
    for (const call of message.tool_calls) {
      const { status, missing, lost } = await (await fetch("health", { cache: "no-store", headers: headers() })).json();
      const content = JSON.stringify({ status, missing, lost });
      say("tool", "tool", `${call.function.name}(${call.function.arguments}) → ${content}`);
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
  throw new Error("The model called the tool five times without an answer.");
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = $("question"), button = event.target.querySelector("button"), begin = messages.length;
  const question = field.value.trim() || field.placeholder;
  field.value = "";
  button.disabled = true;
  try {
    await converse(question);
  } catch (error) {
    messages.length = begin; // so that the next question is valid
    say("bad", "error", error.message);
  }
  button.disabled = false;
});

$("key").addEventListener("change", () => watching.abort()); // watch again, with the key
document.addEventListener("visibilitychange", () => {
  shown_ms = Date.now();
  if (document.hidden) watching.abort();
});
$("legend").append(...Object.entries(KINDS).map(([kind, text]) => element("span", {}, element("i", { class: `key ${kind}` }), text)));
watch();
