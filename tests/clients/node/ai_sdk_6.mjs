// The Vercel AI SDK 6 with Anthropic's provider, the strictest reader of whole answers.
import { createAnthropic } from "ai-sdk-anthropic-3";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai-6";
import { BASE_URL, MODEL, description, parameters, play, readNote, streams } from "./scene.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would stand before the answers
const model = createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: "any" })(MODEL);
const tools = { read_note: tool({ description, inputSchema: jsonSchema(parameters), execute: readNote }) };
const messages = [];

await play(async (question) => {
  messages.push({ role: "user", content: question });
  const asked = { model, tools, messages, stopWhen: stepCountIs(5), maxRetries: 0 };
  const result = streams ? streamText(asked) : await generateText(asked);
  const text = await result.text;
  messages.push(...(await result.response).messages);
  return text;
});
