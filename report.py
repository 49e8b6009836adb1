"""The logs of train.py and tasks.py, written and read: every table and figure of the three papers that logs can give.

    python report.py runs/*-stdlib-*                              steps to a loss, ratios, gaps, cost: on the terminal
    python report.py runs/*-stdlib-* --out figures                and, with the figures, into a folder
    python report.py runs/tasks-40/* --out figures                length generalization
    python report.py runs/pam* runs/sam* --out figures            runs in epochs: also power laws and their crossing

What checkpoints can give is diagnose.py's.
Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691),
section 8; PAM, section III; CSP, section 3. Losses in the logs are in nats per token; divided by ln 2 they are bpc,
bits per character, if the tokens are bytes, and else bits a token. "+-" is half a 95 % confidence interval.
"""

import colorsys
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
from itertools import pairwise, product
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
    """Parts of a run's name, of which the first is the model spec, as a name for its folder."""
    return re.sub(r"[:=/\\\0]", "_", "-".join(map(str, parts)))


def provenance(device, world):
    """What ran: code revision ("-dirty" if changed, None outside a git checkout), versions, device, ranks."""
    import torch

    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # a hook's name its repository
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2, env=env).stdout.strip()
    except (OSError, subprocess.SubprocessError):
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
    if path.is_dir() and not (path / "log.jsonl").exists() and any(path.glob("*.jsonl")):
        raise InputError(f"{path} is a folder of logs: name {path}/*.jsonl")
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
        named = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        note(f"note: of {path} these lines cannot be read and are left out: {named}")
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


def _is_number(x):
    """A finite one, small enough to compute with."""
    return isinstance(x, (int, float)) and abs(x) < 1e100  # false for NaN


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


def of_seeds(found, seeds):
    return f", {found} of {seeds} seeds" if found < seeds else ""


def with_range(values, digits):
    """Text: the mean of those that are not None, in brackets the lowest and the highest; empty if there are none."""
    found = [x for x in values if x is not None]
    if not found:
        return ""
    text = f"{statistics.fmean(found):.{digits}f}"
    text += f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
    return text + of_seeds(len(found), len(values))


def difference(both):
    """Text: the mean of x - y over pairs (x, y), +- half of its 95 % interval."""
    mean, half = mean_interval([x - y for x, y in both])
    return f"{mean:+.3f}" + ("" if half is None else f" +- {half:.3f}")


def ratio(both):
    """Text: the geometric mean of x / y over pairs (x, y) above 0, and its 95 % interval."""
    logs = [math.log(x / y) for x, y in both if x > 0 < y]
    if not logs:
        return "-"
    mean, half = mean_interval(logs)
    interval = "" if half is None else f" [{math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}]"
    return f"{math.exp(mean):.2f}{interval}"


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
VARIANTS = ((0.05, 0.7), (-0.05, 0.2), (0.1, 0.45), (-0.1, 0.6))  # of models with options: turn of the hue, lightness
REAL = {*COMPLEX, "rnn", "signed-mamba", "decoder"}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9,
         "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 150}  # fmt: skip


