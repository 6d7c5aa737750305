// Which tokens of one's own chat went to the expert that is chosen. The server reads the chat again
// when it is asked to, and only then.

import { postJson } from "./api.js";
import { $, count, el } from "./dom.js";

export class OwnTokens {
  constructor(chat) {
    this.chat = chat;
    this.place = null;
    this.read = null; // tokens, and of each layer and token its experts
    this.key = ""; // the conversation that was read
    $("#own-ask").addEventListener("click", () => this.#ask());
  }

  /** Whether the server can tell: it cannot where ranks share the experts. */
  allow(can) {
    $("#own-ask").hidden = !can;
    $("#own-no").hidden = can;
  }

  /** Show the chosen layer and expert; null: none is. */
  show(place) {
    this.place = place;
    this.#draw();
  }

  async #ask() {
    const messages = this.chat.conversation;
    if (!messages.length) {
      $("#own-count").textContent = "There is no chat yet.";
      return;
    }
    $("#own-ask").disabled = true;
    try {
      const body = { model: this.chat.model ?? undefined, messages, add_generation_prompt: false };
      this.read = await postJson("/v1/experts/tokens", body);
      this.key = JSON.stringify(messages);
      this.#draw();
    } catch (error) {
      $("#own-count").textContent = error.message;
    } finally {
      $("#own-ask").disabled = false;
    }
  }

  #draw() {
    const current = this.read && this.key === JSON.stringify(this.chat.conversation);
    $("#own-text").hidden = !this.place || !current;
    $("#own-count").textContent = "";
    if (!this.place || !current) return;
    const [layer, expert] = this.place;
    const went = this.read.experts[layer].map((experts) => experts.includes(expert));
    const { tokens } = this.read;
    $("#own-text").replaceChildren(
      ...tokens.map((text, at) => (went[at] ? el("mark", {}, text) : document.createTextNode(text))),
    );
    const number = went.filter(Boolean).length;
    $("#own-count").textContent =
      `${count(number)} of the last ${count(tokens.length)} tokens went to this expert.`;
  }
}
