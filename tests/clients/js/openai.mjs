// The OpenAI SDK for JavaScript: text, streams, tools and schemas by chat and responses; completions, errors, leaving.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.QUIRE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Where is the cat?" }];
const common = { model: "demo", messages, temperature: 0, max_tokens: 12 };
const place = z.object({ place: z.enum(["box", "bag"]) });
const places = ["box", "bag"];

export const checks = {
  async texts() {
    const { choices: [choice], usage } = await client.chat.completions.create(common);
    assert.ok(choice.message.content);
    assert.equal(usage.completion_tokens, 12);
    const completion = await client.completions.create({ model: "demo", prompt: ["One", "Two"], max_tokens: 5 });
    assert.equal(completion.choices.length, 2);
    assert.equal((await client.models.list()).data[0].id, "demo");
  },
  async streams() {
    const whole = (await client.chat.completions.create(common)).choices[0].message.content;
    const stream = await client.chat.completions.create({ ...common, stream: true, stream_options: { include_usage: true } });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole);
    assert.equal(usage.completion_tokens, 12);
    assert.equal(await client.chat.completions.stream(common).finalContent(), whole);
  },
  async tools() {
    const look = zodFunction({ name: "look", parameters: place });
    const request = { ...common, max_tokens: 60, tools: [look], tool_choice: "required", parallel_tool_calls: false };
    const { choices: [{ message }] } = await client.chat.completions.parse(request);
    const [call] = message.tool_calls;
    assert.equal(call.function.name, "look");
    assert.ok(places.includes(call.function.parsed_arguments.place));
    const streamed = await client.chat.completions.stream(request).finalChatCompletion();
    assert.deepEqual(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    const result = { role: "tool", tool_call_id: call.id, content: "a cat" };
    const told = [...messages, { role: "assistant", content: null, tool_calls: message.tool_calls }, result];
    assert.ok((await client.chat.completions.create({ ...common, messages: told })).choices[0].message.content);
  },
  async schemas() {
    const response_format = zodResponseFormat(place, "sighting");
    const { choices } = await client.chat.completions.parse({ ...common, max_tokens: 60, response_format });
    assert.ok(places.includes(choices[0].message.parsed.place));
  },
  async responses() {
    const request = { model: "demo", input: "Where is the cat?", temperature: 0, max_output_tokens: 60 };
    const { output_text: whole } = await client.responses.create(request);
    assert.ok(whole);
    let text = "";
    for await (const event of await client.responses.create({ ...request, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, whole);
    const parsed = await client.responses.parse({ ...request, text: { format: zodTextFormat(place, "sighting") } });
    assert.ok(places.includes(parsed.output_parsed.place));
  },
  async vectors() {
    const { data } = await client.embeddings.create({ model: "demo", input: ["A cat.", "A dog."] });
    assert.deepEqual(data.map(({ embedding }) => embedding.length), [256, 256]);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...common, model: "other" }), OpenAI.NotFoundError);
    const long = [{ role: "user", content: "word ".repeat(1000) }];
    await assert.rejects(client.chat.completions.create({ ...common, messages: long }), OpenAI.BadRequestError);
  },
  async leaving() {
    const stream = await client.completions.create({ model: "demo", prompt: "One", max_tokens: 400, stream: true, ignore_eos: true });
    for await (const _ of stream) break; // run.py looks whether the engine is idle afterwards
    assert.ok(stream.controller.signal.aborted);
  },
};
