// Measures every .rhino-report of a page and writes what it finds, as JSON, into it:
// per report its width and the colours behind it, and per table its header and cells.
(() => {
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\)$/.test(color) && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const box = (rect) => ({
    left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom,
  });
  const cell = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const style = getComputedStyle(element);
    const bar = element.querySelector(".bar");
    const code = element.querySelector("code");
    const whole = [...element.querySelectorAll(".whole")];
    return {
      text: element.textContent,
      align: style.textAlign,
      box: box(element.getBoundingClientRect()),
      content: box(range.getBoundingClientRect()),
      padding: parseFloat(style.paddingLeft),
      line: parseFloat(style.lineHeight),
      color: style.color,
      codeColor: code && getComputedStyle(code).color,
      codeBackground: code && getComputedStyle(code).backgroundColor,
      bar: bar && box(bar.getBoundingClientRect()),
      broken: whole.filter((w) => w.getClientRects().length > 1).length,
      isOnOneLine: element.textContent === "" ||
        range.getBoundingClientRect().height < 1.5 * parseFloat(style.lineHeight),
    };
  };
  const table = (element) => {
    const scroll = element.parentElement;
    return {
      header: [...element.querySelectorAll("thead th")].map(cell),
      rows: [...element.querySelectorAll("tbody tr")].map(
        (row) => [...row.children].map(cell)),
      box: box(element.getBoundingClientRect()),
      room: box(scroll.getBoundingClientRect()),
      canScroll: getComputedStyle(scroll).overflowX === "auto",
      isWide: scroll.scrollWidth > scroll.clientWidth + 2,
      hint: getComputedStyle(scroll, "::before").content,
    };
  };
  const report = (element) => ({
    box: box(element.getBoundingClientRect()),
    window: document.documentElement.clientWidth,
    background: background(element),
    color: getComputedStyle(element).color,
    titles: [...element.querySelectorAll("h3, summary")].map((t) => t.textContent),
    tables: [...element.querySelectorAll("table")].map(table),
    boxes: [...element.querySelectorAll(".boxes")].map((inside) => ({
      room: box(inside.getBoundingClientRect()),
      isMap: !!inside.closest(".treemap"),
      boxes: [...inside.querySelectorAll(".box")].map((b) => ({
        box: box(b.getBoundingClientRect()), text: b.textContent,
        isCut: b.textContent !== "" && (b.scrollWidth > b.clientWidth + 1 ||
          (!!inside.closest(".treemap") && b.scrollHeight > b.clientHeight + 1)),
        align: getComputedStyle(b).textAlign,
      })),
    })),
    shards: [...element.querySelectorAll(".sharding")].map((one) => ({
      box: box(one.getBoundingClientRect()),
      cells: [...one.querySelectorAll(".box")].map((b) => ({
        box: box(b.getBoundingClientRect()), text: b.textContent,
        isCut: b.scrollWidth > b.clientWidth + 1 || b.scrollHeight > b.clientHeight + 1,
      })),
    })),
    plots: [...element.querySelectorAll(".scatter")].map((plot) => ({
      room: box(plot.querySelector(".plot").getBoundingClientRect()),
      outer: box(plot.getBoundingClientRect()),
      dots: [...plot.querySelectorAll(".dot")].map((d) => ({
        box: box(d.getBoundingClientRect()), title: d.title,
        isMarked: d.classList.contains("marked"),
      })),
      ticks: [...plot.querySelectorAll(".tick")].map((t) => ({
        box: box(t.getBoundingClientRect()), text: t.textContent,
        color: getComputedStyle(t).color,
      })),
    })),
    compared: [...element.querySelectorAll(".compared .track")].map((track) => ({
      name: track.querySelector(".name").textContent,
      room: box(track.querySelector(".boxes").getBoundingClientRect()),
      boxes: [...track.querySelectorAll(".box")].map((b) => ({
        box: box(b.getBoundingClientRect()), text: b.textContent, title: b.title,
      })),
    })),
    paragraphs: [...element.querySelectorAll("p")].map((p) => ({
      box: box(p.getBoundingClientRect()), align: getComputedStyle(p).textAlign,
      isCut: p.scrollWidth > p.clientWidth + 1,
    })),
  });
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify(
    [...document.querySelectorAll(".rhino-report")].map(report));
  document.body.append(out);
})();
