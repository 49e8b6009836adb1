"""The logs of train.py and tasks.py, written and read: every table and figure of the three papers that logs can give.

    python report.py runs/*-stdlib-*                   steps to a loss, ratios, gaps: on the terminal
    python report.py runs/*-stdlib-* --out figures     and, with the figures, into a folder
    python report.py RUN RUN --out mine.pdf            the curves alone, under any name: .png, .pdf or .svg
    python report.py RUN RUN --out gap.pdf             one figure alone that has this name in the folder
    python report.py runs/pam* --csv losses.csv        a row for each run and evaluation
    python report.py runs/tasks-40 --out figures       length generalization
    python report.py runs/pam* --out figures           runs in epochs: also power laws and their crossing
    python report.py --forest results/english results/stdlib --out forest.png    all ratios of steps in one figure

A RUN is a run folder, a log, or a folder of these. What checkpoints can give is diagnose.py's.
Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691),
section 8; PAM, section III; CSP, section 3. Losses in the logs are in nats per token; divided by ln 2 they are bpc,
bits per character, if the tokens are bytes, and else bits a token. "+-" is half a 95 % confidence interval, of slopes
the standard error.
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
from collections import namedtuple
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from data import InputError, Parser, command_line, explain, note, replace_file


class Log:
    """log.jsonl of a run, one JSON object a line. Of several ranks the first alone has one."""

    def __init__(self, folder, start, keep=None):
        """start: the time.monotonic() at which time_s is 0; keep: on resuming, events after this step are dropped."""
        self.path, self.start = folder / "log.jsonl", start
        if keep is not None and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= keep and e["event"] not in ("final", "sample")]
            write_log(self.path, kept)
        elif self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            with open(self.path, "a") as f:
                f.write("\n")  # after a line that a kill cut short

    def write(self, event, step, tokens, **values):
        time_s = round(time.monotonic() - self.start, 3)
        line = json.dumps({"event": event, "step": step, "tokens": tokens, "time_s": time_s} | values)
        with explain(f"write {self.path}"), open(self.path, "a" if event == "header" else "r+") as f:
            f.seek(0, os.SEEK_END)  # r+: a log that was deleted is not begun anew, without its header
            f.write(line + "\n")

    def sync(self):
        """What was written is on the disk when this returns."""
        with explain(f"write {self.path}"), open(self.path, "r+") as f:
            os.fsync(f.fileno())


def write_log(path, events):
    """A whole log.jsonl, in a folder that is made if need be."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    with explain(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
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
        git = subprocess.run(command, capture_output=True, check=True, timeout=2, env=env, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        git = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"git": git, "world": world, "threads": torch.get_num_threads(), "versions": versions, "device": name}


def read_log(path):
    """Events of a run, in order. `path` is a log.jsonl or its run folder. Raises InputError if it holds no header.

    A line that a kill cut short, or whose loss is no finite number, is left out, with a note on stderr."""
    path = Path(path, "log.jsonl") if Path(path).is_dir() else Path(path)
    with explain(f"read the log {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    events, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            needed = {"val": "val_loss", "train": "loss"}.get(event["event"], "step")
            if not all(map(math.isfinite, (event["step"], event[needed], event.get("val_loss", 0)))):
                raise ValueError("not finite")
            events.append(event)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            bad.append(str(number))
    if not events or any(type(events[0].get(key)) is not dict for key in ("settings", "data", "params")):
        raise InputError(f"{path} is not a log of train.py or tasks.py: its first line is no header")
    if any(e["event"] == "header" for e in events[1:]):
        raise InputError(f"{path} holds the logs of several runs: put them into files of their own")
    if bad:
        note(f"note: of {path} these lines cannot be read and are left out: {', '.join(bad)}")
    return events


def read_logs(paths):
    """{path: read_log(path)}, with each path in its header, for messages."""
    return {path: [header | {"path": str(path)}, *events] for path in paths for header, *events in [read_log(path)]}


# ----------------------------------------------------------------------------------------------------------------------
# What the papers print

# QS of its 253M models on enwik8, OpenWebText and FineWeb, one seed each: {table of ours: {column: {row: text}}}. Its
# tables are not in the text: of most cells it has a range, or one corpus, or "about".
PAPER = {
    "steps": {  # table 6
        "2.5 bpc": {"hmamba": "75-79", "mamba": "237-252"},
        "2.0 bpc": {"hmamba": "191 enwik8", "mamba": "575 enwik8", "htransformer": "219 owt", "transformer": "484 owt"},
    },
    "ratio": dict.fromkeys(  # table 5
        ("2.5 bpc", "2.2 bpc", "2.0 bpc"), {"mamba / hmamba": "about 3", "transformer / htransformer": "about 2"}
    ),
    "gap": {  # tables 7-8: of owt and fineweb, and at 1000 steps of all three
        "end of warmup": {"mamba - hmamba": "0.321 and 0.368", "transformer - htransformer": "larger than at the end"},
        "the budget": {"mamba - hmamba": "0.315 to 0.396", "transformer - htransformer": "-0.132 to 0.034"},
    },
    "loss": {"whole split": {"transformer": "1.384 enwik8", "htransformer": "1.516 enwik8"}},  # table 8
    "gradients": {"largest over smallest": {"hmamba": "about 2", "mamba": "more than 10"},
                  "last over first": {"mamba": "10 to 100"}},  # 8.4
}  # fmt: skip
PAPER_COST = ("The paper, to 2.0 bpc: H-Mamba 0.23 and Mamba 0.79 billion tokens of FineWeb (9.3); H-Transformer 0.8 "
              "and Transformer 0.9 hours on OpenWebText, four A100 (8.4).")  # fmt: skip
PAPER_WARMUP = 0.75  # of 1000 steps, table 4

# CSP tables 2-4: mean accuracy at these lengths, then the five seeds at 64. Table 1 prints other means at 16 and 32.
PAPER_LENGTHS = (16, 32, 48, 64)
PAPER_TASKS = {
    "parity": {
        "csp-vanilla": ((1.000, 0.970, 0.884, 0.782), (0.731, 0.716, 1.000, 0.737, 0.724)),
        "csp-fast": ((1.000, 0.960, 0.891, 0.756), (0.895, 0.628, 0.775, 0.759, 0.721)),
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 0.999, 0.998, 0.995), (1.000, 0.982, 0.995, 0.998, 1.000)),
        "signed-mamba": ((0.971, 0.824, 0.743, 0.661), (0.677, 0.666, 0.696, 0.595, 0.673)),
        "decoder": ((0.973, 0.729, 0.649, 0.606), (0.615, 0.602, 0.592, 0.616, 0.603)),
    },
    "mod3": {
        "csp-vanilla": ((1.000, 0.965, 0.927, 0.927), (0.978, 0.836, 0.997, 0.826, 0.996)),
        "csp-fast": ((1.000, 0.888, 0.799, 0.684), (0.697, 0.663, 0.623, 0.746, 0.691)),
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "signed-mamba": ((1.000, 0.642, 0.608, 0.564), (0.569, 0.570, 0.571, 0.563, 0.549)),
        "decoder": ((1.000, 0.541, 0.509, 0.484), (0.485, 0.484, 0.480, 0.481, 0.492)),
    },
    "dyck1": {
        "csp-vanilla": ((1.000, 0.899, 0.864, 0.845), (0.748, 0.785, 0.850, 0.934, 0.907)),
        "csp-fast": ((0.997, 0.919, 0.890, 0.871), (0.917, 0.916, 0.840, 0.751, 0.931)),
        "rnn": ((1.000, 1.000, 0.994, 0.988), (0.994, 0.987, 0.995, 0.976, 0.985)),
        "complex-rnn": ((1.000, 0.990, 0.981, 0.967), (0.983, 0.973, 0.980, 0.937, 0.961)),
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

# Two-sided 95 % quantiles of Student's t for 1 ... 30 degrees of freedom; for more the last one is up to 4 % too large.
T95 = (12.706205, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881,
       2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596, 2.07961, 2.07387, 2.06866, 2.06390,
       2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227)  # fmt: skip


def mean_interval(values):
    """Mean and half-width of its 95 % confidence interval (Student's t); the half-width is None for a single value."""
    n, mean = len(values), statistics.fmean(values)
    return mean, np.interp(n - 1, range(1, 31), T95) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None


def mean_ratio(both):
    """Geometric mean of x / y over pairs (x, y) above 0, and the ends of its 95 % interval, none for a single pair."""
    mean, half = mean_interval([math.log(x / y) for x, y in both])
    return math.exp(mean), () if half is None else (math.exp(mean - half), math.exp(mean + half))


def ratio_text(both, sign="="):
    """mean_ratio as a text. sign: of step_ratio."""
    mean, ends = mean_ratio(both)
    if sign != "=" or not ends:
        return f"{sign} {mean:.2f}".removeprefix("= ")
    digits = 2 if ends[0] <= round(mean, 2) <= ends[1] else 3  # inside its interval
    return f"{mean:.{digits}f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def interval_text(values, sign=""):
    """Mean +- half of its 95 % interval."""
    mean, half = mean_interval(values)
    return f"{mean:{sign}.3f}" + ("" if half is None else f" +- {half:.3f}")


def range_text(values, digits):
    """The mean of those that are not None, in brackets the lowest and the highest; "-" if there are none."""
    found = [x for x in values if x is not None]
    spread = f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.{digits}f}{spread}{of_seeds(found, values)}" if found else "-"


