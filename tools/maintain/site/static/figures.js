// Two figures that move: below a picture of chapter 04 and of chapter 07, the reader changes the
// picture's numbers. A test compares both with the functions in pictures.py that draw the pictures.
const figures = {
  // Return the bytes per weight that a rank holds in each way to shard, as [color, bytes] pairs.
  held(ranks, perNode) {
    const copy = (size) => [["teal", 4 / size], ["blue", 4 / size], ["orange", 8 / size]];
    return { "DDP": copy(1), "hybrid": copy(Math.min(ranks, perNode)),
      "ZeRO-2": [...copy(ranks), ["purple", 2]], "ZeRO-3": copy(ranks) };
  },

  // Return the pass of each rank in each turn: turns[rank][turn] is "F1", and turns count from 1.
  turns(schedule, ranks, microBatches) {
    return Array.from({ length: ranks }, (_, rank) => {
      const row = Array(2 * (microBatches + ranks - 1) + 1).fill("");
      // The first micro-batch goes through all later ranks and back before a gradient arrives.
      const laterRanks = ranks - 1 - rank;
      for (let n = 1; n <= microBatches; n++) {
        let forward = rank + n, backward = microBatches + ranks - 1 + laterRanks + n;
        if (schedule === "1f1b") {
          backward = ranks - 1 + laterRanks + 2 * n;
          // After its first forward passes, a rank alternates between both kinds of passes.
          if (n > laterRanks + 1) forward = rank - 1 + 2 * n;
        }
        row[forward] = `F${n}`;
        row[backward] = `B${n}`;
      }
      return row;
    });
  },

  // Return the most micro-batches that a rank keeps at a time, from its row of turns.
  kept(row) {
    let now = 0;
    return Math.max(...row.map((pass) => now += { F: 1, B: -1 }[pass[0]] ?? 0));
  },
};

function legend(entries) {
  return Object.entries(entries).map(([color, text]) => `<i class="${color}"></i> ${text} `).join("");
}

const drawings = {
  memory({ weights, ranks, memory }) {
    const rows = Object.entries(figures.held(ranks, 8)).map(([name, parts]) => {
      const total = weights * parts.reduce((sum, [, bytes]) => sum + bytes, 0);
      const bar = parts.map(([color, bytes]) =>
        `<i class="${color}" style="width: ${100 * bytes / 16}%"></i>`).join("");
      const shown = Number(total.toPrecision(3)).toLocaleString("en-US");
      return `<b>${name}</b><span class="bar">${bar}</span>
        <span>${shown} GB${total > memory ? ": too much" : ""}</span>`;
    });
    const colors = { teal: "weights", blue: "gradients", orange: "moments", purple: "gathered" };
    return `${rows.join("")}<p>${legend(colors)}</p>`;
  },

  schedule({ schedule, ranks, microBatches }) {
    const cells = (row) => row.slice(1).map((pass) =>
      `<i class="${{ F: "teal", B: "blue" }[pass[0]] ?? ""}">${pass.slice(1)}</i>`).join("");
    const rows = figures.turns(schedule, ranks, microBatches).map((row, rank) => `<b>rank ${rank}</b>
      <span class="turns">${cells(row)}</span><span>keeps ${figures.kept(row)}</span>`);
    const idle = (100 * (ranks - 1) / (microBatches + ranks - 1)).toFixed(0);
    return `${rows.join("")}<p>${legend({ teal: "forward", blue: "backward" })}</p>
      <p>Each rank is idle in (K − 1) / (M + K − 1) = ${idle}% of the turns.</p>`;
  },
};

// Each control is [name, label, values, first value]. A slider moves through the values.
const controls = {
  memory: [["weights", "billions of weights, P", [1, 3, 8, 32, 70, 405], 8],
    ["ranks", "GPUs, N", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], 16],
    ["memory", "GB per GPU", [24, 40, 80, 141, 180], 80]],
  schedule: [["schedule", "schedule", ["gpipe", "1f1b"], "1f1b"],
    ["ranks", "ranks, K", [1, 2, 3, 4, 5, 6, 7, 8], 3],
    ["microBatches", "micro-batches, M", Array.from({ length: 24 }, (_, n) => n + 1), 4]],
};

function addFigure(name, image) {
  const figure = document.createElement("form"), drawing = document.createElement("div");
  figure.className = `figure ${name}`;
  drawing.setAttribute("aria-live", "polite");
  const sliders = controls[name].map(([key, label, values, first]) => {
    const box = document.createElement("label"), shown = document.createElement("span");
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: values.length - 1 });
    slider.value = values.indexOf(first);
    box.append(`${label}: `, shown, slider);
    figure.append(box);
    return { key, values, slider, shown };
  });
  const draw = () => {
    const chosen = {};
    for (const { key, values, slider, shown } of sliders)
      slider.ariaValueText = shown.textContent = chosen[key] = values[slider.value];
    drawing.innerHTML = drawings[name](chosen);
  };
  figure.addEventListener("input", draw);
  figure.append(drawing);
  image.closest("p").after(figure);
  draw();
}

addEventListener("DOMContentLoaded", () => {
  for (const [name, picture] of [["memory", "04-holds"], ["schedule", "07-1f1b"]]) {
    const image = document.querySelector(`img[src*="${picture}"]`);
    if (image) addFigure(name, image);
  }
});
