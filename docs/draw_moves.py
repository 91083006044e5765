#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw moves.svg, the picture of what moves where: draw_moves.py > moves.svg

Only the standard library. The picture says nothing that was measured. Its sizes are those that the
library plans for Llama-3.1-8B at 131,072 tokens and default settings; the test `docs moves` compares
them with the plan.

It is as wide as a README column, so that it is shown at its own size. Which font shows the text is
not known: every text has room for DejaVu Sans, the widest of the common ones, and some to spare.
tools/check_pictures.py measures that.
"""

# The cache; and what of its settings and of its plan the picture tells.
CACHE = {"layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16",
         "tokens_max": 131072}
SETTINGS = {"page_size": 4, "sink_tokens": 4, "local_tokens": 64, "budget_tokens": 1024}
PLAN = {"host_kv_bytes": 16 << 30, "device_digest_bytes": 1088 << 20}
PAGES = CACHE["layers"] * CACHE["kv_heads"] * CACHE["tokens_max"] // SETTINGS["page_size"]

WIDTH, HEIGHT = 840, 540
STYLE = """
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .card { fill: #fbfbf9; }
  .ink { fill: #22303c; }  .soft { fill: #526170; }
  .box { fill: #ffffff; stroke: #b9c4cd; stroke-width: 1.5; }
  .box.marked { stroke: #e07a3f; stroke-width: 2.5; }
  .title { font-size: 17px; font-weight: 600; }
  .label { font-size: 14px; font-weight: 600; }
  .note { font-size: 13px; }
  .page { fill: #d5e0ea; }  .chosen { fill: #e07a3f; }  .fixed { fill: #3d7ea6; }
  .digest { fill: #8fb8a0; }  .empty { fill: #eceff2; }
  .wire { fill: none; stroke: #22303c; stroke-width: 2; }
  .hot { fill: none; stroke: #e07a3f; stroke-width: 3; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b20; }
    .ink { fill: #e3e8ec; }  .soft { fill: #a6b4c0; }
    .box { fill: #1d242b; stroke: #43505c; }
    .page { fill: #34424f; }  .empty { fill: #2a333b; }
    .wire { stroke: #e3e8ec; }
  }
"""
EDGE, PAD = 24, 18       # around the boxes, and inside them
CELL, ROW, GAP = 11, 14, 3
COLUMNS = 20
INNER = COLUMNS * (CELL + GAP) - GAP
SIDE = INNER + 2 * PAD   # width of the host's and of the device's box
LEFT, RIGHT = EDGE, WIDTH - EDGE - SIDE
TOP, TALL = 80, 292      # of both

out = []


def put(text):
    out.append(text)


def words(x, y, text, kind="note soft", anchor="start"):
    put('<text x="%g" y="%g" class="%s" text-anchor="%s">%s</text>' % (x, y, kind, anchor, text))


def box(x, y, w, h, kind="box", radius=8):
    put('<rect x="%g" y="%g" width="%g" height="%g" rx="%g" class="%s"/>'
        % (x, y, w, h, radius, kind))


def cells(x, y, rows, kind_of):
    for row in range(rows):
        for column in range(COLUMNS):
            box(x + column * (CELL + GAP), y + row * (ROW + GAP), CELL, ROW,
                kind_of(row, column), 2)


def arrow(x0, y0, x1, y1, kind="wire"):
    put('<path d="M%g,%g L%g,%g" class="%s" marker-end="url(#%s)"/>' % (x0, y0, x1, y1, kind, kind))


def side(x, title, note):
    box(x, TOP, SIDE, TALL)
    words(x + PAD, TOP + 29, title, "title ink")
    words(x + PAD, TOP + 49, note)


def host():
    side(LEFT, "Host memory", "every page of every layer and KV head")
    chosen = {(1, 4), (2, 14), (4, 9), (6, 2), (8, 17)}
    cells(LEFT + PAD, TOP + 66, 11, lambda r, c: "chosen" if (r, c) in chosen else "page")
    words(LEFT + PAD, TOP + TALL - 18,
          "%d GiB: pinned, NUMA-bound, huge pages" % (PLAN["host_kv_bytes"] >> 30))


def device():
    side(RIGHT, "Device memory", "a small part; the model has the rest")
    x, middle = RIGHT + PAD, RIGHT + SIDE / 2
    rows = [("digest", COLUMNS, "digests",
             "%d bytes for each page" % (PLAN["device_digest_bytes"] // PAGES)),
            ("fixed", 8, "fixed",
             "first %(sink_tokens)d, newest %(local_tokens)d tokens" % SETTINGS),
            ("chosen", 5, "slots", "pages used lately, as many as fit")]
    for i, (kind, count, name, note) in enumerate(rows):
        y = TOP + 80 + i * 47
        words(x, y, name, "label ink")
        words(x + INNER, y, note, anchor="end")
        cells(x, y + 9, 1, lambda r, c, n=count, k=kind: k if c < n else "empty")
    arrow(middle, TOP + 200, middle, TOP + 217)
    box(x, TOP + 220, INNER, 54, radius=6)
    words(middle, TOP + 242, "attend within the budget", "label ink", "middle")
    words(middle, TOP + 262, "%(budget_tokens)d tokens for each KV head" % SETTINGS,
          anchor="middle")


def link():
    """Each arrow lies at the row of the device that it belongs to: the window's, the slots'."""
    middle, left, right = WIDTH / 2, LEFT + SIDE + 5, RIGHT - 5
    words(middle, TOP + 116, "sealed pages", "label ink", "middle")
    words(middle, TOP + 135, "copied once", anchor="middle")
    arrow(right, TOP + 143, left, TOP + 143)
    words(middle, TOP + 180, "missing pages", "label ink", "middle")
    arrow(left, TOP + 190, right, TOP + 190, "hot")
    words(middle, TOP + 211, "no slot holds them", anchor="middle")


def step():
    y, gap = TOP + TALL + 52, 14
    words(EDGE, y - 16, "One decode step of one layer", "title ink")
    stages = [("append", "key and value", "enter the", "window"),
              ("score", "query times", "digests: 2 bits", "per channel"),
              ("select", "best pages", "within the", "budget"),
              ("resolve", "page to slot:", "hit or miss", ""),
              ("fetch", "only pages", "that missed", ""),
              ("attend", "fixed order:", "same bits", "every time")]
    width = (WIDTH - 2 * EDGE - gap * (len(stages) - 1)) / len(stages)
    for i, (name, *notes) in enumerate(stages):
        x = EDGE + i * (width + gap)
        box(x, y, width, 96, "box marked" if name == "fetch" else "box")
        if i:
            put('<path d="M%g,%g l6,6 l-6,6 z" class="ink"/>' % (x - gap / 2 - 3, y + 42))
        words(x + 10, y + 27, name, "label ink")
        for line, note in enumerate(notes):
            if note:
                words(x + 10, y + 48 + 18 * line, note)


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
    words(EDGE, 38, "What moves where", "title ink")
    words(EDGE, 61, "Llama-3.1-8B in bf16 with 128K tokens. "
          "A page is %d tokens of one layer and one KV head: %d KiB."
          % (SETTINGS["page_size"], PLAN["host_kv_bytes"] // PAGES >> 10))
    host()
    device()
    link()
    step()
    put("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    main()
