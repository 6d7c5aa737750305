// Anthropic's client for Node: a round of a tool, streamed.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.ADDRESS, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Read notes/word.txt and tell me the word in it." }];
const schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const tools = [{ name: "read_file", description: "Read a text file.", input_schema: schema }];
let message;
do {
  const asked = { model: process.env.MODEL, max_tokens: 1000, messages, tools };
  message = await client.messages.stream(asked).finalMessage();
  messages.push({ role: "assistant", content: message.content });
  const content = message.content
    .filter((block) => block.type === "tool_use")
    .map(({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: readFileSync(input.path, "utf8"),
    }));
  if (content.length) messages.push({ role: "user", content });
} while (message.stop_reason === "tool_use");
console.log(message.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
