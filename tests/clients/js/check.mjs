// The openai and langchain packages for JavaScript.

import { checks as langchain } from "./langchain.mjs";
import { checks as openai } from "./openai.mjs";

const failed = [];
let count = 0;
for (const [client, checks] of Object.entries({ openai, langchain })) {
  for (const [name, check] of Object.entries(checks)) {
    count += 1;
    try {
      await check();
      console.log(`passed: ${client}, ${name}`);
    } catch (error) {
      failed.push(`${client}, ${name}`);
      console.error(`FAILED: ${client}, ${name}:`, error);
    }
  }
}
console.log(failed.length ? `failed: ${failed.join("; ")}` : `${count} checks`);
process.exit(failed.length ? 1 : 0);
