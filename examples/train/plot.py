"""Draws losses of train.py and test_time_training.py as SVG: against steps, and against seconds.

python plot.py train.jsonl --out docs/assets/training      # …_steps.svg and …_seconds.svg
"""

import argparse
import json
import math
from html import escape

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 44, 44
# Hues that can be told apart on white and on black, also by most of those who see few; dashes tell them apart where
# curves lie on each other.
COLOURS = ["#7a7a7a", "#0a84c1", "#c77f00", "#d1495b", "#1a936f", "#8a5fbf"]
DASHES = ["", "9 5", "2 4", "14 10", "7 4 2 4", "4 3"]
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-weight: 600; font-size: 14px }
  .axis { stroke: #888; stroke-width: 1 }
  .grid { stroke: #8884; stroke-width: 1 }
  .curve { fill: none; stroke-width: 2; stroke-linejoin: round }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


def read(path):
    """Steps, seconds and losses of each contender of a log, in the order in which they were named."""
    curves = {}
    with open(path) as lines:
        for line in map(json.loads, lines):
            if "step" in line and "total" in line:
                curve = curves.setdefault(line["contender"], {"steps": [], "seconds": [], "loss": []})
                for key, value in (("steps", line["step"] + 1), ("seconds", line["total"]), ("loss", line["loss"])):
                    curve[key].append(value)
    if not curves:
        raise SystemExit(f"{path} has no losses")
    return curves


def smooth(values, window):
    """Means over the last `window` values: a loss of one batch says little."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(values))]


def ticks(low, high, most=6):
    """Round numbers from low to high."""
    rough = (high - low or 1) / most
    power = 10.0 ** math.floor(math.log10(rough))
    width = power * next(x for x in (1, 2, 5, 10) if x * power >= rough)
    return [round(i * width, 10) for i in range(math.ceil(low / width), math.floor(high / width) + 1)]


def number(value):
    return f"{value:g}"


def chart(curves, title, axis):
    """An SVG of curves: for each name, its points (x, y)."""
    xs, ys = ([p[at] for points in curves.values() for p in points] for at in (0, 1))
    x_most, (low, high) = max(xs), (min(ys), max(ys))
    room = (high - low or 1) * 0.04
    low, high = low - room, high + room
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    to_x = lambda x: LEFT + (right - LEFT) * x / x_most
    to_y = lambda y: bottom - (bottom - TOP) * (y - low) / (high - low)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    for y in ticks(low, high):
        at = f"{to_y(y):.1f}"
        out.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end">{number(y)}</text>')
    for x in ticks(0, x_most, 8):
        out.append(f'<text x="{to_x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    out.append(f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{escape(axis)}</text>')
    for at, (name, points) in enumerate(curves.items()):
        colour, dash = COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)]
        style = f'stroke="{colour}" stroke-dasharray="{dash}"'
        path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in points)
        out.append(f'<path class="curve" {style} d="M{path}"/>')
        y = TOP + 8 + 18 * at
        out.append(f'<path class="curve" {style} d="M{right - 150} {y}h28"/>')
        out.append(f'<text x="{right - 114}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("log")
    p.add_argument("--out", required=True, help="the beginning of the names of both files")
    p.add_argument("--title", default="Loss")
    p.add_argument("--window", type=int, default=None, help="steps of a mean; a thirtieth of all")
    a = p.parse_args()
    found = read(a.log)
    for key, axis in (("steps", "steps"), ("seconds", "seconds of the contender's own steps")):
        curves = {}
        for name, curve in found.items():
            window = a.window or max(len(curve["loss"]) // 30, 1)
            points = list(zip(curve[key], smooth(curve["loss"], window)))
            # Means over less than a window say little, and some hundred points are enough.
            points = points[min(window, len(points)) - 1 :]
            curves[name] = points[:: max(len(points) // 400, 1)] + points[-1:]
        with open(f"{a.out}_{key}.svg", "w") as file:
            file.write(chart(curves, f"{a.title} against {key}", axis))


if __name__ == "__main__":
    main()
