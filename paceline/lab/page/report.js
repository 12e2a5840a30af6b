"use strict";
// Draws the charts, each time in the colours of the moment: screen or print, light or dark.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const narrow = matchMedia("(max-width: 46rem)");
  const paper = matchMedia("print");
  const PAPER_WIDTH = 680, PAPER_GAP = 16;
  const config = { displayModeBar: false, responsive: true };

  // Figures name their colours as CSS variables, which plotly cannot read by itself.
  const resolve = (value, colours) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((part) => resolve(part, colours));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, resolve(part, colours)]));
    }
    return value;
  };

  const widthOnPaper = (id) => {
    const columns = getComputedStyle(document.getElementById(id).closest(".charts")).getPropertyValue("--columns");
    return (PAPER_WIDTH - PAPER_GAP * (columns - 1)) / columns;
  };

  const figureOf = (id) => {
    const figure = resolve(charts[id], getComputedStyle(document.documentElement));
    // A finger that scrolls the page must not zoom the plot.
    if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;
    if (narrow.matches) figure.layout.font.size = 12;
    // A page is laid out for paper without word of its new width.
    if (paper.matches) figure.layout.width = widthOnPaper(id);
    figure.layout.hoverlabel.bgcolor = getComputedStyle(document.documentElement).getPropertyValue("--page").trim();
    return figure;
  };

  // What lies folded away has no width to be drawn in; it is drawn once it is unfolded.
  const isShown = (id) => document.getElementById(id).checkVisibility();
  const draw = () => Promise.all(Object.keys(charts).filter(isShown).map((id) => {
    const { data, layout } = figureOf(id);
    return Plotly.react(id, data, layout, config);
  })).then((drawn) => document.documentElement.setAttribute("data-drawn", drawn.length));

  const download = async (button) => {
    const id = button.dataset.chart;
    const { data, layout } = figureOf(id);
    const page = getComputedStyle(document.documentElement).getPropertyValue("--page").trim();
    const { width, height } = document.getElementById(id).getBoundingClientRect();
    await Plotly.downloadImage(
      { data, layout: { ...layout, paper_bgcolor: page } },
      { format: button.dataset.format, filename: id, width, height, scale: button.dataset.format === "png" ? 2 : 1 },
    );
  };

  for (const button of document.querySelectorAll("button[data-chart]")) {
    button.addEventListener("click", () => download(button));
  }
  for (const media of [matchMedia("(prefers-color-scheme: dark)"), narrow, paper]) media.addEventListener("change", draw);
  const more = document.getElementById("more");
  const unfold = () => { if (location.hash && more?.querySelector(location.hash)) more.open = true; };
  more?.addEventListener("toggle", draw);
  addEventListener("hashchange", unfold);
  unfold();
  draw();
})();