def of_seeds(found, seeds):
    """What follows a number that only some of the seeds have."""
    return f", {len(found)} of {len(seeds)} seeds" * (len(found) < len(seeds))


def markdown(head, rows, title="", note=""):
    """A table under its title and a note, or "" without rows."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n".join(filter(None, (title, note, "\n".join(lines)))) if rows else ""


def table(first, rows, columns, title="", note="", paper=None):
    """Markdown of {name of a row: what is shown in it} by {head of a column: function of that, which gives the cell}. A
    row of dashes is left out. first: head of the names; paper: {head: {name: what the paper prints}}, in italics."""
    found = []
    for name, shown in rows.items():
        cells = [str(cell(shown)) for cell in columns.values()]
        printed = [(paper or {}).get(head, {}).get(name) for head in columns]
        if {*cells} - {"-"}:
            found.append([name, *(f"{cell} *{text}*" if text else cell for cell, text in zip(cells, printed))])
    return markdown([*first.split(" | "), *columns], found, title, note)


def over_seeds(values, digits):
    """Columns of a table whose rows are {seed: events}: means and ranges of all of values(events). digits: {head: n}"""
    return {head: lambda runs, i=i, n=n: range_text([values(events)[i] for events in runs.values()], n)
            for i, (head, n) in enumerate(digits.items())}  # fmt: skip


def of_header(form):
    """A column of such a table: a text from the header of the first run."""
    return lambda runs: form.format(**next(iter(runs.values()))[0])


def add_run(models, label, seed, events):
    """Adds a run to {label: {seed: events}}, but not one that is there already, repeated bit for bit. Raises InputError
    for another run of a seed, and for another configuration, task, or content of the user's file that it is from."""
    runs = models.setdefault(label, {})
    if seed in runs:
        both = runs[seed], events
        names = " and ".join(run[0].get("path", "?") for run in both)
        course, other = ([(e["step"], e.get("val_loss"), e.get("acc")) for e in run] for run in both)
        if course != other:
            raise InputError(f"two runs of {label} with seed {seed}, {names}: name one of them")
        note(f"note: {names} are equal, and count once")
        return
    for header, *_ in runs.values():
        new, known = ({**first["settings"], **first} for first in (events[0], header))
        shared = {"config", "model", "task", "files", "origin"} & new.keys() & known.keys()
        if any(new[key] != known[key] for key in shared):
            raise InputError(f"the runs of {label} have different configurations: name those of one")
    runs[seed] = events


# Of each model, in every figure. Complex models are drawn through, real ones dashed.
COLOURS = {
    "hmamba": "#0072B2", "mamba": "#D55E00", "htransformer": "#009E73", "transformer": "#CC79A7", "pam": "#7B3FA0",
    "sam": "#E69F00", "csp-vanilla": "#7CB342", "csp-fast": "#332288", "rnn": "#222222", "complex-rnn": "#882255",
    "signed-mamba": "#9C7A00", "decoder": "#999999",
}  # fmt: skip
COMPLEX = {"mamba": "hmamba", "transformer": "htransformer", "sam": "pam"}  # real model -> its complex realization
FAMILIES = {"hmamba": "state space", "htransformer": "attention", "pam": "associative memory"}
REAL = {*COMPLEX, "rnn", "signed-mamba", "decoder"}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9,
         "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8, "legend.handlelength": 4,
         "savefig.dpi": 150}  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")


