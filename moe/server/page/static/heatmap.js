// The heat map of layers and experts: one canvas, a cell an expert, keys and pointer to choose one.

import { $, $$, colour, css, el, mix } from "./dom.js";

export const PLACE_NAMES = {
  memory: "in memory",
  prefix: "in memory, first bits only",
  host: "in host memory",
  loading: "on the way",
  disk: "on disk",
  rank: "on another rank",
};
const HOT = 8; // times the mean that have the strongest colour
const STEPS = 48; // colours of a scale
const GUTTER = 26; // pixels for the numbers of layers
const RANK_COLOURS = 8;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class HeatMap {
  /** @param onChoose called with layer and expert, or with null when nothing is chosen. */
  constructor(onChoose) {
    this.canvas = $("#map");
    this.context = this.canvas.getContext("2d");
    this.onChoose = onChoose;
    this.layers = []; // of the layout
    this.places = [];
    this.heat = []; // times the mean, of each expert of each layer, as it is drawn
    this.target = [];
    this.where = []; // digits
    this.mode = "load";
    this.chosen = null;
    this.hovered = null;
    new ResizeObserver(() => this.#fit()).observe($("#map-scroll"));
    this.#listen();
  }

  setLayout({ layers, places }) {
    const same = layers.length === this.layers.length;
    [this.layers, this.places] = [layers, places];
    const ranked = layers.some((layer) => layer.ranks);
    $('[data-colour="rank"]').hidden = !ranked;
    if (!ranked && this.mode === "rank") this.setMode("load");
    if (!same) {
      this.heat = layers.map(({ bits }) => bits.map(() => 0));
      this.chosen = null;
      this.onChoose(null);
    }
    this.recolour();
    this.#fit();
  }

  /** New values: `target[layer][expert]` times the mean, `where[layer]` digits. */
  update(target, where) {
    const start = performance.now();
    const before = this.heat.map((row) => [...row]);
    [this.target, this.where] = [target, where];
    cancelAnimationFrame(this.frame);
    const step = (now) => {
      const share = calm.matches ? 1 : Math.min(1, (now - start) / 400);
      this.heat = target.map((row, layer) =>
        row.map((value, at) => mix([before[layer]?.[at] ?? 0], [value], share)[0]),
      );
      this.#draw();
      if (share < 1) this.frame = requestAnimationFrame(step);
    };
    step(calm.matches ? start + 400 : start);
  }

  setMode(mode) {
    this.mode = mode;
    $$("[data-colour]").forEach((b) => b.setAttribute("aria-pressed", b.dataset.colour === mode));
    this.#showLegend();
    this.#draw();
  }

  placeOf(layer, expert) {
    return this.places[this.where[layer]?.[expert]] ?? "memory";
  }

  bitsOf = (layer, expert) => this.layers[layer].bits[expert];
  ranksOf = (layer, expert) => this.layers[layer].ranks?.[expert] ?? null;

  recolour() {
    const ground = colour("--cell");
    const scale = (name, least) =>
      Array.from({ length: STEPS }, (_, i) =>
        css(mix(ground, colour(name), least + (1 - least) * (i / (STEPS - 1)))),
      );
    this.scales = Object.fromEntries(
      Object.keys(PLACE_NAMES).map((place) => [
        place,
        scale(`--place-${place}`, place === "disk" || place === "rank" ? 0.06 : 0.22),
      ]),
    );
    this.bitScale = scale("--accent", 0.08);
    this.rankColours = Array.from({ length: RANK_COLOURS }, (_, i) => css(colour(`--rank-${i}`)));
    this.ink = css(colour("--text"));
    this.soft = css(colour("--soft"));
    this.#showLegend();
    this.#draw();
  }

  #listen() {
    $$("[data-colour]").forEach((button) =>
      button.addEventListener("click", () => this.setMode(button.dataset.colour)),
    );
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.#hover(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.#hover(null));
    canvas.addEventListener("click", (event) => this.#choose(this.#at(event)));
    canvas.addEventListener("keydown", (event) => {
      const [layer, expert] = this.chosen ?? [0, 0];
      const last = (this.layers[layer]?.bits.length ?? 1) - 1;
      const to = {
        ArrowLeft: [layer, expert - 1],
        ArrowRight: [layer, expert + 1],
        ArrowUp: [layer - 1, expert],
        ArrowDown: [layer + 1, expert],
        Home: [layer, 0],
        End: [layer, last],
        Enter: [layer, expert],
        Escape: null,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      if (!to) return this.#choose(null);
      const row = Math.min(Math.max(to[0], 0), this.layers.length - 1);
      const column = Math.min(Math.max(to[1], 0), (this.layers[row]?.bits.length ?? 1) - 1);
      this.#choose([row, column]);
    });
  }

  #at({ offsetX, offsetY }) {
    const layer = Math.floor(offsetY / this.high);
    const expert = Math.floor((offsetX - GUTTER) / this.wide);
    return expert >= 0 && expert < (this.layers[layer]?.bits.length ?? 0) ? [layer, expert] : null;
  }

  #hover(place) {
    this.hovered = place;
    this.canvas.title = "";
    $("#hover").textContent = place ? this.describe(...place) : "";
    this.#draw();
  }

  #choose(place) {
    if (place && !this.layers.length) return;
    this.chosen = place;
    this.onChoose(place);
    this.#draw();
  }

  describe(layer, expert) {
    const heat = this.target[layer]?.[expert] ?? 0;
    const ranks = this.ranksOf(layer, expert);
    const on = ranks ? `, rank ${ranks.join(" and ")}` : "";
    return (
      `Layer ${layer}, expert ${expert}: ${heat.toFixed(1)} × the mean, ` +
      `${PLACE_NAMES[this.placeOf(layer, expert)]}, ${this.bitsOf(layer, expert)} bits${on}`
    );
  }

  #fit() {
    const room = $("#map-scroll").clientWidth;
    const widest = Math.max(...this.layers.map(({ bits }) => bits.length), 0);
    if (!room || !widest) return;
    const least = room > 600 ? 2.5 : 4; // a finger needs more
    this.wide = Math.max(least, Math.floor(((room - GUTTER) / widest) * 4) / 4);
    this.high = Math.min(26, Math.max(7, Math.floor(440 / this.layers.length), this.wide * 0.6));
    const [width, height] = [GUTTER + this.wide * widest, this.high * this.layers.length];
    const sharp = devicePixelRatio || 1;
    this.canvas.width = Math.ceil(width * sharp);
    this.canvas.height = Math.ceil(height * sharp);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(sharp, 0, 0, sharp, 0, 0);
    this.#draw();
  }

  #draw() {
    const { context, wide, high, layers } = this;
    if (!wide || !this.scales) return;
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const [gapX, gapY] = [wide > 7 ? 1.5 : wide > 4.5 ? 1 : 0, high > 8 ? 1.5 : 1];
    context.font = "10px system-ui";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(14 / high);
    layers.forEach(({ bits }, layer) => {
      if (layer % every === 0) {
        context.fillStyle = this.soft;
        context.fillText(layer, GUTTER - 7, Math.max(5.5, (layer + 0.5) * high));
      }
      for (let expert = 0; expert < bits.length; expert++) {
        context.fillStyle = this.#fill(layer, expert);
        context.fillRect(GUTTER + expert * wide, layer * high, wide - gapX, high - gapY);
        if (this.mode === "rank" && this.ranksOf(layer, expert)?.length > 1) {
          context.fillStyle = this.ink;
          context.fillRect(GUTTER + expert * wide, layer * high, (wide - gapX) / 2, 2);
        }
      }
    });
    for (const [place, width] of [[this.hovered, 1], [this.chosen, 2]]) {
      if (!place) continue;
      context.strokeStyle = this.ink;
      context.lineWidth = width;
      context.strokeRect(GUTTER + place[1] * wide - 1, place[0] * high - 1, wide - gapX + 2, high - gapY + 2);
    }
  }

  #fill(layer, expert) {
    if (this.mode === "bits") return this.bitScale[this.#bitStep(this.bitsOf(layer, expert))];
    if (this.mode === "rank") {
      return this.rankColours[(this.ranksOf(layer, expert)?.[0] ?? 0) % RANK_COLOURS];
    }
    const scale = this.scales[this.placeOf(layer, expert)];
    if (this.mode === "where") return scale[Math.round(STEPS * 0.6)];
    const heat = Math.min(1, Math.sqrt((this.heat[layer]?.[expert] ?? 0) / HOT));
    return scale[Math.round(heat * (STEPS - 1))];
  }

  #bitStep = (bits) => Math.round((Math.min(bits, 16) / 16) * (STEPS - 1));

  #showLegend() {
    if (!this.scales) return;
    const entry = (text, fill) => {
      const swatch = el("i", { className: "swatch" });
      swatch.style.background = fill;
      return el("li", {}, swatch, text);
    };
    const legend = $("#legend");
    if (this.mode === "bits") {
      const bits = [...new Set(this.layers.flatMap((layer) => layer.bits))].sort((a, b) => a - b);
      legend.replaceChildren(...bits.map((b) => entry(`${b} bits`, this.bitScale[this.#bitStep(b)])));
    } else if (this.mode === "rank") {
      const ranks = new Set(this.layers.flatMap((layer) => (layer.ranks ?? []).flat()));
      const last = Math.max(...ranks, 0);
      const alike = (first) => [...ranks].filter((rank) => rank % RANK_COLOURS === first).sort((a, b) => a - b);
      legend.replaceChildren(
        ...this.rankColours.slice(0, last + 1)
          .map((fill, first) => [alike(first), fill])
          .filter(([same]) => same.length)
          .map(([same, fill]) => entry(`rank ${same.slice(0, 3).join(", ")}${same.length > 3 ? ", …" : ""}`, fill)),
        entry("a bar: several copies", this.ink),
      );
    } else {
      const seen = new Set(this.where.flatMap((row) => [...new Set(row)]).map((d) => this.places[d]));
      const shown = Object.keys(PLACE_NAMES).filter((place) => seen.has(place));
      legend.replaceChildren(
        ...(shown.length ? shown : ["memory"]).map((place) => {
          const scale = this.scales[place];
          const whole = this.mode === "where";
          const fill = whole ? scale[Math.round(STEPS * 0.6)]
            : `linear-gradient(90deg, ${scale[0]}, ${scale[STEPS - 1]})`;
          return entry(PLACE_NAMES[place], fill);
        }),
        ...(this.mode === "load" ? [el("li", { className: "soft" }, `strong: ${HOT} × the mean`)] : []),
      );
    }
  }

  refreshLegend() {
    this.#showLegend();
  }
}
