// langchain.js: text, streams, batches, tools and structured output by chat completions and by responses.

import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI } from "@langchain/openai";
import { z } from "zod";

const configuration = { baseURL: `${process.env.QUIRE_URL}/v1` };
const common = { model: "demo", apiKey: "none", temperature: 0, maxRetries: 0, configuration };
const chat = (fields) => new ChatOpenAI({ ...common, maxTokens: 60, ...fields });
const models = { chat: chat({}), responses: chat({ useResponsesApi: true }) };
const place = z.object({ place: z.enum(["box", "bag"]) });
const places = ["box", "bag"];
const look = tool(async ({ place }) => `a cat in the ${place}`, { name: "look", description: "Looks.", schema: place });

const kinds = {
  async texts(model) {
    const answer = await model.invoke("Tell me a story.");
    assert.ok(answer.text);
    assert.ok(answer.usage_metadata.output_tokens > 0);
    const [first, second] = await model.batch(["Tell me a story.", "Tell me a joke."]);
    assert.equal(first.text, answer.text);
    assert.ok(second.text);
  },
  async streams(model) {
    const whole = await model.invoke("Tell me a story.");
    let text = "", pieces = 0;
    for await (const chunk of await model.stream("Tell me a story.")) {
      text += chunk.text;
      pieces += 1;
    }
    assert.equal(text, whole.text);
    assert.ok(pieces > 1);
  },
  async tools(model) {
    // By its name: with responses, langchain.js sends no tool_choice for "required".
    const bound = model.bindTools([look], { tool_choice: "look" });
    const question = new HumanMessage("Where is the cat?");
    const answer = await bound.invoke([question]);
    const [call] = answer.tool_calls;
    assert.equal(call.name, "look");
    assert.ok(places.includes(call.args.place));
    const result = await look.invoke(call);
    assert.ok(result instanceof ToolMessage);
    assert.ok((await model.invoke([question, answer, result])).text);
    let total;
    for await (const chunk of await bound.stream([question])) total = total === undefined ? chunk : total.concat(chunk);
    assert.deepEqual(total.tool_calls.map((made) => made.args), [call.args]);
  },
  async schemas(model) {
    for (const method of ["jsonSchema", "functionCalling"]) {
      const sighting = await model.withStructuredOutput(place, { method }).invoke("Where is the cat?");
      assert.ok(places.includes(sighting.place), method);
    }
  },
  async errors(model) {
    await assert.rejects(model.invoke("word ".repeat(1000)), /maximum context length/);
  },
};

async function completions() {
  const model = new OpenAI({ ...common, maxTokens: 12 });
  const text = await model.invoke("Tell me a story.");
  let streamed = "";
  for await (const piece of await model.stream("Tell me a story.")) streamed += piece;
  assert.ok(text);
  assert.equal(streamed, text);
}

export const checks = { completions };
for (const [name, check] of Object.entries(kinds))
  for (const [kind, model] of Object.entries(models)) checks[`${name}, ${kind}`] = () => check(model);
