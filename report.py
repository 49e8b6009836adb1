"""The logs of train.py, written and read: steps to a target loss, their ratios, learning curves.

    python report.py runs/hmamba-stdlib-tiny-s1 runs/mamba-stdlib-tiny-s1 --out curves.png

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section
8.1 and tables 5-6. bpc, bits per character, is the loss in nats per byte divided by ln 2.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from data import InputError, Parser, command_line, explain, replace_file

TARGETS = (3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's


class Log:
    """log.jsonl of a run, one JSON object a line."""

    def __init__(self, folder, start, keep=None, active=True):
        """Args: start: the time at which time_s is 0; keep: on resuming, events after this step are dropped;
        active: False for all ranks but the first, which alone writes."""
        self.path, self.start, self.active = folder / "log.jsonl", start, active
        if keep is not None and active and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= keep and e["event"] not in ("final", "sample")]
            with explain(f"write {self.path}"):
                replace_file(self.path, lambda f: f.write("".join(json.dumps(e) + "\n" for e in kept).encode()))
        elif active and self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.path.write_text(self.path.read_text(errors="replace") + "\n")  # after a line that a kill cut short

    def write(self, event, step, tokens, **values):
        if self.active:
            time_s = round(time.time() - self.start, 3)
            line = json.dumps({"event": event, "step": step, "tokens": tokens, "time_s": time_s} | values)
            with explain(f"write {self.path}"), open(self.path, "a") as f:
                f.write(line + "\n")

    def sync(self):
        """What was written is on the disk when this returns."""
        with explain(f"write {self.path}"), open(self.path, "a") as f:
            os.fsync(f.fileno())


def provenance(device, world):
    """What ran: code revision ("-dirty" if changed, None outside a git checkout), versions, device, ranks."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        git = None
    return {
        "git": git, "world": world, "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}",
    }  # fmt: skip


def read_log(path):
    """Events of a run, in order. `path` is a log.jsonl or its run folder. Raises InputError if it holds no header.

    A line that a kill cut short, or that is no event, is left out, with a note on stderr."""
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    with explain(f"read the log {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    events = [e for e in map(_event, lines) if e]
    if not events or events[0]["event"] != "header" or not {"settings", "data", "params"} <= events[0].keys():
        raise InputError(f"{path} is not a log of train.py: its first line is no header")
    if len(events) < len(lines):
        print(f"note: {len(lines) - len(events)} unreadable lines of {path} are left out", file=sys.stderr)
    return events


def _event(line):
    """The event of a line, or None."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int)
    return event if whole and isinstance(event.get("val_loss", 0.0), (int, float)) else None


def val_curve(events):
    """(steps, bpc) of the evaluations on the fixed validation windows."""
    points = [(e["step"], e["val_loss"] / math.log(2)) for e in events if e["event"] == "val" and e["split"] == "val"]
    return [s for s, _ in points], [loss for _, loss in points]


def steps_to_target(steps, losses, target):
    """The step at which the loss first attains `target`: linear interpolation between the evaluations that bracket it
    (QS 8.1). None if it never does."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def targets_table(logs):
    """Markdown table of steps to each target (QS table 6), the ratio to the first model (QS table 5), and the last loss.

    `logs` is a list of event lists. The ratio is formed between runs of equal data, size and seed: this model's steps
    divided by the first model's, so that with `--model hmamba,mamba` 3.0 means that Mamba needs three times as many. The
    last column is over the whole split."""
    first, rows = {}, []
    for events in logs:
        settings = events[0]["settings"]
        key = (events[0]["data"]["name"], settings["size"], settings["seeds"])
        found = [steps_to_target(*val_curve(events), target) for target in TARGETS]
        reference = first.setdefault(key, found)
        final = next((f"{e['val_loss'] / math.log(2):.3f}" for e in events if e["event"] == "final"), "-")
        cells = ["-" if x is None else f"{x:.0f}" + (f" ({x / r:.2f}x)" if r else "") for x, r in zip(found, reference)]
        rows.append([settings["model"], *key, *cells, final])
    head = ["model", "data", "size", "seed", *(f"{t} bpc" for t in TARGETS), "at the end, bpc"]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def plot_curves(logs, out):
    """Validation bpc against the optimization step, one line a run (QS figure 4), written to the PNG `out`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 4), dpi=150)
    models = list(dict.fromkeys(events[0]["settings"]["model"] for events in logs))
    seen = set()
    for events in logs:
        settings = events[0]["settings"]
        model = settings["model"]
        steps, bpc = val_curve(events)
        label = None if model in seen else f"{model} ({events[0]['params']['total'] / 1e6:.2f}M)"
        seen.add(model)
        ax.plot(steps, bpc, color=f"C{models.index(model)}", label=label, lw=1.5)
    ax.set(xlabel="optimization step", ylabel="validation bits per character")
    ax.set_title(
        " / ".join(dict.fromkeys(f"{e[0]['data']['name']}, {e[0]['settings']['size']}" for e in logs)), fontsize=10
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    with explain(f"write {out}"):
        fig.savefig(out)
    plt.close(fig)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("--out", help="also draw the learning curves into this PNG")
    args = parser.parse_args()
    if args.out and Path(args.out).suffix != ".png":
        raise InputError(f"--out {args.out} must end in .png")
    logs = [read_log(run) for run in args.runs]
    print(targets_table(logs))
    if args.out:
        plot_curves(logs, args.out)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    command_line(main)
