#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw moves.svg, the picture of what moves where: draw_moves.py > moves.svg

Only the standard library. The picture says nothing that was measured; its sizes are arithmetic
for Llama-3.1-8B (32 layers, 8 KV heads of 128, bf16) at 131,072 tokens and pages of 32 tokens.
"""

WIDTH, HEIGHT = 960, 500
STYLE = """
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  .card { fill: #fbfbf9; }
  .ink { fill: #22303c; }  .soft { fill: #5b6b7a; }
  .box { fill: #ffffff; stroke: #b9c4cd; stroke-width: 1.5; }
  .title { font-size: 17px; font-weight: 600; }
  .label { font-size: 14px; font-weight: 600; }
  .note { font-size: 12.5px; }
  .page { fill: #d5e0ea; }  .chosen { fill: #e07a3f; }  .fixed { fill: #3d7ea6; }
  .digest { fill: #8fb8a0; }  .empty { fill: #eceff2; }
  .wire { fill: none; stroke: #22303c; stroke-width: 2; }
  .hot { fill: none; stroke: #e07a3f; stroke-width: 3; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b20; }
    .ink { fill: #e3e8ec; }  .soft { fill: #9dacb9; }
    .box { fill: #1d242b; stroke: #43505c; }
    .page { fill: #34424f; }  .empty { fill: #2a333b; }
    .wire { stroke: #e3e8ec; }
  }
"""

out = []


def put(text):
    out.append(text)


def words(x, y, text, kind="note soft", anchor="start"):
    put('<text x="%g" y="%g" class="%s" text-anchor="%s">%s</text>' % (x, y, kind, anchor, text))


def box(x, y, w, h, kind="box", radius=8):
    put('<rect x="%g" y="%g" width="%g" height="%g" rx="%g" class="%s"/>'
        % (x, y, w, h, radius, kind))


def cells(x, y, columns, rows, kind_of, w=12, h=14, gap=3):
    for row in range(rows):
        for column in range(columns):
            box(x + column * (w + gap), y + row * (h + gap), w, h, kind_of(row, column), 2)


def arrow(points, kind):
    marker = "hot" if kind == "hot" else "wire"
    put('<path d="M%s" class="%s" marker-end="url(#%s)"/>' % (" L".join(points), kind, marker))


def host():
    box(24, 58, 380, 290)
    words(42, 84, "host memory", "title ink")
    words(42, 103, "pinned, on the NUMA node nearest the device, in huge pages")
    chosen = {(1, 4), (2, 15), (4, 9), (6, 2), (8, 19)}
    cells(42, 120, 23, 11, lambda r, c: "chosen" if (r, c) in chosen else "page")
    words(42, 330, "every page of every layer and KV head: 16 GiB at 128K tokens")


def device():
    box(556, 58, 380, 290)
    words(574, 84, "device memory", "title ink")
    words(574, 103, "a small part of it; the rest is the model's")
    rows = [
        (118, "digest", 23, "digests", "a box around the keys of every page, 1/32 of its size"),
        (174, "fixed", 8, "sink, window, static set", "always attended"),
        (230, "chosen", 5, "slots", "pages used lately; only a missing one is fetched"),
    ]
    for y, kind, count, name, note in rows:
        words(574, y + 14, name, "label ink")
        words(918, y + 14, note, anchor="end")
        cells(574, y + 22, 23, 1, lambda r, c, n=count, k=kind: k if c < n else "empty")
    box(574, 292, 344, 40, "box", 6)
    words(746, 317, "attend to the budget, merge, one output per head", "label ink", "middle")
    arrow(["746,270", "746,288"], "wire")


def between():
    words(480, 150, "missing pages", "label ink", "middle")
    words(480, 167, "gathered, one copy", "note soft", "middle")
    arrow(["408,182", "550,182"], "hot")
    words(480, 235, "sealed pages", "label ink", "middle")
    words(480, 252, "once each", "note soft", "middle")
    arrow(["552,266", "410,266"], "wire")


def step():
    words(24, 386, "one decode step of one layer", "title ink")
    stages = [("append", "key and value enter", "the window"),
              ("score", "query times digests", "no keys are read"),
              ("select", "the best pages", "within the budget"),
              ("resolve", "page to slot", "hit or miss"),
              ("fetch", "misses only;", "hits are there"),
              ("attend", "fixed groups, merged", "same bits every time")]
    width = 144
    for i, (name, first, second) in enumerate(stages):
        x = 24 + i * (width + 9.6)
        box(x, 400, width, 76)
        if name == "fetch":
            box(x, 400, width, 5, "chosen", 2)
        words(x + 12, 427, name, "label ink")
        words(x + 12, 447, first)
        words(x + 12, 464, second)


def main():
    put('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
        'role="img" aria-label="The whole cache lies in host memory; the device keeps digests, '
        'fixed tokens and slots; only missing pages cross the link.">' % ((WIDTH, HEIGHT) * 2))
    put("<style>%s</style>" % STYLE)
    put('<defs><marker id="wire" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L10,5 L0,10 z" class="ink"/></marker>'
        '<marker id="hot" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0,0 L10,5 L0,10 z" class="chosen"/></marker>'
        '</defs>')
    box(0, 0, WIDTH, HEIGHT, "card", 14)
    words(24, 36, "what moves where", "title ink")
    words(936, 36, "Llama-3.1-8B in bf16; a page is 32 tokens of one layer and KV head, 16 KiB",
          anchor="end")
    host()
    device()
    between()
    step()
    put("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    main()
