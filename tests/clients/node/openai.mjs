// openai for node: chat with its own tool runner, Responses with the loop of its guide.
import OpenAI from "openai";
import { BASE_URL, MODEL, api, description, name, parameters, play, readNote, streams } from "./scene.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "any", maxRetries: 0 });
const model = MODEL;

async function chat(question) {
  messages.push({ role: "user", content: question });
  const run = { function: readNote, parse: JSON.parse, name, description, parameters };
  const tools = [{ type: "function", function: run }];
  const runner = client.chat.completions.runTools({ model, messages, tools, stream: streams });
  const text = await runner.finalContent();
  messages = runner.messages;
  return text;
}

async function responses(question) {
  messages.push({ role: "user", content: question });
  const tools = [{ type: "function", name, description, parameters, strict: true }];
  for (;;) {
    const asked = { model, tools, input: messages, store: false };
    const answer = streams
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    messages.push(...answer.output);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    for (const { call_id, arguments: given } of calls)
      messages.push({ type: "function_call_output", call_id, output: await readNote(JSON.parse(given)) });
  }
}

let messages = [];
await play({ chat, responses }[api]);
