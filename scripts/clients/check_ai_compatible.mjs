// npm's ai with its provider for other servers, which asks /v1/chat/completions: texts, streams, objects, a tool in a loop,
// embeddings, refused images, a stream that is left.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { waitForAborts } = await import(`${process.env.MINISGL_CLIENTS}/aborts.mjs`);
const provider = (url, settings) =>
  createOpenAICompatible({ name: "minisgl", baseURL: `${url}/v1`, apiKey: process.env.OPENAI_API_KEY, ...settings });
const minisgl = provider(process.env.MINISGL_URL, { includeUsage: true, supportsStructuredOutputs: true });
const common = { model: minisgl("demo"), temperature: 0, maxRetries: 0 };
const { text } = await generateText({ ...common, prompt: "What is 12 + 30?" });
assert.match(text, /42/);
const stream = streamText({ ...common, prompt: "What is 12 + 30?" });
assert.equal(await stream.text, text);
assert.ok((await stream.usage).outputTokens > 0);

const schema = z.object({ name: z.string(), age: z.number().int() });
const { output } = await generateText({ ...common, output: Output.object({ schema }), prompt: "Ann is 41 years old." });
assert.deepEqual(output, { name: "Ann", age: 41 });

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

const file = { type: "file", mediaType: "image/png", data: new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]) };
await assert.rejects(generateText({ ...common, messages: [{ role: "user", content: [file] }] }), /only text/);

const left = new AbortController();
const endless = { maxOutputTokens: 3000, providerOptions: { minisgl: { ignore_eos: true } } };
for await (const _ of streamText({ ...common, ...endless, prompt: "Count", abortSignal: left.signal }).textStream)
  left.abort();
await waitForAborts(1);
const embedder = provider(process.env.MINISGL_EMBEDDER).embeddingModel("demo");
assert.equal((await embedMany({ model: embedder, values: ["one two", "three"] })).embeddings.length, 2);
console.log("text, stream, object, a tool in a loop, embeddings, cancel");
