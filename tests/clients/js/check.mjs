// The openai and langchain packages for JavaScript: text, streams, tools, schemas, responses, errors.

import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import OpenAI, { NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = `${process.env.QUIRE_URL}/v1`, apiKey = "none";
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Where is the cat?" }];
const common = { model: "demo", messages, temperature: 0, max_tokens: 40 };
const place = z.object({ place: z.enum(["box", "bag"]) });
const places = ["box", "bag"];
const look = { type: "function", function: { name: "look", parameters: z.toJSONSchema(place) } };
const chat = new ChatOpenAI({ model: "demo", apiKey, configuration: { baseURL }, temperature: 0, maxTokens: 100, maxRetries: 0 });

const checks = {
  async openaiText() {
    const whole = (await client.chat.completions.create(common)).choices[0].message.content;
    assert.ok(whole);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, whole);
    const stream = client.chat.completions.stream(common);
    assert.equal(await stream.finalContent(), whole);
    const completion = await client.completions.create({ model: "demo", prompt: "Once", max_tokens: 8 });
    assert.equal(completion.usage.completion_tokens, 8);
  },
  async openaiTools() {
    const answer = await client.chat.completions.create({ ...common, tools: [look], tool_choice: "required" });
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "look");
    assert.ok(places.includes(JSON.parse(call.function.arguments).place));
  },
  async openaiParse() {
    const answer = await client.chat.completions.parse({ ...common, response_format: zodResponseFormat(place, "sighting") });
    assert.ok(places.includes(answer.choices[0].message.parsed.place));
  },
  async openaiResponses() {
    const answer = await client.responses.create({ model: "demo", input: "hi", max_output_tokens: 40 });
    assert.ok(answer.output_text);
  },
  async openaiErrors() {
    await assert.rejects(client.chat.completions.create({ ...common, model: "other" }), NotFoundError);
  },
  async langchainText() {
    const whole = (await chat.invoke("Where is the cat?")).content;
    assert.ok(whole);
    let text = "";
    for await (const chunk of await chat.stream("Where is the cat?")) text += chunk.content;
    assert.equal(text, whole);
  },
  async langchainTools() {
    const own = tool(async ({ place }) => place, { name: "look", description: "Looks.", schema: place });
    const answer = await chat.bindTools([own], { tool_choice: "required" }).invoke("Where is the cat?");
    assert.equal(answer.tool_calls[0].name, "look");
    assert.ok(places.includes(answer.tool_calls[0].args.place));
  },
  async langchainSchema() {
    const answer = await chat.withStructuredOutput(place, { name: "sighting", method: "jsonSchema" }).invoke("Where is the cat?");
    assert.ok(places.includes(answer.place));
  },
};

const failed = [];
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`passed: ${name}`);
  } catch (error) {
    failed.push(name);
    console.error(error);
  }
}
console.log(failed.length ? `failed: ${failed.join(", ")}` : `${Object.keys(checks).length} checks`);
process.exit(failed.length ? 1 : 0);
