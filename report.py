"""The logs of train.py and tasks.py, written and read: every table and figure of the three papers that logs can give.

    python report.py runs/*-stdlib-*                   steps to a loss, ratios, gaps: on the terminal
    python report.py runs/*-stdlib-* --out figures     and, with the figures, into a folder
    python report.py RUN RUN --out mine.pdf            the curves alone, under any name: .png, .pdf or .svg
    python report.py RUN RUN --out gap.pdf             one figure alone that has this name in the folder
    python report.py runs/* --csv losses.csv           a row for each run and evaluation
    python report.py runs/tasks-40/* --out figures     length generalization
    python report.py runs/pam* --out figures           runs in epochs: also power laws and their crossing
    python report.py --forest results/english results/stdlib --out forest.png    all ratios of steps in one figure

A RUN is a run folder, a log, or a folder of these. What checkpoints can give is diagnose.py's.
Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691),
section 8; PAM, section III; CSP, section 3. Losses in the logs are in nats per token; divided by ln 2 they are bpc,
bits per character, if the tokens are bytes, and else bits a token. "+-" is half a 95 % confidence interval.
"""

import colorsys
import csv
import io
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
import zlib
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from data import InputError, Parser, command_line, explain, note, replace_file

os.environ.pop("MPLBACKEND", None)  # a notebook's, which matplotlib may not know here: no window is opened


class Log:
    """log.jsonl of a run, one JSON object a line."""

    def __init__(self, folder, start, keep=None, active=True):
        """Args: start: the time.monotonic() at which time_s is 0; keep: on resuming, events after this step are
        dropped; active: False for all ranks but the first, which alone writes."""
        self.path, self.start, self.active = folder / "log.jsonl", start, active
        if keep is not None and active and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= keep and e["event"] not in ("final", "sample")]
            write_log(self.path, kept)
        elif active and self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.path.write_text(self.path.read_text(errors="replace") + "\n")  # after a line that a kill cut short

    def write(self, event, step, tokens, **values):
        if self.active:
            time_s = round(time.monotonic() - self.start, 3)
            line = json.dumps({"event": event, "step": step, "tokens": tokens, "time_s": time_s} | values)
            with explain(f"write {self.path}"), open(self.path, "a") as f:
                f.write(line + "\n")

    def sync(self):
        """What was written is on the disk when this returns."""
        with explain(f"write {self.path}"), open(self.path, "a") as f:
            os.fsync(f.fileno())


def write_log(path, events):
    """A whole log.jsonl, in a folder that is made if need be."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    with explain(f"write {path}"):
        path.parent.mkdir(exist_ok=True)
        replace_file(path, lambda f: f.write(text.encode()))


def run_name(*parts):
    """Parts of a run's name, the first of them the model spec, as a name for its folder; of FILE.py:CLASS the class."""
    return re.sub(r"[:=/\\\0 ]", "_", "-".join(re.sub(r"^[^:]*\.py:", "", str(part)) for part in parts))


def provenance(device, world):
    """What ran: code revision ("-dirty" if changed, None outside a git checkout), versions, device, ranks."""
    import torch

    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # a hook's
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        git = subprocess.run(command, capture_output=True, check=True, timeout=2, env=env).stdout.decode().strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        git = None
    return {
        "git": git, "world": world, "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda"
                  else f"{device.type}, {platform.machine()}",
    }  # fmt: skip


def read_log(path):
    """Events of a run, in order. `path` is a log.jsonl or its run folder. Raises InputError if it holds no header.

    A line that a kill cut short, or whose loss is no finite number, is left out, with a note on stderr."""
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    with explain(f"read the log {path}"):
        lines = [parse_event(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    events, bad = [e for e in lines if e], [str(i) for i, e in enumerate(lines, 1) if not e]
    if not events or not {"settings", "data", "params"} <= events[0].keys():
        raise InputError(f"{path} is not a log of train.py or tasks.py: its first line is no header")
    if any(e["event"] == "header" for e in events[1:]):
        raise InputError(f"{path} holds the logs of several runs: put them into files of their own")
    if bad:
        note(f"note: of {path} these lines cannot be read and are left out: {', '.join(bad)}")
    return events


def parse_event(line):
    """The event of a line, or None."""
    try:
        event = json.loads(line)
        finite = all(math.isfinite(event.get(key, 0)) for key in ("step", "loss", "val_loss"))
    except (ValueError, TypeError, AttributeError):
        return None
    return event if finite and {"event", "step"} <= event.keys() else None


# ----------------------------------------------------------------------------------------------------------------------
# What the papers print

# QS of its 253M models on enwik8, OpenWebText and FineWeb, one seed each, by column of our tables and by model. Its
# tables are not in the text: of most cells it has a range, or one corpus, or "about".
PAPER = {
    "steps": {  # table 6
        2.5: {"hmamba": "75-79", "mamba": "237-252"},
        2.0: {"hmamba": "191 enwik8", "mamba": "575 enwik8", "htransformer": "219 owt", "transformer": "484 owt"},
    },
    "ratio of steps": {"mamba": "about 3", "transformer": "about 2"},  # table 5, to 2.5, 2.2 and 2.0 bpc
    "gap after warmup": {"mamba": "0.321 and 0.368", "transformer": "larger than at the end"},  # table 7: owt, fineweb
    "gap": {"mamba": "0.315 to 0.396", "transformer": "-0.132 to 0.034"},  # tables 7-8: at 1000 steps, all three
    "loss": {"transformer": "1.384 enwik8", "htransformer": "1.516 enwik8"},  # table 8
    "spread": {"hmamba": "about 2", "mamba": "more than 10"},  # 8.4
    "last over first": {"mamba": "10 to 100"},  # 8.4
}
PAPER_COST = ("The paper, to 2.0 bpc: H-Mamba 0.23 and Mamba 0.79 billion tokens of FineWeb (9.3); H-Transformer 0.8 "
              "and Transformer 0.9 hours on OpenWebText, four A100 (8.4).")  # fmt: skip
PAPER_WARMUP = 0.75  # of 1000 steps, table 4

# CSP tables 2-4: mean accuracy at these lengths, then the five seeds at 64. Table 1 prints other means at 16 and 32.
PAPER_LENGTHS = (16, 32, 48, 64)
PAPER_TASKS = {
    "parity": {
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 0.999, 0.998, 0.995), (1.000, 0.982, 0.995, 0.998, 1.000)),
        "csp-vanilla": ((1.000, 0.970, 0.884, 0.782), (0.731, 0.716, 1.000, 0.737, 0.724)),
        "csp-fast": ((1.000, 0.960, 0.891, 0.756), (0.895, 0.628, 0.775, 0.759, 0.721)),
        "signed-mamba": ((0.971, 0.824, 0.743, 0.661), (0.677, 0.666, 0.696, 0.595, 0.673)),
        "decoder": ((0.973, 0.729, 0.649, 0.606), (0.615, 0.602, 0.592, 0.616, 0.603)),
    },
    "mod3": {
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "csp-vanilla": ((1.000, 0.965, 0.927, 0.927), (0.978, 0.836, 0.997, 0.826, 0.996)),
        "csp-fast": ((1.000, 0.888, 0.799, 0.684), (0.697, 0.663, 0.623, 0.746, 0.691)),
        "signed-mamba": ((1.000, 0.642, 0.608, 0.564), (0.569, 0.570, 0.571, 0.563, 0.549)),
        "decoder": ((1.000, 0.541, 0.509, 0.484), (0.485, 0.484, 0.480, 0.481, 0.492)),
    },
    "dyck1": {
        "rnn": ((1.000, 1.000, 0.994, 0.988), (0.994, 0.987, 0.995, 0.976, 0.985)),
        "complex-rnn": ((1.000, 0.990, 0.981, 0.967), (0.983, 0.973, 0.980, 0.937, 0.961)),
        "csp-vanilla": ((1.000, 0.899, 0.864, 0.845), (0.748, 0.785, 0.850, 0.934, 0.907)),
        "csp-fast": ((0.997, 0.919, 0.890, 0.871), (0.917, 0.916, 0.840, 0.751, 0.931)),
        "signed-mamba": ((1.000, 0.931, 0.901, 0.907), (0.958, 0.960, 0.868, 0.892, 0.857)),
        "decoder": ((1.000, 0.929, 0.917, 0.926), (0.919, 0.987, 0.979, 0.973, 0.769)),
    },
}

