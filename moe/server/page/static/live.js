// The panels beside the chat, fed by /v1/experts/stream.

import { ApiError, events } from "./api.js";
import { KEPT, Line, recolour } from "./charts.js";
import { $, $$, bytes, colour, count, css, el, percent, rate, seconds } from "./dom.js";
import { HeatMap, PLACE_NAMES } from "./heatmap.js";

const KEEP = 0.7; // of the load a second ago, in the load of now
const BUSIEST = 12;
const PLAN_COLOURS = 7;

const TILES = {
  generated: { name: "Tokens / s", format: rate },
  prompt: { name: "Prompt tokens / s", format: rate },
  first: { name: "First token", format: seconds },
  hits: { name: "Cache hits", format: percent, offload: true },
  disk: { name: "From disk / s", format: bytes, offload: true },
  stalls: { name: "Waiting for disk", format: percent, offload: true },
  accepted: { name: "Drafts accepted", format: percent, drafts: true },
  running: { name: "Running, waiting", format: (value) => value.toFixed(0) },
};

export class Live {
  /** @param needKey called when the server wants a key, or refuses the one it got. */
  /** @param own marks the tokens of one's chat that went to the chosen expert. */
  constructor(needKey, own) {
    this.needKey = needKey;
    this.own = own;
    this.map = new HeatMap((place) => this.#choose(place));
    this.tiles = Object.fromEntries(
      Object.entries(TILES).map(([id, tile]) => [id, this.#addTile(id, tile)]),
    );
    this.expertChart = new Line($("#expert-chart"), { axes: true, format: percent, least: 0.02 });
    this.span = "now";
    this.chosen = null;
    this.#forget();
    $$("[data-span]").forEach((button) =>
      button.addEventListener("click", () => {
        this.span = button.dataset.span;
        $$("[data-span]").forEach((b) => b.setAttribute("aria-pressed", b === button));
        this.#drawMap();
      }),
    );
  }

  /** Read the stream for ever; connects again after it breaks. */
  async run() {
    for (let pause = 500; ; pause = Math.min(pause * 1.6, 8000)) {
      try {
        this.abort = new AbortController();
        for await (const event of events("/v1/experts/stream", { signal: this.abort.signal })) {
          pause = 500;
          if (event.type === "layout") this.#layout(event);
          else this.#snapshot(event);
        }
        this.#state("wait", "The server stops");
      } catch (error) {
        if (error instanceof ApiError && error.status === 401) {
          this.#state("bad", "Key needed");
          await this.needKey(error.message);
          continue;
        }
        this.#state("bad", error instanceof ApiError ? "Refused" : "No connection");
        $("#state").title = error.message;
      }
      await new Promise((wake) => setTimeout(wake, pause));
    }
  }

  recolour() {
    this.map.recolour();
    recolour();
    if (this.plan) this.#memory(this.plan);
  }

  #forget() {
    this.last = null;
    this.recent = []; // tokens of each expert, weighted by age
    this.history = []; // shares by layer and expert, for the chart of the chosen one
    this.quiet = 0; // snapshots without tokens
  }

  #state(kind, text) {
    const pill = $("#state");
    if (pill.textContent !== text) pill.textContent = text;
    pill.dataset.state = kind;
    pill.title = "";
  }

  #addTile(id, { name, format }) {
    const value = el("strong", {}, "–");
    const chart = el("div", { className: "spark", "aria-hidden": "true" });
    const tile = el("div", { className: "tile", id: `tile-${id}` }, el("span", {}, name), value, chart);
    $("#tiles").append(tile);
    return { tile, value, line: new Line(chart), format };
  }

