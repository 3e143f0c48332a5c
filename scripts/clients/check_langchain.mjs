// LangChain for Node: chats, streams, a tool, typed answers by chat and Responses, embeddings.
import assert from "node:assert";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const weather = tool(({ city }) => `4711 in ${city}`, {
  name: "get_weather",
  description: "Get the weather in a city.",
  schema: z.object({ city: z.string() }),
});
const Person = z.object({ name: z.string(), age: z.number().int() });
for (const useResponsesApi of [false, true]) {
  const model = new ChatOpenAI({ model: "demo", temperature: 0, useResponsesApi });
  const { text } = await model.invoke("What is 12 + 30?");
  assert.match(text, /42/);
  let streamed = "";
  for await (const chunk of await model.stream("What is 12 + 30?")) streamed += chunk.text;
  assert.equal(streamed, text);
  const called = await model.bindTools([weather]).invoke("What is the weather in Paris?");
  assert.deepEqual(called.tool_calls.map(({ name, args }) => [name, args]), [["get_weather", { city: "Paris" }]]);
  assert.deepEqual(await model.withStructuredOutput(Person).invoke("Ann is 41 years old."), { name: "Ann", age: 41 });
}
const configuration = { baseURL: `${process.env.MINISGL_EMBEDDER}/v1` };
const embedder = new OpenAIEmbeddings({ model: "demo", configuration });
assert.equal((await embedder.embedDocuments(["one two", "three"])).length, 2);
console.log("chat, stream, a tool, typed answers by chat and responses; embeddings");