# PAM: slopes in loss and perplexity, (N, y) where the fits cross; losses at the ends of its sweep, in nats; PAM's
# perplexity over SAM's.
PAPER_FITS = {
    "loss": {"pam": -0.15, "sam": -0.12, "crossing": (4.5e9, 2.05)},
    "perplexity": {"pam": -0.65, "sam": -0.49, "crossing": (5.5e8, 10.6)},
}
PAPER_LOSSES = {"5m": {"pam": 5.56, "sam": 4.78}, "100m": {"pam": 3.56, "sam": 3.26}}
PAPER_RATIOS = {"5m": 2.18, "100m": 1.36}

# ----------------------------------------------------------------------------------------------------------------------
# Statistics, tables, figures

# Two-sided 95 % quantiles of Student's t for 1 ... 30 degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def t95(freedom):
    """The 97.5 % quantile of Student's t, up to 4 % too large beyond 30 degrees of freedom."""
    return T95[min(freedom, len(T95)) - 1]


def mean_interval(values):
    """Mean and half-width of its 95 % confidence interval (Student's t); the half-width is None for a single value."""
    n, mean = len(values), statistics.fmean(values)
    return mean, t95(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None


def mean_ratio(both):
    """Geometric mean of x / y over pairs (x, y) above 0, and the ends of its 95 % interval, None for a single pair."""
    mean, half = mean_interval([math.log(x / y) for x, y in both])
    return math.exp(mean), None if half is None else (math.exp(mean - half), math.exp(mean + half))


def ratio_text(both, sign="="):
    """mean_ratio as a text. sign: of step_ratio."""
    if sign != "=":
        return f"{sign} {mean_ratio(both)[0]:.2f}" if sign else "-"
    mean, ends = mean_ratio(both)
    return f"{mean:.2f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def interval_text(values, sign=""):
    """Mean +- half of its 95 % interval."""
    mean, half = mean_interval(values)
    return f"{mean:{sign}.3f}" + ("" if half is None else f" +- {half:.3f}")


def range_text(values, digits):
    """The mean of those that are not None, in brackets the lowest and the highest; empty if there are none."""
    found = [x for x in values if x is not None]
    text = f"{statistics.fmean(found):.{digits}f}" if found else ""
    text += f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
    return text + f", {len(found)} of {len(values)} seeds" * (0 < len(found) < len(values))


def markdown(head, rows, title="", note=""):
    """A table under its title and a note, or "" without rows."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n".join(filter(None, (title, note, "\n".join(lines)))) if rows else ""


def nest(rows):
    """{a: {b: {seed: run}}} of rows (a, b, seed, run), with any number of names before the seed."""
    found = {}
    for *names, seed, run in rows:
        runs = found
        for name in names:
            runs = runs.setdefault(name, {})
        if runs.setdefault(seed, run) is not run:
            raise InputError(f"two runs of {' on '.join(reversed(names))} with seed {seed}: name one of them")
    return found


# Of each model, in every figure. Complex models are drawn through, real ones dashed.
COLOURS = {
    "hmamba": "#0072B2", "mamba": "#D55E00", "htransformer": "#009E73", "transformer": "#CC79A7", "pam": "#7B3FA0",
    "sam": "#E69F00", "csp-vanilla": "#7CB342", "csp-fast": "#332288", "rnn": "#222222", "complex-rnn": "#882255",
    "signed-mamba": "#9C7A00", "decoder": "#999999",
}  # fmt: skip
COMPLEX = {"mamba": "hmamba", "transformer": "htransformer", "sam": "pam"}  # real model -> its complex realization
FAMILIES = {"hmamba": "state space", "htransformer": "attention", "pam": "associative memory"}
REAL = {*COMPLEX, "rnn", "signed-mamba", "decoder"}
LIGHT = (0.35, 0.45, 0.55, 0.7)  # lightness of models with options
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9,
         "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 150}  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")


def style(label):
    """Colour and dashes of a model's lines in every figure, by its name and options alone."""
    name, *options = re.split("[: ]", label.partition(", ")[0])
    code = zlib.crc32(":".join(sorted(options)).encode(), 38)  # 38: the variants in results/ look apart
    real = name in REAL or "field=real" in options
    if name not in COLOURS:
        code = zlib.crc32(name.encode(), code)
        return {"color": colorsys.hls_to_rgb(code % 997 / 997, 0.4, 0.7), "ls": ("-.", ":")[code // 997 % 2]}
    if not options:
        return {"color": COLOURS[name], "ls": "--" if real else "-"}
    hue, light, full = colorsys.rgb_to_hls(*(int(COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5)))
    turn, light = (code % 7 - 3) / 12, LIGHT[code // 7 % 4]
    dashes = ((3, 1, 1, 1), (1, 1)) if real else ((7, 1), (12, 1, 2, 1))
    return {"color": colorsys.hls_to_rgb((hue + turn) % 1, light, 0.6 * full), "ls": (0, dashes[code // 28 % 2])}


@contextmanager
def figure(path, title, panels, columns=1, height=2.4, xlabel="", ylabel="", sharex=True, sharey=True):
    """Yields a list of axes, one for each of `panels`, that become the file `path` when the block ends, over one legend
    of all that has a label. The format is that of the name's ending, the style matplotlib's own.

    Args: panels: titles, or {title: {label: (look, curves)}} for lines: of several curves [(x, y)], one a seed, each is
        thin and their mean thick; height: of a row; xlabel: of the lowest axes; ylabel: of each row, or a tuple."""
    import matplotlib.figure
    import matplotlib.style
    from PIL import Image

    path = Path(path)
    with matplotlib.style.context(["default", STYLE]):
        fig, rows = matplotlib.figure.Figure(layout="constrained"), -(-len(panels) // columns)
        axes = [*fig.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat]
        for i, (ax, name) in enumerate(zip(axes, panels)):
            ax.set_title(name)
            ax.set_ylabel("" if i % columns else ylabel if isinstance(ylabel, str) else ylabel[i // columns])
            if i + columns >= len(panels):  # the lowest of its column
                ax.set_xlabel(xlabel)
                ax.tick_params(labelbottom=True)
            for label, (look, curves) in panels[name].items() if isinstance(panels, dict) else ():
                for x, y in curves if len(curves) > 1 else ():
                    ax.plot(x, y, **look | {"lw": 0.6, "alpha": 0.4, "marker": ""})
                ax.plot(*mean_curve(curves), **{"lw": 1.6} | look, label=label)
            if xlabel in ("optimization step", "epoch"):
                ax.xaxis.get_major_locator().set_params(integer=True)
        for ax in axes[len(panels) :]:
            ax.axis("off")
        yield axes[: len(panels)]
        labelled = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels())}
        across = max(1, min(len(labelled), int(128 / (11 + max(map(len, labelled), default=0)))))
        title, lines = textwrap.fill(title, 108), -(-len(labelled) // across)
        fig.set_size_inches(7.5, height * rows + 0.2 * lines + 0.15 * title.count("\n") + 0.3)
        fig.suptitle(title, fontsize=9, parse_math=False)
        if labelled:
            fig.legend(labelled.values(), labelled, loc="outside lower center", ncols=across)
        with explain(f"write {path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # such a character is a box
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.savefig(drawn := io.BytesIO(), format=path.suffix[1:])
            if path.suffix.lower() == ".png":  # a third of the bytes
                image = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
                image.save(drawn := io.BytesIO(), "png", optimize=True)
            replace_file(path, lambda f: f.write(drawn.getvalue()))


def mean_curve(curves):
    """The mean of curves [(x, y)] at the points that all have."""
    values = [dict(zip(x, y)) for x, y in curves if x] or [{}]
    common = sorted(set(values[0]).intersection(*values[1:]))
    return common, [statistics.fmean(v[x] for v in values) for x in common]


def shades(n):
    """Colours of what has an order: the viridis map, without its light end."""
    import matplotlib

    return matplotlib.colormaps["viridis"](np.linspace(0, 0.8, n))


def log_axis(ax, which, ticks=None, form="{x:g}"):
    """Makes the axis "x" or "y" logarithmic, with these ticks or 1, 2 and 5 times the powers of ten."""
    import matplotlib.ticker as ticker

    ax.set(**{f"{which}scale": "log"})
    axis = getattr(ax, f"{which}axis")
    axis.set(major_locator=ticker.FixedLocator(ticks) if ticks else ticker.LogLocator(subs=(1, 2, 5)),
             minor_locator=ticker.NullLocator(), major_formatter=form)  # fmt: skip


def write_report(text, figures, out):
    """Writes `text`, if there is any, as tables.md into the folder `out`, then draws `figures`, {file name: function of
    its path}. A figure that cannot be drawn is a line on stderr. Returns the paths that were written."""
    paths = [out / "tables.md"] * bool(text)
    for path in paths:
        with explain(f"write {out}"):
            out.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda f: f.write((text + "\n").encode(errors="replace")))
    for name, draw in figures.items():
        try:
            draw(out / name)
            paths.append(out / name)
        except Exception as e:  # whatever a library raises: other figures may be drawn
            note(f"error: {name} not drawn: {e if isinstance(e, InputError) else repr(e)}")
    return paths


def parse_out(text):
    """The folder that --out names. Raises InputError for what can be none."""
    out = Path(os.path.expanduser(text))
    if not text or out.suffix.lower() in (*FORMATS, ".md", ".jpg"):
        raise InputError(f"--out {text or repr(text)} must be a folder: tables and figures go into it")
    return out


def show_report(text, figures, out=None, written=None):
    """Writes tables and figures into the folder `out`, if one is given, and then prints `text`. written: what tables.md
    holds, if not `text`. Exits with the code 2 if a figure cannot be drawn."""
    written, paths = text if written is None else written, []
    try:
        if out:
            paths = write_report(written, figures, out)
    finally:  # shown also where they cannot be written
        print(text, *(f"wrote {path}" for path in paths), sep="\n", flush=True)
    if out and len(paths) < len(figures) + bool(written):
        sys.exit(2)


# ----------------------------------------------------------------------------------------------------------------------
# Training runs (QS section 8: tables 3-8, figures 3-7)

TARGETS = (4.0, 3.5, 3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's
MOST_CURVES = 10  # of any runs in one panel
SHAPE = {"D", "L", "H", "N", "d", "heads", "mlp", "width"}  # options of a model that are its size
# What runs of one comparison may differ in: what tables name, and what does not change the course of a run.
NOT_SHARED = {"model", "seeds", "lr", "min_lr", "data", "out", "resume", "stop_at", "micro", "device", "compile",
              "checkpointing", "log_every", "ckpt_every", "sample_every", "eval_only", "split", "params"}  # fmt: skip


def curve(events, kind="val"):
    """(steps, bpc) of the evaluations on the fixed validation windows, or for kind "train" of the training batches."""
    found = [e for e in events if e["event"] == kind and e.get("split", "val") == "val"]
    return [e["step"] for e in found], [e["val_loss" if kind == "val" else "loss"] / math.log(2) for e in found]


def unit(tokens):
    """Of a loss divided by ln 2, by the setting `tokens` of its run."""
    return "bits a token" if tokens == "gpt2" else "bpc"


def steps_to_target(events, target):
    """The step at which the loss first attains `target`, interpolated between evaluations (QS 8.1), or None."""
    steps, losses = curve(events)
    reached = [i for i, loss in enumerate(losses) if loss <= target]
    if not reached or reached[0] == 0:
        return 0.0 if reached else None
    around = slice(reached[0] - 1, reached[0] + 1)
    return float(np.interp(target, losses[around][::-1], steps[around][::-1]))


def speed(events):
    """Median tokens a second, or nan. Intervals in which the clock was set back do not count."""
    return statistics.median([e["tok_s"] for e in events if e.get("tok_s", 0) > 0] or [math.nan])


def loss_at(events, step):
    """The validation loss at `step`, interpolated between evaluations, bpc, or None."""
    steps, losses = curve(events)
    return float(np.interp(step, steps, losses)) if steps and steps[0] <= step <= steps[-1] else None


def final_loss(events):
    """bpc over the whole validation split, or None for a run that is not finished."""
    budget = events[0]["settings"]["steps"]  # --stop_at ends a run before it, with a "final" too
    return next((e["val_loss"] / math.log(2) for e in events if e["event"] == "final" and e["step"] >= budget), None)


def layer_spread(events):
    """Largest over smallest and last over first of the layers' gradient norms, medians (QS 8.4), or [None, None]."""
    norms = [e["layers"] for e in events if e["event"] == "grad" and min(e["layers"], default=0) > 0]
    ratios = [(max(x) / min(x), x[-1] / x[0]) for x in norms]
    return [statistics.median(values) for values in zip(*ratios)] or [None, None]


def spec_label(spec):
    """The name of a model or task in tables and figures: its spec, or what follows a user's file in it."""
    file, *rest = spec.split(":")
    return " ".join(rest) or Path(file).stem if file.endswith(".py") else spec


def split_label(label):
    """(model, other options, options of shape) of a label such as "hmamba:N=4, rate 0.002"."""
    model, *options = re.split("[: ]", label.partition(", ")[0])
    shape = {option for option in options if option.split("=")[0] in SHAPE}
    return model, sorted({*options} - shape), sorted(shape)


def family(label):
    """The complex model that a label's model is, or is the twin of. A user's class belongs to the model that its name
    begins with, as HMambaMinus."""
    model = split_label(label)[0]
    parent = re.match("HTransformer|Transformer|HMamba|Mamba|PAM|SAM", model)
    name = parent[0].lower() if parent else model
    return COMPLEX.get(name, name)


def reference(label, labels):
    """What a row is compared with, or None: its complex realization with the same options, or else without; for a
    variant of a complex model that model; or else the first of its family, or of `labels`."""
    if label in FAMILIES:
        return None
    spec, known = label.partition(", ")[0], family(label) in FAMILIES
    relatives = [x for x in labels if (family(x) == family(label) if known else x.partition(", ")[0] == spec)]
    twin = label.replace(split_label(label)[0], family(label), 1)
    others = twin, family(label), *relatives[:1], next(iter(labels))
    return next((other for other in others if other in labels and other != label), None)


def panels(models):
    """{title: {label: runs}}: a panel for each family if each is a paper's and has several models, else one for all."""
    found = {}
    for label, runs in models.items():
        found.setdefault(FAMILIES.get(family(label)), {})[label] = runs
    paired = None not in found and all(len({split_label(x)[0] for x in members}) > 1 for members in found.values())
    return found if paired else {"": models}


def run_labels(logs):
    """The labels of runs: the model, its learning rate if that model has several, and the end of the cosine if one of
    its rates has several."""
    rates, settings = {}, [events[0]["settings"] for events in logs]
    for s in settings:
        rates.setdefault(s["model"], {}).setdefault(s["lr"], set()).add(s["schedule"] != "constant" and s["min_lr"])
    ends = {model for model, of in rates.items() if max(map(len, of.values())) > 1}
    return [spec_label(s["model"]) + f", rate {s['lr']:g}" * (s["model"] in ends or len(rates[s["model"]]) > 1)
            + f" to {s['min_lr']:g}" * (s["model"] in ends) for s in settings]  # fmt: skip


def group_runs(logs):
    """[(shared settings, {label: {seed: events}})], a group for each set of settings that decide the course of a run;
    its labels are models (with their rates, where one has several), complex ones before their twins. Raises InputError
    for two runs of one label and seed, or of different configurations."""
    groups, place, found = {}, {name: i for i, name in enumerate(FAMILIES)}, []
    for events in logs:
        settings = {"tokens": "bytes"} | {k: v for k, v in events[0]["settings"].items() if v is not None}
        data = {key: events[0]["data"][key] for key in ("name", "size", "sha256")}  # not what a folder left out
        shared = {k: v for k, v in settings.items() if k not in NOT_SHARED} | {"data": data}
        groups.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(events)
    for shared, members in groups.values():
        models = nest((label, e[0]["settings"]["seeds"], e) for label, e in zip(run_labels(members), members))
        for label, runs in models.items():
            kinds = [(h.get("config"), h["settings"]["model"]) for h, *_ in runs.values()]
            if any(kind != kinds[0] for kind in kinds):
                raise InputError(f"the runs of {label} have different configurations: name those of one")
        order = sorted(models, key=lambda label: (place.get(family(label), 9), split_label(label)[0] in COMPLEX))
        found.append((shared, {label: models[label] for label in order}))
    return found


def pairs(models, value):
    """[(label, its reference, [(value, reference's value)] over the seeds of both)]. value: function of a run's events;
    left out are seeds for which it is None on either side, or 0: steps to what a run began with have no ratio."""
    found = []
    for label, runs in models.items():
        other = reference(label, models)
        theirs = models.get(other, {})
        both = [(value(events), value(theirs[seed])) for seed, events in runs.items() if seed in theirs]
        both = [pair for pair in both if all(pair)]
        found += [(label, other, both)] * bool(both)
    return found


def warmup_end(shared):
    """(step, what it is): the end of the warmup, or of the paper's share of the budget if the rate is constant."""
    steps, warmup = shared["steps"], shared.get("warmup", PAPER_WARMUP)
    if shared["schedule"] == "constant":
        return PAPER_WARMUP * steps, f"{PAPER_WARMUP:.0%} of the budget"
    return warmup * steps if warmup < 1 else warmup, "end of warmup"


def targets(models):
    """Losses, falling: those of TARGETS that a run reaches, and of each panel the lowest tenth that all runs reach."""
    found = set()
    for members in panels(models).values():
        curves = [curve(events)[1] for runs in members.values() for events in runs.values()]
        lowest = [min(losses) for losses in curves if losses[1:]]
        found.update(target for target in TARGETS if lowest and target >= min(lowest))
        found.update([math.ceil(10 * max(lowest)) / 10] if lowest else [])
    return sorted(found, reverse=True)


def step_ratio(runs, others, target):
    """([(steps of one model to a loss, steps of another)] over the seeds of both, sign of their ratio). A run that does
    not reach the loss counts with its last step. sign: "=" if all reach it; ">" if only the first model misses it, as
    the ratio is then at least that; "<" if only the second does; "" if nothing follows."""
    seeds, steps, missed = [seed for seed in runs if seed in others], [], []
    for of in (runs, others):
        found = [steps_to_target(of[seed], target) for seed in seeds]
        missed.append(None in found)
        ends = [(curve(of[seed])[0] or [0])[-1] for seed in seeds]
        steps.append([end if x is None else x for end, x in zip(ends, found)])
    both, sign = [*zip(*steps)], {(False, False): "=", (True, False): ">", (False, True): "<"}.get(tuple(missed), "")
    return both, sign * all(map(all, both))


def of_runs(value, digits, paper=None):
    """A column of by_model: the range over the seeds of value(events); in italics the paper's, {label: text}."""
    printed = {label: f" *{text}*" for label, text in (paper or {}).items()}
    return lambda label, runs: (range_text([*map(value, runs)], digits) or "-") + printed.get(label, "")


def of_first(form):
    """A column of by_model: a text from the header of a model's first run."""
    return lambda label, runs: form.format(**runs[0][0])


def by_model(models, columns):
    """Rows of a table: a model, and in each column column(model, its runs)."""
    return [[label, *(column(label, [*runs.values()]) for column in columns)] for label, runs in models.items()]


def by_seed(models, columns):
    return [[label, seed, *(column("", [events]) for column in columns)]
            for label, runs in models.items() for seed, events in runs.items()]  # fmt: skip


def by_pair(models, sign, text, columns):
    """Rows of a table: a pair, and for each column, (function of a run, the paper's {label: number}), text(both)."""
    found = {}
    for i, (value, paper) in enumerate(columns):
        for label, other, both in pairs(models, value):
            cell = text(both) + f", {len(both)} of {len(models[label])} seeds" * (len(both) < len(models[label]))
            cell += f" *{paper[label]}*" if label in paper and COMPLEX[label] == other else ""
            found.setdefault(f"{label} {sign} {other}", ["-"] * len(columns))[i] = cell
    return [[pair, *cells] for pair, cells in found.items()]


def training_tables(shared, models):
    """Markdown of a group: protocol and models (QS tables 3-4), steps to a loss and their ratios (6, 5), gaps (7),
    losses at the budget (8), cost (9.3), spread of the layers' gradients (8.4), PAM's late metric, every run."""
    loss, budget, (warm, what), goals = unit(shared["tokens"]), shared["steps"], warmup_end(shared), targets(models)
    constant, logs = shared["schedule"] == "constant", [e for runs in models.values() for e in runs.values()]
    paper = PAPER if loss == "bpc" else dict.fromkeys(PAPER, {})
    heads, steps = [f"{goal} {loss}" for goal in goals], [partial(steps_to_target, target=goal) for goal in goals]
    evaluated = sorted({budget, *(step for events in logs for step in curve(events)[0] if step)})
    at_budget = partial(loss_at, step=budget)

    def mean_loss(events):
        """Mean of the losses at all evaluated steps but 0, or None if the run did not reach the budget."""
        losses = [loss_at(events, step) for step in evaluated]
        return None if None in losses else statistics.fmean(losses)

    common = min((goal for goal in goals if all(steps_to_target(events, goal) for events in logs)), default=None)

    def tokens(events):
        return steps_to_target(events, common) * shared["batch"] * shared["seq"]

    costs = [of_runs(lambda events: tokens(events) / 1e6, 2), of_runs(speed, 0),
             of_runs(lambda events: tokens(events) / speed(events) / 60, 1)]  # fmt: skip
    of_steps = [of_runs(of, 0, paper["steps"].get(goal)) for of, goal in zip(steps, goals)]
    ratios = []
    for label, other, _ in pairs(models, curve):
        cells = [ratio_text(*step_ratio(models[label], models[other], goal)) for goal in goals]
        printed = paper["ratio of steps"].get(label) if other == COMPLEX.get(label) else None
        cells = [cell + f" *{printed}*" * bool(printed and goal in (2.5, 2.2, 2.0)) for cell, goal in zip(cells, goals)]
        ratios.append([f"{label} / {other}", *cells])
    gaps = [(partial(loss_at, step=warm), {} if constant else paper["gap after warmup"]), (at_budget, paper["gap"]),
            (final_loss, {}), (mean_loss, {})]  # fmt: skip
    ends = [of_runs(at_budget, 3), of_runs(final_loss, 3, paper["loss"])]
    layered = {label: runs for label, runs in models.items() if any(layer_spread(e)[0] for e in runs.values())}
    spread = [of_runs(lambda events: layer_spread(events)[0], 2, paper["spread"]),
              of_runs(lambda events: layer_spread(events)[1], 2, paper["last over first"])]  # fmt: skip
    rate = "{settings[lr]:g}" + " to {settings[min_lr]:g}" * (not constant)
    schedule = "constant rate" if constant else f"{warm:.0f} steps of warmup, then cosine"
    headers, d = [events[0] for events in logs], shared["data"]
    ran = [", ".join(sorted({str(h.get(key)) for h in headers})) for key in ("device", "threads", "git")]
    torch = ", ".join(sorted({h.get("versions", {}).get("torch", "?") for h in headers}))
    o = headers[0].get("optimizer")
    adamw = f", AdamW {tuple(o['betas'])}, decay {o['decay']}, gradients clipped at {o['clip']:g}" if o else ""
    return "\n\n".join(filter(None, [
        f"Data: {d['name']}, {d['size']:,} tokens, SHA-256 {d['sha256'][:12]}. {budget:,} steps of {shared['batch']} x "
        f"{shared['seq']} tokens, {schedule}{adamw}, {shared['dtype']}. Validation every {shared['eval_every']} steps "
        f"on {shared['eval_seqs']} fixed windows, at the end on the whole split. {ran[0]}; threads: {ran[1]}; PyTorch "
        f"{torch}; code {ran[2]}. In brackets: lowest and highest seed; +- and square brackets: 95 % interval, paired "
        "by seed; *italics*: the paper's, 253M parameters, one seed on each of three corpora.",
        markdown(["model", "parameters", "learning rate", "seeds"],
                 by_model(models, [of_first("{params[total]:,}"), of_first(rate), lambda label, runs: len(runs)])),
        markdown(["model", *heads], by_model(models, of_steps), "#### Steps to a validation loss") if goals else "",
        markdown(["pair", *heads], ratios if goals else [], "#### Ratio of steps",
                 "Above 1: the second is faster. Geometric means. > and <: runs do not reach the loss, their last step "
                 "stands for them, and the ratio is a bound."),
        markdown(["pair", f"at step {warm:.0f}, {what}", f"at step {budget}, the budget", "there, whole split",
                  "mean of all evaluations but the first"],
                 by_pair(models, "-", lambda both: interval_text([x - y for x, y in both], "+"), gaps),
                 f"#### Gap in validation loss, {loss}", "Above 0: the second leads."),
        markdown(["model", "fixed windows", "whole split"], by_model(models, ends),
                 f"#### Validation loss at the budget, {loss}"),
        markdown(["model", "tokens, millions", "tokens a second", "minutes"], by_model(models, costs),
                 f"#### Cost of {common} {loss}", "At the median speed of each run, without validation."
                 + f" {PAPER_COST}" * (loss == "bpc")) if common else "",
        markdown(["model", "largest over smallest", "last over first"], by_model(layered, spread),
                 "#### Gradient norms of the layers", "Medians over the evaluations."),
        markdown(["model", "seed", *heads, "at the budget", "whole split"],
                 by_seed(models, [*(of_runs(of, 0) for of in steps), *ends]), "#### Every run"),
        epochs_table(logs),
    ]))  # fmt: skip


def caption(shared, models):
    """What a figure shows, in a line for its title: data, budget, schedule, number of seeds."""
    rate = "constant rate" if shared["schedule"] == "constant" else f"warmup of {warmup_end(shared)[0]:.0f}"
    seeds = "-".join(map(str, sorted({len(runs) for runs in models.values()})))
    return f"{shared['data']['name']}, {shared['size']}, {shared['steps']} steps, {rate}; seeds a model: {seeds}"


def lines_of(models, points, **look):
    """{label: (look, curves)} for `figure`. points: function of a run's events that gives (x, y)."""
    return {label: (style(label) | look, [*map(points, runs.values())]) for label, runs in models.items()}


def late_range(lines):
    """Limits of an axis of losses: without the first fall from 8 bits a byte, which would take most of the height."""
    late = [y for _, curves in lines for _, losses in curves for y in losses[len(losses) // 5 :]]
    return min(late) - 0.1, max(late) + 0.1


def plot_curves(shared, models, path):
    """Loss by optimization step: validation (QS figure 4) and training (figure 7), a row a family."""
    lines = {}
    for name, members in panels(models).items():
        for kind, what in (("val", "validation"), ("train", "training batches")):
            lines[f"{name}, {what}".removeprefix(", ")] = lines_of(members, partial(curve, kind=kind))
    with figure(path, f"{caption(shared, models)}; the first fall is cut off", lines, 2,
                xlabel="optimization step", ylabel=f"loss, {unit(shared['tokens'])}") as axes:  # fmt: skip
        axes[0].set_ylim(late_range([line for of_panel in lines.values() for line in of_panel.values()]))


def plot_overlay(kinds, path):
    """Validation loss of runs of any kinds (what differs, shared settings, models): colour and dash are the model's,
    markers those of the kind and the rate; a panel for each unit of loss."""
    lines, marks = {}, {}
    for what, shared, models in kinds:
        for label, (look, curves) in lines_of(models, curve, ms=4, markevery=0.1).items():
            label = ", ".join(filter(None, [label, what]))
            mark = MARKERS[marks.setdefault(label.partition(", ")[2], len(marks)) % len(MARKERS)]
            lines.setdefault(f"loss, {unit(shared['tokens'])}", {})[label] = look | {"marker": mark}, curves
    title = "Validation loss; the first fall is cut off"
    with figure(path, title, lines, height=3.4, xlabel="optimization step", sharey=False) as axes:
        for ax, of_panel in zip(axes, lines.values()):
            ax.set_ylim(late_range(of_panel.values()))


def plot_steps(shared, models, path):
    """QS figure 3: steps to each loss, and their mean where all seeds reach it."""
    goals = targets(models)

    def reached(events):
        steps = {i: steps_to_target(events, goal) for i, goal in enumerate(goals)}
        return [i for i in steps if steps[i] is not None], [x for x in steps.values() if x is not None]

    lines = {name: lines_of(members, reached, marker="o", ms=4) for name, members in panels(models).items()}
    with figure(path, caption(shared, models), lines, xlabel=f"validation loss, {unit(shared['tokens'])}",
                ylabel="steps to the loss") as axes:  # fmt: skip
        axes[0].set_xticks(range(len(goals)), goals)


def plot_gap(shared, models, path):
    """QS figure 5: validation loss minus its reference's by step, the warmup shaded. Thin: seeds. Horizontal bands: the
    paper's gaps at its budget, of its own pairs. A model and itself in another shape is left out beside others."""
    lines, warmup = {}, shared["schedule"] != "constant"
    compared = {label: (other, both) for label, other, both in pairs(models, lambda events: dict(zip(*curve(events))))}
    others = [label for label, (other, _) in compared.items() if split_label(label)[:2] != split_label(other)[:2]]
    for name, members in panels(models).items():
        for label in (x for x in members if x in (others or compared)):
            other, both = compared[label]
            gaps = [{step: ours[step] - theirs[step] for step in ours if step in theirs} for ours, theirs in both]
            lines.setdefault(name, {})[f"{label} - {other}"] = style(label), [([*gap], [*gap.values()]) for gap in gaps]
    title = f"{caption(shared, models)}; above 0: the second leads" + "; grey: warmup" * warmup
    with figure(path, title, lines, xlabel="optimization step", ylabel=f"gap, {unit(shared['tokens'])}") as axes:
        for ax, of_panel in zip(axes, lines.values()):
            for label, band in PAPER["gap"].items() if unit(shared["tokens"]) == "bpc" else ():
                if (pair := f"{label} - {COMPLEX[label]}") in of_panel:
                    look = {"color": style(label)["color"], "label": f"the paper's {pair}, at 1000 steps"}
                    ax.axhspan(*map(float, band.split(" to ")), alpha=0.2, lw=0, **look)
            ax.axhline(0, color="black", lw=0.8)
            if warmup:
                ax.axvspan(0, warmup_end(shared)[0], color="0.92", zorder=0)


def plot_gradients(shared, models, path):
    """QS figure 6: gradient norm of each layer by step, mean over seeds, a panel a model."""
    lines = {}
    for label, runs in models.items():
        logged = [[e for e in events if e["event"] == "grad" and e["layers"]] for events in runs.values()]
        depth = min((len(e["layers"]) for events in logged for e in events), default=0)
        for layer, colour in enumerate(shades(depth)):
            curves = [([e["step"] for e in events], [e["layers"][layer] for e in events]) for events in logged]
            look = {"color": colour, "lw": 1.2}
            lines.setdefault(label.replace(":", "\n", 1), {})[f"layer {layer}"] = look, [mean_curve(curves)]
    columns = min(3, len(lines))
    with figure(path, caption(shared, models), lines, columns, 2.4, "optimization step", "gradient norm") as axes:
        log_axis(axes[0], "y")


def plot_rates(shared, models, path):
    """Validation loss at the budget by peak learning rate, a row a family with a scale of its own."""
    found, rates = {}, set()  # {model: {seed: {rate: loss}}}
    for label, runs in models.items():
        for seed, events in runs.items():
            rate, loss = events[0]["settings"]["lr"], loss_at(events, shared["steps"])
            if loss is not None:
                rates.add(rate)
                found.setdefault(re.sub(", rate [^ ]+", "", label), {}).setdefault(seed, {})[rate] = loss
    lines = {name: lines_of(members, lambda losses: tuple(zip(*sorted(losses.items()))), marker="o", ms=4)
             for name, members in panels(found).items()}  # fmt: skip
    title = caption(shared, models) + "; scales differ" * (len(lines) > 1)
    with figure(path, title, lines, xlabel="peak learning rate", ylabel=f"loss, {unit(shared['tokens'])}",
                sharey=False) as axes:  # fmt: skip
        log_axis(axes[0], "x", sorted(rates))


def differences(groups):
    """[{setting: value}] of what the groups of group_runs differ in."""
    settings = []
    for shared, _ in groups:
        origin = "/".join(Path(shared.get("init_from", "scratch")).parts[-2:])
        data = f"{shared['data']['name']} {shared['data']['sha256'][:8]}"
        settings.append(shared | {"data": data, "init_from": origin})
    keys = dict.fromkeys(key for s in settings for key in s)
    differ = [key for key in keys if any(s.get(key) != settings[0].get(key) for s in settings)]
    return [{key: s.get(key) for key in differ} for s in settings]


def settings_text(values, *hidden):
    return ", ".join(f"{key} {value}" for key, value in values.items() if key not in hidden)


def training_report(logs):
    """(tables, {file name: function that draws it into a path}) of all groups of runs."""
    groups, text, figures, kinds = group_runs(logs), [], {}, []
    differ = differences(groups)
    if len(groups) > 1:
        text.append(f"Runs of {len(groups)} kinds, which differ in {', '.join(differ[0])} and are not averaged.")
        if not any(pairs(models, curve) for _, models in groups):
            text[0] += " No ratios and no gaps: they would compare these settings, not models."
    for (shared, models), values in zip(groups, differ):
        kinds.append((settings_text(values), shared, models))
        text += [f"### {settings_text(values)}"] * bool(values) + [training_tables(shared, models)]
        members = [events for runs in models.values() for events in runs.values()]
        if len(models) > len({events[0]["settings"]["model"] for events in members}):
            drawn = {"rates": plot_rates}
        else:
            drawn = {"curves": plot_curves}
            drawn |= {"steps": plot_steps} if targets(models) else {}
            drawn |= {"gap": plot_gap} if pairs(models, curve) else {}
            drawn |= {"gradients": plot_gradients} if any(layer_spread(events)[0] for events in members) else {}
        for name, plot in drawn.items():
            figures[f"{run_name(name, *values.values())}.png"] = partial(plot, shared, models)
    if "curves.png" not in figures and sum(len(models) for _, models in groups) <= MOST_CURVES:
        figures["curves.png"] = partial(plot_overlay, kinds)
    laws = power_laws(groups) if {*differ[0]} <= {"size"} and "rates.png" not in figures else {}
    if laws:
        text.append(scaling_table(laws))
        figures["scaling.png"] = partial(plot_scaling, laws)
    return "\n\n".join(text), figures


def csv_text(logs):
    """{path: events} as CSV, a row for each run and evaluation; losses in nats a token. The event "val" is of the fixed
    windows, "final" and "eval" of a whole split, or in tasks of a length."""
    settings = ("model", "task", "size", "lr", "steps", "epochs", "seeds", "seed")
    evaluation = ("event", "split", "step", "epoch", "tokens", "time_s", "val_loss", "length", "acc")
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    writer.writerow(["run", "data", "parameters", *settings, *evaluation])
    for path, (header, *events) in logs.items():
        run = [path, header["data"]["name"], header["params"]["total"], *map(header["settings"].get, settings)]
        writer.writerows([*run, *map(e.get, evaluation)] for e in events if e["event"] in ("val", "final", "eval"))
    return text.getvalue()


def plot_forest(folders, path):
    """All ratios of steps of runs of train.py, {name of a folder: logs}: a row for each pair, in it from top to bottom
    the ratios to ever lower losses, with 95 % intervals."""
    found = {}  # {group: {(label, reference): [step_ratio]}}
    for folder, groups in ((folder, group_runs(logs)) for folder, logs in folders.items()):
        for (shared, models), values in zip(groups, differences(groups)):
            name = f"{folder}: {caption(shared, models).removeprefix(folder + ', ')}"
            name = "; ".join(filter(None, [name, settings_text(values, "size", "steps", "schedule", "warmup")]))
            for label, other, _ in pairs(models, curve):
                ratios = [step_ratio(models[label], models[other], goal) for goal in targets(models)]
                found.setdefault(name, {})[label, other] = [ratio for ratio in ratios if ratio[1]]
    if not found:
        raise InputError("no two models of these runs have a ratio of steps")
    title = ("Steps to a validation loss, of the first model of a pair over those of the second. In each row the loss "
             "falls from top to bottom. Bars: 95 % over seeds; triangles: at least, or at most")  # fmt: skip
    height = 0.34 * sum(1 + len(rows) for rows in found.values())
    xlabel = "the first is faster  <     ratio of steps     >  the second is faster"
    with figure(path, title, [""], height=height, xlabel=xlabel) as (ax,):
        y, names, means = 0, {}, [0.5, 4]
        for group, rows in found.items():
            look = {"weight": "bold", "fontsize": 8, "bbox": {"color": "white", "pad": 1}}
            ax.text(0.01, y, group, transform=ax.get_yaxis_transform(), va="center", **look)
            for (label, other), ratios in rows.items():
                y -= 1
                names[y] = f"{label}\n/ {other}"
                for at, (both, sign) in zip(np.linspace(y + 0.36, y - 0.36, len(ratios) + 2)[1:-1], ratios):
                    (mean, ends), colour = mean_ratio(both), style(label)["color"]
                    ax.plot(mean, at, sign.replace("=", "o"), color=colour, ms=4)
                    means += [mean / 1.1, mean * 1.1]
                    if sign == "=" and ends:
                        ax.plot(ends, [at, at], color=colour, lw=1.2)
                ax.axhline(y - 0.5, color="0.9", lw=0.8)
            y -= 1
        ax.axvline(1, color="black", lw=1)
        for label, ratio in PAPER["ratio of steps"].items():
            text = f"the paper's {label} / {COMPLEX[label]}: {ratio}"
            ax.axvline(float(ratio.split()[-1]), color=style(label)["color"], ls="--", lw=1.2, label=text)
        ax.set(xlim=(min(means), max(means)), ylim=(y + 0.4, 0.6))  # an interval may end outside
        ax.set_yticks([*names], [*names.values()], fontsize=7)
        ax.grid(False, axis="y")
        log_axis(ax, "x", (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20, 40))


# ----------------------------------------------------------------------------------------------------------------------
# PAM: the paper's metric and its scaling fits (PAM section III)


def late_losses(events):
    """PAM section III: the evaluations that its metric averages, in nats: in each of the last three epochs the best one
    before its end and the one at it. None of a run that is not finished, or not in epochs."""
    mid, end = {}, {}
    for e in events if final_loss(events) is not None else ():
        if e["event"] == "val" and e.get("epoch"):
            (end if e["epoch"] % 1 == 0 else mid).setdefault(math.ceil(e["epoch"]), []).append(e["val_loss"])
    epochs = sorted({*mid, *end})[-3:]
    return [loss for epoch in epochs for loss in (sorted(mid.get(epoch, []))[:1] + end.get(epoch, []))]


def late_metric(values):
    """Mean, standard deviation (n - 1) and sigma_log10 = sigma / (y ln 10) of evaluations (PAM section III)."""
    values = [*values]
    mean, sigma = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, sigma, sigma / (mean * math.log(10))


def epochs_table(logs):
    """Markdown: the paper's late metric of finished runs in epochs, in nats and as perplexity, and of pairs the ratio
    of perplexities, but of no model and itself; beside the paper's, if the tokens are its own."""
    models = nest((label, events[0]["settings"]["seeds"], events)
                  for label, events in zip(run_labels(logs), logs) if late_losses(events))  # fmt: skip
    s = logs[0][0]["settings"]
    size = s["size"] if s.get("tokens") == "gpt2" else None

    def perplexity(events):
        return late_metric(map(math.exp, late_losses(events)))[0]

    columns = [of_first("{settings[size]}"), of_first("{params[total]:,}"),
               of_runs(lambda events: late_metric(late_losses(events))[0], 3),
               lambda label, runs: PAPER_LOSSES.get(size, {}).get(label, "-"), of_runs(perplexity, 2)]  # fmt: skip
    table = markdown(["model", "size", "parameters", "loss, nats", "the paper's", "perplexity"],
                     by_model(models, columns), "#### Means of the last three epochs")  # fmt: skip
    rows = by_pair(models, "/", lambda both: ratio_text([(y, x) for x, y in both]), [(perplexity, {})])
    rows = [[pair, ratio, PAPER_RATIOS.get(size, "-") if pair == "sam / pam" else "-"] for pair, ratio in rows
            if len({str(split_label(label)[:2]) for label in pair.split(" / ")}) > 1]  # fmt: skip
    head = ["pair", "perplexity of the second over the first's", "the paper's"]
    return "\n\n".join(filter(None, [table, markdown(head, rows)]))


def power_law(sizes, values):
    """log10 y = a + b log10 N by least squares, unweighted (PAM section III does not say). Returns a, b and their 2 x 2
    covariance, from the scatter of the points about the line (nan for two points, which say nothing of it)."""
    x, y = np.log10(sizes), np.log10(values)
    (b, a), covariance = np.polyfit(x, y, 1, cov="unscaled")
    scatter = ((y - a - b * x) ** 2).sum() / (len(x) - 2) if len(x) > 2 else math.nan
    return float(a), float(b), scatter * covariance[::-1, ::-1]


def crossing(first, second, freedom):
    """(N, y) at which two power laws (a, b, covariance) meet; None if 0 lies in the 95 % interval of the difference of
    their slopes. freedom: degrees of freedom of both, points minus 4."""
    (a, b, covariance), (c, d, other) = first, second
    if freedom > 0 and abs(b - d) > t95(freedom) * math.sqrt(covariance[1, 1] + other[1, 1]):  # nan: of two points
        x = (c - a) / (b - d)
        return 10**x, 10 ** (a + b * x)
    return None


def power_laws(groups):
    """Of models with runs of several sizes: {quantity: {model: ([N], [y], [sigma_log10], power_law, slope's text)}}."""
    found = {}
    for label, runs in (item for _, models in groups for item in models.items()):
        model, options, _ = split_label(label)
        for events in runs.values():
            if late := late_losses(events):
                found.setdefault(":".join([model, *options]), []).append((events[0]["params"]["total"], late))
    laws = {}
    for name in sorted(found, key=lambda name: name != "pam"):
        for quantity, of in (("loss", float), ("perplexity", math.exp)) if len({n for n, _ in found[name]}) > 1 else ():
            points = sorted((n, *late_metric([of(x) for x in late])) for n, late in found[name])
            sizes, values, _, sigmas = zip(*points)
            law = power_law(sizes, values)
            slope = f"{law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}"
            laws.setdefault(quantity, {})[name] = sizes, values, sigmas, law, slope
    return laws


def scaling_table(laws):
    rows = []
    for quantity, models in laws.items():
        paper, (first, (sizes_of_first, _, _, law_of_first, _)) = PAPER_FITS[quantity], next(iter(models.items()))
        for name, (sizes, _, _, law, slope) in models.items():
            met = crossing(law_of_first, law, len(sizes_of_first) + len(sizes) - 4) if name != first else None
            place = f"{met[0]:.2g} ({met[1]:.3g})" if met else "-"
            place += " *{:.2g} ({})*".format(*paper["crossing"]) * ((first, name) == ("pam", "sam"))
            slope += f" *{paper[name]}*" if name in paper else ""
            rows.append([quantity, name, len(sizes), len({*sizes}), slope, place])
    note = ("Fits of log10 y = a + b log10 N to all finished runs. Where the slopes cannot be told apart (95 %), there "
            "is no crossing. *Italics: the paper's, of GPT-2's tokens.*")  # fmt: skip
    head = ["quantity", "model", "runs", "sizes", "slope +- standard error", f"crosses {first} at N (y)"]
    return markdown(head, rows, "### Scaling", note)


def plot_scaling(laws, path):
    """PAM figure 2: loss and perplexity by parameters, error bars and fits. Runs of one size stand side by side."""
    title, ylabel = "Late-epoch loss and perplexity by parameters, a point a run", ("loss, nats", "perplexity")
    with figure(path, title, ["", ""], 1, 3, "parameters", ylabel, sharey=False) as axes:
        for ax, (quantity, models) in zip(axes, laws.items()):
            for i, (name, (sizes, values, sigmas, law, slope)) in enumerate(models.items()):
                colour, ends = style(name)["color"], [sizes[0], sizes[-1]]
                bars = [y * sigma * math.log(10) for y, sigma in zip(values, sigmas)]
                beside = [n * 1.012 ** (4 * i + sizes[:k].count(n)) for k, n in enumerate(sizes)]
                label = f"{name}, {quantity}: slope {slope}"
                ax.errorbar(beside, values, bars, fmt="^*os"[i % 4], color=colour, ms=5, lw=0.8, capsize=2, label=label)
                ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=colour, lw=1)
            ax.set_yscale("log")
            log_axis(ax, "x", form=lambda n, _: f"{n / 1e6:g}M")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")


# ----------------------------------------------------------------------------------------------------------------------
# Tasks (CSP section 3, appendices A and B)

PAPER_ORDER = ("csp-vanilla", "csp-fast", "rnn", "complex-rnn", "signed-mamba", "decoder")


def protocol(events):
    """What runs must have in common to stand in one table."""
    return {k: v for k, v in events[0]["settings"].items() if k not in ("model", "task", "seed")}


def group_tasks(logs):
    """{task: {model: {seed: events}}}, the paper's models first, or InputError if the runs do not belong together."""
    known, rows = {model: i for i, model in enumerate(PAPER_ORDER)}, []
    for events in sorted(logs, key=lambda e: (known.get(e[0]["settings"]["model"], 9), e[0]["settings"]["seed"])):
        s = events[0]["settings"]
        rows.append((spec_label(s["task"]), spec_label(s["model"]), s["seed"], events))
        for k, v in protocol(logs[0]).items():
            if s.get(k) != v:
                raise InputError(f"runs of different protocols do not go into one table: {k} is {v} and {s.get(k)}")
        if events[-1]["event"] != "final":
            raise InputError(f"the run of {s['model']} on {s['task']}, seed {s['seed']}, is not finished: run it again")
    return nest(rows)


def accuracies(events):
    """{length: accuracy} of a finished run."""
    return {e["length"]: e["acc"] for e in events if e["event"] == "eval"}


def task_tables(logs):
    """Markdown: accuracy by length with the paper's (CSP tables 1-4), spread over seeds (table 5), paired differences,
    every seed, and the rotation that CSP learnt for each symbol."""
    groups, s, paired, spread, every_seed, angles = group_tasks(logs), logs[0][0]["settings"], [], [], [], []
    lengths, longest, at = s["lengths"], s["lengths"][-1], [f"L={length}" for length in s["lengths"]]
    text = [
        f"Trained at length {s['train_length']} for {s['epochs']} epochs, tested on 1,000 sequences a length. Mean "
        "over the seeds; in brackets the lowest and the highest. *Italics: the paper's mean, at 300 epochs.*"
    ]
    for task, models in groups.items():
        printed, columns = PAPER_TASKS.get(task, {}), []
        for n in lengths:
            paper = {model: dict(zip(PAPER_LENGTHS, means)).get(n) for model, (means, _) in printed.items()}
            paper = {model: f"{mean:.3f}" for model, mean in paper.items() if mean}
            columns.append(of_runs(lambda events, n=n: accuracies(events)[n], 3, paper))
        rows = by_model(models, [of_first("{params[total]:,}"), lambda model, runs: len(runs), *columns])
        text.append(markdown(["model", "parameters", "seeds", *at], rows, f"### {task}"))
        every_seed += [[task, *row] for row in by_seed(models, columns)]
        for i, (model, runs) in enumerate(models.items()):
            if len(runs) > 1:
                theirs = f"{statistics.stdev(printed[model][1]):.3f}" if model in printed and longest == 64 else "-"
                ours = statistics.stdev(accuracies(events)[longest] for events in runs.values())
                spread.append([task, model, len(runs), f"{ours:.3f}", theirs])
            for other in [*models][:i]:
                both = [(runs[seed], models[other][seed]) for seed in runs if seed in models[other]]
                if len(both) > 1:
                    both = [(accuracies(ours), accuracies(theirs)) for ours, theirs in both]
                    cells = [interval_text([a[n] - b[n] for a, b in both], "+") for n in lengths]
                    paired.append([task, f"{model} - {other}", len(both), *cells])
            for seed, events in runs.items():
                for block, ((zero, sure0), (one, sure1)) in enumerate(events[-1].get("theta", ()), 1):
                    turn = (one - zero + math.pi) % (2 * math.pi) - math.pi
                    found = f"{zero:+.3f} ({sure0:.2f})", f"{one:+.3f} ({sure1:.2f})", f"{turn / math.pi:+.3f}"
                    angles.append([task, model, seed, block, *found])
    text += [
        markdown(["task", "difference", "seeds", *at], paired, "### Paired by seed",
                 "Mean difference in accuracy and 95 % interval (Student's t)."),
        markdown(["task", "model", "seeds", "ours", "paper"], spread, f"### Spread over the seeds, L={longest}",
                 "Sample standard deviation; the paper's from the seeds of its tables 2-4 (its table 5 prints other "
                 "numbers)."),
        markdown(["task", "model", "seed", *at], every_seed, "### Every seed"),
        markdown(["task", "model", "seed", "block", "at 0", "at 1", "difference"], angles,
                 "### What CSP turns its state by, at each symbol",
                 "Radians; in brackets how constant the angle is (1: always the same). The last column is the "
                 "difference in units of pi: parity asks for 1, mod-3 for 2/3."),
        f"Steps skipped because a gradient was not finite: {sum(log[-1]['skipped'] for log in logs)} of all runs.",
    ]  # fmt: skip
    return "\n\n".join(filter(None, text))


def plot_lengths(task, models, path):
    """Accuracy by length and, at the longest, by position (CSP figures 3-5): means, and thin the seeds."""
    header = next(iter(next(iter(models.values())).values()))[0]
    length, longest = header["settings"]["train_length"], max(header["settings"]["lengths"])

    def by_length(events):
        return tuple(zip(*sorted(accuracies(events).items())))

    def by_position(events):
        acc = next(e["acc_by_pos"] for e in events if e["event"] == "eval" and e["length"] == longest)
        return tuple(zip(*((t, x) for t, x in enumerate(acc, 1) if x is not None)))  # where it is scored

    lines = {"by length": lines_of(models, by_length), "by position": lines_of(models, by_position)}
    title = f"{task}: {header['settings']['epochs']} epochs at length {length} (dotted); grey: the commonest answer"
    with figure(path, title, lines, 2, 3, ylabel="accuracy", sharex=False) as (left, right):
        for ax in (left, right):
            ax.axvline(length, color="0.4", ls=":", lw=1)
        right.axhline(max(header["data"]["shares"]), color="0.4", ls="--", lw=1)
        left.set(xlabel="length of the test sequences", ylim=(-0.03, 1.03))
        right.set_xlabel(f"position in sequences of length {longest}")


def plot_seeds(groups, path):
    """Accuracy of every seed at the longest length beside the paper's (CSP appendix B)."""
    longest = max(accuracies(next(iter(next(iter(next(iter(groups.values())).values())).values()))))
    title = f"Every seed, accuracy at length {longest}; o: ours, x: the paper's"
    with figure(path, title, [*groups], len(groups), 3.2, ylabel="accuracy", sharex=False) as axes:
        for ax, (task, models) in zip(axes, groups.items()):
            for i, (model, runs) in enumerate(models.items()):
                ours = [accuracies(events)[longest] for events in runs.values()]
                theirs = PAPER_TASKS.get(task, {}).get(model, ((), ()))[1] if longest == 64 else ()
                for x, values, marker in ((i - 0.15, ours, "o"), (i + 0.15, theirs, "x")):
                    look = {"color": style(model)["color"], "label": model if marker == "o" else None}
                    ax.plot([x] * len(values), values, marker, ms=5, alpha=0.7, **look)
            ax.set_xticks([])
            ax.set_xlim(-0.5, len(models) - 0.5)


def plot_dynamics(groups, model, path):
    """Gradient norm and accuracy at the training length, by epoch, of every seed (CSP figure 6)."""
    lines = {}
    for key, what in (("grad_max", "gradient"), ("acc", "accuracy")):
        for task, runs in ((task, models[model]) for task, models in groups.items() if model in models):
            of_panel = lines.setdefault(f"{task}, {what}", {})
            for (seed, events), colour in zip(runs.items(), cycle(COLOURS.values())):
                points = [(e["epoch"], e[key]) for e in events if e["event"] == "train"]
                of_panel[f"seed {seed}"] = {"color": colour, "lw": 0.8}, [tuple(zip(*points))]
    ylabel = "largest gradient norm\nsince the last point", "accuracy at the training length"
    title = f"{model}: training, a line a seed"
    with figure(path, title, lines, len(lines) // 2, 2.2, "epoch", ylabel, sharey="row") as axes:
        axes[0].set_yscale("log")


def task_figures(groups):
    """{file name: function that draws it into a path} of group_tasks."""
    names = [model for models in groups.values() for model in models]
    figures = {f"{run_name('lengths', task)}.png": partial(plot_lengths, task, runs) for task, runs in groups.items()}
    dynamics = partial(plot_dynamics, groups, "csp-fast" if "csp-fast" in names else names[0])
    return figures | {"seeds.png": partial(plot_seeds, groups), "dynamics.png": dynamics}


def find_logs(run):
    """What a RUN on the command line names: a log, a run folder, or all in a folder of these."""
    path = Path(os.path.expanduser(run))
    below = [] if (path / "log.jsonl").exists() else sorted(path.glob("*.jsonl")) or sorted(path.glob("*/log.jsonl"))
    return below or [path]


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, log.jsonl files, or folders of these")
    where = "folder for the tables, as tables.md, and the figures; or one figure: gap.pdf, or curves as any.pdf"
    parser.add_argument("--out", help=where)
    parser.add_argument("--csv", metavar="FILE", help="file for all evaluations, a row each")
    parser.add_argument("--forest", action="store_true", help="one figure: all ratios of steps, by folder")
    args = parser.parse_args()
    target = Path(os.path.expanduser(args.out or ""))
    one_figure = target.suffix.lower() in FORMATS
    out = None if args.out is None else target.parent if one_figure else parse_out(args.out)
    found = {run: {path: read_log(path) for path in find_logs(run)} for run in args.runs}
    by_path = {path: events for of_run in found.values() for path, events in of_run.items()}
    of_tasks, *both = {"task" in events[0]["settings"] for events in by_path.values()}
    if both or (of_tasks and args.forest):
        raise InputError("logs of tasks.py go neither into one report with those of train.py, nor into --forest")
    logs, written = [*by_path.values()], None
    if args.forest:
        if not one_figure:
            raise InputError("--forest draws one figure: name it, such as --out forest.png")
        folders = {Path(run).resolve().name: [*of_run.values()] for run, of_run in found.items()}
        text, figures = "", {target.name: partial(plot_forest, folders)}
    else:
        try:
            text, figures = (task_tables(logs), task_figures(group_tasks(logs))) if of_tasks else training_report(logs)
        except KeyError as e:
            raise InputError(f"a log lacks {e}: it is of another version of train.py or tasks.py") from None
    if one_figure and not args.forest:
        ours = f"plot_{target.stem.partition('-')[0]}" in globals()  # a name of ours, or one of the user's own
        name = f"{target.stem}.png" if ours or of_tasks else "curves.png"
        if name not in figures:
            names = ", ".join(figure.removesuffix(".png") for figure in figures)
            raise InputError(f"--out {args.out} is none of their figures: these runs have {names}")
        figures, written = {target.name: figures[name]}, ""
    if args.csv is not None:
        with explain(f"write --csv {args.csv}"):
            Path(os.path.expanduser(args.csv)).write_text(csv_text(by_path))
    show_report(text, figures, out, written)


if __name__ == "__main__":
    command_line(main)
