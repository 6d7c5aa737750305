// Line charts of the last two minutes, drawn by uPlot in the colours of the theme.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { colour, css } from "./dom.js";

export const KEPT = 120; // snapshots
const charts = new Set();

/** One line over time that fills its element. */
export class Line {
  constructor(element, { name = "--accent", axes = false, format = String, least = 1e-9 } = {}) {
    Object.assign(this, { element, name, axes, format, least, times: [], values: [], plot: null });
    charts.add(this);
    new ResizeObserver(() => this.#resize()).observe(element);
  }

  add(time, value) {
    this.show([...this.times, time].slice(-KEPT), [...this.values, value].slice(-KEPT));
  }

  show(times, values) {
    [this.times, this.values] = [times, values];
    if (this.plot) this.plot.setData([times, values]);
    else this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height) return;
    const line = colour(this.name);
    const text = css(colour("--soft"));
    const grid = { stroke: css(colour("--line")), width: 1 };
    const shown = { stroke: text, font: "11px system-ui", grid, ticks: { show: false } };
    const value = { ...shown, size: 46, values: (_, splits) => splits.map(this.format) };
    this.plot = new uPlot(
      {
        width,
        height,
        padding: this.axes ? [8, 4, 0, 0] : [2, 0, 2, 0],
        cursor: { show: false },
        legend: { show: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(high, this.least) * 1.1] } },
        axes: this.axes ? [{ ...shown, size: 22, space: 70 }, value] : [{ show: false }, { show: false }],
        series: [
          {},
          { stroke: css(line), width: 1.5, fill: css(line, 0.12), points: { show: false } },
        ],
      },
      [this.times, this.values],
      this.element,
    );
  }

  #resize() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (this.plot && width && height) this.plot.setSize({ width, height });
    else this.draw();
  }
}

/** Draw all charts again, in the colours of another theme. */
export const recolour = () => charts.forEach((chart) => chart.draw());
