// The chat: messages, answers as they stream, stop and regenerate. Nothing is stored.

import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import { marked } from "./vendor/marked/marked.esm.js";
import { ApiError, events } from "./api.js";
import { $, count, el, rate, seconds } from "./dom.js";

const SHOW_EVERY_MS = 60;
const ALLOWED = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["img", "style", "form", "input", "button", "video", "audio", "picture", "source", "svg"],
  FORBID_ATTR: ["style", "id", "class", "name"],
  RETURN_DOM_FRAGMENT: true,
};
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
// HTML that a model writes is shown as text, and of an image what it is to show.
const renderer = { html: ({ raw }) => escaped(raw), image: ({ text }) => escaped(text) };
marked.use({ gfm: true, breaks: true, renderer });

/** Markdown of a model as safe nodes: no images, no styles, no scripts; links open a new tab. */
function rendered(text) {
  const nodes = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of nodes.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  }
  for (const block of nodes.querySelectorAll("pre")) {
    const text = block.textContent;
    block.tabIndex = 0;
    block.before(el("div", { className: "code-head" }, copyButton(() => text, "Copy code")));
  }
  for (const table of nodes.querySelectorAll("table")) {
    const wrap = el("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(wrap);
    wrap.append(table);
  }
  return nodes;
}

function copyButton(read, name = "Copy") {
  const button = el("button", { type: "button", className: "quiet" }, name);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = name), 1500);
  });
  return button;
}

export class Chat {
  /** @param needKey called when the server refuses the key. */
  constructor(needKey) {
    this.needKey = needKey;
    this.messages = [];
    this.model = null;
    this.abort = null;
    const input = $("#input");
    $("#form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    input.addEventListener("input", () => this.#grow());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.abort && !document.querySelector("dialog[open]")) this.stop();
    });
    $("#stop").addEventListener("click", () => this.stop());
    $("#clear").addEventListener("click", () => this.#clear());
  }

  stop() {
    this.abort?.abort();
  }

  #grow() {
    const input = $("#input");
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, 220)}px`;
  }

  #submit() {
    const text = $("#input").value.trim();
    if (!text || this.abort) return;
    $("#input").value = "";
    this.#grow();
    $("#empty")?.remove();
    this.messages.push({ role: "user", content: text });
    $("#log").append(el("article", { className: "message user" },
      el("h3", { className: "hidden" }, "You"), el("div", { className: "text" }, text)));
    this.#answer();
  }

  #clear() {
    this.stop();
    this.messages = [];
    $("#log").replaceChildren();
    $("#input").focus();
  }

  #regenerate() {
    if (this.abort) return;
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    $("#log").lastElementChild.remove();
    this.#answer();
  }

  /** The conversation so far, as a request sends it. */
  get conversation() {
    const system = $("#system").value.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
  }

  #body() {
    const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    return {
      model: this.model ?? undefined,
      messages: this.conversation,
      temperature: number("#temperature"),
      max_tokens: number("#max-tokens"),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  async #answer() {
    const view = new AnswerView();
    $("#log").append(view.element);
    view.follow();
    this.#busy(true);
    const conversation = this.messages;
    const start = performance.now();
    let [first, usage, notice, problem] = [null, null, "", ""];
    let tokens = 0;
    try {
      const stream = events("/v1/chat/completions", { body: this.#body(), signal: this.abort.signal });
      for await (const chunk of stream) {
        usage = chunk.usage ?? usage;
        const [choice] = chunk.choices ?? [];
        const { content, reasoning_content: thought } = choice?.delta ?? {};
        if ((content || thought) && first === null) first = performance.now();
        tokens += choice ? 1 : 0;
        view.add(content ?? "", thought ?? "");
        if (choice?.finish_reason === "length") notice = "The answer has reached its limit of tokens.";
      }
    } catch (error) {
      if (error.name === "AbortError") notice = "Stopped.";
      else problem = this.#explain(error);
      if (error instanceof ApiError && error.status === 401) this.needKey(error.message);
    }
    if (conversation === this.messages && view.text) {
      this.messages.push({ role: "assistant", content: view.text });
    }
    const took = (performance.now() - (first ?? start)) / 1000;
    const made = usage?.completion_tokens ?? tokens; // an answer that was stopped has no usage
    const speed = made > 1 && took > 0 ? `, ${rate((made - 1) / took)} a second` : "";
    const wait = first === null ? "" : `, first after ${seconds((first - start) / 1000)}`;
    view.end(`${count(made)} tokens${speed}${wait}`, notice, problem, () => this.#regenerate());
    this.#busy(false);
  }

  #explain(error) {
    if (error instanceof ApiError) return error.message;
    return "The connection to the server broke. Answer again when it is back.";
  }

  #busy(busy) {
    this.abort = busy ? new AbortController() : null;
    const hadFocus = [$("#send"), $("#stop")].includes(document.activeElement);
    $("#send").hidden = busy;
    $("#stop").hidden = !busy;
    $("#log").setAttribute("aria-busy", busy);
    if (hadFocus) (busy ? $("#stop") : $("#input")).focus();
  }
}

/** One answer in the conversation, which grows. */
class AnswerView {
  constructor() {
    this.text = this.thought = "";
    this.body = el("div", { className: "text markdown" }, el("span", { className: "cursor" }));
    this.thinking = el("details", { className: "thinking", hidden: true },
      el("summary", {}, "Reasoning"), el("div", { className: "text markdown" }));
    this.foot = el("footer");
    this.element = el("article", { className: "message assistant" },
      el("h3", { className: "hidden" }, "Answer"), this.thinking, this.body, this.foot);
    this.wait = 0;
  }

  add(text, thought) {
    this.text += text;
    this.thought += thought;
    if (!this.timer && (text || thought)) {
      this.timer = setTimeout(() => this.#show(), Math.max(SHOW_EVERY_MS, this.wait));
    }
  }

  /** Show the text so far. Rendering may take a fifth of the time at most. */
  #show() {
    const start = performance.now();
    const log = $("#log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.timer = null;
    this.thinking.hidden = !this.thought;
    $(".markdown", this.thinking).replaceChildren(rendered(this.thought));
    this.body.replaceChildren(rendered(this.text));
    if (atEnd) this.follow();
    this.wait = 4 * (performance.now() - start);
  }

  follow() {
    $("#log").scrollTop = $("#log").scrollHeight;
  }

  end(about, notice, problem, again) {
    clearTimeout(this.timer);
    this.#show();
    const retry = el("button", { type: "button", className: "quiet" }, "Answer again");
    retry.addEventListener("click", again);
    document.querySelectorAll(".again").forEach((old) => old.remove());
    retry.classList.add("again");
    this.foot.replaceChildren(
      el("span", {}, about),
      ...(notice ? [el("span", { className: "notice" }, notice)] : []),
      ...(problem ? [el("span", { className: "problem" }, problem)] : []),
      copyButton(() => this.text),
      retry,
    );
    this.follow();
  }
}
