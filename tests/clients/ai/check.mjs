// The Vercel AI SDK: text, streams, tools and objects, by its providers for chat, responses and messages.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.QUIRE_URL}/v1`, apiKey = "none";
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  chat: createOpenAICompatible({ name: "quire", baseURL, apiKey, supportsStructuredOutputs: true })("demo"),
  openai: openai.chat("demo"),
  responses: openai.responses("demo"),
  messages: createAnthropic({ baseURL, apiKey })("demo"),
};
const common = { prompt: "Tell me a story.", temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const place = z.object({ place: z.enum(["box", "bag"]) });
const places = ["box", "bag"];

const checks = {
  async texts(model) {
    const { text, usage } = await generateText({ model, ...common });
    assert.ok(text);
    assert.equal(usage.outputTokens, 12);
  },
  async streams(model) {
    const whole = await generateText({ model, ...common });
    const stream = streamText({ model, ...common });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
  },
  async tools(model) {
    const look = tool({ description: "Looks into it.", inputSchema: place, execute: async ({ place }) => `a cat in the ${place}` });
    const { steps } = await generateText({
      model, ...common, maxOutputTokens: 100, tools: { look }, stopWhen: isStepCount(2),
      toolChoice: { type: "tool", toolName: "look" },
    });
    assert.equal(steps.length, 2); // the second one was told the first one's result
    for (const step of steps) assert.ok(places.includes(step.toolCalls[0].input.place));
    assert.ok(steps[0].toolResults[0].output.startsWith("a cat"));
  },
  async objects(model) {
    const { output } = await generateText({ model, ...common, maxOutputTokens: 100, output: Output.object({ schema: place }) });
    assert.ok(places.includes(output.place));
  },
  async errors(model) {
    await assert.rejects(generateText({ model, ...common, prompt: "word ".repeat(1000) }), APICallError);
  },
};

checks.vectors = async (model) => {
  if (model !== models.openai) return;
  const { embeddings } = await embedMany({ model: openai.textEmbeddingModel("demo"), values: ["A cat.", "A dog."] });
  assert.deepEqual(embeddings.map((one) => one.length), [256, 256]);
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  for (const [kind, model] of Object.entries(models)) {
    try {
      await check(model);
      console.log(`passed: ${name}, ${kind}`);
    } catch (error) {
      failed += 1;
      console.error(`FAILED: ${name}, ${kind}:`, error);
    }
  }
}
console.log(failed ? `${failed} failed` : `${Object.keys(checks).length * Object.keys(models).length} checks`);
process.exit(failed ? 1 : 0);
