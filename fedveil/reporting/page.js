"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const drawn = new Set();
  const phone = window.matchMedia("(max-width: 40rem)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // "@c0/0.2" is the theme's colour c0 at an opacity of 0.2.
  function colour(named) {
    const [name, opacity] = named.slice(1).split("/");
    if (name === "scale") return [0, 1, 2, 3, 4].map((i) => [i / 4, style(`--scale-${i}`)]);
    const hex = style(`--${name}`);
    if (opacity === undefined) return hex;
    const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${parts.join(",")},${opacity})`;
  }

  const COLOURED = new Set(["color", "fillcolor", "colorscale"]);

  function themed(value, key) {
    if (typeof value === "string") {
      return COLOURED.has(key) && value.startsWith("@") ? colour(value) : value;
    }
    if (Array.isArray(value)) return value.map((item) => themed(item, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
  }

  function axis(given, narrow, fitted) {
    const { title, ...rest } = given || {};
    if (narrow && rest.tickvals && rest.ticktext?.some((label) => label.includes("<br>"))) {
      const kept = (_, i) => i % 2 === 0; // labels of two lines do not fit side by side on a phone
      rest.tickvals = rest.tickvals.filter(kept);
      rest.ticktext = rest.ticktext.filter(kept);
    }
    return {
      automargin: fitted, tickformat: given?.type === "log" ? "~g" : undefined,
      gridcolor: style("--line"), linecolor: style("--edge"), zeroline: false,
      ticks: "outside", tickcolor: style("--edge"), ticklen: 4, nticks: narrow ? 5 : 8,
      separatethousands: true,
      exponentformat: "power", minexponent: 4,
      ...themed(rest), title: { text: title || "", standoff: 8 },
    };
  }

  function layout(index, narrow, traces) {
    const { xaxis, yaxis, ...rest } = charts[index].layout;
    const legend = Boolean(charts[index].frames.members); // others have theirs above them
    const bar = traces.some((t) => t.showscale);
    const fitted = traces.some((t) => t.type === "heatmap"); // measuring labels takes long
    const deep = xaxis?.ticktext?.some((label) => label.includes("<br>"));
    const free = { l: narrow ? 60 : 68, r: 14, t: 10, b: (narrow ? 44 : 50) + (deep ? 14 : 0) };
    return {
      ...themed(rest), xaxis: axis(xaxis, narrow, fitted), yaxis: axis(yaxis, narrow, fitted),
      margin: fitted ? { l: 12, r: bar ? 4 : 14, t: 10, b: 10 } : free, autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style("--font"), size: narrow ? 11 : 12.5, color: style("--text") },
      showlegend: legend, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hovermode: "closest", dragmode: narrow ? false : "zoom",
      hoverlabel: {
        bgcolor: style("--card"), bordercolor: style("--edge"), align: "left",
        font: { color: style("--text"), family: style("--font"), size: 12.5 }, namelength: 40,
      },
    };
  }

  const KINDS = [
    { name: "unchanged", color: "@c0", symbol: "circle" },
    { name: "shortened", color: "@c1", symbol: "diamond" },
    { name: "lengthened", color: "@c2", symbol: "triangle-up" },
  ];

  const member = (index) =>
    charts[index].frames.members[document.getElementById(`member-${index}`)?.value || 0];
  const position = (index) => Number(document.getElementById(`slider-${index}`).value);

  function frameTraces(index) {
    const frames = member(index);
    const at = position(index);
    const frame = frames.rounds[at];
    const ever = new Set(frames.rounds.flatMap((f) => f.kind));
    const traces = KINDS.map((kind, k) => ({ kind, k })).filter(({ k }) => ever.has(k))
      .map(({ kind, k }) => ({
        type: "scatter", mode: "markers", name: kind.name,
        x: frame.norm.filter((_, i) => frame.kind[i] === k),
        y: frame.angle.filter((_, i) => frame.kind[i] === k),
        marker: { color: `${kind.color}/0.7`, size: 7, symbol: kind.symbol },
        hovertemplate: "norm %{x:.4~g}, %{y:.0f}°",
      }));
    const bound = frames.bound[at];
    if (bound !== null) {
      traces.push({
        type: "scatter", mode: "lines", name: "bound C", x: [bound, bound], y: [-4, 184],
        line: { color: "@text", width: 1.5, dash: "dot" }, hovertemplate: "C = %{x:.4~g}",
      });
    }
    const said = document.getElementById(`said-${index}`);
    said.value = `Round ${frame.round}: ${frame.of} clients, median norm ${frame.median[0]}, ` +
      `median angle ${Math.round(frame.median[1])}°, ` +
      `${Math.round(100 * frame.shortened)}% shortened`;
    return traces;
  }

  // Black or white, whichever is read better on a cell: at least 4.5 to 1 on any colour.
  function inkOn(share) {
    const stops = colour("@scale").map(([, hex]) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    const at = Math.min(3, Math.floor(share * 4));
    const light = stops[at].map((from, i) => (from + (stops[at + 1][i] - from) * (share * 4 - at)) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.179 ? "#000000" : "#ffffff";
  }

  // The numbers in the cells of a heat map.
  function inscribed({ x, y, z, text, zmin, zmax }, narrow) {
    const known = z.flat().filter((v) => v !== null);
    const low = zmin ?? Math.min(...known);
    const high = zmax ?? Math.max(...known);
    const cells = z.flatMap((row, i) => row.map((value, j) => ({ value, x: x[j], y: y[i], text: text[i][j] })))
      .filter((cell) => cell.value !== null && cell.text);
    return {
      type: "scatter", mode: "text", hoverinfo: "skip", showlegend: false,
      x: cells.map((c) => c.x), y: cells.map((c) => c.y), text: cells.map((c) => c.text),
      textfont: {
        size: narrow ? 9 : 12,
        color: cells.map((c) => inkOn(high > low ? (c.value - low) / (high - low) : 0.5)),
      },
    };
  }

  function draw(index) {
    if (!window.Plotly) return;
    const place = document.getElementById(`chart-${index}`);
    const narrow = phone.matches && !printing;
    const raw = charts[index].frames.members ? frameTraces(index) : charts[index].traces;
    const traces = themed(raw).flatMap((trace) => {
      if (trace.type !== "heatmap") return [trace];
      const { text, ...map } = trace;
      const bar = { ...map, showscale: !text && !narrow, colorbar: { ...map.colorbar, thickness: 12, outlinewidth: 0 } };
      return text ? [bar, inscribed(trace, narrow)] : [bar];
    });
    const full = layout(index, narrow, traces);
    if (!drawn.has(index)) place.replaceChildren(); // the sketch that was shown until now
    if (printing) full.width = place.clientWidth;
    Plotly.react(place, traces, full, {
      responsive: !printing, displayModeBar: false,
    });
    drawn.add(index);
  }

  const redraw = () => drawn.forEach(draw);

  // Charts near the window come first, the others while the browser has nothing else to do.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const index = Number(entry.target.id.slice("chart-".length));
      if (entry.isIntersecting && !drawn.has(index)) draw(index);
    }
  }, { rootMargin: "300px" });
  const later = window.requestIdleCallback || ((work) => setTimeout(work, 50));

  function rest() {
    const next = charts.findIndex((_, index) => !drawn.has(index));
    if (next >= 0) later(() => { if (!drawn.has(next)) draw(next); rest(); });
    else root.dataset.ready = "all";
  }

  // Running Plotly takes longer than all else, so the text is shown before it.
  function start() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.body.append(script);
    charts.forEach((_, index) => seen.observe(document.getElementById(`chart-${index}`)));
    rest();
  }
  window.addEventListener("load", () => setTimeout(start, 30));

  function turn(index) {
    const slider = document.getElementById(`slider-${index}`);
    slider.max = member(index).rounds.length - 1;
    slider.setAttribute("aria-valuetext", `round ${member(index).rounds[position(index)].round}`);
    draw(index);
  }
  document.querySelectorAll(".slider input, .slider select").forEach((part) => {
    part.addEventListener("input", () => turn(Number(part.dataset.chart)));
  });

  function theme(name) {
    if (name === "system") delete root.dataset.theme;
    else root.dataset.theme = name;
    redraw();
  }
  const remembered = (() => {
    try { return localStorage.getItem("fedveil-theme"); } catch { return null; }
  })();
  document.querySelectorAll("input[name=theme]").forEach((choice) => {
    if (choice.value === remembered) { choice.checked = true; theme(remembered); }
    choice.addEventListener("change", () => {
      try { localStorage.setItem("fedveil-theme", choice.value); } catch { /* from disk it may be refused */ }
      theme(choice.value);
    });
  });
  dark.addEventListener("change", redraw);
  phone.addEventListener("change", redraw);

  document.querySelectorAll(".code").forEach((block) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.querySelector("pre").textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block.querySelector("pre"));
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.prepend(button);
  });

  if (phone.matches) document.querySelector("nav details").open = false;

  // On paper nothing can be unfolded: a few recipes are printed, of many only their names.
  const folded = document.querySelectorAll("section > details:not([open])");
  const unfold = (open) => { if (folded.length <= 6) folded.forEach((part) => { part.open = open; }); };

  window.addEventListener("beforeprint", () => {
    printing = true;
    unfold(true);
    root.dataset.printing = "yes";
    start();
    charts.forEach((_, index) => draw(index));
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    unfold(false);
    delete root.dataset.printing;
    redraw();
  });
})();