def style(label):
    """Colour and dashes of a model's lines in every figure, by its name and options alone."""
    name, options, *_ = parse_label(label)
    code = zlib.crc32(":".join(sorted(options)).encode(), 38)  # 38: the variants in results/ look apart
    real = name in REAL or "field=real" in options
    if name not in COLOURS:
        code = zlib.crc32(name.encode(), code ^ 896778)  # chosen likewise
        return {"color": colorsys.hls_to_rgb(code % 997 / 997, 0.4, 0.7), "ls": ("-.", ":")[code // 997 % 2]}
    if not options:
        return {"color": COLOURS[name], "ls": "--" if real else "-"}
    hue, light, full = colorsys.rgb_to_hls(*(x / 255 for x in bytes.fromhex(COLOURS[name][1:])))
    turn, light = (code % 7 - 3) / 12, (0.35, 0.45, 0.55, 0.7)[code // 7 % 4]
    dashes = ((3, 1, 1, 1), (1, 1)) if real else ((7, 1), (12, 1, 2, 1))
    return {"color": colorsys.hls_to_rgb((hue + turn) % 1, light, 0.6 * full), "ls": (0, dashes[code // 28 % 2])}


@contextmanager
def figure(path, title, panels, columns=1, height=2.4, xlabel="", ylabel="", sharex=True, sharey=True):
    """Yields a list of axes, one for each of `panels`, that become the file `path` when the block ends. One legend.

    Args: panels: titles, or {title: {label: (look, curves)}} for lines: of several curves {x: y}, one a seed, each is
        thin and their mean thick; height: of a row; xlabel: of the lowest axes; ylabel: of each row, or a tuple."""
    import matplotlib.figure
    import matplotlib.style
    from PIL import Image

    with matplotlib.style.context(["default", STYLE]):
        fig, rows = matplotlib.figure.Figure(layout="constrained"), -(-len(panels) // columns)
        axes = [*fig.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat]
        for i, (ax, name) in enumerate(zip(axes, panels)):
            ax.set(title=name, ylabel="" if i % columns else np.broadcast_to(ylabel, rows)[i // columns])
            if i + columns >= len(panels):  # the lowest of its column
                ax.set_xlabel(xlabel)
                ax.tick_params(labelbottom=True)
            for label, (look, curves) in panels[name].items() if isinstance(panels, dict) else ():
                for points in curves if len(curves) > 1 else ():
                    ax.plot([*points], [*points.values()], **look | {"lw": 0.6, "alpha": 0.4, "marker": ""})
                mean = mean_curve(curves)
                look = {"lw": 1.6, "marker": "o" if len(mean) == 1 else None} | look
                ax.plot([*mean], [*mean.values()], **look, label=label)
            if xlabel in ("optimization step", "epoch"):
                ax.xaxis.get_major_locator().set_params(integer=True)
        for ax in axes[len(panels) :]:
            ax.axis("off")
        yield axes[: len(panels)]
        labelled = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels())}
        across = max(1, min(len(labelled), int(128 / (14 + max(map(len, labelled), default=0)))))
        title, lines = textwrap.fill(title, 108), -(-len(labelled) // across)
        fig.set_size_inches(7.5, height * rows + 0.2 * lines + 0.15 * title.count("\n") + 0.3)
        fig.suptitle(title, fontsize=9, parse_math=False)
        if labelled:
            legend = fig.legend(labelled.values(), labelled, loc="outside lower center", ncols=across)
            for text in legend.get_texts():
                text.set_parse_math(False)
        for text in fig.findobj(lambda artist: hasattr(artist, "set_text")):  # a folder's name may be no UTF-8
            text.set_text(text.get_text().encode(errors="replace").decode())
        with explain(f"write {path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # such a character is a box
            path = Path(path)  # README's example gives a name
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn, kind = io.BytesIO(), path.suffix[1:].lower() or "png"
            fig.savefig(drawn, format=kind)
            if kind == "png":  # a third of the bytes
                image = Image.open(drawn).convert("RGB").quantize(256, kmeans=1)
                image.save(drawn := io.BytesIO(), "PNG", optimize=True)
            replace_file(path, lambda f: f.write(drawn.getvalue()))


def mean_curve(curves):
    """The mean of curves {x: y} at the points that all have; those without a point do not count."""
    found = [points for points in curves if points] or [{}]
    return {x: statistics.fmean(points[x] for points in found) for x in sorted(set.intersection(*map(set, found)))}


def shades(n):
    """Colours of what has an order: the viridis map, without its light end."""
    import matplotlib

    return matplotlib.colormaps["viridis"](np.linspace(0, 0.8, n))


def log_axis(ax, which, ticks=None, form="{x:g}"):
    """Makes the axis "x" or "y" logarithmic, with these ticks or 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    ax.set(**{f"{which}scale": "log"})
    ticks = FixedLocator(ticks) if ticks else LogLocator(subs=(1, 2, 5))
    getattr(ax, f"{which}axis").set(major_locator=ticks, minor_locator=NullLocator(), major_formatter=form)


def parse_out(text):
    """The folder that --out names. Raises InputError for what can be none."""
    out = Path(os.path.expanduser(text))
    if not text or out.is_file() or out.suffix.lower() in (*FORMATS, ".md", ".jpg", ".jpeg", ".bmp", ".gif", ".eps"):
        raise InputError(f"--out {text or repr('')} must be a folder, or for report.py a figure, {', '.join(FORMATS)}")
    return out


def show_report(text, figures, out=None, written=None):
    """Writes tables.md (`text`, or what is `written`) and the figures, {file name: function that draws it into a path},
    into the folder `out`, if one is given, and then prints `text`. A file that cannot be written is a line on stderr.
    Returns the exit code: 2 after such a line, else 0."""
    tables, paths, code = f"{text if written is None else written}\n".encode(errors="replace"), [], 0
    if tables != b"\n":
        figures = {"tables.md": partial(replace_file, write=lambda f: f.write(tables))} | figures
    if out:
        with explain(f"write {out}"):
            out.mkdir(parents=True, exist_ok=True)
    for name, write in figures.items() if out else ():
        try:
            write(out / name)
            paths.append(out / name)
        except Exception as e:  # whatever the system or a library raises: others may be written
            note(f"error: {name} not written: {e if isinstance(e, InputError) else repr(e)}")
            code = 2
    print(text, *(f"wrote {path}" for path in paths), sep="\n", flush=True)
    return code


# ----------------------------------------------------------------------------------------------------------------------
# Training runs (QS section 8: tables 3-8, figures 3-7)

TARGETS = (4.0, 3.5, 3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's
SHAPE = {"D", "L", "H", "N", "d", "heads", "mlp", "width"}  # options of a model that are its size
# What runs of one comparison may differ in: what tables name, and what does not change the course of a run.
NOT_SHARED = {"model", "seeds", "lr", "min_lr", "data", "out", "resume", "stop_at", "micro", "device", "compile",
              "checkpointing", "log_every", "ckpt_every", "sample_every", "eval_only", "split", "params"}  # fmt: skip


def curve(events, kind="val"):
    """{step: bpc} of the evaluations on the fixed validation windows, or for kind "train" of the training batches."""
    found = (e for e in events if e["event"] == kind and e.get("split", "val") == "val")
    return {e["step"]: e["val_loss" if kind == "val" else "loss"] / math.log(2) for e in found}


def unit(tokens):
    """Of a loss divided by ln 2, by the setting `tokens` of its run."""
    return "bits a token" if tokens == "gpt2" else "bpc"


def steps_to_target(events, target):
    """The step at which the loss first attains `target`, interpolated between evaluations (QS 8.1), or None."""
    points = [*curve(events).items()]
    first = next((i for i, (_, loss) in enumerate(points) if loss <= target), None)
    if not first:  # its first evaluation attains it: when it did is known of step 0 alone
        return 0.0 if first == 0 == points[0][0] else None
    (before, high), (after, low) = points[first - 1 : first + 1]
    return float(np.interp(target, [low, high], [after, before]))


def loss_at(events, step):
    """The validation loss at `step`, interpolated between evaluations, bpc, or None."""
    points = curve(events)
    within = points and min(points) <= step <= max(points)
    return float(np.interp(step, [*points], [*points.values()])) if within else None


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
    """The name of a model or task in tables and figures: its spec, or what follows a file, unless that is ours."""
    file, *rest = spec.split(":")
    if not file.endswith(".py") or {*rest[:1]} & {*COLOURS, *PAPER_TASKS}:
        return spec
    return " ".join(rest) or Path(file).stem


Label = namedtuple("Label", "model options size kind rate parent family")


def parse_label(label):
    """What a label such as "hmamba:N=4, rate 0.002" says. kind: the model and its options but those of its size;
    parent: of a user's class the model that it is named after, as HMambaMinus; family: the complex model of a twin."""
    spec, _, rate = label.partition(", ")
    model, *options = re.split("[: ]", spec)
    size = {x for x in options if x.split("=")[0] in SHAPE}
    named = re.match("HTransformer|Transformer|HMamba|Mamba|PAM|SAM", model)
    parent = named[0].lower() if named else model
    kind = ":".join([model, *sorted({*options} - size)])
    return Label(model, {*options}, size, kind, rate, parent, COMPLEX.get(parent, parent))


def reference(label, labels):
    """What a row is compared with, or None: for a user's variant of a model that model, else its complex realization,
    with the same options, or with those of its size, at the same rate if possible; or else an earlier row of its
    family, likewise; or else the first of all, but of a complex model in another size."""
    if label in FAMILIES:
        return None
    ours, known, others = parse_label(label), {x: parse_label(x) for x in labels}, []
    for name in [ours.parent] * (ours.parent != ours.model) + [ours.family]:
        fits = {x: (len(y.options & ours.size), y.rate == ours.rate, len(y.options)) for x, y in known.items()
                if y.model == name and y[:2] != ours[:2] and (y.options == ours.options or y.options <= ours.size)}
        others.append(max(fits, key=fits.get, default=None))  # fmt: skip
    alike = [x for x in [*known][: [*known].index(label)]
             if (known[x].family == ours.family if ours.family in FAMILIES else known[x][:2] == ours[:2])]  # fmt: skip
    others.append(min(alike, key=lambda x: known[x].rate != ours.rate, default=None))
    if ours.options - ours.size or ours.model not in FAMILIES:
        others.append(next(iter(known)))
    return next((other for other in others if other not in (None, label)), None)


def by_family(models):
    """{title: {label: runs}}: a panel for each family if each is a paper's and has several models, else one for all."""
    found = {}
    for label, runs in models.items():
        found.setdefault(FAMILIES.get(parse_label(label).family), {})[label] = runs
    paired = None not in found and all(len({parse_label(x).model for x in members}) > 1 for members in found.values())
    return found if paired else {"": models}


def group_runs(logs):
    """[(shared settings, {label: {seed: events}})], a group for each set of settings that decide the course of a run;
    shared["kind"] is what the groups differ in, {setting: value}. Labels are models, with their rates if one has
    several, and the ends of the cosine if a rate has several; complex models come before their twins, models
    before their variants. Raises InputError for two runs of one label and seed, or of different configurations."""
    groups, found = {}, []
    for events in logs:
        data, settings = events[0]["data"], {k: v for k, v in events[0]["settings"].items() if v is not None}
        settings = {"tokens": "bytes", "init_from": "scratch"} | settings
        shared = {k: v for k, v in settings.items() if k not in NOT_SHARED}
        shared["data"] = f"{data['name']} {data['sha256'][:8]}"
        groups.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(events)
    origins = {s["init_from"]: "/".join(Path(s["init_from"]).parts[-2:]) for s, _ in groups.values()}
    alike = len({*origins.values()}) < len(origins)
    kinds = [s | {"init_from": s["init_from"] if alike else origins[s["init_from"]]} for s, _ in groups.values()]
    keys = [key for key in dict.fromkeys(chain(*kinds)) if len({kind.get(key) for kind in kinds}) > 1]
    for (shared, members), kind in zip(groups.values(), kinds):
        shared["kind"], models = {key: kind.get(key) for key in keys}, {}
        settings = [events[0]["settings"] for events in members]
        rates = {(s["model"], s["lr"], shared["schedule"] == "constant" or s["min_lr"]) for s in settings}
        several, ends = (len(rates) > len({rate[:n] for rate in rates}) for n in (1, 2))
        for s, events in zip(settings, members):
            label = spec_label(s["model"]) + f", rate {s['lr']:g}" * several + f" to {s['min_lr']:g}" * ends
            add_run(models, label, s["seeds"], events)
        known = {x: parse_label(x) for x in models}
        place = {x: ([*FAMILIES, y.family].index(y.family), y.parent in COMPLEX, y.parent != y.model)
                 for x, y in known.items()}  # fmt: skip
        found.append((shared, {label: models[label] for label in sorted(models, key=place.get)}))
    return found


def pairs(models):
    """[(label, its reference)] of the models that have a seed in common with theirs."""
    found = [(label, reference(label, models)) for label in models]
    return [(label, other) for label, other in found if other and models[label].keys() & models[other].keys()]


def paired(models, pair, value):
    """[(value of a run, value of the run of its reference with the same seed)]. value: function of events. Left out are
    seeds for which it is None on either side, or 0: steps to what a run began with have no ratio."""
    runs, others = (models[label] for label in pair)
    both = [(value(events), value(others[seed])) for seed, events in runs.items() if seed in others]
    return [x for x in both if all(x)]


def compare(models, values, heads, text):
    """Columns of a table whose rows are pairs: text of each of values(events), paired, and of how many seeds it is."""

    def cell(pair, i):
        both = paired(models, pair, lambda events: values(events)[i])
        return text(both) + of_seeds(both, models[pair[0]]) if both else "-"

    return {head: partial(cell, i=i) for i, head in enumerate(heads)}


def gap_text(both):
    return interval_text([x - y for x, y in both], "+")


def step_ratio(models, pair, target):
    """([(steps to a loss, steps of the reference)] over the seeds of both, sign of their ratio). A run that misses the
    loss counts with its last step. sign: "=" if none does; ">", at least that, if only the first model does; "<" if
    only the second does; "" if nothing follows."""

    def steps(events):
        reached, points = steps_to_target(events, target), curve(events)
        if reached is None and min(points.values(), default=math.inf) <= target:
            return None  # it was reached before a log that was begun anew
        return max(points, default=0) if reached is None else reached, reached is not None

    found = paired(models, pair, steps)
    both = [(x, y) for (x, _), (y, _) in found]
    all_reach = tuple(all(reached for _, reached in side) for side in zip(*found))
    sign = {(True, True): "=", (False, True): ">", (True, False): "<"}.get(all_reach, "")
    return both, sign * all(map(all, both))


def warmup_end(shared):
    """(step, what it is): the end of the warmup, or of the paper's share of the budget if the rate is constant."""
    steps, warmup = shared["steps"], shared.get("warmup", PAPER_WARMUP)
    if shared["schedule"] == "constant":
        return PAPER_WARMUP * steps, f"{PAPER_WARMUP:.0%} of the budget"
    return warmup * steps if warmup < 1 else warmup, "end of warmup"


def targets(models):
    """Losses, falling: those of TARGETS that a run reaches, and of each panel the lowest tenth that all runs reach."""
    found = set()
    for members in by_family(models).values():
        curves = [curve(events) for runs in members.values() for events in runs.values()]
        if lowest := [min(points.values()) for points in curves if len(points) > 1]:
            found |= {math.ceil(10 * max(lowest)) / 10, *(target for target in TARGETS if target >= min(lowest))}
    return sorted(found, reverse=True)


def training_tables(shared, models):
    """Markdown of a group: protocol and models (QS tables 3-4), steps to a loss and their ratios (6, 5), gaps (7),
    losses at the budget (8), cost (9.3), spread of the layers' gradients (8.4), PAM's late metric, every run."""
    loss, budget, (warm, what), goals = unit(shared["tokens"]), shared["steps"], warmup_end(shared), targets(models)
    constant, logs = shared["schedule"] == "constant", [e for runs in models.values() for e in runs.values()]
    paper = PAPER if loss == "bpc" else dict.fromkeys(PAPER, {})
    common = min((x for x in goals if all(steps_to_target(events, x) is not None for events in logs)), default=None)
    evaluated = sorted({budget, *(step for events in logs for step in curve(events) if step)})

    def losses(events):
        all_of = [loss_at(events, step) for step in evaluated]
        mean = None if None in all_of else statistics.fmean(all_of)
        return loss_at(events, warm), loss_at(events, budget), final_loss(events), mean

    def ratio(pair, goal):
        both, sign = step_ratio(models, pair, goal)
        return ratio_text(both, sign) + of_seeds(both, models[pair[0]]) if sign else "-"

    def cost(events):
        tokens = steps_to_target(events, common) * shared["batch"] * shared["seq"]
        speed = statistics.median([e["tok_s"] for e in events if "tok_s" in e] or [math.nan])
        return tokens / 1e6, speed, tokens / speed / 60

    headers, sizes = [events[0] for events in logs], [e.get("n_tokens") for e in logs[0] if e["event"] == "val"]
    windows = min([shared["eval_seqs"], *(n // shared["seq"] for n in sizes if n)])  # a short split has fewer
    d, o = headers[0]["data"], headers[0].get("optimizer")
    rate = "{settings[lr]:g}" + " to {settings[min_lr]:g}" * (not constant)
    schedule = "constant rate" if constant else f"{warm:.0f} steps of warmup, then cosine"
    adamw = f", AdamW {tuple(o['betas'])}, decay {o['decay']}, gradients clipped at {o['clip']:g}" if o else ""
    ran = [(h.get("device"), h.get("threads"), h.get("git"), h.get("versions", {}).get("torch", "?")) for h in headers]
    device, threads, git, torch = (", ".join(sorted({*map(str, values)})) for values in zip(*ran))
    steps = over_seeds(lambda events: [steps_to_target(events, goal) for goal in goals],
                       {f"{goal} {loss}": 0 for goal in goals})  # fmt: skip
    ratios = {f"{goal} {loss}": partial(ratio, goal=goal) for goal in goals}
    gaps = compare(models, losses, (f"at step {warm:.0f}, {what}", f"at step {budget}, the budget",
                                    "there, whole split", "mean of all evaluations but the first"), gap_text)
    ends = over_seeds(lambda events: losses(events)[1:3], {"fixed windows": 3, "whole split": 3})
    costs = over_seeds(cost, {"tokens, millions": 2, "tokens a second": 0, "minutes": 1})
    every_run = {f"{label} | {seed}": {seed: events} for label, runs in models.items() for seed, events in runs.items()}
    spread = over_seeds(layer_spread, {"largest over smallest": 2, "last over first": 2})
    return "\n\n".join(filter(None, [
        f"Data: {d['name']}, {d['size']:,} tokens, SHA-256 {d['sha256'][:12]}. {budget:,} steps of {shared['batch']} x "
        f"{shared['seq']} tokens, {schedule}{adamw}, {shared['dtype']}. Validation every {shared['eval_every']} steps "
        f"on {windows} fixed windows, at the end on the whole split. {device}; threads: {threads}; PyTorch "
        f"{torch}; code {git}. In brackets: lowest and highest seed; +- and square brackets: 95 % interval, paired "
        "by seed; *italics*: the paper's, 253M parameters, one seed on each of three corpora.",
        table("model", models,
              {"parameters": of_header("{params[total]:,}"), "learning rate": of_header(rate), "seeds": len}),
        table("model", models, steps, "#### Steps to a validation loss", paper=paper["steps"]),
        table("pair", {" / ".join(pair): pair for pair in pairs(models)}, ratios, "#### Ratio of steps",
              "Above 1: the second is faster. Geometric means. > and <: runs do not reach the loss, their last step "
              "stands for them, and the ratio is a bound.", paper["ratio"]),
        table("pair", {" - ".join(pair): pair for pair in pairs(models)}, gaps,
              f"#### Gap in validation loss, {loss}", "Above 0: the second leads.",
              {head: paper["gap"].get(head.partition(", ")[2], {}) for head in gaps}),
        table("model", models, ends, f"#### Validation loss at the budget, {loss}", paper=paper["loss"]),
        table("model", models if common else {}, costs, f"#### Cost of {common} {loss}",
              "At the median speed of each run, without validation." + f" {PAPER_COST}" * (loss == "bpc")),
        table("model", models, spread, "#### Gradient norms of the layers", "Medians over the evaluations.",
              paper["gradients"]),
        table("model | seed", every_run,
              steps | {"at the budget": ends["fixed windows"], "whole split": ends["whole split"]}, "#### Every run"),
        epochs_table(shared, models),
    ]))  # fmt: skip


def caption(shared, models):
    """What a figure shows, in a line for its title: data, budget, schedule, number of seeds."""
    name = shared["data"].rpartition(" ")[0]
    rate = "constant rate" if shared["schedule"] == "constant" else f"warmup of {warmup_end(shared)[0]:.0f}"
    seeds = "-".join(map(str, sorted({len(runs) for runs in models.values()})))
    return f"{name}, {shared['size']}, {shared['steps']} steps, {rate}; seeds a model: {seeds}"


def lines_of(models, points, **look):
    """{label: (look, curves)} for `figure`. points: function of a run's events that gives {x: y}."""
    return {label: (style(label) | look, [*map(points, runs.values())]) for label, runs in models.items()}


def without_start(*panels):
    """({"ylim": limits}, a remark for the title) of an axis of losses without the first fall, from 8 bits a byte."""
    curves = [[*points.values()] for lines in panels for _, runs in lines.values() for points in runs]
    late = [y for losses in curves for y in losses[len(losses) // 5 :]]
    if not late:
        return {}, ""
    cut = max(map(max, filter(None, curves))) > max(late)
    return {"ylim": (min(late) - 0.1, max(late) + 0.1)}, "; the first fall is cut off" * cut


def plot_curves(shared, models, path):
    """Loss by optimization step: validation (QS figure 4) and training (figure 7), a row a family."""
    lines = {}
    for name, members in by_family(models).items():
        for kind, what in (("val", "validation"), ("train", "training batches")):
            lines[f"{name}, {what}".removeprefix(", ")] = lines_of(members, partial(curve, kind=kind))
    limits, remark = without_start(*lines.values())
    with figure(path, caption(shared, models) + remark, lines, 2,
                xlabel="optimization step", ylabel=f"loss, {unit(shared['tokens'])}") as axes:  # fmt: skip
        axes[0].set(**limits)


def plot_overlay(groups, path):
    """Validation loss of runs of any kinds, whose marker is that of the kind and the rate; a panel for each unit."""
    lines, marks = {}, {}
    for shared, models in groups:
        for label, (look, curves) in lines_of(models, curve, ms=4, markevery=0.1).items():
            label = ", ".join(filter(None, [label, kind_text(shared)]))
            mark = "os^DvPX<>*"[marks.setdefault(label.partition(", ")[2], len(marks)) % 10]
            lines.setdefault(f"loss, {unit(shared['tokens'])}", {})[label] = look | {"marker": mark}, curves
    limits, remarks = zip(*map(without_start, lines.values()))
    with figure(path, "Validation loss" + max(remarks), lines, 1, 3.4, "optimization step", sharey=False) as axes:
        for ax, limit in zip(axes, limits):
            ax.set(**limit)


def plot_steps(shared, models, path):
    """QS figure 3: steps to each loss, and their mean where all seeds reach it."""
    goals = targets(models)

    def reached(events):
        steps = enumerate(steps_to_target(events, goal) for goal in goals)
        return {i: step for i, step in steps if step is not None}

    lines = {name: lines_of(members, reached, marker="o", ms=4) for name, members in by_family(models).items()}
    with figure(path, caption(shared, models), lines, xlabel=f"validation loss, {unit(shared['tokens'])}",
                ylabel="steps to the loss") as axes:  # fmt: skip
        axes[0].set_xticks(range(len(goals)), goals)


def plot_gap(shared, models, path):
    """QS figure 5: validation loss minus its reference's by step, the warmup shaded. Thin: seeds. Horizontal bands: the
    paper's gaps at its budget, of its own pairs. A model and itself in another shape is left out beside others."""
    lines, warmup, found = {}, shared["schedule"] != "constant", pairs(models)
    panels = {label: name for name, members in by_family(models).items() for label in members}
    for pair in [(x, y) for x, y in found if parse_label(x).kind != parse_label(y).kind] or found:
        both = paired(models, pair, curve)
        gaps = [{step: x[step] - y[step] for step in x if step in y} for x, y in both]
        lines.setdefault(panels[pair[0]], {})[" - ".join(pair)] = style(pair[0]), gaps
    title = f"{caption(shared, models)}; above 0: the second leads" + "; grey: warmup" * warmup
    with figure(path, title, lines, xlabel="optimization step", ylabel=f"gap, {unit(shared['tokens'])}") as axes:
        for ax, drawn in zip(axes, lines.values()):
            for pair, band in PAPER["gap"]["the budget"].items() if unit(shared["tokens"]) == "bpc" else ():
                if pair in drawn:
                    look = {"color": style(pair.split()[0])["color"], "label": f"the paper's {pair}, at 1000 steps"}
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
            curves = [{e["step"]: e["layers"][layer] for e in events} for events in logged]
            of_model = lines.setdefault(re.sub(r"[: ](?=\w+=)", "\n", label, count=1), {})
            of_model[f"layer {layer}"] = {"color": colour, "lw": 1.2}, [mean_curve(curves)]
    columns, height = min(3, len(lines)), 2.4 if len(lines) <= 12 else 1.7  # at most a page
    title = f"{caption(shared, models)}; means over the seeds"
    with figure(path, title, lines, columns, height, "optimization step", "gradient norm") as axes:
        log_axis(axes[0], "y")


def plot_rates(shared, models, path):
    """Loss at the budget by peak learning rate, of the seeds that have most of a model's rates. A row a family."""
    found, rates = {}, set()  # {model: {seed: {rate: loss}}}
    for label, runs in models.items():
        for seed, events in runs.items():
            rate, loss = events[0]["settings"]["lr"], loss_at(events, shared["steps"])
            if loss is not None:
                rates.add(rate)
                found.setdefault(re.sub(", rate [^ ]+", "", label), {}).setdefault(seed, {})[rate] = loss
    for label, seeds in found.items():
        most = max(map(len, seeds.values()))
        found[label] = {seed: dict(sorted(x.items())) for seed, x in seeds.items() if len(x) == most}
    lines = {name: lines_of(members, dict, marker="o", ms=4) for name, members in by_family(found).items()}
    title = caption(shared, models) + "; scales differ" * (len(lines) > 1)
    with figure(path, title, lines, xlabel="peak learning rate", ylabel=f"loss, {unit(shared['tokens'])}",
                sharey=False) as axes:  # fmt: skip
        log_axis(axes[0], "x", sorted(rates))


def kind_text(shared, *hidden):
    return ", ".join(f"{key} {value}" for key, value in shared["kind"].items() if key not in hidden)


def training_report(logs):
    """(tables, {file name: function that draws it into a path}) of all groups of runs."""
    groups, text, figures = group_runs(logs), [], {}
    if differ := groups[0][0]["kind"]:
        text.append(f"Runs of {len(groups)} kinds, which differ in {', '.join(differ)} and are not averaged.")
        if not any(pairs(models) for _, models in groups):
            text[0] += " No ratios and no gaps: they would compare these settings, not models."
    for shared, models in groups:
        text += [f"### {kind_text(shared)}"] * bool(differ) + [training_tables(shared, models)]
        members = [events for runs in models.values() for events in runs.values()]
        if any(", rate " in label for label in models):
            plots = {plot_rates: any(loss_at(events, shared["steps"]) is not None for events in members)}
        else:
            plots = {plot_curves: True, plot_steps: targets(models), plot_gap: pairs(models),
                     plot_gradients: any(layer_spread(events)[0] for events in members)}  # fmt: skip
        for plot in filter(plots.get, plots):
            name = run_name(plot.__name__.removeprefix("plot_"), *shared["kind"].values())
            figures[f"{name}.png"] = partial(plot, shared, models)
    if "curves.png" not in figures and sum(len(models) for _, models in groups) <= 10:
        figures["curves.png"] = partial(plot_overlay, groups)
    if {*differ} <= {"size"} and not any(name.startswith("rates") for name in figures):
        scaling, laws = scaling_laws(groups)
        text += [scaling] * bool(scaling)
        figures |= {"scaling.png": partial(plot_scaling, laws)} if scaling else {}
    return "\n\n".join(text), figures


def write_csv(path, logs):
    """{path: events} as CSV, in nats a token. The event "val" is of the fixed windows, others of a whole split."""
    settings = ("model", "task", "size", "lr", "steps", "epochs", "seeds", "seed")
    evaluation = ("event", "split", "step", "epoch", "tokens", "time_s", "val_loss", "length", "acc")
    if path.endswith(".jsonl"):
        raise InputError(f"--csv {path} has a log's name: name the file to write")
    path = Path(os.path.expanduser(path))
    with explain(f"write --csv {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", errors="surrogateescape") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(["run", "data", "parameters", *settings, *evaluation])
            for name, (header, *events) in logs.items():
                about = [header["params"]["total"], *map(header["settings"].get, settings)]
                writer.writerows([name, (e.get("data") or header["data"])["name"], *about, *map(e.get, evaluation)]
                                 for e in events if e["event"] in ("val", "final", "eval"))  # fmt: skip


def plot_forest(folders, path):
    """All ratios of steps of {name of a folder: logs of train.py}: a row a pair, in it downwards ever lower losses."""
    found = {}  # {group: {pair: [step_ratio]}}
    for folder, logs in folders.items():
        for shared, models in group_runs(logs):
            name = f"{folder}: {caption(shared, models).removeprefix(folder + ', ')}"
            name = "; ".join(filter(None, [name, kind_text(shared, "size", "steps", "schedule", "warmup")]))
            name = f"{name}; {kind_text(shared)}" if name in found else name  # what is hidden may be the difference
            for pair in pairs(models):
                ratios = [step_ratio(models, pair, goal) for goal in targets(models)]
                seeds = of_seeds(ratios[0][0], models[pair[0]]) if ratios else ""
                found.setdefault(name, {})[pair[0], pair[1] + seeds] = [ratio for ratio in ratios if ratio[1]]
    if not found:
        raise InputError("no two models of these runs have a ratio of steps")
    title = ("Steps to a validation loss, of the first model of a pair over those of the second. In each row the loss "
             "falls from top to bottom. Bars: 95 % over seeds; triangles: at least, or at most")  # fmt: skip
    height = 0.34 * sum(1 + len(rows) for rows in found.values())
    xlabel = "the first is faster  <     ratio of steps     >  the second is faster"
    with figure(path, title, [""], height=height, xlabel=xlabel) as (ax,):
        y, names, shown = 0, {}, [0.35, 4]
        for group, rows in found.items():
            look = {"weight": "bold", "fontsize": 8, "bbox": {"color": "white", "pad": 1}}
            ax.text(0.01, y, group, transform=ax.get_yaxis_transform(), va="center", parse_math=False, **look)
            for (label, other), ratios in rows.items():
                y -= 1
                names[y] = f"{label}\n/ {other}"
                for level, (both, sign) in zip(np.linspace(y + 0.36, y - 0.36, len(ratios) + 2)[1:-1], ratios):
                    (mean, ends), colour = mean_ratio(both), style(label)["color"]
                    ax.plot(mean, level, sign.replace("=", "o"), color=colour, ms=4)
                    shown += [mean / 1.1, mean * 1.1]
                    if sign == "=" and ends:
                        ax.plot(ends, [level, level], color=colour, lw=1.2)
                        shown += [max(ends[0], mean / 2), min(ends[1], mean * 2)]
                ax.axhline(y - 0.5, color="0.9", lw=0.8)
            y -= 1
        ax.axvline(1, color="black", lw=1)
        for pair, ratio in PAPER["ratio"]["2.0 bpc"].items():
            look = {"color": style(pair.split()[0])["color"], "label": f"the paper's {pair}: {ratio}"}
            ax.axvline(float(ratio.split()[-1]), ls="--", lw=1.2, **look)
        ax.set(xlim=(min(shown), max(shown)), ylim=(y + 0.4, 0.6))  # a wide interval may end outside
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
    """Mean and standard deviation (n - 1) of evaluations (PAM section III)."""
    values = [*values]
    return statistics.fmean(values), statistics.stdev(values) if values[1:] else 0.0


def epochs_table(shared, models):
    """Markdown: the paper's late metric of finished runs in epochs, in nats and as perplexity, and of pairs the ratio
    of perplexities, but of no model and itself; beside the paper's, if the tokens are its own."""
    models = {label: {seed: events for seed, events in runs.items() if late_losses(events)}
              for label, runs in models.items() if any(map(late_losses, runs.values()))}  # fmt: skip

    def late(events):
        return [late_metric(map(scale, late_losses(events)))[0] for scale in (float, math.exp)]

    size = shared["size"] if shared["tokens"] == "gpt2" else None
    loss, perplexity = over_seeds(late, {"loss": 3, "perplexity": 2}).values()
    columns = {"size": of_header("{settings[size]}"), "parameters": of_header("{params[total]:,}"), "loss, nats": loss,
               "the paper's": lambda runs: PAPER_LOSSES.get(size, {}).get(of_header("{settings[model]}")(runs), "-"),
               "perplexity": perplexity}  # fmt: skip
    rows = {f"{x} / {y}": (x, y) for x, y in pairs(models) if parse_label(x).kind != parse_label(y).kind}
    ratios = compare(models, lambda events: late(events)[1:], ["perplexity of the second over the first's"],
                     lambda both: ratio_text([(y, x) for x, y in both]))  # fmt: skip
    ratios |= {"the paper's": lambda pair: PAPER_RATIOS.get(size, "-") if pair == ("sam", "pam") else "-"}
    tables = table("model", models, columns, "#### Means of the last three epochs"), table("pair", rows, ratios)
    return "\n\n".join(filter(None, tables))


def power_law(sizes, values):
    """log10 y = a + b log10 N by least squares, unweighted (PAM section III does not say). Returns a, b and the
    standard error of b, from the scatter of the points about the line: nan for two points, which say nothing of it."""
    x, y = np.log10(sizes), np.log10(values)
    (b, a), covariance = np.polyfit(x, y, 1, cov="unscaled" if len(x) == 2 else True)
    return float(a), float(b), math.nan if len(x) == 2 else math.sqrt(covariance[0, 0])


def crossing(first, second, freedom):
    """(N, y) at which two power laws (a, b, error of b) meet; None if 0 lies in the 95 % interval of the difference of
    their slopes. freedom: degrees of freedom of both, points minus 4."""
    (a, b, error), (c, d, other) = first, second
    half = np.interp(freedom, range(1, 31), T95) * math.hypot(error, other)  # nan: of two points
    if freedom > 0 and abs(b - d) > half:
        x = (c - a) / (b - d)
        return 10**x, 10 ** (a + b * x)
    return None


def scaling_laws(groups):
    """(table, {quantity: {model: ([N], [mean], [deviation], power_law, text)}}) of models that have several sizes."""
    found, laws, rows = {}, {"loss": {}, "perplexity": {}}, []
    for label, runs in (item for _, models in groups for item in models.items()):
        late = [(events[0]["params"]["total"], late_losses(events)) for events in runs.values()]
        found.setdefault(parse_label(label).kind, []).extend((n, losses) for n, losses in late if losses)
    for quantity, models in laws.items():
        paper, scale = PAPER_FITS[quantity], math.exp if quantity == "perplexity" else float
        for name in sorted(found, key=lambda name: name != "pam"):
            points = sorted((n, *late_metric(map(scale, losses))) for n, losses in found[name])
            if not points or points[-1][0] <= 1.1 * points[0][0]:  # variants of one size
                continue
            sizes, means, sigmas = zip(*points)
            law = power_law(sizes, means)
            models[name] = sizes, means, sigmas, law, f"{law[1]:.3f} +- {law[2]:.3f}"
            first, (others, *_, reference_law, _) = next(iter(models.items()))
            met = crossing(reference_law, law, len(others) + len(sizes) - 4) if name != first else None
            place = f"{met[0]:.2g} ({met[1]:.3g})" if met else "-"
            place += " *{:.2g} ({})*".format(*paper["crossing"]) * ((first, name) == ("pam", "sam"))
            slope = models[name][-1] + (f" *{paper[name]}*" if name in paper else "")
            rows.append([quantity, name, len(sizes), len({*sizes}), slope, place])
    note = ("Fits of log10 y = a + b log10 N to all finished runs. Where the slopes cannot be told apart (95 %), there "
            "is no crossing. *Italics: the paper's, of GPT-2's tokens.*")  # fmt: skip
    crosses = f"crosses {next(iter(laws['loss']), '')} at N (y)"
    head = ["quantity", "model", "runs", "sizes", "slope +- standard error", crosses]
    return markdown(head, rows, "### Scaling", note), laws


def plot_scaling(laws, path):
    """PAM figure 2: loss and perplexity by parameters, error bars and fits. Runs of one size stand side by side."""
    title = ("Late-epoch loss and perplexity by parameters. A point a run, beside others of its size; bars: standard "
             "deviation of the evaluations")  # fmt: skip
    ylabel = "loss, nats", "perplexity"
    with figure(path, title, ["", ""], 1, 3, "parameters", ylabel, sharey=False) as axes:
        for ax, (quantity, models) in zip(axes, laws.items()):
            for i, (name, (sizes, means, sigmas, law, slope)) in enumerate(models.items()):
                colour, ends = style(name)["color"], [sizes[0], sizes[-1]]
                beside = [n * 1.012 ** (4 * i + sizes[:k].count(n)) for k, n in enumerate(sizes)]
                name = f"{name}, {quantity}: slope {slope}"
                ax.errorbar(beside, means, sigmas, fmt="^*os"[i % 4], color=colour, ms=5, lw=0.8, capsize=2, label=name)
                ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=colour, lw=1)
            ax.set_yscale("log")
            log_axis(ax, "x", form=lambda n, _: f"{n / 1e6:g}M")
            ax.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")


# ----------------------------------------------------------------------------------------------------------------------
# Tasks (CSP section 3, appendices A and B)

def protocol(events):
    """What runs must have in common to stand in one table."""
    return {k: v for k, v in events[0]["settings"].items() if k not in ("model", "task", "seed")}


def group_tasks(logs):
    """{task: {model: {seed: events}}}, the paper's models first, or InputError if the runs do not belong together."""
    known, groups = {model: i for i, model in enumerate(PAPER_TASKS["parity"])}, {}
    for events in sorted(logs, key=lambda e: (known.get(e[0]["settings"]["model"], 9), e[0]["settings"]["seed"])):
        s = events[0]["settings"]
        for k, v in protocol(logs[0]).items():
            if s.get(k) != v:
                raise InputError(f"runs of different protocols do not go into one table: {k} is {v} and {s.get(k)}")
        if events[-1]["event"] != "final":
            raise InputError(f"the run of {s['model']} on {s['task']}, seed {s['seed']}, is not finished: run it again")
        add_run(groups.setdefault(spec_label(s["task"]), {}), spec_label(s["model"]), s["seed"], events)
    return groups


def accuracies(events):
    """{length: accuracy} of a finished run."""
    return {e["length"]: e["acc"] for e in events if e["event"] == "eval"}


def task_tables(groups):
    """Markdown: accuracy by length (CSP tables 1-4), paired, spread over seeds (table 5), every seed, CSP's angles."""
    logs = [events for models in groups.values() for runs in models.values() for events in runs.values()]
    s, paired_rows, spread, every_seed, angles, text = logs[0][0]["settings"], {}, [], {}, [], []
    lengths, longest = s["lengths"], s["lengths"][-1]
    at_length = over_seeds(lambda events: [accuracies(events)[n] for n in lengths], {f"L={n}": 3 for n in lengths})
    for task, models in groups.items():
        printed = PAPER_TASKS.get(task, {}) if s["train_length"] == PAPER_LENGTHS[0] else {}
        paper = {f"L={n}": {model: f"{means[i]:.3f}" for model, (means, _) in printed.items()}
                 for i, n in enumerate(PAPER_LENGTHS)}  # fmt: skip
        columns = {"parameters": of_header("{params[total]:,}"), "seeds": len} | at_length
        text.append(table("model", models, columns, f"### {task}", paper=paper))
        for i, (model, runs) in enumerate(models.items()):
            if len(runs) > 1:
                theirs = f"{statistics.stdev(printed[model][1]):.3f}" if model in printed and longest == 64 else "-"
                ours = statistics.stdev(accuracies(events)[longest] for events in runs.values())
                spread.append([task, model, len(runs), f"{ours:.3f}", theirs])
            both = {other: paired(models, (model, other), accuracies) for other in [*models][:i]}
            paired_rows |= {f"{task} | {model} - {other}": x for other, x in both.items() if len(x) > 1}
            for seed, events in runs.items():
                every_seed[f"{task} | {model} | {seed}"] = {seed: events}
                for block, ((zero, sure0), (one, sure1)) in enumerate(events[-1].get("theta", ()), 1):
                    turn = (one - zero + math.pi) % (2 * math.pi) - math.pi
                    found = f"{zero:+.3f} ({sure0:.2f})", f"{one:+.3f} ({sure1:.2f})", f"{turn / math.pi:+.3f}"
                    angles.append([task, model, seed, block, *found])
    gaps = {f"L={n}": lambda both, n=n: gap_text([(x[n], y[n]) for x, y in both]) for n in lengths}
    return "\n\n".join(filter(None, [
        f"Trained at length {s['train_length']} for {s['epochs']} epochs, tested on 1,000 sequences a length. Mean "
        "over the seeds; in brackets the lowest and the highest. *Italics: the paper's mean, at 300 epochs.*",
        *text,
        table("task | difference", paired_rows, {"seeds": len} | gaps, "### Paired by seed",
              "Mean difference in accuracy and 95 % interval (Student's t)."),
        markdown(["task", "model", "seeds", "ours", "paper"], spread, f"### Spread over the seeds, L={longest}",
                 "Sample standard deviation; the paper's from the seeds of its tables 2-4 (its table 5 prints other "
                 "numbers)."),
        table("task | model | seed", every_seed, at_length, "### Every seed"),
        markdown(["task", "model", "seed", "block", "at 0", "at 1", "difference"], angles,
                 "### The angle that CSP computes at each symbol",
                 "Radians; in brackets how constant the angle is (1: always the same). The last column is the "
                 "difference in units of pi: parity asks for 1, mod-3 for 2/3."),
        f"Gradients that were not finite, and counted as zero: {sum(log[-1]['skipped'] for log in logs)} in all runs.",
    ]))  # fmt: skip


def plot_lengths(task, models, path):
    """Accuracy by length and, at the longest, by position (CSP figures 3-5): means, and thin the seeds."""
    header = next(iter(next(iter(models.values())).values()))[0]
    s, longest = header["settings"], max(header["settings"]["lengths"])

    def by_position(events):
        acc = next(e["acc_by_pos"] for e in events if e["event"] == "eval" and e["length"] == longest)
        return {t: x for t, x in enumerate(acc, 1) if x is not None}  # where it is scored

    lines = {"by length": lines_of(models, accuracies), "by position": lines_of(models, by_position)}
    title = f"{task}: {s['epochs']} epochs at length {s['train_length']} (dotted); dashes across: the commonest answer"
    with figure(path, title, lines, 2, 3, ylabel="accuracy", sharex=False) as (left, right):
        for ax in (left, right):
            ax.axvline(s["train_length"], color="0.4", ls=":", lw=1)
        right.axhline(max(header["data"]["shares"]), color="0.4", ls="--", lw=1)
        left.set(xlabel="length of the test sequences", ylim=(-0.03, 1.03))
        right.set_xlabel(f"position in sequences of length {longest}")


def plot_seeds(groups, path):
    """Accuracy of every seed at the longest length beside the paper's (CSP appendix B)."""
    first = next(iter(next(iter(next(iter(groups.values())).values())).values()))
    longest = max(accuracies(first))
    as_paper = (first[0]["settings"]["train_length"], longest) == (PAPER_LENGTHS[0], PAPER_LENGTHS[-1])
    title = f"Every seed, accuracy at length {longest}; o: ours, x: the paper's"
    with figure(path, title, [*groups], len(groups), 3.2, ylabel="accuracy", sharex=False) as axes:
        for ax, (task, models) in zip(axes, groups.items()):
            for i, (model, runs) in enumerate(models.items()):
                ours = [accuracies(events)[longest] for events in runs.values()]
                theirs = PAPER_TASKS.get(task, {}).get(model, ((), ()))[1] if as_paper else ()
                for x, values, marker in ((i - 0.15, ours, "o"), (i + 0.15, theirs, "x")):
                    look = {"color": style(model)["color"], "label": model if marker == "o" else None}
                    ax.plot([x] * len(values), values, marker, ms=5, alpha=0.7, **look)
            ax.set(xticks=[], xlim=(-0.5, len(models) - 0.5))


def plot_dynamics(groups, path):
    """CSP figure 6: gradient norm and accuracy by epoch of every seed of CSP-Fast, or else of the first model."""
    names = [name for models in groups.values() for name in models]
    model, lines = "csp-fast" if "csp-fast" in names else names[0], {}
    for key, what in (("grad_max", "gradient"), ("acc", "accuracy")):
        for task, runs in ((task, models[model]) for task, models in groups.items() if model in models):
            points = [{e["epoch"]: e[key] for e in events if e["event"] == "train"} for events in runs.values()]
            lines[f"{task}, {what}"] = {f"seed {seed}": ({"color": colour, "lw": 0.8}, [x])
                                        for seed, colour, x in zip(runs, shades(len(runs)), points)}  # fmt: skip
    ylabel = "largest gradient norm\nsince the last point", "accuracy at the training length"
    title = f"{model}: training, a line a seed"
    with figure(path, title, lines, len(lines) // 2, 2.2, "epoch", ylabel, sharey="row") as axes:
        axes[0].set_yscale("log")


def task_report(logs):
    """(tables, {file name: function that draws it into a path})."""
    groups = group_tasks(logs)
    figures = {f"{run_name('lengths', task)}.png": partial(plot_lengths, task, runs) for task, runs in groups.items()}
    figures |= {"seeds.png": partial(plot_seeds, groups), "dynamics.png": partial(plot_dynamics, groups)}
    return task_tables(groups), figures


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def tables_and_figures(logs):
    """task_report or training_report of {path: log} of one kind. Raises InputError, also for one that lacks a value."""
    named, logs = logs, [*logs.values()]
    try:
        return (task_report if "task" in logs[0][0]["settings"] else training_report)(logs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as e:
        for path in named if len(logs) > 1 else ():
            tables_and_figures({path: named[path]})  # the one at fault is named
        what = f"lacks a value ({type(e).__name__}: {e}): it is damaged, or of another version"
        raise InputError(f"{' or '.join(map(str, named))} {what}") from None


def find_logs(run):
    """What a RUN on the command line names: a log, a run folder, or all in a folder of these."""
    path = Path(os.path.expanduser(run))
    is_log = not path.is_dir() or (path / "log.jsonl").exists()
    found = [path] if is_log else sorted([*path.glob("*.jsonl"), *path.glob("*/log.jsonl")])
    if not found:
        raise InputError(f"{path} holds no run and no log")
    return found


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
    found = {run: read_logs(find_logs(run)) for run in args.runs}
    by_file = {Path(path, "log.jsonl" * path.is_dir()).resolve(): (path, events)
               for logs in found.values() for path, events in logs.items()}  # fmt: skip
    by_path = dict(by_file.values())  # each file once
    tasks, *both = {"task" in events[0]["settings"] for events in by_path.values()}
    if both or (tasks and args.forest):
        raise InputError("logs of tasks.py go neither into one report with those of train.py, nor into --forest")
    if args.forest:
        if not one_figure:
            raise InputError("--forest draws one figure: name it, such as --out forest.png")
        folders = {Path(run).resolve().name: [*logs.values()] for run, logs in found.items()}
        if len(folders) < len({Path(run).resolve() for run in found}):
            raise InputError("two folders have one name, by which --forest groups: rename one")
        text, figures = "", {target.name: partial(plot_forest, folders)}
    else:
        text, figures = tables_and_figures(by_path)
    if one_figure and not args.forest:
        ours = f"plot_{target.stem.partition('-')[0]}" in globals()  # a name of ours, or one of the user's own
        name = f"{target.stem}.png" if ours or tasks else "curves.png"
        if name not in figures:
            names = ", ".join(figure.removesuffix(".png") for figure in figures)
            raise InputError(f"--out {args.out} is none of their figures: these runs have {names}")
        figures = {target.name: figures[name]}
    written = {Path(out, name).resolve() for name in (*figures, "tables.md")} if out else ()
    if args.csv is not None:
        if Path(os.path.expanduser(args.csv)).resolve() in written:
            raise InputError(f"--csv {args.csv} is a file that --out writes: name another")
        write_csv(args.csv, by_path)
        print(f"wrote {args.csv}")
    sys.exit(show_report(text, figures, out, "" if one_figure else text))


if __name__ == "__main__":
    command_line(main)
