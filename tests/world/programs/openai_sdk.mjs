// OpenAI's client for Node: a round of a tool by its own runner, streamed.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.ADDRESS}/v1`, apiKey: "none", maxRetries: 0 });
const runner = client.chat.completions.runTools({
  model: process.env.MODEL,
  stream: true,
  messages: [{ role: "user", content: "Read notes/word.txt and tell me the word in it." }],
  tools: [
    {
      type: "function",
      function: {
        name: "read_file",
        description: "Read a text file.",
        parameters: {
          type: "object",
          properties: { path: { type: "string" } },
          required: ["path"],
        },
        parse: JSON.parse,
        function: ({ path }) => readFileSync(path, "utf8"),
      },
    },
  ],
});
console.log(await runner.finalContent());
