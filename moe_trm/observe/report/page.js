"use strict";
// Exact values under the pointer, a finger or the arrow keys. Without this script the page shows everything but them.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const scale = (text) => {
    const [kind, low, high, start, end] = text.split(" ").map((part, place) => (place ? Number(part) : part));
    return {
      start, end,
      place: (value) => start + ((end - start) * (value - low)) / (high - low),
      value: (place) => low + ((place - start) / (end - start)) * (high - low),
      log: kind === "log",
    };
  };

  const series = (element) => {
    const run = data.runs[Number(element.dataset.run)];
    return { run, name: element.dataset.metric, ...run.metrics[element.dataset.metric] };
  };

  const nearest = (steps, step) =>
    steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);

  const shown = (svg, y) => {
    const rows = [...svg.querySelectorAll("g.cells")];
    if (rows.length) {
      const vertical = scale(svg.dataset.y);
      const row = Math.min(rows.length - 1, Math.max(0, Math.floor(vertical.value(y))));
      return [series(rows[row])];
    }
    const unique = new Map();
    for (const element of svg.querySelectorAll("[data-metric]")) {
      unique.set(`${element.dataset.run} ${element.dataset.metric}`, series(element));
    }
    return [...unique.values()];
  };

  const say = (lines, at) => {
    tip.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(at.x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${at.y + 18 + box.height > innerHeight ? at.y - box.height - 12 : at.y + 18}px`;
  };

  const show = (svg, step, y, at) => {
    const found = shown(svg, y);
    const steps = [...new Set(found.flatMap((each) => each.steps))];
    if (!steps.length) return;
    const chosen = nearest(steps, step);
    svg.dataset.step = chosen;
    const x = scale(svg.dataset.x).place(chosen);
    const height = svg.viewBox.baseVal.height;
    svg.querySelector(".cursor").setAttribute("d", `M${x} 10V${height - 26}`);
    const lines = [`step ${chosen}`];
    for (const each of found) {
      const place = each.steps.indexOf(chosen);
      if (place < 0) continue;
      const whose = data.runs.length > 1 ? `${each.run.name}: ` : "";
      lines.push(`${whose}${each.name} = ${each.values[place] === null ? "not finite" : each.values[place]}`);
    }
    say(lines, at);
  };

  const hide = (svg) => {
    tip.hidden = true;
    svg.querySelector(".cursor").setAttribute("d", "");
  };

  // A lifted finger leaves its figures standing, until another place is touched.
  const dismissed = (element, hide) => {
    element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    element.addEventListener("blur", hide);
    document.addEventListener("pointerdown", (event) => element.contains(event.target) || hide(), { capture: true });
  };

  for (const svg of document.querySelectorAll("svg.chart")) {
    const horizontal = scale(svg.dataset.x);
    const inside = (event) => {
      const box = svg.getBoundingClientRect();
      const unit = svg.viewBox.baseVal.width / box.width;
      return { x: (event.clientX - box.left) * unit, y: (event.clientY - box.top) * unit };
    };
    const follow = (event) => {
      const at = inside(event);
      show(svg, horizontal.value(at.x), at.y, { x: event.clientX, y: event.clientY });
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    dismissed(svg, () => hide(svg));
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide(svg);
      if (!way) return;
      event.preventDefault();
      const steps = [...new Set(shown(svg, 0).flatMap((each) => each.steps))].sort((a, b) => a - b);
      const now = svg.dataset.step === undefined ? steps.at(-1) : Number(svg.dataset.step);
      const next = steps[Math.min(steps.length - 1, Math.max(0, steps.indexOf(nearest(steps, now)) + way))];
      const box = svg.getBoundingClientRect();
      show(svg, next, 0, { x: box.left + box.width / 2, y: box.top });
    });
  }

  // Transcripts: the figures of one token.
  for (const block of document.querySelectorAll(".tokens[data-rollout]")) {
    const rollout = data.rollouts[Number(block.dataset.rollout)];
    const spans = [...block.children];
    let now = -1;
    const mark = (place) => {
      spans[now]?.classList.remove("now");
      now = place;
      spans[now]?.classList.add("now");
    };
    const tell = (place, at) => {
      mark(place);
      const lines = [`token ${place}: ${JSON.stringify(rollout.texts[place])}, id ${rollout.ids[place]}, turn ${rollout.turns[place]}, ${rollout.kinds[place]}`];
      if (rollout.rollout_logprobs[place] !== null) lines.push(`rollout log-prob ${rollout.rollout_logprobs[place]}`);
      if (rollout.log_ratio[place] !== null) {
        lines.push(`${rollout.ratio} log-ratio ${rollout.log_ratio[place]}`);
        lines.push(`weight ${rollout.weight[place]}, ${rollout.keep[place] ? "kept" : "rejected"}`);
      }
      say(lines, at);
    };
    const leave = () => {
      mark(-1);
      tip.hidden = true;
    };
    const follow = (event) => {
      const place = spans.indexOf(event.target);
      if (place >= 0) tell(place, { x: event.clientX, y: event.clientY });
    };
    block.addEventListener("pointermove", follow);
    block.addEventListener("pointerdown", follow);
    dismissed(block, leave);
    block.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!way) return;
      event.preventDefault();
      const place = Math.min(spans.length - 1, Math.max(0, now + way));
      const box = spans[place].getBoundingClientRect();
      tell(place, { x: box.left, y: box.bottom });
    });
  }
})();
