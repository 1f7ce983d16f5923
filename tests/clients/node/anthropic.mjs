// Anthropic's SDK for node: the loop of its guide.
import Anthropic from "@anthropic-ai/sdk";
import { BASE_URL, MODEL, description, name, parameters, play, readNote, streams } from "./scene.mjs";

const client = new Anthropic({ baseURL: BASE_URL, apiKey: "any", maxRetries: 0 });
const tools = [{ name, description, input_schema: parameters }];
const messages = [];

await play(async (question) => {
  messages.push({ role: "user", content: question });
  for (;;) {
    const asked = { model: MODEL, max_tokens: 1000, tools, messages };
    const answer = streams
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    messages.push({ role: "assistant", content: answer.content });
    const calls = answer.content.filter((block) => block.type === "tool_use");
    if (!calls.length) return answer.content.find((block) => block.type === "text").text;
    const results = calls.map(async ({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: await readNote(input),
    }));
    messages.push({ role: "user", content: await Promise.all(results) });
  }
});
