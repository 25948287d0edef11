// Vercel's AI SDK: texts, tools and output of a schema.
import assert from "node:assert/strict";
import { parseArgs } from "node:util";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const text = { type: "string" };
const { url, model: name } = parseArgs({ options: { url: text, model: text, "model-dir": text } }).values;
const provider = createOpenAICompatible({
  name: "tandem",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const given = { model: provider(name), maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
const question = "How is the weather in Bern?";
// As a library of schemas makes it: nothing says that no other properties are allowed.
const city = jsonSchema({
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, population: { type: "integer" } },
  required: ["city", "population"],
});
const weather = (execute) =>
  tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema({
      type: "object",
      properties: { city: { type: "string", maxLength: 20 } },
      required: ["city"],
    }),
    execute,
  });

const checks = {
  "two turns": async () => {
    const messages = [{ role: "user", content: "What is the capital of France?" }];
    const first = await generateText({ ...given, system: "Be brief.", messages });
    assert(first.text);
    messages.push(...first.response.messages, { role: "user", content: "And of Italy?" });
    assert((await generateText({ ...given, messages })).text);
  },
  "streamed with usage": async () => {
    const stream = streamText({ ...given, prompt: "Say hello." });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, await stream.text);
    assert((await stream.usage).outputTokens > 0);
  },
  "output by a schema": async () => {
    const { output } = await generateText({ ...given, prompt: "Name a city.", output: Output.object({ schema: city }) });
    assert.deepEqual(Object.keys(output).sort(), ["city", "population"]);
  },
  "a tool's call and its result": async () => {
    const asked = [];
    const look = (input) => (asked.push(input.city), "Sunny.");
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const tools = { weather: weather(look) };
    const { steps } = await generateText({ ...given, prompt: question, tools, prepareStep, stopWhen: stepCountIs(2) });
    assert.equal(steps.length, 2);
    assert.equal(typeof asked[0], "string");
  },
  "a forced call with an output": async () => {
    const tools = { weather: weather() };
    const { toolCalls } = await generateText({
      ...given,
      prompt: question,
      tools,
      toolChoice: "required",
      output: Output.object({ schema: city }),
    });
    assert.equal(toolCalls[0].toolName, "weather");
    assert(!toolCalls[0].invalid);
  },
  "a forced call, streamed": async () => {
    const stream = streamText({ ...given, prompt: question, tools: { weather: weather() }, toolChoice: "required" });
    const kinds = [];
    for await (const part of stream.fullStream) kinds.push(part.type);
    assert(kinds.includes("tool-call") && !kinds.includes("text-delta"), kinds.join());
  },
  embeddings: async () => {
    const model = provider.embeddingModel(name);
    const { embeddings } = await embedMany({ model, values: ["Paris", "Rome"] });
    assert.equal(embeddings.length, 2);
  },
};

let failed = false;
for (const [what, attempt] of Object.entries(checks)) {
  try {
    await attempt();
    console.log(`ok      ${what}`);
  } catch (error) {
    failed = true;
    console.log(`failed  ${what}: ${error.name}: ${error.message}`.replaceAll("\n", " ").slice(0, 400));
    if (process.env.TANDEM_CLIENTS_TRACEBACK) console.error(error);
  }
}
process.exit(failed ? 1 : 0);
