"""The logs of train.py and tasks.py, written and read: every table and figure of the three papers that logs can give.

    python report.py runs/*-stdlib-*                   steps to a loss, ratios, gaps, cost: on the terminal
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
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np

from data import InputError, Parser, command_line, explain, hold, needs, note, replace_file


class Log:
    """log.jsonl of a run, one JSON object a line."""

    def __init__(self, folder, start, keep=None, active=True):
        """Args: start: the time.monotonic() at which time_s is 0; keep: on resuming, events after this step are
        dropped; active: False for all ranks but the first, which alone writes."""
        self.path, self.start, self.active = folder / "log.jsonl", start, active
        if keep is not None and active and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= keep and e["event"] not in ("final", "sample")]
            with explain(f"write {self.path}"):
                replace_file(self.path, lambda f: f.write("".join(json.dumps(e) + "\n" for e in kept).encode()))
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


def run_name(*parts):
    """Parts of a run's name, of which the first is the model spec, as a name for its folder; of FILE.py:CLASS the class."""
    return re.sub(r"[:=/\\\0]", "_", "-".join(re.sub(r"^[^:]*\.py:", "", str(part)) for part in parts))


def figure_name(*parts):
    return run_name(*parts).replace(" ", "-") + ".png"


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

    A line that a kill cut short, or that is no event, is left out, with a note on stderr."""
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    with explain(f"read the log {path}"):
        lines = [_event(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    events, bad = [e for e in lines if e], [str(i) for i, e in enumerate(lines, 1) if not e]
    parts = [events[0].get(key) for key in ("settings", "data", "params")] if events else [None]
    if not all(isinstance(part, dict) and part for part in parts) or events[0]["event"] != "header":
        raise InputError(f"{path} is not a log of train.py or tasks.py: its first line is no header")
    if any(e["event"] == "header" for e in events[1:]):
        several = "holds the logs of several runs, one behind the other: put them into files of their own"
        raise InputError(f"{path} {several}")
    if bad:
        note(f"note: of {path} these lines cannot be read and are left out: {first_five(bad)}")
    return events


def _event(line):
    """The event of a line, or None."""
    try:
        event = json.loads(line)
        numbers = [event.get(key, 0.0) for key in ("step", "loss", "val_loss", "epoch", "tok_s")]
        numbers += event.get("layers", [])
        whole = isinstance(event["event"], str) and isinstance(event["step"], int) and all(map(_is_number, numbers))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return event if whole else None


def first_five(names):
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_number(x):
    """A finite one, small enough to compute with."""
    return isinstance(x, (int, float)) and abs(x) < 1e100  # false for NaN


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
    if n < 2:
        return mean, None
    return mean, t95(n - 1) * statistics.stdev(values) / math.sqrt(n)


def mean_ratio(both):
    """Geometric mean of x / y over pairs (x, y) above 0, and the ends of its 95 % interval, None for a single pair."""
    mean, half = mean_interval([math.log(x / y) for x, y in both])
    return math.exp(mean), None if half is None else (math.exp(mean - half), math.exp(mean + half))


def ratio_text(both):
    mean, ends = mean_ratio(both)
    return f"{mean:.2f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def difference_text(both):
    """The mean of x - y over pairs (x, y), +- half of its 95 % interval."""
    mean, half = mean_interval([x - y for x, y in both])
    return f"{mean:+.3f}" + ("" if half is None else f" +- {half:.3f}")


def range_text(values, digits):
    """The mean of those that are not None, in brackets the lowest and the highest; empty if there are none."""
    found = [x for x in values if x is not None]
    if not found:
        return ""
    text = f"{statistics.fmean(found):.{digits}f}"
    text += f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
    return text + of_seeds(len(found), len(values))


def plural(n, noun):
    return f"{n} {noun}" + "s" * (str(n) != "1")


def seeds_a_model(models):
    return plural("-".join(map(str, sorted({len(runs) for runs in models.values()}))), "seed") + " a model"


def of_seeds(found, seeds):
    return f", {found} of {seeds} seeds" if found < seeds else ""


def markdown(head, rows, title="", note=""):
    """A table under its title and a note, or "" without rows."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n".join(filter(None, (title, note, "\n".join(lines)))) if rows else ""


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
FIGURES = ("steps", "gap", "gradients", "rates", "scaling", "lengths", "seeds", "dynamics")  # and curves


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
def figure(path, title, panels, columns=1, height=2.4, xlabel="", ylabel="", **shared):
    """Yields a list of axes, one for each of `panels`, that become the file `path` when the block ends, over one legend
    of all that has a label, as it is: $ is no formula. The format is that of the name's ending, the style matplotlib's
    own, whatever MPLBACKEND and matplotlibrc say.

    Args: panels: titles, or {title: {label: (look, curves)}} for lines: of several curves [(x, y)], one a seed, each is
        thin and their mean thick; height: of a row; xlabel: of the lowest axes; ylabel: of each row, or a tuple."""
    path, backend = Path(path), os.environ.pop("MPLBACKEND", None)  # a name that matplotlib does not know ends its import
    try:
        with needs("matplotlib"):
            import matplotlib.style
            from matplotlib.figure import Figure
            from PIL import Image
    finally:
        os.environ.update({} if backend is None else {"MPLBACKEND": backend})
    with matplotlib.style.context(["default", STYLE]):
        fig, rows = Figure(layout="constrained"), -(-len(panels) // columns)
        axes = [*fig.subplots(rows, columns, squeeze=False, **shared).flat]
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
        handles = [pair for ax in axes for pair in zip(*ax.get_legend_handles_labels())]
        labelled = {textwrap.fill(name.encode(errors="replace").decode(), 100): handle for handle, name in handles}
        across = max(1, min(len(labelled), int(128 / (11 + max(map(len, labelled), default=0)))))
        lines, title = -(-len(labelled) // across), textwrap.fill(title, 108)
        breaks = sum(text.count("\n") for text in (title, *labelled))
        fig.set_size_inches(7.5, height * rows + 0.2 * lines + 0.15 * breaks + 0.3)
        fig.suptitle(title.encode(errors="replace").decode(), fontsize=9, parse_math=False)
        if labelled:
            legend = fig.legend(labelled.values(), labelled, loc="outside lower center", ncols=across)
            for label in legend.get_texts():
                label.set_parse_math(False)
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
    with needs("matplotlib"):
        import matplotlib
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.8, n))


def log_axis(ax, which, ticks=None, form="{x:g}"):
    """Makes the axis "x" or "y" logarithmic, with these ticks or 1, 2 and 5 times the powers of ten."""
    import matplotlib.ticker as ticker

    ax.set(**{f"{which}scale": "log"})
    axis = getattr(ax, f"{which}axis")
    axis.set(major_locator=ticker.FixedLocator(ticks) if ticks else ticker.LogLocator(subs=(1, 2, 5)),
             minor_locator=ticker.NullLocator(), major_formatter=form)  # fmt: skip


def write_report(text, figures, out, tables="tables.md"):
    """Writes `text` as the file `tables` of the folder `out`, then draws `figures`, {file name: function of its path}.
    A figure that cannot be drawn is a line on stderr and stops nothing. Returns the paths that were written."""
    paths, faults = [out / tables] * bool(text), {}
    if text:
        with explain(f"write {out}"):
            out.mkdir(parents=True, exist_ok=True)
            replace_file(paths[0], lambda f: f.write((text + "\n").encode(errors="replace")))
    for name, draw in figures.items():
        try:
            draw(out / name)
            paths.append(out / name)
        except Exception as e:  # whatever a library raises: the tables are there, and other figures may be drawn
            faults.setdefault(f"{e}" if isinstance(e, InputError) else repr(e), []).append(name)
    for fault, names in faults.items():
        note(f"error: {', '.join(names)} not drawn: {fault}")
    return paths


def parse_out(text):
    """The folder that --out names. Raises InputError for what can be none."""
    out = Path(os.path.expanduser(text))
    if not text or out.suffix.lower() in (*FORMATS, ".md", ".jpg"):
        raise InputError(f"--out {text or repr(text)} must be a folder: tables and figures go into it")
    return out


