// promptfoo: an evaluation by its command, of chat, completions and responses; tools and a schema; its own asserts.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

const schema = {
  type: "object",
  properties: { place: { enum: ["box", "bag"] } },
  required: ["place"],
  additionalProperties: false,
};
const look = { type: "function", function: { name: "look", parameters: schema } };
const form = { type: "json_schema", json_schema: { name: "sighting", strict: true, schema } };
const common = { apiBaseUrl: `${process.env.QUIRE_URL}/v1`, apiKey: "none", temperature: 0, max_tokens: 60 };
const provider = (id, label, fields) => ({ id: `openai:${id}:demo`, label, config: { ...common, ...fields } });
const says = { type: "javascript", value: "output.length > 0" };
const places = { type: "javascript", value: "['box', 'bag'].includes((typeof output === 'string' ? JSON.parse(output) : output).place)" };
const calls = { type: "javascript", value: "['box', 'bag'].includes(JSON.parse(output[0].function.arguments).place)" };
const kinds = {
  chat: [provider("chat", "chat", {}), says],
  completion: [provider("completion", "completion", {}), says],
  responses: [provider("responses", "responses", { max_output_tokens: 60 }), says],
  schema: [provider("chat", "schema", { response_format: form }), places],
  tools: [provider("chat", "tools", { tools: [look], tool_choice: "required", parallel_tool_calls: false }), calls],
};

const failed = [];
for (const [name, [one, check]] of Object.entries(kinds)) {
  const config = { prompts: ["Where is {{what}}?"], providers: [one], tests: [{ vars: { what: "the cat" }, assert: [check] }] };
  writeFileSync(`${name}.json`, JSON.stringify(config));
  const command = ["node_modules/promptfoo/dist/src/entrypoint.js", "eval", "-c", `${name}.json`, "-o", `${name}.out.json`, "--no-cache", "--no-write"];
  const env = {
    ...process.env,
    PROMPTFOO_CONFIG_DIR: process.cwd(),
    PROMPTFOO_DISABLE_TELEMETRY: "1",
    PROMPTFOO_DISABLE_UPDATE: "1",
    PROMPTFOO_DISABLE_REMOTE_GENERATION: "1",
  };
  const { status, stdout, stderr } = spawnSync(process.execPath, command, { env, encoding: "utf8", timeout: 60_000 });
  try {
    assert.equal(status, 0);
    const { results } = JSON.parse(readFileSync(`${name}.out.json`, "utf8"));
    assert.deepEqual([results.stats.successes, results.stats.failures, results.stats.errors], [1, 0, 0]);
    assert.ok(results.results[0].response.tokenUsage.completion > 0);
    console.log(`passed: ${name}`);
  } catch (error) {
    failed.push(name);
    console.error(`FAILED: ${name}:`, error, stdout, stderr);
  }
}
console.log(failed.length ? `failed: ${failed.join(", ")}` : `${Object.keys(kinds).length} checks`);
process.exit(failed.length ? 1 : 0);
