"""Draws loss curves: a run's, from its TensorBoard files, beside the entropies of simple byte models; or the variants'
of scripts/train_compare.py, from its JSON file, as averages of 20 steps and each one's distance from the first.

python scripts/plot_loss.py outputs/kda_debug docs/images/kda_debug.png
python scripts/plot_loss.py curves.json docs/images/kda_340m.png
"""

import argparse
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import matplotlib
from arguments import picture

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of a run; where a resumed run wrote a step again, the later value."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("tb/**/events.out.tfevents.*"), key=lambda p: p.stat().st_mtime):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


def byte_entropies(longest: int = 3) -> list[float]:
    """Nats a byte of the standard library's source, given the 0, 1, ... bytes before it."""
    from titan_kda.data import read_python_stdlib

    data = "".join(text for file in read_python_stdlib() for text in file.documents).encode()
    joint = [0.0]
    for n in range(1, longest + 1):
        counts = Counter(data[i : i + n] for i in range(len(data) - n + 1))
        total = sum(counts.values())
        joint.append(-sum(c / total * math.log(c / total) for c in counts.values()))
    return [after - before for before, after in itertools.pairwise(joint)]


def read_variants(path: Path) -> dict[str, dict]:
    """What train_compare.py wrote.

    Raises:
        ValueError: a file of something else.
    """
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # no JSON, or no text
        raise ValueError(f"{path}: {error}") from None
    losses = (
        [result.get("losses") if isinstance(result, dict) else None for result in results.values()]
        if isinstance(results, dict)
        else []
    )
    if not losses or not all(
        isinstance(own, list) and own and all(isinstance(loss, (int, float)) for loss in own) for own in losses
    ):
        raise ValueError(f"{path} is not what train_compare.py --json writes: losses of each variant by its name")
    return results


def draw_variants(results: dict[str, dict], image: Path, title: str, width: int = 20) -> None:
    figure, (above, below) = plt.subplots(2, figsize=(7, 5.5), layout="constrained", sharex=True, height_ratios=[3, 1])
    first = None
    for name, result in results.items():
        losses = result["losses"]
        own = min(width, len(losses))
        averages = [sum(losses[i - own : i]) / own for i in range(own, len(losses) + 1)]
        first = averages if first is None else first
        steps = range(own, len(losses) + 1)
        above.plot(steps, averages, label=name, linewidth=1)
        below.plot(steps[: len(first)], [one - other for one, other in zip(averages, first)], linewidth=1)
    above.set(ylabel=f"loss, nats, average of {width} steps", title=title)
    above.legend()
    below.set(xlabel="step", ylabel="from the first")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's dump_folder, or train_compare.py's JSON file")
    parser.add_argument("image", type=picture, help="the picture to write")
    parser.add_argument("--title", default="KDA on the Python standard library")
    args = parser.parse_args()
    if not args.run.exists():
        parser.error(f"no such file or folder: {args.run}")
    if args.run.is_file():
        try:
            results = read_variants(args.run)
        except ValueError as error:
            parser.error(str(error))
        draw_variants(results, args.image, args.title)
        return

    found = curves(args.run)
    if "loss_metrics/global_avg_loss" not in found:
        parser.error(f"no losses in {args.run}/tb: was [metrics] enable_tensorboard on?")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for tag, label, style in (
        ("loss_metrics/global_avg_loss", "training", "-"),
        ("validation_metrics/loss", "validation, held-out files", "o-"),
    ):
        points = sorted(found.get(tag, {}).items())
        axes.plot([step for step, _ in points], [value for _, value in points], style, label=label, markersize=4)
    for entropy, name in zip(byte_entropies(), ("single bytes", "pairs", "triples")):
        axes.axhline(entropy, color="0.6", linewidth=0.8, linestyle="--")
        axes.annotate(f"entropy by {name}: {entropy:.2f}", (1, entropy), xycoords=("axes fraction", "data"),
                      ha="right", va="bottom", fontsize=8, color="0.4")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(1, 4), title=args.title)
    axes.legend(loc="upper center")
    args.image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.image, dpi=130)
    print(args.image)


if __name__ == "__main__":
    main()