def show_report(text, figures, out=None, written=None, tables="tables.md"):
    """Writes tables and figures into the folder `out`, if one is given, and then prints `text`. written: what the file
    `tables` holds, if not `text`. Raises InputError if another program works in `out`. Exits with the code 2 if a
    figure cannot be drawn."""
    written, paths = text if written is None else written, []
    try:
        if out and (written or figures):
            with explain(f"write {out}"):
                out.mkdir(parents=True, exist_ok=True)
            with hold(out):
                paths = write_report(written, figures, out, tables)
    finally:  # shown also where they cannot be written
        with suppress(BrokenPipeError):  # who reads has seen enough
            print(text, *(f"wrote {path}" for path in paths), sep="\n", flush=True)
    if out and len(paths) < len(figures) + bool(written):
        sys.exit(2)


# ----------------------------------------------------------------------------------------------------------------------
# Training runs (QS section 8: tables 3-8, figures 3-7)

TARGETS = (4.0, 3.5, 3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's
MOST_CURVES = 10  # of any runs in one panel
# What runs of one comparison may differ in: what tables name, and what does not change the course of a run.
NOT_SHARED = {"model", "seeds", "lr", "min_lr", "data", "out", "resume", "stop_at", "micro", "device", "compile",
              "checkpointing", "log_every", "ckpt_every", "sample_every", "eval_only", "split", "params"}  # fmt: skip


def check_training(events, path):
    """The events of a run of train.py that have all that tables and figures need, or InputError."""
    course = [e["step"] for e in events if e["event"] in ("train", "val", "final")]
    try:
        training_report([events])
        header, s = events[0], events[0]["settings"]
        whole = min(header["params"]["total"], s["batch"], s["seq"]) > 0 and curve(events, "train")
        whole = whole and all("layers" in e for e in events if e["event"] == "grad")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        whole = False
    if not whole:
        raise InputError(f"{path} is a damaged log: parts of a run of train.py are missing")
    for before, after in pairwise(course):
        if after < before:
            raise InputError(f"{path} is a damaged log: after step {before} comes step {after}; did two runs write it?")
    return events


def curve(events, kind="val"):
    """(steps, bpc) of the evaluations on the fixed validation windows, or for kind "train" of the training batches."""
    found = [e for e in events if e["event"] == kind and e.get("split", "val") == "val"]
    return [e["step"] for e in found], [e["val_loss" if kind == "val" else "loss"] / math.log(2) for e in found]


def unit(tokens):
    """Of a loss divided by ln 2, by the setting `tokens` of its run."""
    return "bits a token" if tokens == "gpt2" else "bpc"


def steps_to_target(steps, losses, target):
    """The step at which the loss first attains `target`, interpolated between evaluations (QS 8.1). None if it never
    does, or did before the first evaluation, in a log that begins after step 0."""
    first = next((i for i, loss in enumerate(losses) if loss <= target), None)
    if not first:
        return None if first is None or steps[0] > 0 else 0.0
    bracket = slice(first - 1, first + 1)
    return float(np.interp(target, losses[bracket][::-1], steps[bracket][::-1]))


def steps_to(target):
    """The function of a run's events that gives its steps to a loss."""
    return lambda events: steps_to_target(*curve(events), target)


def ratio_steps_to(target):
    """The same without what was attained before the first step, and has no ratio."""
    return lambda events: steps_to_target(*curve(events), target) or None


def loss_at(events, step):
    """The validation loss at `step`, interpolated between evaluations, bpc, or None."""
    steps, losses = curve(events)
    return float(np.interp(step, steps, losses)) if steps and steps[0] <= step <= steps[-1] else None


def final_loss(events):
    """bpc over the whole validation split, or None for a run that is not finished."""
    budget = events[0]["settings"]["steps"]  # --stop_at ends a run before it, with a "final" too
    return next((e["val_loss"] / math.log(2) for e in events if e["event"] == "final" and e["step"] >= budget), None)


def speed(events):
    """Median tokens a second. Intervals in which the clock was set back do not count; nan if none is left."""
    found = [e["tok_s"] for e in events if e["event"] == "train" and e.get("tok_s", 0) > 0]
    return statistics.median(found or [math.nan])


def layer_spread(events):
    """Largest over smallest and last over first of the layers' gradient norms, medians (QS 8.4), or [None, None]."""
    norms = [e["layers"] for e in events if e["event"] == "grad" and min(e["layers"], default=0) > 0]
    ratios = [(max(x) / min(x), x[-1] / x[0]) for x in norms]
    return [statistics.median(values) for values in zip(*ratios)] or [None, None]


def spec_label(spec):
    """The name of a model or task in tables and figures: its spec, or what follows a user's file in it."""
    file, *rest = spec.split(":")
    return " ".join(rest) or Path(file).stem if file.endswith(".py") else spec


def base(label):
    """The model's name in a label such as "hmamba:N=4, rate 0.002"."""
    return re.split("[:, ]", label)[0]


def family(label):
    """The complex model that a label's model is, or is the twin of. A user's class belongs to the model that its name
    begins with, as HMambaMinus."""
    parent = re.match("HTransformer|Transformer|HMamba|Mamba|PAM|SAM", base(label))
    name = parent[0].lower() if parent else base(label)
    return COMPLEX.get(name, name)


def reference(label, labels):
    """What a row is compared with, or None: its complex realization with the same options, or else without; for a
    variant of a complex model that model; or else the first of its family, or of `labels`."""
    if label in FAMILIES:
        return None
    model, known = label.partition(", ")[0], family(label) in FAMILIES
    relatives = [x for x in labels if (family(x) == family(label) if known else x.partition(", ")[0] == model)]
    others = label.replace(base(label), family(label), 1), family(label), *relatives[:1], next(iter(labels))
    return next((other for other in others if other in labels and other != label), None)


def by_family(labels):
    found = {}
    for label in labels:
        found.setdefault(FAMILIES.get(family(label), "others"), []).append(label)
    return found


def panels(labels):
    """{title: its labels}: a panel for each family if all of them are pairs of a paper, else one of all."""
    found = by_family(labels)
    paired = "others" not in found and all(len(set(map(base, members))) > 1 for members in found.values())
    return found if paired else {"": [*labels]}


def run_labels(logs):
    """The runs' names: the model, and its rate if that model was run at several."""
    rates, settings = {}, [events[0]["settings"] for events in logs]
    for s in settings:
        rates.setdefault(s["model"], set()).add(s.get("lr"))
    return [spec_label(s["model"]) + (f", rate {s['lr']:g}" if len(rates[s["model"]]) > 1 else "") for s in settings]


def group_runs(logs):
    """[(shared settings, {label: {seed: events}})], a group for each set of settings that decide the course of a run;
    its labels are models (with their rates, where one has several), complex ones before their twins. Raises InputError
    for two runs of one label and seed, or of different configurations."""
    groups, place = {}, {name: i for i, name in enumerate(FAMILIES)}
    for events in logs:
        settings = {"tokens": "bytes"} | {k: v for k, v in events[0]["settings"].items() if v is not None}
        data = {key: events[0]["data"][key] for key in ("name", "size", "sha256")}  # not what a folder left out
        shared = {k: v for k, v in settings.items() if k not in NOT_SHARED} | {"data": data}
        groups.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(events)
    found = []
    for shared, members in groups.values():
        models = {}
        for label, events in zip(run_labels(members), members):
            seed, runs = events[0]["settings"]["seeds"].lstrip("0") or "0", models.setdefault(label, {})
            if runs.setdefault(seed, events) is not events:
                raise InputError(f"two runs of {label} with seed {seed}: name one of them")
        for label, runs in models.items():
            headers = [events[0] for events in runs.values()]
            if len({json.dumps([h["settings"]["model"], h.get("config")], sort_keys=True) for h in headers}) > 1:
                raise InputError(f"the runs of {label} have different configurations: name those of one")
            ends = sorted({h["settings"]["min_lr"] for h in headers})
            if len(ends) > 1 and shared.get("schedule") != "constant":
                ends = ", ".join(map(str, ends))
                raise InputError(f"the runs of {label} end at different rates (min_lr {ends}): name those of one")
        order = sorted(models, key=lambda label: (place.get(family(label), 9), base(label) in COMPLEX))
        found.append((shared, {label: models[label] for label in order}))
    return found


def pairs(models, value):
    """[(label, its reference, [(value, reference's value)] over the seeds of both)]. value: function of a run's events;
    seeds for which it is None on either side are left out."""
    found = []
    for label, runs in models.items():
        other = reference(label, models)
        theirs = models.get(other, {})
        both = [(value(events), value(theirs[seed])) for seed, events in runs.items() if seed in theirs]
        both = [pair for pair in both if None not in pair]
        found += [(label, other, both)] * bool(both)
    return found


def warmup_end(shared):
    """(step, what it is): the end of the warmup, or of the paper's share of the budget if the rate is constant."""
    steps, warmup = shared["steps"], shared.get("warmup", PAPER_WARMUP)
    if shared.get("schedule") == "constant":
        return PAPER_WARMUP * steps, f"{PAPER_WARMUP:.0%} of the budget"
    return warmup * steps if warmup < 1 else warmup, "end of warmup"


def targets(models):
    """(losses, common). losses, falling: those of TARGETS that a run reaches, and for each family the tenth of a bit
    that all of its runs reach; common: the one that all runs reach, None without any evaluation."""

    def lowest(labels):
        curves = [curve(events)[1] for label in labels for events in models[label].values()]
        return [min(losses) for losses in curves if losses[1:]] or [min(losses) for losses in curves if losses]

    commons = [math.ceil(10 * max(found)) / 10 for found in map(lowest, by_family(models).values()) if found]
    reached = {target for target in TARGETS if target >= min(lowest(models), default=math.inf)}
    return sorted(reached.union(commons), reverse=True), max(commons, default=None)


def describe(shared, models):
    """One paragraph: the data, the protocol (QS table 4), and what ran it."""
    events = [e for runs in models.values() for log in runs.values() for e in log]
    headers = [e for e in events if e["event"] in ("header", "resume")]
    device, threads, git = (", ".join(sorted({str(h.get(k)) for h in headers})) for k in ("device", "threads", "git"))
    torch = ", ".join(sorted({str(h.get("versions", {}).get("torch", "?")) for h in headers}))
    d, (step, _) = shared["data"], warmup_end(shared)
    warmup = plural(f"{step:.0f}", "step") + " of warmup, then cosine"
    rate = "constant rate" if shared.get("schedule") == "constant" else warmup
    steps, every = plural(f"{shared['steps']:,}", "step"), plural(shared.get("eval_every", "?"), "step")
    o = headers[0].get("optimizer")
    adamw = f", AdamW {tuple(o['betas'])}, decay {o['decay']}, gradients clipped at {o['clip']:g}" if o else ""
    return (
        f"Data: {d['name']}, {d['size']:,} tokens, SHA-256 {d['sha256'][:12]}. {steps} of {shared['batch']} x "
        f"{shared['seq']} tokens, {rate}{adamw}, {shared['dtype']}. Validation every {every} on "
        f"{plural(shared['eval_seqs'], 'fixed window')}, at the end on the whole split. "
        f"{device}; threads: {threads}; PyTorch {torch}; code {git}. In brackets: lowest and highest seed; +- and "
        "square brackets: 95 % interval, paired by seed; *italics*: the paper's, 253M parameters, one seed on each of "
        "three corpora."
    )


def training_tables(shared, models):
    """Markdown of a group: models and protocol (QS tables 3-4), steps to a loss and their ratios (6, 5), gaps (7),
    losses at the budget (8), cost (9.3), spread of the layers' gradients (8.4), every run."""
    loss, budget, constant = unit(shared["tokens"]), shared["steps"], shared.get("schedule") == "constant"
    (goals, common), (warm, what) = targets(models), warmup_end(shared)
    heads, at_budget = [f"{goal} {loss}" for goal in goals], partial(loss_at, step=budget)
    evaluated = {step for runs in models.values() for events in runs.values() for step in curve(events)[0] if step}

    def paper(printed, label):
        return f" *{printed[label]}*" if label in printed and loss == "bpc" else ""

    def mean_loss(events):
        """Mean of the losses at all evaluated steps but 0, or None if the run did not reach the budget."""
        losses = [loss_at(events, step) for step in sorted({*evaluated, budget})]
        return None if None in losses else statistics.fmean(losses)

    def tokens(events):
        """Up to the common loss."""
        steps = steps_to(common)(events)
        return None if steps is None else steps * shared["batch"] * shared["seq"]

    def minutes(events):
        return None if tokens(events) is None else tokens(events) / (60 * speed(events))

    def by_model(columns, missing=lambda label: ""):
        """A row a model: its label, and for each (function of a run, digits, the paper's) the range of its seeds."""
        rows = []
        for label, runs in models.items():
            cells = [range_text([*map(value, runs.values())], digits) or missing(label) for value, digits, _ in columns]
            printed = [paper(numbers, label) for *_, numbers in columns]
            rows.append([label, *(cell and cell + number for cell, number in zip(cells, printed))])
        return rows

    def by_pair(text, sign, columns):
        """A row a pair, and for each (function of a run, the paper's) its difference or ratio as a text."""
        found = {}
        for i, (value, printed) in enumerate(columns):
            for label, other, both in pairs(models, value):
                cell = text(both) + of_seeds(len(both), len(models[label]))
                cell += paper(printed, label) if other == COMPLEX.get(label) else ""
                found.setdefault(f"{label} {sign} {other}", ["-"] * len(columns))[i] = cell
        return [[pair, *cells] for pair, cells in found.items()]

    def unreached(label):
        return "not reached" if all(map(final_loss, models[label].values())) else "not finished"

    of_models, every_run = [], []
    for label, runs in models.items():
        header = next(iter(runs.values()))[0]
        s, config = header["settings"], header.get("config", {})
        shape = ", ".join(f"{key}={config[key]}" for key in ("D", "L") if key in config)
        rate = f"{s['lr']:g}" + ("" if constant else f" to {s['min_lr']:g}")
        of_models.append([label, f"{header['params']['total']:,}", shape, rate, len(runs)])
        for seed, events in runs.items():
            cells = [range_text([steps_to(goal)(events)], 0) or "-" for goal in goals]
            cells += [range_text([end(events)], 3) or "-" for end in (at_budget, final_loss)]
            every_run.append([label, seed, *cells])
    steps = [(steps_to(goal), 0, PAPER["steps"].get(goal, {})) for goal in goals]
    ratios = [(ratio_steps_to(goal), PAPER["ratio of steps"] if goal in (2.5, 2.2, 2.0) else {}) for goal in goals]
    gaps = [(partial(loss_at, step=warm), {} if constant else PAPER["gap after warmup"]), (at_budget, PAPER["gap"]),
            (final_loss, {}), (mean_loss, {})]  # fmt: skip
    costs = [(lambda events: tokens(events) and tokens(events) / 1e6, 2, {}), (speed, 0, {}), (minutes, 1, {})]
    spread = [(lambda events: layer_spread(events)[0], 2, PAPER["spread"]),
              (lambda events: layer_spread(events)[1], 2, PAPER["last over first"])]  # fmt: skip
    tables = [
        markdown(["model", "parameters", "shape", "learning rate", "seeds"], of_models),
        markdown(["model", *heads], by_model(steps, unreached), "#### Steps to a validation loss") if goals else "",
        markdown(["pair", *heads], by_pair(ratio_text, "/", ratios), "#### Ratio of steps",
                 "Above 1: the second is faster. Geometric means."),
        markdown(["pair", f"at step {warm:.0f}, {what}", f"at step {budget}, the budget", "there, whole split",
                  "mean of all evaluations but the first"], by_pair(difference_text, "-", gaps),
                 f"#### Gap in validation loss, {loss}", "Above 0: the second leads."),
        markdown(["model", "fixed windows", "whole split"],
                 by_model([(at_budget, 3, {}), (final_loss, 3, PAPER["loss"])], lambda label: "not finished"),
                 f"#### Validation loss at the budget, {loss}"),
        markdown(["model", "tokens, millions", "tokens a second", "minutes"], by_model(costs),
                 f"#### Cost of {common} {loss}", "At the median speed of each run, without validation."
                 + f" {PAPER_COST}" * (loss == "bpc")) if common else "",
        markdown(["model", "largest over smallest", "last over first"], [row for row in by_model(spread) if row[1]],
                 "#### Gradient norms of the layers", "Medians over the evaluations."),
        markdown(["model", "seed", *heads, "at the budget", "whole split"], every_run, "#### Every run"),
    ]  # fmt: skip
    return "\n\n".join(filter(None, [describe(shared, models), *tables]))


def caption(shared, models):
    """What a figure shows, in a line for its title: data, budget, schedule, number of seeds."""
    rate = "constant rate" if shared.get("schedule") == "constant" else f"warmup of {warmup_end(shared)[0]:.0f}"
    steps = f"{shared['size']}, {plural(shared['steps'], 'step')}, {rate}"
    return f"{shared['data']['name']}, {steps}; {seeds_a_model(models)}"


def late_range(panels, share=0.2):
    """Limits for losses: of all but the first fall, from 8 bits a byte, which would take most of the height."""
    curves = [curve for lines in panels.values() for _, of_seeds in lines.values() for curve in of_seeds]
    begin = share * max((x for xs, _ in curves for x in xs), default=0)
    late = [y for xs, ys in curves for x, y in zip(xs, ys) if x >= begin]
    return (min(late) - 0.1, max(late) + 0.1) if late else None


def plot_curves(shared, models, path):
    """Loss by optimization step: validation (QS figure 4) and training (figure 7), a row a family."""
    lines = {}
    for name, labels in panels(models).items():
        for kind, what in (("val", "validation"), ("train", "training batches")):
            of_panel = lines.setdefault(f"{name}, {what}".removeprefix(", "), {})
            for label in labels:
                runs = models[label].values()
                legend = f"{label} ({next(iter(runs))[0]['params']['total'] / 1e6:.2f}M, n = {len(runs)})"
                of_panel[legend] = style(label), [curve(events, kind) for events in runs]
    with figure(path, f"{caption(shared, models)}; the first fall is cut off", lines, 2, sharex=True, sharey=True,
                xlabel="optimization step", ylabel=f"loss, {unit(shared['tokens'])}") as axes:  # fmt: skip
        axes[0].set_ylim(late_range(lines))


def plot_overlay(kinds, path):
    """Validation loss of runs of any kinds (what differs, shared settings, models): colour and dash are the model's,
    markers those of the kind and the rate; a panel for each unit of loss."""
    batches = {shared["batch"] * shared["seq"] for _, shared, _ in kinds}
    xlabel = "optimization step" if len(batches) == 1 else "tokens, millions"
    lines, marks = {}, {}
    for what, shared, models in kinds:
        scale = 1 if len(batches) == 1 else shared["batch"] * shared["seq"] / 1e6
        for label, runs in models.items():
            label = ", ".join(filter(None, [label, what]))
            mark = MARKERS[marks.setdefault(label.partition(", ")[2], len(marks)) % len(MARKERS)]
            curves = [([scale * step for step in steps], losses) for steps, losses in map(curve, runs.values())]
            look = style(label) | {"marker": mark, "ms": 4, "markevery": 0.1}
            lines.setdefault(f"loss, {unit(shared['tokens'])}", {})[label] = look, curves
    title = "Validation loss; the first fall is cut off"
    with figure(path, title, lines, height=3.4, xlabel=xlabel, sharex=True) as axes:
        for ax, (name, of_panel) in zip(axes, lines.items()):
            ax.set_ylim(late_range({name: of_panel}))


def plot_steps(shared, models, path):
    """QS figure 3: bars of the steps to each target, points the seeds, over a bar its ratio to its reference."""
    goals, families = targets(models)[0], panels(models)
    compared = {goal: {label: both for label, _, both in pairs(models, ratio_steps_to(goal))} for goal in goals}
    with figure(path, f"{caption(shared, models)}; points: seeds; numbers: ratio of steps", [*families],
                ylabel="steps to the loss", sharey=True) as axes:  # fmt: skip
        for ax, labels in zip(axes, families.values()):
            width = 0.8 / len(labels)
            for i, label in enumerate(labels):
                other, colour = reference(label, models), style(label)["color"]
                for j, goal in enumerate(goals):
                    x = j + width * (i - (len(labels) - 1) / 2)
                    steps = [*map(steps_to(goal), models[label].values())]
                    reached = [s for s in steps if s is not None]
                    text, height = " not reached", 0
                    if len(reached) == len(steps):  # a mean over some of the seeds would be too low
                        both, height = compared[goal].get(label), statistics.fmean(reached)
                        text = f"  {mean_ratio(both)[0]:.2f}" if both else ""
                    elif reached:
                        text = f" {len(reached)} of {len(steps)} seeds"
                    legend = label + (f" / {other}" if other else "") if goal == goals[0] else None
                    ax.bar(x, height, 0.9 * width, color=colour, label=legend, alpha=0.6)
                    ax.plot([x] * len(reached), reached, ".", color="black", ms=3)
                    ax.text(x, max(reached) if height else 0, text, rotation=90, ha="center", va="bottom", fontsize=7)
            ax.set_xticks(range(len(goals)), [f"{goal} {unit(shared['tokens'])}" for goal in goals])
            ax.margins(y=0.2)


def plot_gap(shared, models, path):
    """QS figure 5: validation loss minus its reference's by step, the warmup shaded. Thin: seeds. Horizontal bands: the
    paper's gaps at its budget, of its own pairs. A model and itself in another shape is left out beside others."""
    lines, bands, warmup = {}, {}, shared.get("schedule") != "constant"
    compared = {label: (other, both) for label, other, both in pairs(models, lambda events: dict(zip(*curve(events))))}
    others = [label for label, (other, _) in compared.items() if split_shape(label)[0] != split_shape(other)[0]]
    for name, labels in panels(models).items():
        for label in (x for x in labels if x in (others or compared)):
            other, both = compared[label]
            gaps = [{step: ours[step] - theirs[step] for step in ours if step in theirs} for ours, theirs in both]
            curves = [([*gap], [*gap.values()]) for gap in gaps]
            lines.setdefault(name, {})[f"{label} - {other}"] = style(label), curves
            if label in PAPER["gap"] and other == COMPLEX[label] and unit(shared["tokens"]) == "bpc":
                bands[name] = label, [*map(float, PAPER["gap"][label].split(" to "))]
    values = [y for of_panel in lines.values() for _, curves in of_panel.values() for _, ys in curves for y in ys]
    values += [0, *(y for _, band in bands.values() for y in band)]
    title = f"{caption(shared, models)}; above 0: the second leads" + "; grey: warmup" * warmup
    with figure(path, title, lines, xlabel="optimization step", ylabel=f"gap, {unit(shared['tokens'])}",
                sharex=True, sharey=True) as axes:  # fmt: skip
        for ax, name in zip(axes, lines):
            if name in bands:
                label, band = bands[name]
                legend = f"the paper's {label} - {COMPLEX[label]}, at 1000 steps"
                ax.axhspan(*band, color=style(label)["color"], alpha=0.2, lw=0, label=legend)
            ax.axhline(0, color="black", lw=0.8)
            if warmup:
                ax.axvspan(0, warmup_end(shared)[0], color="0.92", zorder=0)
        axes[0].set_ylim(min(values) - 0.05, max(values) + 0.05)


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
    with figure(path, caption(shared, models), lines, min(3, len(lines)), xlabel="optimization step",
                ylabel="gradient norm", sharex=True, sharey=True) as axes:  # fmt: skip
        log_axis(axes[0], "y")


def plot_rates(shared, models, path):
    """Validation loss at the budget by peak learning rate, a row a family with a scale of its own."""
    found = {}
    for events in (events for runs in models.values() for events in runs.values()):
        s, loss = events[0]["settings"], loss_at(events, shared["steps"])
        if loss is not None:
            found.setdefault(spec_label(s["model"]), {}).setdefault(s["seeds"], {})[s["lr"]] = loss
    rates = sorted({rate for seeds in found.values() for losses in seeds.values() for rate in losses})
    curves = {label: [tuple(zip(*sorted(of.items()))) for of in seeds.values()] for label, seeds in found.items()}
    lines = {name: {label: (style(label) | {"marker": "o", "ms": 4}, curves[label]) for label in labels}
             for name, labels in panels(found).items()}  # fmt: skip
    title = caption(shared, models) + "; scales differ" * (len(lines) > 1)
    with figure(path, title, lines, xlabel="peak learning rate", ylabel=f"loss, {unit(shared['tokens'])}",
                sharex=True) as axes:  # fmt: skip
        log_axis(axes[0], "x", rates)


def differences(groups):
    """[{setting: value}] of what the groups of group_runs differ in; of init_from its folder, if that is enough."""
    corpora = [f"{shared['data']['name']} {shared['data']['sha256'][:8]}" for shared, _ in groups]
    settings = [shared | {"data": corpus} for (shared, _), corpus in zip(groups, corpora)]
    paths = {s["init_from"] for s in settings if "init_from" in s}
    short = len({Path(path).parent.name for path in paths}) == len(paths)
    for s in settings:
        path = s.get("init_from", "scratch")
        s["init_from"] = f"from {Path(path).parent.name if short and path in paths else path}"
    keys = dict.fromkeys(key for s in settings for key in s)
    differ = [key for key in keys if any(s.get(key) != settings[0].get(key) for s in settings)]
    return [{key: s.get(key) for key in differ} for s in settings]


def told(values):
    """Of `differences`, a text a setting."""
    return [value if key == "init_from" else f"{key} {value}" for key, value in values.items()]


def training_report(logs):
    """(tables, {file name: function that draws it into a path}) of all groups of runs."""
    groups, text, figures, sweeps, kinds = group_runs(logs), [], {}, {}, []
    if len(groups) > 1:
        differ = ", ".join(differences(groups)[0])
        text.append(f"Runs of {len(groups)} kinds, which differ in {differ} and are not averaged.")
        if not any(pairs(models, curve) for _, models in groups):
            text[-1] += " No ratios and no gaps: they would compare these settings, not models."
    for (shared, models), values in zip(groups, differences(groups)):
        kind = ", ".join(told(values))
        kinds.append((kind, shared, models))
        text += [f"### {kind}"] * bool(kind) + [training_tables(shared, models)]
        members = [events for runs in models.values() for events in runs.values()]
        drawn, finished = {}, [events for events in members if epoch_losses(events) and final_loss(events) is not None]
        if any(map(epoch_losses, members)):
            text += ["#### Epochs", epochs_table(members)]
        if len(models) > len({events[0]["settings"]["model"] for events in members}):
            drawn["rates"] = plot_rates
            text += ["No power laws: a model has several rates here."] * any(map(epoch_losses, members))
        else:
            drawn["curves"] = plot_curves
            drawn |= {"steps": plot_steps} if targets(models)[0] else {}
            drawn |= {"gap": plot_gap} if pairs(models, curve) else {}
            drawn |= {"gradients": plot_gradients} if any(layer_spread(events)[0] for events in members) else {}
            protocol = json.dumps({key: value for key, value in shared.items() if key != "size"}, sort_keys=True)
            named = {key: value for key, value in values.items() if key != "size"}
            sweeps.setdefault(protocol, (named, shared["tokens"], []))[-1].extend(finished)
        for name, plot in drawn.items():
            figures[figure_name(name, *values.values())] = partial(plot, shared, models)
    if "curves.png" not in figures and sum(len(models) for _, models in groups) <= MOST_CURVES:
        figures["curves.png"] = partial(plot_overlay, kinds)
    for named, tokens, finished in sweeps.values():
        sizes = {}
        for events in finished:
            sizes.setdefault(sweep_name(events)[0], set()).add(events[0]["params"]["total"])
        swept = [events for events in finished if len(sizes[sweep_name(events)[0]]) > 1]
        if swept:
            table, fits = scaling_table(swept, tokens)
            text += ["### " + ", ".join(["Scaling", *told(named)]), table]
            figures[figure_name("scaling", *named.values())] = partial(plot_scaling, fits, tokens)
    return "\n\n".join(text), figures


def csv_text(logs):
    """{path: events} as CSV, a row for each run and evaluation; losses in nats a token. The event "val" is of the fixed
    windows, "final" and "eval" of a whole split, or in tasks of a length."""
    rows = []
    for path, events in logs.items():
        s = events[0]["settings"] | {"data": events[0]["data"].get("name")}
        run = {"run": path} | {key: s.get(key) for key in ("model", "task", "size", "data", "lr", "steps", "epochs")}
        run |= {"seed": s.get("seeds", s.get("seed")), "parameters": events[0]["params"]["total"]}
        for e in events:
            if e["event"] in ("val", "final", "eval") and ("val_loss" in e or "acc" in e):
                found = ("event", "split", "step", "epoch", "tokens", "time_s", "val_loss", "length", "acc")
                rows.append(run | {key: e.get(key) for key in found})
    columns = [key for key in (rows or [{}])[0] if any(row[key] is not None for row in rows)]
    writer = csv.DictWriter(text := io.StringIO(), columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ---- all ratios of steps in one figure ----


def bounded_ratio(runs, others, target):
    """The steps of one model to a loss over another's, over the seeds of both: (sign, [(steps, the other's)]).

    sign: "="; or where runs of one model do not reach it, and their last steps stand for them, ">", the ratio is at
    least that, or "<", at most; or "", with no pairs, if nothing follows."""
    signs, both = set(), []
    for seed in (seed for seed in runs if seed in others):
        steps = [steps_to(target)(events) for events in (runs[seed], others[seed])]
        last = [(curve(events)[0] or [0])[-1] for events in (runs[seed], others[seed])]
        both.append(tuple(end if x is None else x for x, end in zip(steps, last)))
        signs.add({(0, 0): "=", (1, 0): ">", (0, 1): "<"}.get(tuple(x is None for x in steps), ""))
    sign, *others = signs.difference("=") or "="
    return (sign, both) if sign and both and not others and min(map(min, both)) > 0 else ("", [])


def forest(folders):
    """All ratios of steps of runs of train.py, {name of a folder: logs}: (table, function that draws the figure)."""
    found, named = {}, ("size", "steps", "schedule", "warmup")  # {group: {(label, reference): {loss: bounded_ratio}}}
    for folder, groups in ((folder, group_runs(logs)) for folder, logs in folders.items()):
        for (shared, models), values in zip(groups, differences(groups)):
            name = f"{folder}: {caption(shared, models).removeprefix(folder + ', ')}"
            rows = found.setdefault("; ".join([name, *told({k: v for k, v in values.items() if k not in named})]), {})
            for label, other, _ in pairs(models, curve):
                ratios = {goal: bounded_ratio(models[label], models[other], goal) for goal in targets(models)[0]}
                rows[label, other] = {f"{goal} {unit(shared['tokens'])}": ratio for goal, ratio in ratios.items()}
    losses = {loss for rows in found.values() for ratios in rows.values() for loss in ratios}
    losses, table = sorted(losses, key=lambda loss: (-float(loss.split()[0]), loss)), []
    if not losses:
        raise InputError("no two models of these runs have a ratio of steps")
    for group, rows in found.items():
        for (label, other), ratios in rows.items():
            cells = []
            for sign, both in (ratios.get(loss, ("", [])) for loss in losses):
                cells.append(ratio_text(both) if sign == "=" else f"{sign} {mean_ratio(both)[0]:.2f}" if sign else "-")
            paper = PAPER["ratio of steps"].get(label, "-") if other == COMPLEX.get(label) else "-"
            table.append([group, f"{label} / {other}", *cells, paper])
    kinds = plural(len(found), "kind")
    text = (f"Runs of {kinds}: steps of a pair's first model to a validation loss over the second's. "
            "Above 1: the second is faster. Geometric means over seeds, 95 % intervals. > and <: runs do not reach the "
            "loss, their last step stands for them, and the ratio is a bound.")  # fmt: skip
    return markdown(["runs", "pair", *losses, "the paper's"], table, note=text), partial(plot_forest, found)


def plot_forest(found, path):
    """A row for each pair of `forest`: from top to bottom the ratios to ever lower losses, with 95 % intervals."""
    lines = sum(1 + len(rows) for rows in found.values())
    title = "Steps to a validation loss, of the first model of a pair over those of the second. In each row the loss "
    title += "falls from top to bottom. Bars: 95 % over seeds; triangles: at least, or at most"
    xlabel = "the first is faster  <     ratio of steps     >  the second is faster"
    with figure(path, title, [""], height=0.34 * lines, xlabel=xlabel) as (ax,):
        y, names, means = 0, {}, [0.5, 4]
        for group, rows in found.items():
            look = {"weight": "bold", "fontsize": 8, "bbox": {"color": "white", "pad": 1}}
            ax.text(0.01, y, group, transform=ax.get_yaxis_transform(), va="center", **look)
            for (label, other), ratios in rows.items():
                y -= 1
                names[y] = f"{label}\n/ {other}"
                bounded = [ratio for ratio in ratios.values() if ratio[0]]
                for at, (sign, both) in zip(np.linspace(y + 0.36, y - 0.36, len(bounded) + 2)[1:-1], bounded):
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
# Tasks (CSP section 3, appendices A and B)

PAPER_ORDER = ("csp-vanilla", "csp-fast", "rnn", "complex-rnn", "signed-mamba", "decoder")


def check_task(events, path):
    """The events of a run of tasks.py, which if it is finished has all that the tables need, or InputError."""
    events = [e for e in events if e["event"] in ("header", "train", "eval", "final")]
    try:
        header, s = events[0], events[0]["settings"]
        whole = all(isinstance(s[key], int) for key in ("seed", "epochs", "train_length"))
        whole = whole and all(isinstance(s[key], str) for key in ("model", "task")) and header["params"]["total"] > 0
        whole = whole and max(header["data"]["shares"]) <= 1
        if events[-1]["event"] == "final":
            lengths = {e["length"]: len(e["acc_by_pos"]) for e in events if e["event"] == "eval" and e["acc"] <= 1}
            whole = whole and lengths == {n: n for n in s["lengths"]} and events[-1]["skipped"] >= 0
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise InputError(f"{path} is a damaged log: parts of a run of tasks.py are missing")
    return events


def protocol(events):
    """What runs must have in common to stand in one table."""
    return {k: v for k, v in events[0]["settings"].items() if k not in ("model", "task", "seed")}


def group_tasks(logs):
    """{task: {model: {seed: events}}}, the paper's models first, or InputError if the runs do not belong together."""
    known = {model: i for i, model in enumerate(PAPER_ORDER)}
    logs = sorted(logs, key=lambda e: (known.get(e[0]["settings"]["model"], len(known)), e[0]["settings"]["seed"]))
    groups, specs, first = {}, {}, protocol(logs[0])
    for events in logs:
        s = events[0]["settings"]
        task, model = map(spec_label, (s["task"], s["model"]))
        if specs.setdefault(task, s["task"]) != s["task"] or specs.setdefault(model, s["model"]) != s["model"]:
            raise InputError(f"{task} or {model} is of two files: name the runs of one")
        for k, v in first.items():
            if s.get(k) != v:
                raise InputError(f"runs of different protocols do not go into one table: {k} is {v} and {s.get(k)}")
        if events[-1]["event"] != "final":
            raise InputError(f"the run of {model} on {task}, seed {s['seed']}, is not finished: run it again")
        if groups.setdefault(task, {}).setdefault(model, {}).setdefault(s["seed"], events) is not events:
            raise InputError(f"two runs of {model} on {task} with seed {s['seed']}: name one of them")
    return groups


def accuracies(events):
    """{length: accuracy} of a finished run."""
    return {e["length"]: e["acc"] for e in events if e["event"] == "eval"}


def task_tables(logs):
    """Markdown: accuracy by length with the paper's (CSP tables 1-4), spread over seeds (table 5), paired differences,
    every seed, and the rotation that CSP learnt for each symbol."""
    groups, s = group_tasks(logs), logs[0][0]["settings"]
    lengths, longest, at = s["lengths"], s["lengths"][-1], [f"L={length}" for length in s["lengths"]]
    text = [
        f"Trained at length {s['train_length']} for {plural(s['epochs'], 'epoch')}, tested on 1,000 sequences a "
        "length. Mean over the seeds; in brackets the lowest and the highest. *Italics: the paper's mean, at 300 "
        "epochs.*"
    ]
    paired, spread, every_seed, angles = [], [], [], []
    for task, models in groups.items():
        rows, earlier = [], {}
        for model, runs in models.items():
            acc = {seed: accuracies(events) for seed, events in runs.items()}
            means, seeds = PAPER_TASKS.get(task, {}).get(model, ((), ()))
            printed = {n: f" *{mean:.3f}*" for n, mean in zip(PAPER_LENGTHS, means)}
            cells = [range_text([a[n] for a in acc.values()], 3) + printed.get(n, "") for n in lengths]
            rows.append([model, f"{next(iter(runs.values()))[0]['params']['total']:,}", len(runs), *cells])
            if len(acc) > 1:
                theirs = f"{statistics.stdev(seeds):.3f}" if seeds and longest == 64 else "-"
                deviation = statistics.stdev(a[longest] for a in acc.values())
                spread.append([task, model, len(acc), f"{deviation:.3f}", theirs])
            for other, of_other in earlier.items():
                both = [(a, of_other[seed]) for seed, a in acc.items() if seed in of_other]
                if len(both) > 1:
                    cells = [difference_text([(a[n], b[n]) for a, b in both]) for n in lengths]
                    paired.append([task, f"{model} - {other}", len(both), *cells])
            earlier[model] = acc
            for seed, events in runs.items():
                every_seed.append([task, model, seed, *(f"{acc[seed][n]:.3f}" for n in lengths)])
                for i, ((zero, sure0), (one, sure1)) in enumerate(events[-1].get("theta", ()), 1):
                    turn = (one - zero + math.pi) % (2 * math.pi) - math.pi
                    found = f"{zero:+.3f} ({sure0:.2f})", f"{one:+.3f} ({sure1:.2f})", f"{turn / math.pi:+.3f}"
                    angles.append([task, model, seed, i, *found])
        text.append(markdown(["model", "parameters", "seeds", *at], rows, f"### {task}"))
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
    s, lines = header["settings"], {"by length": {}, "by position": {}}
    length, longest = s["train_length"], max(s["lengths"])
    for model, runs in models.items():
        logged = [[e for e in events if e["event"] == "eval"] for events in runs.values()]
        by_length = [tuple(zip(*sorted((e["length"], e["acc"]) for e in evals))) for evals in logged]
        by_position = [next(e["acc_by_pos"] for e in evals if e["length"] == longest) for evals in logged]
        lines["by length"][model] = style(model), by_length
        scored = [[(t, acc) for t, acc in enumerate(run, 1) if acc is not None] for run in by_position]
        lines["by position"][model] = style(model), [tuple(zip(*points)) for points in scored]
    title = f"{task}: {plural(s['epochs'], 'epoch')} at length {length} (dotted), {seeds_a_model(models)}"
    with figure(path, f"{title}; grey: always the commonest answer", lines, 2, height=3, ylabel="accuracy",
                sharey=True) as (left, right):  # fmt: skip
        for ax in (left, right):
            ax.axvline(length, color="0.4", ls=":", lw=1)
        right.axhline(max(header["data"]["shares"]), color="0.4", ls="--", lw=1)
        left.set(xlabel="length of the test sequences", ylim=(-0.03, 1.03))
        right.set_xlabel(f"position in sequences of length {longest}")


def plot_seeds(groups, path):
    """Accuracy of every seed at the longest length beside the paper's (CSP appendix B)."""
    longest = max(accuracies(next(iter(next(iter(next(iter(groups.values())).values())).values()))))
    title = f"Every seed, accuracy at length {longest}"
    with figure(path, title, [*groups], len(groups), 3.2, ylabel="accuracy", sharey=True) as axes:
        for ax, (task, models) in zip(axes, groups.items()):
            for i, (model, runs) in enumerate(models.items()):
                ours = [accuracies(events)[longest] for events in runs.values()]
                theirs = PAPER_TASKS.get(task, {}).get(model, ((), ()))[1] if longest == 64 else ()
                for x, values, marker, label in ((i - 0.15, ours, "o", "ours"), (i + 0.15, theirs, "x", "the paper's")):
                    ax.plot([x] * len(values), values, marker, color=style(model)["color"], ms=5, alpha=0.7)
                    ax.plot([], [], marker, color="0.3", label=label if values else None)
            ax.set_xticks(range(len(models)), models, rotation=40, ha="right")
            ax.set_xlim(-0.5, len(models) - 0.5)
        ax.set_ylim(None, 1.03)  # of all panels, when all are drawn


def plot_dynamics(groups, model, path):
    """Gradient norm and accuracy at the training length, by epoch, of every seed (CSP figure 6)."""
    groups = {task: models[model] for task, models in groups.items() if model in models}
    length = next(iter(next(iter(groups.values())).values()))[0]["settings"]["train_length"]
    lines = {}
    for key, what in (("grad_max", "gradient"), ("acc", "accuracy")):
        for task, runs in groups.items():
            of_panel = lines.setdefault(f"{task}, {what}", {})
            for (seed, events), colour in zip(runs.items(), cycle(COLOURS.values())):
                train = [e for e in events if e["event"] == "train"]
                curve = [e["epoch"] for e in train], [e[key] for e in train]
                of_panel[f"seed {seed}"] = {"color": colour, "lw": 0.8}, [curve]
    ylabel = "largest gradient norm\nsince the last point", f"accuracy at length {length}"
    with figure(path, f"{model}: training, a line a seed", lines, len(groups), 2.2, "epoch", ylabel, sharex=True,
                sharey="row") as axes:  # fmt: skip
        axes[0].set_yscale("log")


def task_figures(groups):
    """{file name: function that draws it into a path} of group_tasks."""
    names = list(dict.fromkeys(model for models in groups.values() for model in models))
    figures = {figure_name("lengths", task): partial(plot_lengths, task, runs) for task, runs in groups.items()}
    dynamics = partial(plot_dynamics, groups, "csp-fast" if "csp-fast" in names else names[0])
    return figures | {"seeds.png": partial(plot_seeds, groups), "dynamics.png": dynamics}


# ----------------------------------------------------------------------------------------------------------------------
# PAM: the paper's metric and its scaling fits (PAM section III)

SHAPE_OPTIONS = ("D", "L", "H", "N", "d", "heads", "mlp", "width")


def epoch_losses(events):
    """{epoch: ([loss at its end], [best loss before that])} of a run in epochs, in nats; a list may be empty."""
    found = {}
    for e in events:
        if e["event"] == "val" and e.get("epoch"):
            epoch = math.ceil(e["epoch"])
            found.setdefault(epoch, ([], []))[e["epoch"] < epoch].append(e["val_loss"])
    return {epoch: (end, sorted(before)[:1]) for epoch, (end, before) in found.items()}


def late_losses(events):
    """PAM section III: the evaluations that its metric averages, in nats: in each of the last three epochs the one at
    its end and the best one before that. `events` is the log of a run in epochs. Raises InputError if it has none."""
    found = epoch_losses(events)
    if not found:
        raise InputError("no late evaluations: the run was not trained in epochs (--epochs, or a size of PAM's sweep)")
    return [loss for epoch, (end, best) in found.items() if epoch > max(found) - 3 for loss in best + end]


def late_metric(values):
    """Mean, standard deviation (n - 1) and sigma_log10 = sigma / (y ln 10) of evaluations (PAM section III)."""
    mean, sigma = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, sigma, sigma / (mean * math.log(10))


def epochs_table(logs):
    """Markdown: loss in nats a token and perplexity by epoch, and the paper's late metric of each finished run."""
    rows = []
    for label, events in zip(run_labels(logs), logs):
        found, run = epoch_losses(events), [label, *map(events[0]["settings"].get, ("size", "seeds"))]
        if not found:  # begun, not yet evaluated
            continue
        for epoch, losses in found.items():
            end, best = ([*of, math.nan][0] for of in losses)
            if losses[0] or epoch < max(found):  # ended
                rows.append([*run, epoch, f"{end:.4f}", f"{best:.4f}", f"{math.exp(end):.2f}"])
        if final_loss(events) is not None:
            late = late_losses(events)
            (loss, sigma, _), (ppl, ppl_sigma, _) = late_metric(late), late_metric([math.exp(x) for x in late])
            spread = f"{loss:.4f} +- {sigma:.4f}", "", f"{ppl:.2f} +- {ppl_sigma:.2f}"
            rows.append([*run, f"late, n = {len(late)}", *spread])
    return markdown(["model", "size", "seed", "epoch", "loss", "best before", "perplexity"], rows)


def power_law(sizes, values):
    """log10 y = a + b log10 N by least squares, unweighted (PAM section III does not say). Returns a, b and their 2 x 2
    covariance, from the scatter of the points about the line (nan for two points, which say nothing of it)."""
    x, y = np.log10(np.asarray(sizes, float)), np.log10(np.asarray(values, float))
    if len(np.unique(x)) < 2:
        raise InputError("a power law needs at least two sizes")
    (b, a), covariance = np.polyfit(x, y, 1, cov="unscaled")
    scatter = ((y - a - b * x) ** 2).sum() / (len(x) - 2) if len(x) > 2 else math.nan
    return float(a), float(b), scatter * covariance[::-1, ::-1]


def crossing(first, second, freedom):
    """(N, y, standard error of log10 N) at which two power laws (a, b, covariance) meet; None if 0 lies in the 95 %
    interval of the difference of their slopes. freedom: degrees of freedom of both, points minus 4."""
    (a, b, covariance), (c, d, other) = first, second
    apart = freedom > 0 and abs(b - d) > t95(freedom) * math.sqrt(covariance[1, 1] + other[1, 1])  # nan: of two points
    if not apart or abs(c - a) > 100 * abs(b - d):  # all but parallel
        return None
    x = (c - a) / (b - d)
    variance = (covariance + other) * [[1, x], [x, x * x]] / (b - d) ** 2  # of first order in the errors of a, b, c, d
    return 10**x, 10 ** (a + b * x), math.sqrt(abs(variance.sum()))  # abs: of a rounding error


def slope_text(law):
    return f"{law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}"


def split_shape(label):
    """(model with its other options, [options of its shape])."""
    model, *options = re.split("[: ]", label)
    shape = sorted(option for option in options if option.split("=")[0] in SHAPE_OPTIONS)
    return ":".join([model, *sorted({*options}.difference(shape))]), shape


def sweep_name(events):
    """(model with its other options, size with the options of shape) of a run."""
    name, shape = split_shape(spec_label(events[0]["settings"]["model"]))
    return name, ":".join([events[0]["settings"]["size"], *shape])


def scaling_table(logs, tokens):
    """Fits of every model family in `logs` in loss and in perplexity, and the late loss at each size, beside the
    paper's: all of it if `tokens` are its own, "gpt2", else the slopes of the loss and their crossing. Returns
    (Markdown, {quantity: {model: ([N], [y], [sigma_log10], (a, b, covariance), its crossing with the first)}})."""
    runs, by_size, own = {}, {}, tokens == "gpt2"  # {model: [run]}, {size: {model: {seed: run}}}
    for events in logs:
        (name, size), seed, late = sweep_name(events), events[0]["settings"]["seeds"], late_losses(events)
        run = {"N": events[0]["params"]["total"], "loss": late_metric(late),
               "perplexity": late_metric([math.exp(x) for x in late])}  # fmt: skip
        runs.setdefault(name, []).append(run)
        if by_size.setdefault(size, {}).setdefault(name, {}).setdefault(seed, run) is not run:
            raise InputError(f"two runs of {name}, size {size}, with seed {seed}: name one of them")
    names = sorted(runs, key=lambda name: name != "pam")
    first, fits, rows, ends = names[0], {}, [], []  # the others are compared with the first
    for quantity, paper in PAPER_FITS.items():
        paper = paper if own or quantity == "loss" else {}
        models = fits.setdefault(quantity, {})
        for name in names:
            sizes, values, sigmas = zip(*sorted((run["N"], run[quantity][0], run[quantity][2]) for run in runs[name]))
            law, met = power_law(sizes, values), None
            if name != first:
                met = crossing(models[first][3], law, len(models[first][0]) + len(sizes) - 4)
            models[name] = sizes, values, sigmas, law, met
            place = [f"{met[0]:.2g} ({met[1]:.3g})", f"{math.log10(met[0]):.2f} +- {met[2]:.2f}"] if met else ["-", "-"]
            theirs = "-"
            if paper and (first, name) == ("pam", "sam"):
                theirs = f"{paper['crossing'][0]:.2g}" + f" ({paper['crossing'][1]})" * own
            slopes = [slope_text(law), paper.get(name, "-")]
            rows.append([quantity, name, len(sizes), len({*sizes}), *slopes, *place, theirs])
    for size in sorted(by_size, key=lambda size: max(run["N"] for of in by_size[size].values() for run in of.values())):
        for name, seeds in by_size[size].items():
            theirs = by_size[size].get(first, {}) if name != first else {}
            both = [(theirs[s]["perplexity"][0], run["perplexity"][0]) for s, run in seeds.items() if s in theirs]
            compared = ratio_text(both) + of_seeds(len(both), len(seeds)) if both else "-"
            loss = range_text([run["loss"][0] for run in seeds.values()], 3)
            printed = PAPER_LOSSES.get(size, {}).get(name, "-") if own else "-"
            printed_ratio = PAPER_RATIOS.get(size, "-") if own and (first, name) == ("pam", "sam") else "-"
            total = f"{next(iter(seeds.values()))['N']:,}"
            ends.append([size, name, total, len(seeds), loss, printed, compared, printed_ratio])
    head_of_ends = ["size", "model", "parameters", "seeds", "late loss, nats", "the paper's",
                    f"perplexity of {first} / its own", "the paper's"]  # fmt: skip
    head = ["quantity", "model", "runs", "sizes", "slope +- standard error", "the paper's slope",
            f"crosses {first} at N (y)", "log10 N +- standard error", "the paper's"]  # fmt: skip
    note = ("Fits of log10 y = a + b log10 N to all finished runs. "
            "Where the slopes cannot be told apart (95 %), there is no crossing.")  # fmt: skip
    return "\n\n".join([markdown(head_of_ends, ends), markdown(head, rows, note=note)]), fits


def plot_scaling(fits, tokens, path):
    """PAM figure 2: loss and perplexity against parameters, error bars, fits, their crossing unless it is far away;
    hollow markers are the paper's ends of the sweep, of its `tokens`. Runs of one size stand side by side."""
    title = "Late-epoch loss and perplexity by parameters, a point a run"
    with figure(path, title, ["", ""], height=3, xlabel="parameters", sharex=True,
                ylabel=("validation loss, nats", "validation perplexity")) as axes:  # fmt: skip
        for ax, (quantity, models) in zip(axes, fits.items()):
            first, paper = next(iter(models)), PAPER_FITS[quantity] if tokens == "gpt2" or quantity == "loss" else {}
            largest = max(max(sizes) for sizes, *_ in models.values())
            far = [met[0] for *_, met in models.values() if met and largest / 1e3 < met[0] < 1e3 * largest]
            for i, (name, (sizes, values, sigmas, law, met)) in enumerate(models.items()):
                colour, marker = style(name)["color"], "^*os"[i % 4]
                bars = [y * s * math.log(10) for y, s in zip(values, sigmas)]
                beside = [n * 1.012 ** (4 * i + list(sizes[:k]).count(n)) for k, n in enumerate(sizes)]
                label = f"{name}, {quantity}: slope {slope_text(law)}"
                label += f" (the paper's {paper[name]})" if name in paper else ""
                ax.errorbar(beside, values, bars, fmt=marker, color=colour, ms=5, lw=0.8, capsize=2, label=label)
                ends = [min(*sizes, *far), max(*sizes, *far)]
                ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=colour, lw=1)
                for size, losses in PAPER_LOSSES.items() if tokens == "gpt2" else ():
                    at = 1e6 * float(size[:-1])
                    if name in losses and sizes[0] / 2 < at < 2 * sizes[-1]:
                        theirs = losses[name] if quantity == "loss" else math.exp(losses[name])
                        ax.plot(at, theirs, marker, color=colour, mfc="none", ms=9)
                if met and met[0] in far:
                    label = f"{quantity}: {name} crosses {first} at 10^({math.log10(met[0]):.2f} +- {met[2]:.2f})"
                    if paper and (first, name) == ("pam", "sam"):
                        label += f" (the paper's {paper['crossing'][0]:.2g})"
                    ax.axvline(met[0], ls=":", color="grey", label=label)
            ax.set_yscale("log")
            log_axis(ax, "x", form=lambda n, _: f"{n / 1e6:g}M")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")


def find_logs(run):
    """What a RUN on the command line names: a log, a run folder, or all in a folder of these."""
    path = Path(os.path.expanduser(run))
    if not path.is_dir() or (path / "log.jsonl").exists():
        return [path]
    return sorted(path.glob("*.jsonl")) or sorted(path.glob("*/log.jsonl")) or [path]


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, log.jsonl files, or folders of these")
    where = "folder for the tables, as tables.md, and the figures; or one figure: gap.pdf, or curves as any.pdf"
    parser.add_argument("--out", help=where)
    parser.add_argument("--csv", metavar="FILE", help="file for all evaluations, a row each")
    parser.add_argument("--forest", action="store_true", help="one figure: all ratios of steps, by folder")
    args = parser.parse_args()
    alone = Path(os.path.expanduser(args.out or ""))  # a figure, if it ends as one
    is_figure = alone.suffix.lower() in FORMATS
    out = None if args.out is None else alone.parent if is_figure else parse_out(args.out)
    evaluations = Path(os.path.expanduser(args.csv or ""))
    if args.csv is not None and not evaluations.name:
        raise InputError(f"--csv {args.csv or repr(args.csv)} must be a file: all evaluations go into it")
    logs = {path: read_log(path) for run in args.runs for path in find_logs(run)}
    programs = {run: {"task" in logs[path][0]["settings"] for path in find_logs(run)} for run in args.runs}
    of_tasks, *both = set().union(*programs.values())
    if both:
        folders = first_five([run for run, found in programs.items() if True in found])
        several = "logs of train.py and of tasks.py do not go into one report"
        raise InputError(f"{several}: leave out those of tasks.py, in {folders}")
    written, tables = None, "tables.md"
    logs = {path: (check_task if of_tasks else check_training)(events, path) for path, events in logs.items()}
    if args.forest and of_tasks:
        raise InputError("--forest takes runs of train.py: those of tasks.py have no steps to a loss")
    if args.forest:
        folders = {}
        for path, events in logs.items():
            folder = (path.parent if path.name == "log.jsonl" else path).absolute().parent.name
            folders.setdefault(folder, []).append(events)
        text, plot = forest(folders)
        name = alone if is_figure else Path("forest.png")
        figures, tables = {name.name: plot}, f"{name.stem}.md"
    elif of_tasks:
        text, figures = task_tables([*logs.values()]), task_figures(group_tasks([*logs.values()]))
    else:
        text, figures = training_report([*logs.values()])
    if is_figure and not args.forest:
        name = f"{alone.stem}.png"
        if not of_tasks and name not in figures and re.split(r"\W|_", alone.stem)[0] not in FIGURES:
            name = "curves.png"  # under a name of the user's own
        if name not in figures:
            too_many = name == "curves.png" and not of_tasks
            split = [part for part in figures if too_many and part.startswith("curves-")]
            names = ", ".join(part.removesuffix(".png") for part in split or figures)
            fault = f"would hold more than {MOST_CURVES} curves" if too_many else "is none of their figures"
            raise InputError(f"--out {args.out} {fault}: these runs have {names}")
        figures, written = {alone.name: figures[name]}, ""
    if args.csv is not None:
        with explain(f"write {evaluations}"):
            replace_file(evaluations, lambda f: f.write(csv_text(logs).encode(errors="surrogateescape")))
    show_report(text, figures, out, written, tables)


if __name__ == "__main__":
    command_line(main)
