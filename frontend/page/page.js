"use strict";
// The live page: one snapshot a second from /fleet, drawn without any library. Text is set by textContent only.

const STAGES = ["read", "render", "queue", "prefill_wait", "prefill", "decode_wait", "kv_move", "transit", "stream", "send"];
const MOST_WORKERS = 32; // of a role; the rest is one line
const $ = (id) => document.getElementById(id);
const words = (name) => name.replaceAll("_", " ");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

function bytes(value) {
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 1000) return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(2)} GB`;
}

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10));

function headers() {
  const key = $("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

// --- the fleet ---

function meter(name, used, most, text) {
  const bar = element("i");
  bar.style.setProperty("--share", most ? Math.min(1, used / most) : 0);
  return element("div", { class: "meter" }, element("span", {}, name), bar, element("span", {}, text));
}

function card(worker) {
  const state = { ready: "", warming: " warming" }[worker.state] ?? " unwell";
  const made = element("div", { class: `worker${state}`, id: `worker-${worker.worker_id}`, "data-state": worker.state });
  made.append(element("span", { class: "state" }, words(worker.state)), element("b", {}, worker.name));
  const places = worker.places === null ? `${worker.num_running}` : `${worker.num_running} of ${worker.places}`;
  const waiting = worker.num_waiting ? `, ${worker.num_waiting} wait` : "";
  made.append(meter("running", worker.num_running, worker.places ?? 0, places + waiting));
  if (worker.kv_blocks) made.append(meter("KV", worker.kv_used_blocks, worker.kv_blocks, `${worker.kv_used_blocks} of ${worker.kv_blocks}`));
  const place = [worker.host, worker.pid && `pid ${worker.pid}`, `for ${seconds(worker.age_s)}`].filter(Boolean).join(", ");
  made.append(element("small", {}, worker.reason || `${worker.engine} on ${place}`));
  return made;
}

function drawFleet(workers, pairs) {
  for (const role of ["prefill", "decode"]) {
    const mine = workers.filter((worker) => worker.role === role);
    const cards = mine.slice(0, MOST_WORKERS).map(card);
    if (mine.length > MOST_WORKERS) cards.push(element("p", { class: "empty" }, `and ${mine.length - MOST_WORKERS} more`));
    if (!mine.length) cards.push(element("p", { class: "empty" }, `no ${role} worker`));
    $(role).replaceChildren(...cards);
  }
  const origin = $("drawing").getBoundingClientRect();
  const end = (id, side) => {
    const box = $(`worker-${id}`)?.getBoundingClientRect();
    return box && [box[side] - origin.left, (box.top + box.bottom) / 2 - origin.top];
  };
  const lines = [];
  for (const pair of pairs) {
    const from = end(pair.prefill, "right"), to = end(pair.decode, "left");
    if (!from || !to || from[0] > to[0]) continue;
    const middle = (from[0] + to[0]) / 2;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", `M${from} C${middle},${from[1]} ${middle},${to[1]} ${to}`);
    line.setAttribute("class", pair.state === "ready" ? (pair.num_handoffs ? "moves" : "") : "cut");
    lines.push(line);
  }
  $("flows").replaceChildren(...lines);
}

// --- figures over time ---

function plot(figure, points, columns) {
  const values = points.flatMap((point) => columns.map(([column]) => point[column])).filter((value) => value !== null);
  const top = Math.max(...values, 0.001), newest = points.length ? points.at(-1).at_s : 0;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const latest = [];
  for (const [column, name] of columns) {
    let drawn = "", is_on = false;
    for (const point of points) {
      if (point[column] === null) { is_on = false; continue; }
      drawn += `${is_on ? "L" : "M"}${300 - (newest - point.at_s)},${100 - (100 * point[column]) / top}`;
      is_on = true;
    }
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", drawn);
    line.setAttribute("class", name);
    svg.append(line);
    latest.push(`${name} ${seconds(points.findLast((point) => point[column] !== null)?.[column])}`);
  }
  figure.replaceChildren(svg, element("figcaption", {}, element("span", {}, latest.join(", ")), element("span", {}, `top ${seconds(top)}`)));
}

// --- requests and events ---

function bar(stages) {
  const made = element("div", { class: "bar" });
  for (const name of STAGES) {
    if (!stages[name]) continue;
    const part = element("i", { class: name, title: `${words(name)} ${seconds(stages[name])}` });
    part.style.flexGrow = stages[name];
    made.append(part);
  }
  return made;
}

const named = (stages) => STAGES.filter((name) => stages[name] >= 0.0005).map((name) => `${words(name)} ${seconds(stages[name])}`).join(", ");

function slow(request) {
  const failed = request.status >= 400;
  const line = element("span", failed ? { class: "bad" } : {}, `${request.request_id ?? "request"} `, `${request.status}, ${seconds(request.duration_s)}`);
  return element("li", {}, line, bar(request.stages), element("small", {}, request.verdict || named(request.stages)));
}

function happened(event) {
  const at = new Date(event.at_s * 1000);
  const lasted = event.lasted_s === null ? "" : ` after ${seconds(event.lasted_s)}`;
  const bad = ["lost", "cut", "refused", "full"].includes(event.kind) ? { class: "bad" } : {};
  const what = element("span", bad, `${event.what} ${words(event.kind)}${lasted}`);
  const details = event.detail ? [element("small", {}, ` ${event.detail}`)] : [];
  return element("li", {}, element("time", { datetime: at.toISOString() }, at.toLocaleTimeString()), what, ...details);
}

function list(id, items, empty) {
  $(id).replaceChildren(...(items.length ? items : [element("li", { class: "empty" }, empty)]));
}

let model = "";

function draw(fleet) {
  model = fleet.models[0] ?? "";
  $("model").textContent = fleet.models.join(", ") || "no model yet";
  const totals = [["tokens/s", number(fleet.tokens_per_s)], ["requests/s", number(fleet.requests_per_s)],
    ["running", number(fleet.num_running)], ["in the queue", number(fleet.num_queued)], ["refused/s", number(fleet.refused_per_s)]];
  $("totals").replaceChildren(...totals.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  drawFleet(fleet.workers, fleet.pairs);
  const running = STAGES.filter((name) => fleet.stages[name]);
  $("stages").replaceChildren(...running.map((name) => element("li", {}, element("b", {}, `${fleet.stages[name]} `), words(name))));
  plot($("ttft"), fleet.points, [["ttft_p50_s", "p50"], ["ttft_p99_s", "p99"]]);
  plot($("itl"), fleet.points, [["itl_p50_s", "p50"], ["itl_p99_s", "p99"]]);
  list("slowest", fleet.slowest.map(slow), "no request has ended yet");
  list("events", fleet.events.map(happened), "nothing has changed");
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

async function watch() {
  for (;;) {
    try {
      const answer = await fetch("fleet", { headers: { accept: "text/event-stream", ...headers() } });
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      for await (const data of events(answer)) {
        $("problem").hidden = true;
        draw(JSON.parse(data));
      }
    } catch (error) {
      $("problem").textContent = `No answer from the frontend (${error.message}); the figures below are old.`;
      $("problem").hidden = false;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

// --- chat ---

const TOOL = { type: "function", function: { name: "get_system_health",
  description: "Returns the current health status of the LLM runtime—use before critical operations to verify the service is live.",
  parameters: { type: "object", properties: {} } } };
const messages = [];

function say(kind, text = "") {
  const item = element("li", { class: kind }, text);
  $("turns").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

async function answer() { // one answer of the model; returns its message
  const shown = {}, message = { role: "assistant", content: "" }, calls = [];
  const body = { model, messages, tools: [TOOL], stream: true, reasoning_effort: "low", max_tokens: 600,
    stream_options: { include_usage: true, include_timings: true } };
  const reply = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...headers() } });
  if (!reply.ok) throw new Error((await reply.json()).error?.message ?? reply.statusText);
  const write = (kind, text) => { (shown[kind] ??= say(kind)).append(text); };
  for await (const data of events(reply)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data), delta = chunk.choices?.[0]?.delta ?? {};
    if (chunk.error) throw new Error(chunk.error.message);
    if (delta.reasoning_content) write("reasoning", delta.reasoning_content);
    if (delta.content) { write("assistant", delta.content); message.content += delta.content; }
    for (const call of delta.tool_calls ?? []) {
      const mine = (calls[call.index] ??= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } });
      mine.function.arguments += call.function.arguments ?? "";
    }
    if (chunk.timings) say("stages").append(bar(chunk.timings.stages), element("small", {}, named(chunk.timings.stages)));
  }
  return calls.length ? { ...message, tool_calls: calls } : message;
}

async function converse(question) {
  say("user", question);
  messages.push({ role: "user", content: question });
  for (let round = 0; round < 5; round++) {
    const message = await answer();
    messages.push(message);
    if (!message.tool_calls) return;
    for (const call of message.tool_calls) {
      const health = await (await fetch("health")).json();
      const content = JSON.stringify({ status: health.status, workers: health.instances?.length });
      say("tool", `${call.function.name}(${call.function.arguments}) → ${content}`);
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = $("question"), button = event.target.querySelector("button");
  const question = field.value.trim() || field.placeholder, begin = messages.length;
  field.value = "";
  button.disabled = true;
  try {
    await converse(question);
  } catch (error) {
    messages.length = begin; // so that the next question is valid
    say("bad", error.message);
  }
  button.disabled = false;
});

watch();
