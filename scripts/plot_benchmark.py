"""Draws the runs of scripts/benchmark.py from their JSON: each contender's time over the floor, one panel a suite.

python scripts/plot_benchmark.py chunk.json output.json docs/images/benchmark.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def merge(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run of several, of one kind of device."""
    devices = {run["machine"]["device"] for run in runs}
    if len(devices) != 1:
        raise ValueError(f"runs of one device, please, got {', '.join(sorted(devices))}")
    return {
        "machine": runs[0]["machine"],
        "results": [line for run in runs for line in run["results"]],
        "quantities": [line for run in runs for line in run.get("quantities", [])],
    }


def plot(run: dict[str, Any], image: Path) -> None:
    """Writes a picture of a run's times. Candidates of a tuning run, whose names begin with a space, are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    lines = [line for line in run["results"] if not line["contender"].startswith(" ")]
    suites = list(dict.fromkeys(line["suite"] for line in lines))
    if not suites:
        raise ValueError("no times to draw: was every row filtered out?")
    works = {name: list(dict.fromkeys(line["work"] for line in lines if line["suite"] == name)) for name in suites}
    names = list(dict.fromkeys(line["contender"] for line in lines))
    colours = {name: f"C{i}" if i < 10 else "0.6" for i, name in enumerate(names)}
    heights = [1 + len(works[name]) for name in suites]
    figure, axes = plt.subplots(
        len(suites), 1, figsize=(10, 1.5 + 0.28 * sum(heights)), height_ratios=heights, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, name in zip(axes[:, 0], suites):
        for line in (line for line in lines if line["suite"] == name):
            row = works[name].index(line["work"])
            ours = line["contender"].startswith("titan_kda")
            low, high = (line[key] / line["floor_us"] for key in ("low_us", "high_us"))
            axis.hlines(row, low, high, color=colours[line["contender"]], linewidth=1)
            axis.plot(
                line["us"] / line["floor_us"], row, "o" if ours else "x", color=colours[line["contender"]],
                label=line["contender"], markersize=5,
            )  # fmt: skip
        axis.axvline(1, color="0.5", linewidth=0.8, linestyle="--")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_yticks(range(len(works[name])), works[name], fontsize=7)
        axis.set_ylim(len(works[name]) - 0.5, -0.5)
        axis.grid(axis="x", which="both", linewidth=0.3)
        axis.set_title(name, loc="left", fontsize=9)
        handles = dict(zip(*reversed(axis.get_legend_handles_labels())))
        axis.legend(handles.values(), handles.keys(), fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    about = run["machine"]
    axes[-1, 0].set_xlabel("time over the floor (1: every byte once at copy bandwidth)")
    figure.suptitle(f"{about['device']}, torch {about['torch']}, Triton {about['triton']}, {about['date']}", fontsize=9)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="JSON", help="files that benchmark.py --json wrote")
    parser.add_argument("image", type=Path, help="the picture to write")
    options = parser.parse_args(arguments)
    for path in options.runs:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    try:
        plot(merge([json.loads(path.read_text()) for path in options.runs]), options.image)
    except ValueError as error:
        parser.error(str(error))
    print(options.image)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
