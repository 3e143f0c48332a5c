// Anthropic's package for Node: messages, streams, tools, count_tokens, errors.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic();
const messages = [{ role: "user", content: "What is 12 + 30?" }];
const common = { model: "demo", max_tokens: 200 };
const whole = await client.messages.create({ ...common, messages });
assert.match(whole.content[0].text, /42/);
const final = await client.messages.stream({ ...common, messages }).finalMessage();
assert.match(final.content[0].text, /42/);
const { input_tokens } = await client.messages.countTokens({ model: "demo", messages });
assert.equal(input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

const tool = {
  name: "get_weather",
  description: "Get the weather in a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const called = await client.messages.stream({ ...common, messages: asked, tools: [tool] }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
assert.deepEqual(called.content.find((block) => block.type === "tool_use").input, { city: "Paris" });
await assert.rejects(client.messages.create({ ...common, model: "claude", messages }), Anthropic.NotFoundError);
console.log("messages, stream, tools, count_tokens, errors");
