// Where each panel stands: Grafana's grid of 24 columns, with collapsed rows opened.
export const COLUMNS = 24;
const CELL = 30;
const GAP = 8;

/** Panels in the order of the page; those of a collapsed row move what is below it down. */
export function opened(panels) {
  const sorted = [...panels].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  const all = [];
  let added = 0;
  for (const panel of sorted) {
    const moved = (one, by) => ({ ...one, gridPos: { ...one.gridPos, y: one.gridPos.y + by } });
    const here = moved(panel, added);
    all.push(here);
    const inside = panel.type === 'row' && panel.collapsed ? panel.panels ?? [] : [];
    if (inside.length) {
      const top = Math.min(...inside.map(({ gridPos }) => gridPos.y));
      const below = here.gridPos.y + 1;
      all.push(...inside.map((one) => moved(one, below - top)));
      added += Math.max(...inside.map(({ gridPos }) => gridPos.y + gridPos.h)) - top;
    }
  }
  return all;
}

/** Left, top, width and height in pixels on a page of the given width. */
export function place({ x, y, w, h }, width) {
  const column = (width + GAP) / COLUMNS;
  return { left: x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
}

/** How high the grid is. */
export const heightOf = (panels) =>
  Math.max(0, ...panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * (CELL + GAP);