  #set(id, time, value, text = null) {
    const { value: strong, line, format } = this.tiles[id];
    strong.textContent = value === null ? "–" : text ?? format(value);
    line.add(time, value);
  }

  #layout(layout) {
    this.map.setLayout(layout);
    this.plan = layout.memory_plan;
    this.block = layout.status.keys_and_values.block_tokens;
    this.own.allow(!layout.layers[0]?.ranks);
    this.#memory(this.plan);
    this.#how(layout.status);
    const { offload, speculation } = layout.status;
    for (const [id, { offload: needsCache, drafts }] of Object.entries(TILES)) {
      this.tiles[id].tile.hidden = (needsCache && !offload) || (drafts && !speculation.enabled);
    }
    $("#tiles").dataset.count = Object.values(this.tiles).filter(({ tile }) => !tile.hidden).length;
    $("#drafts-why").textContent = speculation.why;
  }

  #snapshot(now) {
    if (now.state !== "ready") {
      const { progress } = now;
      const share = progress?.fraction ? ` ${percent(progress.fraction)}` : "";
      this.#state("wait", now.state === "loading" ? `Loading${share}` : `Server: ${now.state}`);
    } else this.#state("good", "Live");
    if (this.last && (now.number <= this.last.number || now.layers.length !== this.last.layers.length)) {
      this.#forget();
    }
    if (this.last) this.#compare(this.last, now);
    else this.#begin(now);
    this.last = now;
    this.#drawMap();
    this.#kv(now);
    this.#drafts(now.drafts);
    this.#ranks(now.ranks);
    this.#cache(now.cache);
  }

  #begin(now) {
    this.recent = now.layers.map(({ tokens }) => tokens.map(() => 0));
  }

  #compare(before, now) {
    const past = now.time - before.time;
    const since = (read) => Math.max(0, read(now) - read(before));
    const { time } = now;
    this.#set("generated", time, since((s) => s.generated_tokens) / past);
    this.#set("prompt", time, since((s) => s.prompt_tokens) / past);
    const first = since((s) => s.first_token.count);
    if (first) this.firstToken = since((s) => s.first_token.seconds) / first;
    this.#set("first", time, this.firstToken ?? null);
    const { running_requests: running, waiting_requests: waiting } = now.occupancy;
    this.#set("running", time, running ?? 0, `${running ?? 0}, ${waiting ?? 0}`);
    if (now.cache && before.cache) {
      const hits = since((s) => s.cache.hits);
      const asked = hits + since((s) => s.cache.misses);
      if (asked) this.hitShare = hits / asked;
      this.#set("hits", time, this.hitShare ?? null);
      this.#set("disk", time, since((s) => s.cache.disk_bytes) / past);
      this.#set("stalls", time, Math.min(1, since((s) => s.cache.stall_seconds) / past));
    }
    if (now.drafts && before.drafts) {
      const total = (s, key) => Object.values(s.drafts).reduce((sum, mode) => sum + mode[key], 0);
      const verified = since((s) => total(s, "verified"));
      if (verified) this.acceptedShare = since((s) => total(s, "accepted")) / verified;
      this.#set("accepted", time, this.acceptedShare ?? null);
    }
    this.#addTokens(before, now, past);
  }

  #addTokens(before, now, past) {
    const keep = KEEP ** past;
    let any = false;
    this.recent = now.layers.map(({ tokens }, layer) =>
      tokens.map((total, expert) => {
        const added = Math.max(0, total - before.layers[layer].tokens[expert]);
        any ||= added > 0;
        return (this.recent[layer]?.[expert] ?? 0) * keep + added;
      }),
    );
    this.quiet = any ? 0 : this.quiet + 1;
    const shares = now.layers.map(({ tokens }, layer) => {
      const added = tokens.map((total, expert) => total - before.layers[layer].tokens[expert]);
      const sum = added.reduce((a, b) => a + b, 0);
      return added.map((value) => (sum > 0 ? value / sum : 0));
    });
    this.history = [...this.history, { time: now.time, shares }].slice(-KEPT);
  }

  /** Times the mean of its layer, of each expert. */
  #heat() {
    const rows = this.span === "all" ? this.last.layers.map(({ tokens }) => tokens) : this.recent;
    const fade = this.span === "now" ? 0.6 ** Math.max(0, this.quiet - 3) : 1;
    return rows.map((row) => {
      const mean = row.reduce((a, b) => a + b, 0) / row.length;
      return row.map((value) => (mean > 0 ? (value / mean) * fade : 0));
    });
  }

  #drawMap() {
    if (!this.last?.layers.length) return;
    const where = this.last.layers.map((layer) => layer.where);
    const kinds = new Set(where.join("")).size;
    this.map.update(this.#heat(), where);
    if (kinds !== this.kinds) this.map.refreshLegend();
    this.kinds = kinds;
    this.#showExpert();
    this.#table();
    this.map.hovered && ($("#hover").textContent = this.map.describe(...this.map.hovered));
  }

  #choose(place) {
    this.chosen = place;
    $("#expert").hidden = !place;
    this.titled = null;
    this.own.show(place);
    this.#showExpert();
  }

  #showExpert() {
    if (!this.chosen || !this.last) return;
    const [layer, expert] = this.chosen;
    const { tokens } = this.last.layers[layer];
    const all = tokens.reduce((a, b) => a + b, 0);
    const place = [1 + tokens.filter((other) => other > tokens[expert]).length, tokens.length];
    const title = `Layer ${layer}, expert ${expert}`;
    if (this.titled !== title) $("#expert-title").textContent = this.titled = title;
    const ranks = this.map.ranksOf(layer, expert);
    facts($("#expert-facts"), {
      Now: `${(this.map.target[layer]?.[expert] ?? 0).toFixed(1)} × the mean`,
      "Since start": `${percent(tokens[expert] / Math.max(all, 1))} of the layer's tokens`,
      Tokens: `${count(tokens[expert])}, number ${place[0]} of ${place[1]}`,
      Lives: PLACE_NAMES[this.map.placeOf(layer, expert)],
      Bits: String(this.map.bitsOf(layer, expert)),
      ...(ranks ? { Copies: `${ranks.length}, on rank ${ranks.join(", ")}` } : {}),
    });
    this.expertChart.show(
      this.history.map(({ time }) => time),
      this.history.map(({ shares }) => shares[layer]?.[expert] ?? 0),
    );
  }

  #table() {
    if (!$("#busiest").open) return;
    const rows = this.map.target.flatMap((row, layer) =>
      row.map((heat, expert) => ({ layer, expert, heat })),
    );
    rows.sort((a, b) => b.heat - a.heat);
    body($("#busiest"), rows.slice(0, BUSIEST).map(({ layer, expert, heat }) => [
      layer, expert, heat.toFixed(1), PLACE_NAMES[this.map.placeOf(layer, expert)],
      this.map.bitsOf(layer, expert),
    ]));
  }

  #memory(plan) {
    const total = Math.max(plan.available_bytes ?? 0, plan.needed_bytes);
    const free = total - plan.needed_bytes;
    $("#memory-total").textContent =
      `${bytes(plan.needed_bytes)} planned` +
      (plan.available_bytes ? ` of ${bytes(plan.available_bytes)}${this.#where(plan.place)}` : "");
    const used = plan.lines.filter((line) => line.bytes);
    const lines = used.map((line, i) => ({ ...line, fill: css(colour(`--plan-${i % PLAN_COLOURS}`)) }));
    segments($("#memory"), lines.map(({ bytes: size, fill }) => [size / total, fill]));
    $("#memory").setAttribute(
      "aria-label", lines.map(({ name, bytes: size }) => `${name} ${bytes(size)}`).join(", "),
    );
    const tiers = plan.tiers.map(({ name, experts, bytes: size }) =>
      el("li", { className: "soft" }, `${name}: ${count(experts)} experts, ${bytes(size)}`));
    $("#memory-legend").replaceChildren(
      ...lines.map(({ name, bytes: size, how, fill }) => {
        const swatch = el("i", { className: "swatch" });
        swatch.style.background = fill;
        return el("li", { title: how }, swatch, `${name} `, el("b", {}, bytes(size)));
      }),
      el("li", { className: "soft" }, `free ${bytes(free)}`),
      ...tiers,
    );
  }

  #where = (place) => (place === "memory" ? "" : ` on ${place}`);

  #kv({ occupancy, kv_tokens_limit: limit, prefixes }) {
    const used = occupancy.kv_tokens ?? 0;
    const held = prefixes?.held_tokens ?? 0;
    const of = limit ? ` of ${count(limit)} tokens` : " tokens";
    const blocks = this.block ? ` in blocks of ${this.block}` : "";
    const text =
      `${count(used)}${of}${blocks}` + (held ? `, ${count(held)} kept for known beginnings` : "");
    $("#kv-text").textContent = text;
    $("#kv").setAttribute("aria-label", text);
    const total = limit || Math.max(used + held, 1);
    segments($("#kv"), [
      [used / total, css(colour("--accent"))],
      [held / total, css(colour("--plan-5"))],
    ]);
  }

  #cache(cache) {
    $("#cache-card").hidden = !cache;
    if (!cache) return;
    const asked = cache.hits + cache.misses;
    facts($("#cache"), {
      "Hits since start": asked ? `${percent(cache.hits / asked)} of ${count(asked)}` : "none yet",
      "Read from disk": bytes(cache.disk_bytes),
      Slots: count(cache.slots),
      Prefetches: `${count(cache.prefetches)}, ${count(cache.late)} of them late`,
      Evictions: count(cache.evictions),
      "Waited for experts": seconds(cache.stall_seconds),
    });
  }

  #drafts(drafts) {
    const rows = Object.entries(drafts ?? {});
    $("#drafts").hidden = !rows.length;
    body($("#drafts"), rows.map(([mode, { drafts: made, verified, accepted }]) => [
      mode, count(made), count(verified), `${count(accepted)} (${percent(accepted / Math.max(verified, 1))})`,
    ]));
  }

  #ranks(ranks) {
    $("#ranks-card").hidden = !ranks;
    body($("#ranks"), (ranks ?? []).filter(Boolean).map((own) => [
      own.rank, count(own.tokens), count(own.served), seconds(own.seconds),
    ]));
  }

  #how(status) {
    const parts = {
      Model: { enabled: true, why: `${status.architecture} on ${status.device}` },
      "Packed prompts": status.packing,
      "Fused decode": status.fused,
      Drafts: status.speculation,
      "Expert kernel": { enabled: true, why: `${status.expert_kernel.name}: ${status.expert_kernel.reason}` },
      "Keys and values": {
        enabled: true, why: `${status.keys_and_values.bits} bits: ${status.keys_and_values.why}`,
      },
      Offload: status.offload
        ? { enabled: true, why: `${status.offload.policy} keeps ${count(status.offload.slots)} of ` +
            `${count(status.offload.experts)} experts; ${status.offload.reader.name}: ${status.offload.reader.reason}` }
        : { enabled: false, why: "all experts are in memory" },
      Ranks: status.parallel
        ? { enabled: true, why: [
            `${count(status.parallel.ranks.length)} share the experts`,
            ...Object.entries(status.parallel.lost).map(([rank, why]) => `rank ${rank} ${why}`),
          ].join("; ") }
        : { enabled: false, why: "the experts are on one rank" },
      Images: status.images,
      Tools: status.tools,
      Reasoning: status.reasoning,
    };
    $("#how").replaceChildren(
      ...Object.entries(parts).map(([name, { enabled, why }]) => el("div", {},
        el("dt", { className: enabled ? "on" : "off" }, name,
          el("span", { className: "hidden" }, enabled ? " is on" : " is off")),
        el("dd", {}, why || (enabled ? "on" : "off")),
      )),
    );
    $("#notices").replaceChildren(...status.notices.map((text) => el("li", {}, text)));
  }
}

function facts(list, pairs) {
  list.replaceChildren(
    ...Object.entries(pairs).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

function body(table, rows) {
  $("tbody", table).replaceChildren(
    ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))))),
  );
}

function segments(bar, parts) {
  bar.replaceChildren(
    ...parts.filter(([share]) => share > 0).map(([share, fill]) => {
      const part = el("span");
      part.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
      part.style.background = fill;
      return part;
    }),
  );
}
