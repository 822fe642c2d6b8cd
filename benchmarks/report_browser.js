// What is wrong with the report that is open; arguments[0] lists the sections that it must have.
const out = {overflow: [], figures: [], contrast: [], overlaps: [], missing: [], texts: 0};
for (const id of arguments[0]) if (!document.getElementById(id)) out.missing.push(id);
for (const d of document.querySelectorAll('details')) d.open = true;
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) out.overflow.push(`page is ${document.documentElement.scrollWidth} wide`);
const rgb = c => { const m = c.match(/[\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
const lum = c => { const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
const ratio = (a, b) => { const [h, l] = [lum(a), lum(b)].sort((x, y) => y - x); return (h + 0.05) / (l + 0.05); };
const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
const hidden = e => { for (; e; e = e.parentElement) { if (e.classList?.contains('sr') || e.tagName === 'THEAD' &&
  getComputedStyle(e).position === 'absolute' || e.classList?.contains('skip')) return true; } return false; };
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let n = walker.nextNode(); n; n = walker.nextNode()) {
  const e = n.parentElement;
  if (!n.data.trim() || hidden(e) || ['TITLE', 'DESC', 'STYLE', 'title', 'desc'].includes(e.tagName)) continue;
  out.texts++;
  const range = document.createRange(); range.selectNodeContents(n);
  for (const r of range.getClientRects())
    if (r.width && (r.right > width + 0.5 || r.left < -0.5)) { out.overflow.push(n.data.slice(0, 60)); break; }
  const style = getComputedStyle(e), svg = e.closest('svg');
  const colour = rgb(svg ? style.fill : style.color);
  const got = ratio(colour, ground(svg || e));
  const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && +style.fontWeight >= 700;
  if (got < (large ? 3 : 4.5)) out.contrast.push(`${got.toFixed(2)} ${n.data.slice(0, 40)}`);
}
for (const svg of document.querySelectorAll('svg')) {
  const id = svg.getAttribute('aria-labelledby'), box = svg.getBoundingClientRect();
  const name = document.getElementById(id)?.textContent, told = svg.querySelector('desc')?.textContent;
  if (svg.getAttribute('role') !== 'img' || !name || !told || told.length < 20) out.figures.push(id || 'no name');
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.getBoundingClientRect(), t.textContent]);
  for (const [b, t] of boxes) if (b.right > box.right + 1 || b.left < box.left - 1 || b.top < box.top - 2 ||
    b.bottom > box.bottom + 3) out.overflow.push(`${id}: ${t.slice(0, 60)}`);
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, s] = boxes[i], [b, t] = boxes[j];
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 1 && y > 0.35 * Math.min(a.height, b.height)) out.overlaps.push(`${id}: '${s.slice(0, 30)}' on '${t.slice(0, 30)}'`);
  }
}
for (const d of document.querySelectorAll('details')) d.open = false;
return out;
