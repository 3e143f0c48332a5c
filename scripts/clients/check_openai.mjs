// The openai package for Node: chats, streams, a tool that is run, Responses, embeddings, errors, refused images, cancel.
import assert from "node:assert";
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const { waitForAborts } = await import(`${process.env.MINISGL_CLIENTS}/aborts.mjs`);
const client = new OpenAI();
const chat = { model: "demo", messages: [{ role: "user", content: "What is 12 + 30?" }], temperature: 0 };
const text = (await client.chat.completions.create(chat)).choices[0].message.content;
assert.match(text, /42/);
assert.equal(await client.chat.completions.stream(chat).finalContent(), text);

const asked = [];
const runner = client.chat.completions.runTools({
  model: "demo",
  temperature: 0,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => asked.push(city) && `rain in ${city}`,
      },
    },
  ],
});
assert.ok(await runner.finalContent());
assert.deepEqual(asked, ["Paris"]);

const input = { model: "demo", input: "What is 12 + 30?", temperature: 0 };
const response = await client.responses.create(input);
assert.equal(response.output_text, text);
let streamed = "";
for await (const event of await client.responses.create({ ...input, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, text);
assert.equal((await client.responses.retrieve(response.id)).output_text, text);
await assert.rejects(client.chat.completions.create({ ...chat, model: "gpt-4" }), NotFoundError);
const image = { type: "image_url", image_url: { url: "data:image/png;base64,iVBORw0KGgo=" } };
await assert.rejects(
  client.chat.completions.create({ ...chat, messages: [{ role: "user", content: [image] }] }),
  (error) => error instanceof BadRequestError && /only text/.test(error.message),
);

const stream = await client.chat.completions.create({ ...chat, stream: true, ignore_eos: true });
for await (const _ of stream) break;
await waitForAborts(1);
const embedder = new OpenAI({ baseURL: `${process.env.MINISGL_EMBEDDER}/v1` });
const embedded = await embedder.embeddings.create({ model: "demo", input: ["one two", "three"], dimensions: 16 });
assert.deepEqual(embedded.data.map(({ embedding }) => embedding.length), [16, 16]);
console.log("chat, stream, a tool run, responses, embeddings, errors, cancel");
