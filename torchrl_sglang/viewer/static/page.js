"use strict";
(() => {
  const POLL_MS = 2000, QUIET_POLL_MS = 5000, MOST_TOKENS = 20000, PAGE = 50;
  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // A page that a viewer serves has none in it, and asks for it.
  let data = JSON.parse($("data").textContent || "null");
  const state = { filter: "", text: "", sort: "", down: true, page: 0, run: 0, open: null, colour: "log_prob", axis: "" };
  const views = new Map();

  // The address has the state of the page, so that a link leads to it.
  const LINKED = ["run", "open", "filter", "text", "sort", "axis"];

  function linkTo(changes) {
    const linked = { ...state, ...changes };
    return `#${new URLSearchParams(LINKED.filter((name) => linked[name]).map((name) => [name, linked[name]]))}`;
  }

  function saveState() {
    const link = linkTo({});
    if (link !== (location.hash || "#")) history.replaceState(null, "", link);
  }

  function loadState() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const run = Number(parts.get("run"));
    for (const name of LINKED) state[name] = parts.get(name) ?? "";
    state.run = data.runs[run] ? run : 0;
    state.open ||= null;
    if (!AXES.some(([name]) => name === state.axis)) state.axis = "";
    if (!data.runs[state.run].groups.columns.includes(state.sort)) state.sort = "";
  }

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((each) => each !== null && each !== undefined));
    return node;
  }

  // Charts.

  const COLOURS = {
    light: ["#1f5fbf", "#c2500a", "#1b7f4b", "#8a3fa8", "#6d5a00", "#0b7285", "#b3246f", "#55606e"],
    dark: ["#7fb2ff", "#ffa866", "#69d79a", "#d79bf0", "#e6cf5c", "#66d3e3", "#ff8fc4", "#b4bdc9"],
  };
  const STATES = {
    light: { generating: "#1f6fd0", idle: "#d3d8e0", paused: "#e8890c", updating: "#8a3fa8", sleeping: "#66707f",
      down: "#c81e1e", waiting: "#cdb583", training: "#1f8a55", sending: "#8a3fa8", evaluating: "#0f93a6",
      saving: "#8c6a12", other: "#b3246f" },
    dark: { generating: "#5d9dff", idle: "#3d4552", paused: "#ffab4a", updating: "#c98ae6", sleeping: "#8d97a6",
      down: "#ff6b5e", waiting: "#77673f", training: "#4cc587", sending: "#c98ae6", evaluating: "#4cc9db",
      saving: "#d8b04a", other: "#ff8fc4" },
  };

  function theme() {
    const name = dark.matches ? "dark" : "light";
    const text = dark.matches ? "#e8eaee" : "#1b1f27", soft = dark.matches ? "#adb5c2" : "#555d6b";
    const line = dark.matches ? "#3a414d" : "#e3e6eb";
    const font = "system-ui, 'DejaVu Sans', sans-serif";
    return { name, config: {
      background: "transparent", font,
      view: { stroke: null },
      axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line,
        labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" },
      axisX: { grid: false }, axisY: { domain: false, ticks: false },
      legend: { labelColor: text, titleColor: text, labelFontSize: 11, symbolStrokeWidth: 2, labelLimit: 220,
        layout: { bottom: { anchor: "start", direction: "vertical" } } },
      range: { category: COLOURS[name] },
      title: { color: soft, fontSize: 11, fontWeight: "normal" },
      line: { strokeWidth: 1.8 }, point: { size: 22 }, area: { color: COLOURS[name][0] },
    } };
  }

  function themed(spec, width) {
    const { name, config } = theme();
    const copy = structuredClone(spec);
    const colour = copy.encoding.color;
    if (colour?.field === "state") colour.scale.range = colour.scale.domain.map((each) => STATES[name][each]);
    // A legend does not wrap by itself.
    if (colour?.legend) colour.legend.columns = Math.max(Math.floor((width - 70) / (colour.field === "state" ? 95 : 150)), 1);
    return { ...copy, config };
  }

  async function draw(box, spec, key) {
    views.get(key)?.finalize();
    try {
      const made = await vegaEmbed(box, themed(spec, box.clientWidth), {
        renderer: "svg", actions: false, ast: false,
        tooltip: { theme: theme().name === "dark" ? "dark" : "default" },
      });
      views.set(key, made);
      box.dataset.drawn = "true";
    } catch (error) {
      box.textContent = `This chart cannot be drawn: ${error.message}`;
    }
  }

  // Of a run that goes on, what was opened stays open.
  const opened = new Set(["differences"]);

  function numbers(key, columns, rows, total, title = "Numbers") {
    const body = make("div", { class: "numbers", tabindex: "0", role: "region", "aria-label": "numbers" });
    const details = make("details", {}, make("summary", {}, title), body);
    details.addEventListener("toggle", () => {
      opened[details.open ? "add" : "delete"](key);
      if (!details.open || body.firstChild) return;
      const table = make("table", {},
        make("thead", {}, make("tr", {}, ...columns.map((each) => make("th", { scope: "col" }, each)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((each) => make("td", {}, shown(each)))))));
      if (total > rows.length) body.append(make("p", { class: "note" }, `The last ${rows.length} of ${total} points.`));
      body.append(table);
    });
    details.open = opened.has(key);
    return details;
  }

  const pending = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || entry.target.dataset.drawn) continue;
      entry.target.dataset.drawn = "soon";
      draw(entry.target, entry.target.spec, entry.target.id);
    }
  }, { rootMargin: "600px" });

  const AXES = [["", "batches and steps"], ["tokens", "response tokens"], ["minutes", "minutes"]];

  // The value at a place of a line of points.
  function valueAt(points, x) {
    const after = points.findIndex((each) => each[0] >= x);
    if (after < 0) return points.at(-1)?.[1];
    if (after === 0) return points[0][1];
    const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0 || 1);
  }

  // A curve over batches or steps, over another axis.
  function overAxis(spec) {
    const x = spec.encoding.x;
    if (!state.axis || !["batch", "step"].includes(x.title) || x.type !== "quantitative") return spec;
    const progress = Object.fromEntries(data.runs.map((run) => [run.name, run.progress]));
    const values = spec.data.values.map((point) => {
      const of = progress[point.run], seconds = valueAt(of[x.title], point.x);
      return { ...point, x: state.axis === "minutes" ? seconds / 60 : valueAt(of.tokens, seconds) };
    }).filter((point) => point.x !== undefined && !Number.isNaN(point.x));
    const title = AXES.find(([name]) => name === state.axis)[1];
    const tooltip = spec.encoding.tooltip.map((each) => each.field === "x" ? { ...each, title } : each);
    return { ...spec, data: { values }, encoding: { ...spec.encoding, tooltip, x: { ...x, title, axis: { tickCount: 6, format: state.axis === "minutes" ? ",.4~g" : "~s" } } } };
  }

  function chartBox(id, spec) {
    const box = make("div", { class: "chart", id });
    box.spec = spec;
    box.style.minHeight = `${(spec.height || 100) + 60}px`;
    pending.observe(box);
    return box;
  }

  function redraw() {
    for (const box of document.querySelectorAll(".chart")) {
      if (box.dataset.drawn === "true") draw(box, box.spec, box.id);
    }
  }

  // Overview and curves.

  function showOverview() {
    document.title = `${data.title} - torchrl-sglang`;
    $("title").textContent = data.title;
    $("live").textContent = data.runs.some((run) => run.live) ? "running" : "";
    $("overview").replaceChildren(...data.runs.map((run, place) => {
      const box = make("section", { class: "run", "aria-label": run.name });
      if (data.runs.length > 1) box.append(make("h2", {}, run.name));
      box.append(make("dl", { class: "facts" }, ...run.facts.map(([name, value]) =>
        make("div", {}, make("dt", {}, name), make("dd", { "data-fact": name }, value)))));
      box.append(make("p", { class: "sentence", "data-sentence": true }, run.sentence));
      if (run.settings.length) {
        box.append(numbers(`settings of ${place}`, ["setting", "value"], run.settings, run.settings.length, `Settings, versions and commit: ${run.settings.length}`));
      }
      for (const note of run.notes) box.append(make("p", { class: "note" }, note));
      if (run.failures.length) {
        const key = `errors of ${run.name}`;
        box.append(make("details", { open: opened.has(key), ontoggle: (event) => opened[event.target.open ? "add" : "delete"](key) },
          make("summary", {}, `Errors of groups: the last ${run.failures.length}`),
          ...run.failures.map((each) => make("p", { class: "note bad" }, each))));
      }
      if (run.timeline) {
        box.append(make("figure", { class: "wide" }, make("figcaption", {}, make("h3", {}, "Timeline")),
          chartBox(`timeline-${place}`, run.timeline),
          ...(run.in_flight ? [chartBox(`in-flight-${place}`, run.in_flight)] : [])));
      }
      return box;
    }));
    if (data.runs.length > 1) {
      const names = data.runs.map((run) => run.name), rows = data.differences;
      $("overview").prepend(numbers("differences", ["setting", ...names], rows, rows.length, `Settings that differ: ${rows.length}`));
    }
  }

  function showCurves() {
    $("axis").replaceChildren(...AXES.map(([name, words]) => make("option", { value: name, selected: name === state.axis }, words)));
    const focused = document.activeElement?.closest?.("[data-curve]")?.dataset.curve;
    $("charts").replaceChildren(...data.curves.map((curve) => make("figure", { "data-curve": curve.id },
      make("figcaption", {}, make("h3", {}, curve.title), curve.about ? make("p", {}, curve.about) : null),
      chartBox(`curve-${curve.id}`, overAxis(curve.spec)),
      numbers(curve.title, curve.columns, curve.rows, curve.points))));
    if (data.constants.length) {
      $("charts").append(make("figure", { "data-curve": "constants", class: "wide" },
        numbers("constants", ["metric", "value"], data.constants, data.constants.length, `Metrics that stayed the same: ${data.constants.length}`)));
    }
    if (focused) $("charts").querySelector(`[data-curve="${focused}"] summary`)?.focus({ preventScroll: true });
    if (!data.curves.length && !data.constants.length) $("charts").append(make("p", { class: "note" }, "Nothing was recorded yet that a curve could show."));
  }

  // The table of groups.

  function shown(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number" && value && Math.abs(value) < 1e-3) return value.toExponential(2);
    return typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : String(value);
  }

  const HIDDEN = new Set(["tags", "prompt_key"]);
  const TEXTS = new Set(["prompt", "status", "id"]);

  function chosenRows() {
    const { columns, rows } = data.runs[state.run].groups;
    const at = Object.fromEntries(columns.map((name, place) => [name, place]));
    const text = state.text.toLowerCase();
    const found = rows.filter((row) => (!state.filter || row[at.tags].includes(state.filter))
      && (!text || row[at.prompt].toLowerCase().includes(text) || row[at.id] === state.text || search.ids.has(row[at.id])));
    if (state.sort) {
      const place = at[state.sort], sign = state.down ? -1 : 1;
      found.sort((a, b) => {
        const [x, y] = [a[place], b[place]];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
      });
    }
    return found;
  }

  // Groups whose conversations have the text.
  const search = { ids: new Set(), about: "", timer: 0 };

  async function searchTexts() {
    const { run, text } = state;
    Object.assign(search, { ids: new Set(), about: "" });
    if (!text) return showTable();
    const found = await (data.conversations ? searchFile(run, text) : searchServer(run, text));
    if (state.run !== run || state.text !== text) return;
    search.ids = new Set(found.ids);
    search.about = `Searched the prompts and responses of ${found.searched.toLocaleString("en")} of ${found.total.toLocaleString("en")} groups.`;
    showTable();
  }

  function searchFile(run, text) {
    const small = text.toLowerCase();
    const said = (turn) => [...turn.messages, turn.reply];
    const within = (each) => [...each.turns.flatMap(said), ...each.after].some((message) =>
      [message.content, message.reasoning_content, message.tool_calls].some((part) => String(part ?? "").toLowerCase().includes(small)));
    const all = Object.entries(data.conversations).filter(([key]) => key.startsWith(`${run}/`));
    const ids = all.filter(([, group]) => group.responses.some(within)).map(([, group]) => group.id);
    return { ids, searched: all.length, total: data.runs[run].groups.total };
  }

  async function searchServer(run, text) {
    const answer = await fetch(`search/${run}/${encodeURIComponent(text)}`).catch(() => null);
    return answer?.ok ? answer.json() : { ids: [], searched: 0, total: data.runs[run].groups.total };
  }

  function showTools() {
    const groups = data.runs[state.run].groups;
    const set = (change) => () => { Object.assign(state, change, { page: 0 }); showGroups(); };
    const button = (name, words, title, count) => make("button", {
      type: "button", "aria-pressed": String(state.filter === name), title, "data-filter": name, onclick: set({ filter: name }),
    }, `${words} ${count.toLocaleString("en")}`);
    const input = make("input", { type: "search", placeholder: "Search in prompts and responses", "aria-label": "Search in prompts and responses", value: state.text });
    input.addEventListener("input", () => {
      state.text = input.value; state.page = 0;
      clearTimeout(search.timer);
      search.timer = setTimeout(searchTexts, 300);
    });
    const runs = make("select", { "aria-label": "Run", onchange: (event) => {
      Object.assign(state, { run: Number(event.target.value), page: 0, open: null });
      $("group").hidden = true; showGroups(); searchTexts();
    } }, ...data.runs.map((run, place) => make("option", { value: place, selected: place === state.run }, run.name)));
    $("tools").replaceChildren(...(data.runs.length > 1 ? [runs] : []),
      button("", "All", "every group", groups.rows.length),
      ...data.filters.map(([name, words, title]) => button(name, words, title, groups.counts[name])), input);
  }

  function showTable() {
    saveState();
    const groups = data.runs[state.run].groups;
    const names = groups.columns.filter((name) => !HIDDEN.has(name));
    const rows = chosenRows();
    const pages = Math.max(Math.ceil(rows.length / PAGE), 1);
    state.page = Math.min(state.page, pages - 1);
    const head = make("tr", {}, ...names.map((name) => make("th", {
      scope: "col", class: TEXTS.has(name) ? "text" : null,
      "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : "none",
    }, make("button", { type: "button", onclick: () => {
      state.down = state.sort === name ? !state.down : true;
      state.sort = name; state.page = 0; showTable();
      $("table").querySelector(`[data-sort="${name}"]`).focus();
    }, "data-sort": name }, name + (state.sort === name ? (state.down ? " \u2193" : " \u2191") : "")))));
    const body = rows.slice(state.page * PAGE, (state.page + 1) * PAGE).map((row) => {
      const id = row[0];
      const open = () => showGroup(id, true);
      return make("tr", { tabindex: "0", "data-id": id, "aria-selected": String(state.open === id), onclick: open,
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); }
          if (event.key === "ArrowDown") { event.preventDefault(); event.currentTarget.nextElementSibling?.focus(); }
          if (event.key === "ArrowUp") { event.preventDefault(); event.currentTarget.previousElementSibling?.focus(); }
        } },
        ...names.map((name) => make("td", { class: name === "prompt" ? "text prompt" : TEXTS.has(name) ? "text" : null },
          shown(row[groups.columns.indexOf(name)]))));
    });
    $("table").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
    const move = (by) => () => { state.page += by; showTable(); };
    $("pages").replaceChildren(
      make("button", { type: "button", disabled: state.page === 0, onclick: move(-1) }, "Previous"),
      make("span", { "data-count": rows.length }, `${rows.length.toLocaleString("en")} groups, page ${state.page + 1} of ${pages}`),
      make("span", { class: "note", "data-searched": true }, state.text ? search.about : ""),
      make("button", { type: "button", disabled: state.page === pages - 1, onclick: move(1) }, "Next"),
      ...(groups.total > groups.rows.length
        ? [make("span", { class: "note" }, `The newest ${groups.rows.length.toLocaleString("en")} of ${groups.total.toLocaleString("en")} groups.`)] : []));
  }

  function showGroups() { showTools(); showTable(); }

  // The conversations of a group.

  async function fetchGroup(id) {
    const key = `${state.run}/${id}`;
    if (data.conversations) return data.conversations[key] || { missing: "This file has no room for the conversations of this group, or they were not recorded. `torchrl-sglang view` with the folder shows all that there are." };
    const answer = await fetch(`group/${key}`);
    return answer.ok ? answer.json() : { missing: await answer.text() };
  }

  async function showGroup(id, focus) {
    state.open = id;
    saveState();
    for (const row of document.querySelectorAll("#table tbody tr")) row.setAttribute("aria-selected", String(row.dataset.id === id));
    const box = $("group");
    const found = await fetchGroup(id).catch((error) => ({ missing: `The viewer does not answer: ${error.message}` }));
    if (state.open !== id) return;
    box.hidden = false;
    if (found.missing) {
      box.replaceChildren(make("h3", {}, `Group ${id}`), make("p", { class: "note" }, found.missing));
    } else {
      const strips = make("div", {});
      const fill = () => strips.replaceChildren(...found.responses.map(response));
      box.replaceChildren(make("h3", {}, `Group ${id}`), ...samePrompt(id), colourChoice(found, fill), strips);
      fill();
    }
    if (focus) { box.focus({ preventScroll: true }); box.scrollIntoView({ block: "start" }); }
  }

  // The groups with the prompt of a group, over the epochs of a run.
  function samePrompt(id) {
    const { columns, rows } = data.runs[state.run].groups;
    const at = Object.fromEntries(columns.map((name, place) => [name, place]));
    const key = rows.find((row) => row[0] === id)?.[at.prompt_key];
    if (!key) return [];
    const names = ["batch", "id", "status", "reward", "best", "worst", "tokens"];
    const same = rows.filter((row) => row[at.prompt_key] === key).sort((a, b) => a[at.batch] - b[at.batch]);
    const link = (row) => make("a", { href: linkTo({ open: row[0] }), "aria-current": row[0] === id ? "true" : null }, row[0]);
    return [make("p", { class: "note" }, `Groups with this prompt, from the first batch to the last: ${same.length}`),
      make("div", { class: "numbers", id: "same-prompt" }, make("table", {},
        make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...same.map((row) => make("tr", {}, ...names.map((name) => make("td", {}, name === "id" ? link(row) : shown(row[at[name]]))))))))];
  }

  const KINDS = [
    ["log_prob", "Log-prob", "that the engine sampled the token with"],
    ["gap", "Log-prob gap", "between trainer and engine"],
    ["version", "Weight version", "that computed the token"],
    ["mask", "Mask", "whether the loss has it"],
    ["entropy", "Entropy", "of the distribution"],
  ];
  const BOUNDS = { log_prob: [0.1, 0.7, 2.3, 4.6], gap: [0.01, 0.05, 0.2, 1], entropy: [0.1, 0.5, 1, 2] };

  function turnsOf(found) { return found.responses.flatMap((each) => each.turns); }

  function valueOf(turn, place, kind) {
    if (kind === "log_prob") return turn.log_probs?.[place] ?? null;
    if (kind === "gap") {
      const [a, b] = [turn.log_probs?.[place], turn.trainer?.[place]];
      return a == null || b == null ? null : Math.abs(a - b);
    }
    if (kind === "version") return turn.versions[place] ?? null;
    if (kind === "mask") return turn.trained && (turn.log_probs?.[place] ?? null) !== null ? 1 : 0;
    return turn.columns.entropy?.[place] ?? null;
  }

  function classOf(turn, place, kind) {
    const value = valueOf(turn, place, kind);
    if (value === null) return "";
    if (kind === "version") return `d${((value % 6) + 6) % 6}`;
    if (kind === "mask") return value ? "d2" : "masked";
    const size = kind === "log_prob" ? -value : value;
    return `q${BOUNDS[kind].filter((bound) => size > bound).length}`;
  }

  function colourChoice(found, fill) {
    const known = KINDS.filter(([kind]) => kind === "mask" || kind === "log_prob"
      || turnsOf(found).some((turn) => Array.from({ length: turn.count }).some((_, place) => valueOf(turn, place, kind) !== null)));
    if (!known.some(([kind]) => kind === state.colour)) state.colour = "log_prob";
    const legend = make("div", { class: "legend" });
    const tell = () => legend.replaceChildren(...legendOf(found));
    const select = make("select", { id: "colour", onchange: (event) => { state.colour = event.target.value; fill(); tell(); } },
      ...known.map(([kind, words, title]) => make("option", { value: kind, selected: kind === state.colour }, `${words} ${title}`)));
    tell();
    return make("div", { class: "colours" }, make("label", { for: "colour" }, "Colour of tokens: "), select, legend);
  }

  function legendOf(found) {
    const part = (name, words) => make("span", { style: `--own: var(--${name})` }, words);
    if (state.colour === "mask") return [part("d2", "in the loss"), make("span", { style: "--own: transparent" }, "struck out: not")];
    if (state.colour === "version") {
      const versions = [...new Set(turnsOf(found).flatMap((turn) => turn.versions))].sort((a, b) => a - b);
      return versions.slice(0, 12).map((each) => part(`d${((each % 6) + 6) % 6}`, `version ${each}`));
    }
    const bounds = BOUNDS[state.colour], sign = state.colour === "log_prob" ? "-" : "";
    const word = state.colour === "log_prob" ? "below" : "above";
    return [part("q0", `up to ${sign}${bounds[0]}`), ...bounds.map((bound, place) => part(`q${place + 1}`, `${word} ${sign}${bound}`))];
  }

  function response(each, place) {
    const facts = [`reward ${shown(each.reward) || "unknown"}`,
      ...Object.entries(each.rewards).map(([name, value]) => `${name} ${shown(value)}`),
      each.advantage === null ? null : `advantage ${shown(each.advantage)}`,
      `${each.tokens} tokens`, each.cut ? "cut off" : null].filter(Boolean);
    const depth = depths(each.turns);
    return make("section", { class: "response", "aria-label": `Response ${place + 1}` },
      make("h3", {}, `Response ${place + 1}`), make("p", { class: "note" }, facts.join(", ")),
      ...each.turns.map((turn) => turnBox(turn, depth.get(turn.number))),
      ...each.after.map(message));
  }

  // A turn that goes on from the end of a path stays at its depth; a branch is indented.
  function depths(turns) {
    const found = new Map(), continued = new Set();
    for (const turn of turns) {
      const parent = turn.parent === null ? undefined : found.get(turn.parent);
      const branches = turn.parent !== null && continued.has(turn.parent);
      found.set(turn.number, (parent ?? 0) + (branches ? 1 : 0));
      continued.add(turn.parent);
    }
    return found;
  }

  function message(each) {
    return make("div", {}, make("span", { class: "role" }, each.name ? `${each.role} ${each.name}` : each.role),
      make("div", { class: "message" }, each.content || "(not recorded, or empty)"));
  }

  function turnBox(turn, depth) {
    const [began, ended] = turn.time;
    // A session begins with a turn that says so, too.
    const branch = turn.number === 0 ? "" : turn.branch.replace(/\.$/, "");
    const facts = [`turn ${turn.number}`, turn.parent === null ? null : `goes on from turn ${turn.parent}`, branch || null,
      `${turn.count} tokens`, `prompt ${shown(turn.prompt_tokens)} tokens, ${shown(turn.cached)} cached`,
      began && ended ? `${shown(ended - began)} s` : null, `ended by ${turn.finish}`,
      turn.reward ? `reward ${shown(turn.reward)}` : null].filter(Boolean);
    return make("div", { class: branch ? "turn branch" : "turn", style: `--depth: ${Math.min(depth, 12)}` },
      ...turn.messages.map(message),
      make("span", { class: "role" }, "assistant"),
      ...(turn.pieces.length ? strip(turn) : [make("div", { class: "message" }, turn.reply.content || "(not recorded)"), ...(turn.log_probs ? strip(turn) : [])]),
      turn.reply.tool_calls ? make("div", { class: "message" }, turn.reply.tool_calls) : null,
      make("p", { class: "note" }, facts.join(", ")));
  }

  function strip(turn) {
    const about = make("p", { class: "about", role: "status" });
    const pieces = turn.pieces.length ? turn.pieces : Array.from({ length: turn.count }, () => "\u25a1");
    // A browser takes long for more.
    const cut = pieces.length > MOST_TOKENS ? pieces.length - MOST_TOKENS : 0, half = MOST_TOKENS / 2;
    const places = Array.from({ length: pieces.length - cut }, (_, place) => place < half || !cut ? place : place + cut);
    const spans = places.map((place, at) => make("span", { class: classOf(turn, place, state.colour), "data-place": at },
      (cut && at === half ? "\n...\n" : "") + pieces[place].replaceAll("\n", "\u21b5\n")));
    let here = -1;
    const go = (place) => {
      spans[here]?.classList.remove("here");
      here = Math.max(0, Math.min(place, spans.length - 1));
      spans[here].classList.add("here");
      about.textContent = describe(turn, pieces, places[here]);
    };
    const box = make("div", { class: "strip", tabindex: "0", role: "application",
      "aria-label": "Tokens of the response; arrow keys tell of each",
      onmouseover: (event) => { if (event.target.dataset.place) go(Number(event.target.dataset.place)); },
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
        if (step !== undefined) { event.preventDefault(); go(here + step); }
        if (event.key === "Home") { event.preventDefault(); go(0); }
        if (event.key === "End") { event.preventDefault(); go(spans.length - 1); }
        spans[here]?.scrollIntoView({ block: "nearest" });
      } }, ...spans);
    return [box, about, cut ? make("p", { class: "note" }, `${cut.toLocaleString("en")} tokens in the middle are not shown.`) : null];
  }

  function describe(turn, pieces, place) {
    const gap = valueOf(turn, place, "gap"), trainer = turn.trainer?.[place];
    return [`token ${place + 1} of ${pieces.length}`, turn.ids.length ? `${JSON.stringify(pieces[place])}, id ${turn.ids[place]}` : null,
      `log-prob ${shown(valueOf(turn, place, "log_prob")) || "unknown"}`,
      trainer == null ? null : `trainer's ${shown(trainer)}, gap ${shown(gap)}`,
      `version ${shown(turn.versions[place]) || "unknown"}`,
      ...Object.entries(turn.columns).map(([name, values]) => `${name} ${shown(values[place])}`),
      valueOf(turn, place, "mask") ? "in the loss" : "not in the loss"].filter(Boolean).join("; ");
  }

  // A live run.

  async function follow() {
    // What the mouse is on stays, so that it can be read.
    if (document.querySelector("#vg-tooltip-element.visible")) { setTimeout(follow, POLL_MS); return; }
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": data.tag || "" } });
      if (answer.ok) {
        data = { ...(await answer.json()), conversations: null };
        showOverview(); showCurves();
        if (!$("tools").contains(document.activeElement)) showTools();
        if (!$("table").contains(document.activeElement)) showTable();
      }
      // A run that has ended may go on.
      setTimeout(follow, data.runs.some((run) => run.live) ? POLL_MS : QUIET_POLL_MS);
    } catch (error) {
      $("live").textContent = "The viewer has ended; this is what it showed last.";
    }
  }

  async function load() {
    $("live").textContent = "Reading the run ...";
    try {
      const answer = await fetch("data.json");
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      data = await answer.json();
    } catch (error) {
      $("live").textContent = `The viewer did not tell what the run is: ${error.message}. Its terminal may say why.`;
      return;
    }
    begin();
  }

  // What the address leads to.
  function showLinked() {
    const { open } = state;
    showGroups();
    searchTexts();
    if (open) showGroup(open, true);
  }

  function begin() {
    $("live").textContent = "";
    loadState();
    showOverview(); showCurves(); showLinked();
    addEventListener("hashchange", () => {
      // Not the link to the groups.
      if (location.hash.includes("=")) { loadState(); showCurves(); showLinked(); }
    });
    $("axis").addEventListener("change", (event) => { state.axis = event.target.value; saveState(); showCurves(); });
    dark.addEventListener("change", redraw);
    let soon = 0, width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(soon);
      soon = setTimeout(redraw, 200);
    });
    if (!data.conversations) setTimeout(follow, POLL_MS);
    document.body.dataset.ready = "true";
  }

  if (data) begin(); else load();
})();
