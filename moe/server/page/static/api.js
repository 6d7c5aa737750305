// Requests to the server that this page comes from, with the key that the reader typed.

import { createParser } from "./vendor/eventsource-parser/index.js";

const KEY = "moe-key";

/** An answer that is no success: its HTTP status, and what the server says is wrong. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** Send a request; its response. Throws `ApiError`, or what fetch throws. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (hasKey()) headers.authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (options.body) headers["content-type"] = "application/json";
  const response = await fetch(path, { ...options, headers, credentials: "omit" });
  if (response.ok) return response;
  let message = `the server answers with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: a proxy's answer
  }
  throw new ApiError(response.status, message);
}

export const getJson = async (path) => (await request(path)).json();
export const postJson = async (path, body) =>
  (await request(path, { method: "POST", body: JSON.stringify(body) })).json();

/** Server-sent events of a route, each parsed as JSON; `[DONE]` ends them. */
export async function* events(path, { body, signal } = {}) {
  const options = body ? { method: "POST", body: JSON.stringify(body), signal } : { signal };
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const found = [];
  const parser = createParser({ onEvent: (event) => found.push(event.data) });
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      parser.feed(value);
      for (const data of found.splice(0)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(500, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
