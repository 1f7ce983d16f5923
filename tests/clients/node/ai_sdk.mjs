// The Vercel AI SDK with each of its providers that Baton serves; it runs the tool itself.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { BASE_URL, MODEL, api, description, parameters, play, readNote, streams } from "./scene.mjs";

const settings = { name: "baton", baseURL: `${BASE_URL}/v1`, apiKey: "any" };
const model = {
  chat: () => createOpenAI(settings).chat(MODEL),
  responses: () => createOpenAI(settings).responses(MODEL),
  compatible: () => createOpenAICompatible(settings).chatModel(MODEL),
  anthropic: () => createAnthropic(settings)(MODEL),
}[api]();
const tools = { read_note: tool({ description, inputSchema: jsonSchema(parameters), execute: readNote }) };
const messages = [];

await play(async (question) => {
  messages.push({ role: "user", content: question });
  const asked = { model, tools, messages, stopWhen: isStepCount(5), maxRetries: 0 };
  const result = streams ? streamText(asked) : await generateText(asked);
  const text = await result.text;
  messages.push(...(await result.responseMessages));
  return text;
});
