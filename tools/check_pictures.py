#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that text in SVG pictures runs neither over other text nor over the edge of a box.

usage: check_pictures.py [--font FAMILY] FILE...    prints `FILE: what` for every finding, exits 1
                                                    if any

A picture is shown in a font of its reader's, and widths of fonts differ. So it is laid out in the
widest of the common ones, whatever it asks for: what fits then, fits in the others. Every text has
to lie inside the picture, and inside or outside every rect. Extents are librsvg's, of the ink, with
transforms and styles. Lines and curves are not looked at.
"""
import argparse
import ctypes
import itertools
import sys
import xml.etree.ElementTree as ET

MARGIN = 4  # around a text, in units of the picture: a font may be wider still
SVG = "{http://www.w3.org/2000/svg}"


class Box(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("x", "y", "w", "h")]

    def grown(self, by):
        return Box(self.x - by, self.y - by, self.w + 2 * by, self.h + 2 * by)

    def meets(self, other):
        return (self.x < other.x + other.w and other.x < self.x + self.w and
                self.y < other.y + other.h and other.y < self.y + self.h)

    def holds(self, other):
        return (self.x <= other.x and other.x + other.w <= self.x + self.w and
                self.y <= other.y and other.y + other.h <= self.y + self.h)


def load_library():
    rsvg = ctypes.CDLL("librsvg-2.so.2")
    rsvg.rsvg_handle_new_from_data.restype = ctypes.c_void_p
    rsvg.rsvg_handle_new_from_data.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    rsvg.rsvg_handle_get_geometry_for_layer.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, *[ctypes.POINTER(Box)] * 3, ctypes.c_void_p]
    return rsvg


def measure(rsvg, path, font):
    """Measures of a picture: its box, the boxes of its rects, and (words, box) of its texts."""
    root = ET.parse(path).getroot()
    for defs in root.iter(SVG + "defs"):
        defs.clear()  # shapes of markers and patterns; they have no place of their own
    shapes = [e for e in root.iter() if e.tag in (SVG + "text", SVG + "rect")]
    for number, shape in enumerate(shapes):
        shape.set("id", "shape%d" % number)
        for part in shape.iter():
            part.set("style", "%s; font-family: '%s'" % (part.get("style", ""), font))
    canvas = Box(*map(float, root.get("viewBox").split()))
    data = ET.tostring(root)
    handle = rsvg.rsvg_handle_new_from_data(data, len(data), None)
    rects, texts = [], []
    for shape in shapes:
        ink, outline = Box(), Box()
        if not handle or not rsvg.rsvg_handle_get_geometry_for_layer(
                handle, b"#" + shape.get("id").encode(), canvas, ink, outline, None):
            sys.exit("%s: librsvg cannot lay it out" % path)
        if shape.tag == SVG + "rect":
            rects.append(outline)
        elif ink.w > 0:
            texts.append((" ".join("".join(shape.itertext()).split()), ink))
    return canvas, rects, texts


def check(canvas, rects, texts):
    for words, ink in texts:
        room = ink.grown(MARGIN)
        if not canvas.holds(room):
            yield '"%s" runs out of the picture' % words
        elif any(rect.meets(room) and not rect.holds(room) for rect in rects):
            yield '"%s" runs over the edge of a box' % words
    for (words, ink), (others, other) in itertools.combinations(texts, 2):
        if ink.grown(MARGIN).meets(other):
            yield '"%s" runs into "%s"' % (words, others)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--font", default="DejaVu Sans")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    rsvg = load_library()
    findings = 0
    for path in args.files:
        for what in check(*measure(rsvg, path, args.font)):
            print("%s: %s" % (path, what))
            findings += 1
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())
