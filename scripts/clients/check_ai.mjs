// npm's ai with its default provider, which asks /v1/responses: texts, streams, objects, a tool in a loop.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const common = { model: openai("demo"), temperature: 0 };
const { text } = await generateText({ ...common, prompt: "What is 12 + 30?" });
assert.match(text, /42/);
let streamed = "";
for await (const part of streamText({ ...common, prompt: "What is 12 + 30?" }).textStream) streamed += part;
assert.equal(streamed, text);

const schema = z.object({ name: z.string(), age: z.number().int() });
const { object } = await generateObject({ ...common, schema, prompt: "Ann is 41 years old." });
assert.deepEqual(object, { name: "Ann", age: 41 });

const cities = [];
const weather = tool({
  description: "Get the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => cities.push(city) && `4711 in ${city}`,
});
const agent = await generateText({
  ...common,
  prompt: "What is the weather in Paris?",
  tools: { get_weather: weather },
  stopWhen: stepCountIs(3),
});
assert.deepEqual(cities, ["Paris"]);
assert.ok(agent.text);
console.log("text, stream, object, a tool in a loop over /v1/responses");
