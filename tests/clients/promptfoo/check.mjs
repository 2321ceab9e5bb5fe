// promptfoo: an evaluation of a chat and of a completion model, with assertions on what they answer.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

const own = { apiBaseUrl: `${process.env.QUIRE_URL}/v1`, apiKey: "none", temperature: 0, max_tokens: 12 };
const schema = {
  type: "object",
  properties: { place: { enum: ["box", "bag"] } },
  required: ["place"],
  additionalProperties: false,
};
const response_format = { type: "json_schema", json_schema: { name: "sighting", strict: true, schema } };
const config = {
  prompts: ["Where is {{what}}?"],
  providers: [
    { id: "openai:chat:demo", label: "chat", config: own },
    { id: "openai:completion:demo", label: "completion", config: own },
    { id: "openai:chat:demo", label: "schema", config: { ...own, max_tokens: 60, response_format } },
  ],
  tests: [{ vars: { what: "the cat" }, assert: [{ type: "javascript", value: "JSON.stringify(output).length > 2" }] }],
};
writeFileSync("promptfooconfig.json", JSON.stringify(config));
const environment = { ...process.env, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: process.cwd() };
const command = ["node_modules/promptfoo/dist/src/entrypoint.js", "eval", "-c", "promptfooconfig.json", "-o", "out.json", "--no-cache"];
const done = spawnSync(process.env.NODE_BINARY, command, { env: environment, encoding: "utf8", timeout: 120000 });
console.log(done.stdout, done.stderr);
const { results } = JSON.parse(readFileSync("out.json", "utf8")).results;
assert.equal(results.length, 3);
for (const result of results) assert.ok(result.success, JSON.stringify(result));
const answer = results.find((result) => result.provider.label === "schema").response.output;
assert.ok(["box", "bag"].includes((typeof answer === "string" ? JSON.parse(answer) : answer).place));
console.log("1 checks");
