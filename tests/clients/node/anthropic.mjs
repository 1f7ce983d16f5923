// Anthropic's SDK for node: the loop of its guide, its tool runner, and its threads.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { BASE_URL, MODEL, api, description, name, parameters, play, readNote, streams } from "./scene.mjs";

const client = new Anthropic({ baseURL: BASE_URL, apiKey: "any", maxRetries: 0 });
const asked = { model: MODEL, max_tokens: 1000 };
const tools = [{ name, description, input_schema: parameters }];
const history = [];

// Sends a turn with `send`, then the results of its calls, until there are none.
async function loop(send, question) {
  let answer = await send({ role: "user", content: question });
  for (;;) {
    const calls = answer.content.filter((block) => block.type === "tool_use");
    if (!calls.length) return answer;
    const results = calls.map(async ({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: await readNote(input),
    }));
    answer = await send({ role: "user", content: await Promise.all(results) });
  }
}

async function send(turn) {
  history.push(turn);
  const request = { ...asked, tools, messages: history };
  const answer = streams
    ? await client.messages.stream(request).finalMessage()
    : await client.messages.create(request);
  history.push({ role: "assistant", content: answer.content });
  return answer;
}

async function run(question) {
  history.push({ role: "user", content: question });
  const tool = betaTool({ name, description, inputSchema: parameters, run: readNote });
  const request = { ...asked, tools: [tool], messages: history, stream: streams };
  const runner = client.beta.messages.toolRunner(request);
  let answer;
  for await (const turn of runner) {
    answer = streams ? await turn.finalMessage() : turn;
    history.push({ role: "assistant", content: answer.content });
    const results = await runner.generateToolResponse();
    if (results) history.push(results);
  }
  return answer;
}

const thread = client.beta.messages.thread({ ...asked, tools });
const sendToThread = (turn) => (streams ? thread.stream(turn).finalMessage() : thread.send(turn));

const answered = {
  messages: (question) => loop(send, question),
  runner: run,
  thread: (question) => loop(sendToThread, question),
}[api];
await play(async (question) => (await answered(question)).content.find((block) => block.type === "text").text);