def style(label):
    """Colour and dashes of a model's lines in every figure, by its name and options alone."""
    name, *options = re.split("[:,]", label.partition(", rate")[0])
    colour = COLOURS.get(name) or list(COLOURS.values())[zlib.crc32(name.encode()) % len(COLOURS)]
    real = name in REAL or "field=real" in options
    if not options:
        return {"color": colour, "ls": "--" if real else "-"}
    hue, light, full = colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    code = zlib.crc32(":".join(sorted(options)).encode())
    turn, light = VARIANTS[code % 4]
    dashes = ((3, 1, 1, 1), (1, 1)) if real else ((7, 1), (12, 1, 2, 1))
    return {"color": colorsys.hls_to_rgb((hue + turn) % 1, light, 0.6 * full), "ls": (0, dashes[code // 4 % 2])}


@contextmanager
def figure(path, title, panels=("",), columns=1, height=2.4, xlabel="", ylabel="", colours=128, **shared):
    """Yields a list of axes, one for each title in `panels`, that become the PNG `path` when the block ends, over one
    legend of all that has a label, as it is: $ is no formula. Drawn by Agg in matplotlib's own style, whatever
    MPLBACKEND and matplotlibrc say.
    height: of a row; xlabel: of the lowest axes; ylabel: of each row, or a tuple; colours: kept."""
    backend = os.environ.pop("MPLBACKEND", None)  # a name that matplotlib does not know would end its import
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
        for ax in axes[len(panels) :]:
            ax.axis("off")
        yield axes[: len(panels)]
        handles = [pair for ax in axes for pair in zip(*ax.get_legend_handles_labels())]
        labelled = {name.encode(errors="replace").decode(): handle for handle, name in handles}
        across = max(1, min(len(labelled), int(128 / (11 + max(map(len, labelled), default=0)))))
        lines, title = -(-len(labelled) // across), textwrap.fill(title, 108)
        fig.set_size_inches(7.5, height * rows + 0.2 * lines + 0.15 * title.count("\n") + 0.3)
        fig.suptitle(title.encode(errors="replace").decode(), fontsize=9, parse_math=False)
        if labelled:
            legend = fig.legend(labelled.values(), labelled, loc="outside lower center", ncols=across)
            for label in legend.get_texts():
                label.set_parse_math(False)
        with explain(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # such a character is a box
                fig.savefig(drawn := io.BytesIO(), format="png")
            image = Image.open(drawn).convert("RGB").quantize(colours)  # a third of the bytes
            replace_file(path, lambda f: image.save(f, "png", optimize=True))


def mean_curve(curves):
    """The mean of curves [(x, y)] at the points that all have."""
    values = [dict(zip(x, y)) for x, y in curves if x] or [{}]
    common = sorted(set(values[0]).intersection(*values[1:]))
    return common, [statistics.fmean(v[x] for v in values) for x in common]


def draw_runs(ax, curves, label, **look):
    """Curves [(x, y)] of several seeds: each thin, and their mean."""
    for x, y in curves if len(curves) > 1 else ():
        ax.plot(x, y, **look, lw=0.6, alpha=0.4)
    ax.plot(*mean_curve(curves), **look, lw=1.6, label=label)


def write_report(text, figures, out):
    """Writes `text` as tables.md into the folder `out`, then draws `figures`, {file name: function of its path}. A
    figure that cannot be drawn is a line on stderr and stops nothing. Returns the paths that were written."""
    paths, faults = [out / "tables.md"] * bool(text), {}
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
    if not text or out.suffix in (".png", ".md", ".jpg", ".pdf", ".svg"):
        raise InputError(f"--out {text or repr(text)} must be a folder: tables and figures go into it")
    return out


def show_report(text, figures, out=None, written=None):
    """Writes tables and figures into the folder `out`, if one is given, and then prints `text`. written: the tables of
    the file, if not `text`. Raises InputError if another program works in `out`. Exits with the code 2 if a figure
    cannot be drawn."""
    written, paths = text if written is None else written, []
    try:
        if out and (written or figures):
            with explain(f"write {out}"):
                out.mkdir(parents=True, exist_ok=True)
            with hold(out):
                paths = write_report(written, figures, out)
    finally:  # shown also where they cannot be written
        with suppress(BrokenPipeError):  # who reads has seen enough
            print(text, *(f"wrote {path}" for path in paths), sep="\n", flush=True)
    if out and len(paths) < len(figures) + bool(written):
        sys.exit(2)


# ----------------------------------------------------------------------------------------------------------------------
# Training runs (QS section 8: tables 3-8, figures 3-7)

TARGETS = (4.0, 3.5, 3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's
# What the paper's text prints of its 253M models on enwik8, OpenWebText and FineWeb, one seed each. Its tables are not
# in the text: of most cells it has a range, or one corpus, or "about".
PAPER_STEPS = {  # table 6
    2.5: {"hmamba": "75-79", "mamba": "237-252"},
    2.0: {"hmamba": "191 enwik8", "mamba": "575 enwik8", "htransformer": "219 owt", "transformer": "484 owt"},
}
PAPER_STEP_RATIOS = {"mamba": "about 3", "transformer": "about 2"}  # table 5
PAPER_WARMUP_GAPS = {"mamba": "0.321 and 0.368", "transformer": "larger than at the end"}  # table 7: owt, fineweb
PAPER_GAPS = {"mamba": (0.315, 0.396), "transformer": (-0.132, 0.034)}  # tables 7-8: at 1000 steps, all three
PAPER_LOSS = {"transformer": "1.384 enwik8", "htransformer": "1.516 enwik8"}  # table 8
PAPER_SPREAD, PAPER_ENDS = {"hmamba": "about 2", "mamba": "more than 10"}, {"mamba": "10 to 100"}  # 8.4
PAPER_COST = ("The paper, to 2.0 bpc: H-Mamba 0.23 and Mamba 0.79 billion tokens of FineWeb (9.3); H-Transformer 0.8 "
              "and Transformer 0.9 hours on OpenWebText, four A100 (8.4).")  # fmt: skip
PAPER_WARMUP = 0.75  # of 1000 steps, table 4
FAMILIES = {"hmamba": "state space", "htransformer": "attention", "pam": "associative memory"}
# What runs of one comparison may differ in: what tables name, and what does not change the course of a run.
NOT_SHARED = {"model", "seeds", "lr", "min_lr", "data", "out", "resume", "stop_at", "micro", "device", "compile",
              "checkpointing", "log_every", "ckpt_every", "sample_every", "eval_only", "split", "params"}  # fmt: skip


def check_training(events, path):
    """The events of a run of train.py, of which the header has all that the tables need, or InputError."""
    header, s, d = events[0], events[0]["settings"], events[0]["data"]
    course = [e for e in events if e["event"] in ("train", "val", "final")]
    try:
        o = header.get("optimizer", {"betas": (), "decay": 0, "clip": 0})
        numbers = [s[key] for key in ("steps", "batch", "seq", "lr", "min_lr", "eval_seqs")]
        numbers += [s.get("warmup") or 0, header["params"]["total"], d["size"], *o["betas"], o["decay"], o["clip"]]
        numbers += [e["loss" if e["event"] == "train" else "val_loss"] for e in course]
        texts = [*(s[key] for key in ("model", "size", "seeds", "dtype")), d["name"], d["sha256"]]
        texts += [e["split"] for e in course if e["event"] == "val"]
        parts = [e.get(key, {}) for e in events if e["event"] in ("header", "resume") for key in ("config", "versions")]
        whole = all(map(_is_number, numbers)) and min(numbers[1:3]) > 0 < header["params"]["total"]
        whole = whole and all(isinstance(x, str) for x in texts) and all(isinstance(x, dict) for x in parts)
        whole = whole and all(e["layers"] for e in events if e["event"] == "grad")
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise InputError(f"{path} is a damaged log: parts of a run of train.py are missing")
    for before, after in pairwise(e["step"] for e in course):
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
    does."""
    first = next((i for i, loss in enumerate(losses) if loss <= target), None)
    if not first:
        return None if first is None else float(steps[0])
    bracket = slice(first - 1, first + 1)
    return float(np.interp(target, losses[bracket][::-1], steps[bracket][::-1]))


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
    norms = [e["layers"] for e in events if e["event"] == "grad" and min(e["layers"]) > 0]
    ratios = [(max(x) / min(x), x[-1] / x[0]) for x in norms]
    return [statistics.median(values) for values in zip(*ratios)] or [None, None]


def base(label):
    """The model's name in a label such as "hmamba:N=4, rate 0.002"."""
    return re.split("[:,]", label)[0]


def family(label):
    """The complex model that a label's model is, or is the twin of."""
    return COMPLEX.get(base(label), base(label))


def reference(label, labels):
    """What a row is compared with, or None: its complex realization with the same options, or else without; for a
    variant of a complex model that model; or else the first of its family, or of `labels`."""
    if label in FAMILIES:
        return None
    relatives = [x for x in labels if family(x) == family(label)]
    known = (label.replace(base(label), family(label), 1), family(label), *relatives[:1], next(iter(labels)))
    return next((other for other in known if other in labels and other != label), None)


def panels(labels):
    """{title: its labels}, a panel for each family among `labels`."""
    found = {}
    for label in labels:
        found.setdefault(FAMILIES.get(family(label), "others"), []).append(label)
    return found


def run_labels(logs):
    """The runs' names: the model, and its rate if that model was run at several."""
    rates, settings = {}, [events[0]["settings"] for events in logs]
    for s in settings:
        rates.setdefault(s["model"], set()).add(s.get("lr"))
    return [s["model"] + (f", rate {s['lr']:g}" if len(rates[s["model"]]) > 1 else "") for s in settings]


def group_runs(logs):
    """[(shared settings, {label: {seed: events}})], a group for each set of settings that decide the course of a run;
    its labels are models (with their rates, where one has several), complex ones before their twins. Raises InputError
    for two runs of one label and seed, or of different configurations."""
    groups = {}
    for events in logs:
        settings = {"tokens": "bytes"} | {k: v for k, v in events[0]["settings"].items() if v is not None}
        shared = {k: v for k, v in settings.items() if k not in NOT_SHARED} | {"data": events[0]["data"]}
        groups.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(events)
    return [(shared, _by_label(members)) for shared, members in groups.values()]


def _by_label(logs):
    order, models = list(FAMILIES), {}
    for label, events in zip(run_labels(logs), logs):
        s, runs = events[0]["settings"], models.setdefault(label, {})
        if runs.setdefault(s["seeds"], events) is not events:
            raise InputError(f"two runs of {label} with seed {s['seeds']}: name one of them")
        if any(other[0].get("config") != events[0].get("config") for other in runs.values()):
            raise InputError(f"the runs of {label} have different configurations: name those of one")
        ends = sorted({other[0]["settings"].get("min_lr") for other in runs.values()})
        if len(ends) > 1 and s.get("schedule") != "constant":
            ends = ", ".join(map(str, ends))
            raise InputError(f"the runs of {label} end at different rates (min_lr {ends}): name those of one")
    place = {label: order.index(family(label)) if family(label) in order else 9 for label in models}
    return {label: models[label] for label in sorted(models, key=lambda x: (place[x], base(x) in COMPLEX))}


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

    commons = [math.ceil(10 * max(found)) / 10 for found in map(lowest, panels(models).values()) if found]
    reached = {target for target in TARGETS if target >= min(lowest(models), default=math.inf)}
    return sorted(reached.union(commons), reverse=True), max(commons, default=None)


def describe(shared, models):
    """One paragraph: the data, the protocol (QS table 4), and what ran it."""
    events = [e for runs in models.values() for log in runs.values() for e in log]
    headers = [e for e in events if e["event"] in ("header", "resume")]
    device, threads, git = (", ".join(sorted({str(h.get(k)) for h in headers})) for k in ("device", "threads", "git"))
    torch = ", ".join(sorted({str(h.get("versions", {}).get("torch", "?")) for h in headers}))
    d, (step, _) = shared["data"], warmup_end(shared)
    rate = "constant rate" if shared.get("schedule") == "constant" else f"{step:.0f} steps of warmup, then cosine"
    o = headers[0].get("optimizer")
    adamw = f", AdamW {tuple(o['betas'])}, decay {o['decay']}, gradients clipped at {o['clip']:g}" if o else ""
    return (
        f"Data: {d['name']}, {d.get('size', 0):,} tokens, SHA-256 {d.get('sha256', '?')[:12]}. {shared['steps']:,} "
        f"steps of {shared['batch']} x {shared['seq']} tokens, {rate}{adamw}, {shared['dtype']}. Validation every "
        f"{shared.get('eval_every', '?')} steps on {shared['eval_seqs']} fixed windows, at the end on the whole split. "
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

    def reaches(goal):
        return lambda events: steps_to_target(*curve(events), goal)

    def mean_loss(events):
        """Mean of the losses at all evaluated steps but 0, or None if the run did not reach the budget."""
        losses = [loss_at(events, step) for step in sorted(evaluated)]
        return statistics.fmean(losses) if losses and None not in losses else None

    def by_model(columns, missing=lambda label: ""):
        """A row a model: its label, and for each (function of a run, digits, the paper's) the range of its seeds."""
        rows = []
        for label, runs in models.items():
            cells = [with_range([*map(value, runs.values())], digits) or missing(label) for value, digits, _ in columns]
            printed = [paper(numbers, label) for *_, numbers in columns]
            rows.append([label, *(cell and cell + number for cell, number in zip(cells, printed))])
        return rows

    def paired(join, sign, columns):
        """A row a pair, and for each (function of a run, the paper's) its text by `join`: difference or ratio."""
        found = {}
        for i, (value, printed) in enumerate(columns):
            for label, other, both in pairs(models, value):
                cell = join(both) + of_seeds(len(both), len(models[label]))
                cell += paper(printed, label) if other == COMPLEX.get(label) else ""
                found.setdefault(f"{label} {sign} {other}", ["-"] * len(columns))[i] = cell
        return [[pair, *cells] for pair, cells in found.items()]

    def short(label):
        return "not reached" if all(map(final_loss, models[label].values())) else "not finished"

    def cost(events, of_step):
        steps = steps_to_target(*curve(events), common)
        return None if steps is None else steps * shared["batch"] * shared["seq"] / of_step(events)

    of_models, every_run = [], []
    for label, runs in models.items():
        header = next(iter(runs.values()))[0]
        s, config = header["settings"], header.get("config", {})
        shape = ", ".join(f"{key}={config[key]}" for key in ("D", "L") if key in config)
        rate = f"{s['lr']:g}" + ("" if constant else f" to {s['min_lr']:g}")
        of_models.append([label, f"{header['params']['total']:,}", shape, rate, len(runs)])
        for seed, events in runs.items():
            cells = [with_range([reaches(goal)(events)], 0) or "-" for goal in goals]
            cells += [with_range([end(events)], 3) or "-" for end in (at_budget, final_loss)]
            every_run.append([label, seed, *cells])
    gaps = {label: f"{low} to {high}" for label, (low, high) in PAPER_GAPS.items()}
    spread = [(lambda events: layer_spread(events)[0], 2, PAPER_SPREAD),
              (lambda events: layer_spread(events)[1], 2, PAPER_ENDS)]  # fmt: skip
    costs = [(partial(cost, of_step=lambda events: 1e6), 2, {}), (speed, 0, {}),
             (partial(cost, of_step=lambda events: 60 * speed(events)), 1, {})]  # fmt: skip
    tables = [
        markdown(["model", "parameters", "shape", "learning rate", "seeds"], of_models),
        markdown(["model", *heads], by_model([(reaches(goal), 0, PAPER_STEPS.get(goal, {})) for goal in goals], short),
                 "#### Steps to a validation loss") if goals else "",
        markdown(["pair", *heads], paired(ratio, "/", [
            (reaches(goal), PAPER_STEP_RATIOS if goal in (2.5, 2.2, 2.0) else {}) for goal in goals
        ]), "#### Ratio of steps", "Above 1: the second is faster. Geometric means."),
        markdown(["pair", f"at step {warm:.0f}, {what}", f"at step {budget}, the budget", "there, whole split",
                  "mean of all evaluations but the first"],
                 paired(difference, "-", [(partial(loss_at, step=warm), {} if constant else PAPER_WARMUP_GAPS),
                                          (at_budget, gaps), (final_loss, {}), (mean_loss, {})]),
                 f"#### Gap in validation loss, {loss}", "Above 0: the second leads."),
        markdown(["model", "fixed windows", "whole split"],
                 by_model([(at_budget, 3, {}), (final_loss, 3, PAPER_LOSS)], lambda label: "not finished"),
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
    seeds = "-".join(map(str, sorted({len(runs) for runs in models.values()})))
    rate = "constant rate" if shared.get("schedule") == "constant" else f"warmup of {warmup_end(shared)[0]:.0f}"
    steps = f"{shared['size']}, {shared['steps']} steps, {rate}"
    return f"{shared['data']['name']}, {steps}; {seeds} seed{'s' * (seeds != '1')} a model"


def plot_curves(shared, models, path):
    """Loss by optimization step: validation (QS figure 4) and training (figure 7), a row a family."""
    families = panels(models)
    titles = [f"{name}, {what}" for name in families for what in ("validation", "training batches")]
    with figure(path, f"{caption(shared, models)}; the first fall is cut off", titles, 2, xlabel="optimization step",
                ylabel=f"loss, {unit(shared['tokens'])}", sharex=True, sharey="row") as axes:  # fmt: skip
        for left, right, labels in zip(axes[::2], axes[1::2], families.values()):
            late = []
            for label in labels:
                runs = models[label].values()
                legend = f"{label} ({next(iter(runs))[0]['params']['total'] / 1e6:.2f}M, n = {len(runs)})"
                for ax, kind in ((left, "val"), (right, "train")):
                    curves = [curve(events, kind) for events in runs]
                    draw_runs(ax, curves, legend, **style(label))
                    late += [y for x, ys in curves for x, y in zip(x, ys) if x >= 0.2 * shared["steps"]]
            if late:  # the fall from 8 bits a byte in the first steps would take most of the height
                left.set_ylim(min(late) - 0.1, max(late) + 0.1)


def plot_steps(shared, models, path):
    """QS figure 3: bars of the steps to each target, points the seeds, in a bar its ratio to its reference."""
    goals, families = targets(models)[0], panels(models)
    title = f"{caption(shared, models)}; points: seeds; numbers: ratio of steps"
    values = [partial(lambda goal, events: steps_to_target(*curve(events), goal), goal) for goal in goals]
    compared = [{label: both for label, _, both in pairs(models, value)} for value in values]
    with figure(path, title, families, ylabel="steps to the loss") as axes:
        for ax, labels in zip(axes, families.values()):
            width = 0.8 / len(labels)
            for (i, label), (j, value) in product(enumerate(labels), enumerate(values)):
                x, other = j + width * (i - (len(labels) - 1) / 2), reference(label, models)
                steps = [*map(value, models[label].values())]
                reached = [s for s in steps if s is not None]
                whole = len(reached) == len(steps)  # a mean over some of the seeds would be too low
                ratios = [ours / theirs for ours, theirs in compared[j].get(label, ()) if ours > 0 < theirs]
                text = f"  {statistics.geometric_mean(ratios):.2f}" if ratios else ""
                if not whole:
                    text = f" {len(reached)} of {len(steps)} seeds" if reached else " not reached"
                legend = None if j else label + (f" / {other}" if other else "")
                height = statistics.fmean(reached) if whole else 0
                ax.bar(x, height, 0.9 * width, color=style(label)["color"], label=legend, alpha=0.6)
                ax.plot([x] * len(reached), reached, ".", color="black", ms=3)
                ax.text(x, max(reached) if whole else 0, text, rotation=90, ha="center", va="bottom", fontsize=7)
            ax.set_xticks(range(len(goals)), [f"{goal} {unit(shared['tokens'])}" for goal in goals])
            ax.margins(y=0.2)


def plot_gap(shared, models, path):
    """QS figure 5: validation loss minus its reference's by step, the warmup shaded. Thin: seeds.
    Horizontal bands: the paper's gaps at its budget, of its own pairs."""
    compared = {label: (other, both) for label, other, both in pairs(models, lambda events: dict(zip(*curve(events))))}
    families, warmup, values = panels(compared), shared.get("schedule") != "constant", [0.0]
    title = f"{caption(shared, models)}; above 0: the second leads" + "; grey: warmup" * warmup
    with figure(path, title, families, xlabel="optimization step",
                ylabel=f"gap, {unit(shared['tokens'])}", sharex=True, sharey=True) as axes:  # fmt: skip
        for ax, labels in zip(axes, families.values()):
            for label, (other, both) in ((label, compared[label]) for label in labels):
                gaps = [{step: ours[step] - theirs[step] for step in ours if step in theirs} for ours, theirs in both]
                draw_runs(ax, [([*gap], [*gap.values()]) for gap in gaps], f"{label} - {other}", **style(label))
                values += [y for gap in gaps for y in gap.values()]
                if label in PAPER_GAPS and other == COMPLEX[label] and unit(shared["tokens"]) == "bpc":
                    legend = f"the paper's {label} - {other}, at 1000 steps"
                    ax.axhspan(*PAPER_GAPS[label], color=style(label)["color"], alpha=0.2, lw=0, label=legend)
                    values += PAPER_GAPS[label]
            ax.axhline(0, color="black", lw=0.8)
            if warmup:
                ax.axvspan(0, warmup_end(shared)[0], color="0.92", zorder=0)
        ax.set_ylim(min(values) - 0.05, max(values) + 0.05)


def plot_gradients(shared, models, path):
    """QS figure 6: gradient norm of each layer by step, mean over seeds, a panel a model."""
    titles, columns = [label.replace(":", "\n", 1) for label in models], min(3, len(models))
    with figure(path, caption(shared, models), titles, columns, xlabel="optimization step",
                ylabel="gradient norm", sharex=True, sharey=True) as axes:  # fmt: skip
        import matplotlib

        for ax, runs in zip(axes, models.values()):
            logged = [[e for e in events if e["event"] == "grad"] for events in runs.values()]
            depth = min(len(e["layers"]) for events in logged for e in events)
            colours = matplotlib.colormaps["viridis"].resampled(depth + 1)  # the last, a light yellow, is left out
            for layer in range(depth):
                curves = [([e["step"] for e in events], [e["layers"][layer] for e in events]) for events in logged]
                ax.semilogy(*mean_curve(curves), color=colours(layer), lw=1.2, label=f"layer {layer}")
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")


def plot_rates(shared, models, path):
    """Validation loss at the budget by peak learning rate, a row a family, points the seeds."""
    found, ylabel = {}, f"loss, {unit(shared['tokens'])}"
    for events in (events for runs in models.values() for events in runs.values()):
        s, loss = events[0]["settings"], loss_at(events, shared["steps"])
        if loss is not None:
            found.setdefault(s["model"], {}).setdefault(s["lr"], []).append(loss)
    families = panels(found)
    with figure(path, caption(shared, models), families, xlabel="peak learning rate", ylabel=ylabel) as axes:
        for ax, labels in zip(axes, families.values()):
            for label in labels:
                rates, look = sorted(found[label]), style(label)
                points = [(rate, loss) for rate in rates for loss in found[label][rate]]
                ax.plot(rates, [statistics.fmean(found[label][rate]) for rate in rates], **look, label=label)
                ax.plot(*zip(*points), "o", ms=4, color=look["color"])
            ticks = sorted({rate for label in labels for rate in found[label]})
            ax.set_xscale("log")
            ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
            ax.set_xticks([], minor=True)


def training_report(logs):
    """(tables, {file name: function that draws it into a path}) of all groups of runs."""
    groups, text, figures, sweeps = group_runs(logs), [], {}, {}
    keys = dict.fromkeys(key for shared, _ in groups for key in shared)
    differ = [key for key in keys if any(shared.get(key) != groups[0][0].get(key) for shared, _ in groups)]
    if differ:
        text.append(f"Runs of {len(groups)} kinds, which differ in {', '.join(differ)} and are not averaged.")
    for shared, models in groups:
        corpus = f"{shared['data']['name']} {shared['data']['sha256'][:8]}"
        values = {key: corpus if key == "data" else shared.get(key) for key in differ}
        text += ["### " + ", ".join(f"{key} {value}" for key, value in values.items())] * bool(differ)
        text.append(training_tables(shared, models))
        members = [events for runs in models.values() for events in runs.values()]
        drawn, finished = {}, [events for events in members if epoch_losses(events) and final_loss(events) is not None]
        if any(map(epoch_losses, members)):
            text += ["#### Epochs", epochs_table(members)]
        if len(models) > len({events[0]["settings"]["model"] for events in members}):
            drawn["rates"] = plot_rates  # alone, as a curve for each rate of each model would say little
            text += ["No power laws: a model has several rates here."] * any(map(epoch_losses, members))
        else:
            drawn["curves"] = plot_curves
            drawn |= {"steps": plot_steps} if targets(models)[0] else {}
            drawn |= {"gap": plot_gap} if pairs(models, curve) else {}
            drawn |= {"gradients": plot_gradients} if all(layer_spread(events)[0] for events in members) else {}
            protocol = json.dumps({key: value for key, value in shared.items() if key != "size"}, sort_keys=True)
            named = {key: value for key, value in values.items() if key != "size"}
            sweeps.setdefault(protocol, (named, shared["tokens"], []))[-1].extend(finished)
        for name, plot in drawn.items():
            figures[run_name(name, *values.values()) + ".png"] = partial(plot, shared, models)
    for named, tokens, finished in sweeps.values():
        sizes = {}
        for events in finished:
            sizes.setdefault(sweep_name(events)[0], set()).add(events[0]["params"]["total"])
        swept = [events for events in finished if len(sizes[sweep_name(events)[0]]) > 1]
        if swept:
            table, fits = scaling_table(swept, tokens)
            text += ["### " + ", ".join(["Scaling", *(f"{key} {value}" for key, value in named.items())]), table]
            figures[run_name("scaling", *named.values()) + ".png"] = partial(plot_scaling, fits, tokens)
    return "\n\n".join(text), figures


# ----------------------------------------------------------------------------------------------------------------------
# Tasks (CSP section 3, appendices A and B)

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
    groups, first = {}, protocol(logs[0])
    for events in logs:
        s = events[0]["settings"]
        for k, v in first.items():
            if s.get(k) != v:
                raise InputError(f"runs of different protocols do not go into one table: {k} is {v} and {s.get(k)}")
        if events[-1]["event"] != "final":
            raise InputError(f"the run of {s['model']} on {s['task']}, seed {s['seed']}, is not finished: run it again")
        if groups.setdefault(s["task"], {}).setdefault(s["model"], {}).setdefault(s["seed"], events) is not events:
            raise InputError(f"two runs of {s['model']} on {s['task']} with seed {s['seed']}: name one of them")
    return groups


def accuracies(events):
    """{length: accuracy} of a finished run."""
    return {e["length"]: e["acc"] for e in events if e["event"] == "eval"}


def paper_task(task, model):
    """(its mean accuracies at PAPER_LENGTHS, those of its seeds at 64), empty if the paper has no such run."""
    return PAPER_TASKS.get(task, {}).get(model, ((), ()))


def task_tables(logs):
    """Markdown: accuracy by length with the paper's (CSP tables 1-4), spread over seeds (table 5), paired differences,
    every seed, and the rotation that CSP learnt for each symbol."""
    groups, s = group_tasks(logs), logs[0][0]["settings"]
    lengths, longest, at = s["lengths"], s["lengths"][-1], [f"L={length}" for length in s["lengths"]]
    text = [
        f"Trained at length {s['train_length']} for {s['epochs']} epochs, tested on 1,000 sequences a length. Mean "
        "over the seeds; in brackets the lowest and the highest. *Italics: the paper's mean, at 300 epochs.*"
    ]
    paired, spread, every_seed, angles = [], [], [], []
    for task, models in groups.items():
        rows, earlier = [], {}
        for model, runs in models.items():
            acc = {seed: accuracies(events) for seed, events in runs.items()}
            means, seeds = paper_task(task, model)
            printed = {n: f" *{mean:.3f}*" for n, mean in zip(PAPER_LENGTHS, means)}
            cells = [with_range([a[n] for a in acc.values()], 3) + printed.get(n, "") for n in lengths]
            rows.append([model, f"{next(iter(runs.values()))[0]['params']['total']:,}", len(runs), *cells])
            if len(acc) > 1:
                theirs = f"{statistics.stdev(seeds):.3f}" if seeds and longest == 64 else "-"
                deviation = statistics.stdev(a[longest] for a in acc.values())
                spread.append([task, model, len(acc), f"{deviation:.3f}", theirs])
            for other, of_other in earlier.items():
                both = [(a, of_other[seed]) for seed, a in acc.items() if seed in of_other]
                if len(both) > 1:
                    cells = [difference([(a[n], b[n]) for a, b in both]) for n in lengths]
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
    s, seeds = header["settings"], "-".join(map(str, sorted({len(runs) for runs in models.values()})))
    length, longest = s["train_length"], max(s["lengths"])
    title = f"{task}: {s['epochs']} epochs at length {length} (dotted), {seeds} seeds a model"
    with figure(path, f"{title}; grey: always the commonest answer", ("", ""), 2, 3, ylabel="accuracy",
                sharey=True) as (left, right):  # fmt: skip
        for model, runs in models.items():
            logged = [[e for e in events if e["event"] == "eval"] for events in runs.values()]
            by_length = [sorted((e["length"], e["acc"]) for e in evals) for evals in logged]
            by_position = [next(e["acc_by_pos"] for e in evals if e["length"] == longest) for evals in logged]
            draw_runs(left, [tuple(zip(*points)) for points in by_length], model, **style(model))
            draw_runs(right, [(range(1, longest + 1), acc) for acc in by_position], None, **style(model))
        for ax in (left, right):
            ax.axvline(length, color="0.4", ls=":", lw=1)
        right.axhline(max(header["data"]["shares"]), color="0.4", ls="--", lw=1)
        left.set(xlabel="length of the test sequences", ylim=(-0.03, 1.03))
        right.set_xlabel(f"position in sequences of length {longest}")


def plot_seeds(groups, path):
    """Accuracy of every seed at the longest length beside the paper's (CSP appendix B)."""
    longest = max(accuracies(next(iter(next(iter(next(iter(groups.values())).values())).values()))))
    title = f"Every seed, accuracy at length {longest}"
    with figure(path, title, groups, len(groups), 3.2, ylabel="accuracy", sharey=True) as axes:
        for ax, (task, models) in zip(axes, groups.items()):
            for i, (model, runs) in enumerate(models.items()):
                ours = [accuracies(events)[longest] for events in runs.values()]
                theirs = paper_task(task, model)[1] if longest == 64 else ()
                for x, values, marker in ((i - 0.15, ours, "o"), (i + 0.15, theirs, "x")):
                    ax.plot([x] * len(values), values, marker, color=style(model)["color"], ms=5, alpha=0.7)
            for marker, label in (("o", "ours"), ("x", "the paper's")):
                ax.plot([], [], marker, color="0.3", label=label)
            ax.set_xticks(range(len(models)), models, rotation=40, ha="right")
            ax.set_xlim(-0.5, len(models) - 0.5)
        ax.set_ylim(None, 1.03)  # of all panels, when all are drawn


def plot_dynamics(groups, model, path):
    """Gradient norm and accuracy at the training length, by epoch, of every seed (CSP figure 6)."""
    groups = {task: models[model] for task, models in groups.items() if model in models}
    length = next(iter(next(iter(groups.values())).values()))[0]["settings"]["train_length"]
    ylabel = "largest gradient norm\nsince the last point", f"accuracy at length {length}"
    with figure(path, f"{model}: training, a line a seed", [*groups, *[""] * len(groups)], len(groups), 2.2,
                "epoch", ylabel, sharex=True, sharey="row") as axes:  # fmt: skip
        for upper, lower, runs in zip(axes, axes[len(groups) :], groups.values()):
            for j, (seed, events) in enumerate(runs.items()):
                train = [e for e in events if e["event"] == "train"]
                epochs, look = [e["epoch"] for e in train], {"color": f"C{j % 10}", "lw": 0.8}
                upper.semilogy(epochs, [e["grad_max"] for e in train], **look)
                lower.plot(epochs, [e["acc"] for e in train], label=f"seed {seed}" if j < 10 else None, **look)


def task_figures(groups):
    """{file name: function that draws it into a path} of group_tasks."""
    names = list(dict.fromkeys(model for models in groups.values() for model in models))
    figures = {f"lengths-{task}.png": partial(plot_lengths, task, models) for task, models in groups.items()}
    dynamics = partial(plot_dynamics, groups, "csp-fast" if "csp-fast" in names else names[0])
    return figures | {"seeds.png": partial(plot_seeds, groups), "dynamics.png": dynamics}


# ----------------------------------------------------------------------------------------------------------------------
# PAM: the paper's metric and its scaling fits (PAM section III)

PAPER_FITS = {  # slopes in loss and perplexity, (N, y) where the fits cross
    "loss": {"pam": -0.15, "sam": -0.12, "crossing": (4.5e9, 2.05)},
    "perplexity": {"pam": -0.65, "sam": -0.49, "crossing": (5.5e8, 10.6)},
}
PAPER_LOSSES = {"5m": {"pam": 5.56, "sam": 4.78}, "100m": {"pam": 3.56, "sam": 3.26}}  # ends of its sweep, in nats
PAPER_RATIOS = {"5m": 2.18, "100m": 1.36}  # PAM's perplexity to SAM's
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
    """Markdown: loss in nats a token and perplexity by epoch, and the paper's late metric of each run."""
    rows = []
    for label, events in zip(run_labels(logs), logs):
        found, run = epoch_losses(events), [label, *map(events[0]["settings"].get, ("size", "seeds"))]
        if not found:  # begun, not yet evaluated
            continue
        for epoch, losses in found.items():
            end, best = ([*of, math.nan][0] for of in losses)
            if losses[0] or epoch < max(found):  # ended
                rows.append([*run, epoch, f"{end:.4f}", f"{best:.4f}", f"{math.exp(end):.2f}"])
        late = late_losses(events)
        (loss, sigma, _), (ppl, ppl_sigma, _) = late_metric(late), late_metric([math.exp(x) for x in late])
        rows.append([*run, f"late, n = {len(late)}", f"{loss:.4f} +- {sigma:.4f}", "", f"{ppl:.2f} +- {ppl_sigma:.2f}"])
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


def meeting(models, first, second):
    """Where the laws of two models of a fit of scaling_table cross, or None."""
    (sizes, *_, law), (others, *_, other) = models[first], models[second]
    return crossing(law, other, len(sizes) + len(others) - 4)


def slope_text(law):
    return f"{law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}"


def sweep_name(events):
    """(model with its other options, size with the options of shape) of a run."""
    s = events[0]["settings"]
    model, *options = s["model"].split(":")
    shape = sorted(option for option in options if option.split("=")[0] in SHAPE_OPTIONS)
    return ":".join([model, *sorted({*options}.difference(shape))]), ":".join([s["size"], *shape])


def scaling_table(logs, tokens):
    """Fits of every model family in `logs` in loss and in perplexity, and the late loss at each size, beside the
    paper's: all of it if `tokens` are its own, "gpt2", else the slopes of the loss and their crossing. Returns
    (Markdown, fits), fits being {quantity: {model: ([N], [y], [sigma_log10], (a, b, covariance))}}."""
    runs, by_size = {}, {}  # {model: [run]}, {size: {model: {seed: run}}}; run: parameters, late metrics
    for events in logs:
        (name, size), seed, late = sweep_name(events), events[0]["settings"]["seeds"], late_losses(events)
        ppl = late_metric([math.exp(x) for x in late])
        run = {"N": events[0]["params"]["total"], "loss": late_metric(late), "perplexity": ppl}
        runs.setdefault(name, []).append(run)
        if by_size.setdefault(size, {}).setdefault(name, {}).setdefault(seed, run) is not run:
            raise InputError(f"two runs of {name}, size {size}, with seed {seed}: name one of them")
    names, own = sorted(runs, key=lambda name: name != "pam"), tokens == "gpt2"
    first, fits, rows, ends = names[0], {}, [], []  # the others are compared with the first
    for quantity in ("loss", "perplexity"):
        models, paper = fits.setdefault(quantity, {}), PAPER_FITS[quantity] if own or quantity == "loss" else {}
        for name in names:
            sizes, values, _, sigmas = zip(*sorted((run["N"], *run[quantity]) for run in runs[name]))
            law = power_law(sizes, values)
            models[name] = sizes, values, sigmas, law
            met, cells = None if name == first else meeting(models, first, name), ["-", "-", "-"]
            if met:
                cells[:2] = f"{met[0]:.2g} ({met[1]:.3g})", f"{math.log10(met[0]):.2f} +- {met[2]:.2f}"
            if paper and (first, name) == ("pam", "sam"):
                cells[2] = f"{paper['crossing'][0]:.2g}" + f" ({paper['crossing'][1]})" * own
            rows.append([quantity, name, len(sizes), len({*sizes}), slope_text(law), paper.get(name, "-"), *cells])

    def largest(size):
        return max(run["N"] for seeds in by_size[size].values() for run in seeds.values())

    for size, models in ((size, by_size[size]) for size in sorted(by_size, key=largest)):
        for name, seeds in models.items():
            theirs = models.get(first, {}) if name != first else {}
            shared = [seed for seed in seeds if seed in theirs]
            both = [(theirs[seed]["perplexity"][0], seeds[seed]["perplexity"][0]) for seed in shared]
            compared = ratio(both) + of_seeds(len(both), len(seeds)) if both else "-"
            loss = with_range([run["loss"][0] for run in seeds.values()], 3)
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
    hollow markers are the paper's ends of the sweep, of its `tokens`."""
    with figure(path, "Late-epoch loss and perplexity by parameters, a point a run", ("", ""), height=3,
                xlabel="parameters", ylabel=("validation loss, nats", "validation perplexity"),
                sharex=True) as axes:  # fmt: skip
        for ax, (quantity, models) in zip(axes, fits.items()):
            names, paper = list(models), PAPER_FITS[quantity] if tokens == "gpt2" or quantity == "loss" else {}
            met = meeting(models, *names[:2]) if len(names) > 1 else None
            largest = max(max(sizes) for sizes, *_ in models.values())
            shown = [met[0]] if met and largest / 1e3 < met[0] < 1e3 * largest else []
            for name, (sizes, values, sigmas, law) in models.items():
                colour, marker = style(name)["color"], "^*os"[names.index(name) % 4]
                bars = [y * s * math.log(10) for y, s in zip(values, sigmas)]
                label = f"{name}, {quantity}: slope {slope_text(law)}"
                label += f" (the paper's {paper[name]})" if name in paper else ""
                ax.errorbar(sizes, values, bars, fmt=marker, color=colour, capsize=2, label=label)
                ends = [min(*sizes, *shown), max(*sizes, *shown)]
                ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=colour, lw=1)
                for size, losses in PAPER_LOSSES.items() if tokens == "gpt2" else ():
                    at = 1e6 * float(size[:-1])
                    if name in losses and sizes[0] / 2 < at < 2 * sizes[-1]:
                        theirs = losses[name] if quantity == "loss" else math.exp(losses[name])
                        ax.plot(at, theirs, marker, color=colour, mfc="none", ms=9)
            if shown:
                theirs = f" (the paper's {paper['crossing'][0]:.2g})" if paper and names[:2] == ["pam", "sam"] else ""
                place = f"10^({math.log10(met[0]):.2f} +- {met[2]:.2f})"
                label = f"{quantity}: {names[1]} crosses {names[0]} at {place}{theirs}"
                ax.axvline(met[0], ls=":", color="grey", label=label)
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders or log.jsonl files")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the tables, as tables.md, and the figures")
    args = parser.parse_args()
    runs, out = [os.path.expanduser(run) for run in args.runs], None if args.out is None else parse_out(args.out)
    logs = [read_log(run) for run in runs]
    of_tasks = ["task" in events[0]["settings"] for events in logs]
    if any(of_tasks) and not all(of_tasks):
        raise InputError("logs of train.py and of tasks.py do not go into one report")
    if of_tasks[0]:
        logs = [check_task(events, run) for events, run in zip(logs, runs)]
        show_report(task_tables(logs), task_figures(group_tasks(logs)), out)
    else:
        show_report(*training_report([check_training(events, run) for events, run in zip(logs, runs)]), out)


if __name__ == "__main__":
    command_line(main)
