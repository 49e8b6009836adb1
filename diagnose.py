"""What trained models hold, from their checkpoints: what the PAM paper looks for, and phases over a text.

    python diagnose.py runs/pam-stdlib-tiny-s1 runs/sam-stdlib-tiny-s1    rank of the memory, repetition
    python diagnose.py runs/pam* --wordnet data/wordnet                   of runs on GPT-2's tokens: also word pairs
    python diagnose.py runs/hmamba-stdlib-tiny-s1 --prompt "def main("    phases and moduli of its state over a text

Papers: PAM, "Phase-Associative Memory", sections II and III; QS (arXiv 2608.14691), sections 5.1 and 5.5. Of runs of
pam and sam: the effective rank of the memory beside the same model at its initialisation, the repetition of the texts
in the log and, with --wordnet, the phase coherence of word pairs. With --text or --prompt instead a picture a run:
hue is the phase, brightness grows with the modulus, of psi_t (hmamba), of the diagonal of the memory S_t (pam) or of
the turned keys (htransformer). Real models have no phase.
"""

import codecs
import math
import os
import re
import statistics
import sys
from copy import deepcopy
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import torch

import data
import hmamba
import htransformer
import pam
import sample
from data import InputError, Parser, command_line, explain
from report import (COLOURS, figure, interval_text, log_axis, markdown, mean_interval, parse_out, range_text, read_log,
                    shades, show_report, spec_label, style)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Effective rank of the memory (PAM section III)

PAPER_RANK, PAPER_SETTLED = 10, 15  # about 10 of d = 64 within 10-15 tokens
RANK_WINDOWS = 8  # of validation text


def effective_rank(S):
    """exp of the entropy of the normalised singular values of (..., n, n); 0 for a zero matrix."""
    s = torch.linalg.svdvals(S)
    p = s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
    return torch.where(s.sum(-1) > 0, torch.exp(-torch.xlogy(p, p).sum(-1)), 0.0)


def memories(state):
    """The memories S of PAM's or SAM's state, (layers, B, H, d, d, 2). A hybrid block has a past beside."""
    return torch.stack([S if torch.is_tensor(S) else S[0] for S, _ in filter(None, state)])


@torch.no_grad()
def state_ranks(model, tokens, positions):
    """Effective rank of the memories of a PAM or SAM that has read the first t of tokens (B, T), for each t of
    `positions`, ascending: (positions, layers, H, B)."""
    state, ranks = None, []
    for begin, end in pairwise([0, *positions]):
        _, _, state = model(tokens[:, begin:end], state=state)
        S = memories(state) if model.real else torch.view_as_complex(memories(state).contiguous())
        ranks.append(effective_rank(S).transpose(1, 2))
    return torch.stack(ranks)


def ranks_table(positions, trained, untrained, after):
    """Markdown: for each layer and head the effective rank after `after` tokens, and from there on its mean (range).
    trained, untrained: of state_ranks; means over the windows."""
    first, rows = positions.index(after), []
    for layer, head in np.ndindex(*trained.shape[1:3]):
        curves = [ranks[first:, layer, head].mean(-1).tolist() for ranks in (trained, untrained)]
        rows.append([layer, head, *(text for curve in curves for text in (f"{curve[0]:.2f}", range_text(curve, 2)))])
    at, on = f"after {after} tokens", f"from there to {positions[-1]} (range)"
    return markdown(["layer", "head", at, on, f"untrained, {at}", f"untrained, {on}"], rows)


def plot_ranks(positions, trained, untrained, d, path):
    """Effective rank against the tokens read, a line a layer (mean over heads and windows). Grey: the untrained model,
    thin its layers; dotted: the bound, one pair a token. trained, untrained: of state_ranks."""
    layers, fresh = ([dict(zip(positions, y)) for y in r.mean((2, 3)).T.tolist()] for r in (trained, untrained))
    lines = {"untrained": ({"color": "0.7"}, fresh)}
    lines |= {f"layer {i}": ({"color": shade}, [layers[i]]) for i, shade in enumerate(shades(len(layers)))}
    lines["bound"] = {"color": "black", "ls": ":", "lw": 1}, [{t: min(t, d) for t in positions}]
    with figure(path, "Effective rank of the memory by the tokens read", {"": lines}, height=3.4, xlabel="tokens read",
                ylabel=f"effective rank of S (of {d})") as (ax,):  # fmt: skip
        if d == 64:
            ax.axhline(PAPER_RANK, ls="--", color="#D55E00", lw=1, label="the paper's")
        log_axis(ax, "x")
        ax.set_ylim(0, 1.05 * d)


# ----------------------------------------------------------------------------------------------------------------------
# Repetition of generated texts (PAM section III)

PAPER_REPETITION = {"3-gram": 0.034, "4-gram": 0.011, "unique": 0.703}  # of one sample
PAPER_SAMPLE = 91  # tokens: the shortest text that has all three (3 of 89 3-grams, 1 of 88 4-grams, 64 of 91 tokens)
SAMPLING = {"generated": "temperature 1, top-k 50, top-p 0.9, penalty 1.2", "sample": "temperature 0.8, top-k 50"}


def repetitions(texts, split):
    """Repetition in texts, in pieces of PAPER_SAMPLE tokens, as all three numbers depend on the length; a text of less
    is one piece. split: text -> list of tokens or words.
    Returns: {"3-gram": [a piece's share of 3-grams that occurred before], "4-gram": [...], "unique": [distinct tokens
        over tokens]}."""
    found = {key: [] for key in PAPER_REPETITION}
    for tokens in map(split, texts):
        for start in range(0, max(1, len(tokens) - PAPER_SAMPLE + 1), PAPER_SAMPLE):
            piece = tokens[start : start + PAPER_SAMPLE]
            for n in (3, 4):
                grams = [tuple(piece[i : i + n]) for i in range(len(piece) - n + 1)]
                found[f"{n}-gram"].append(1 - len(set(grams)) / len(grams) if grams else 0.0)
            found["unique"].append(len(set(piece)) / max(1, len(piece)))
    return found


def repetition_rows(events, windows, split, decode):
    """Rows of a table: kind of text, how many, and each kind of repetition with a 95 % interval; of the windows (B, T)
    of real text, and of the texts logged in the last tenth of the steps. decode: of a token."""
    texts = {"validation text": [b"".join(map(decode, window)).decode(errors="replace") for window in windows.tolist()]}
    late = 0.9 * max(e["step"] for e in events)  # the last event may evaluate an earlier checkpoint
    for event, name in SAMPLING.items():
        texts[name] = [e["text"] for e in events if e["event"] == event and e["step"] >= late]
    return [[name, len(written), *map(interval_text, repetitions(written, split).values())]
            for name, written in texts.items() if written]  # fmt: skip


def plot_repetition(curves, path):
    """Repetition of generated texts against the training step, a line a run; dashed grey: the paper's, of its last
    epoch. curves: {run: (model, {step: what `repetitions` finds there})}."""
    lines = {}
    for key in PAPER_REPETITION:
        of_panel = lines.setdefault("unique tokens" if key == "unique" else f"{key}s that occurred before", {})
        for run, (model, found) in curves.items():
            means = {step: statistics.fmean(pieces[key]) for step, pieces in found.items()}
            of_panel[run] = style(model) | {"marker": ".", "lw": 1}, [means]
    title = "Repetition of the texts generated in training"
    with figure(path, title, lines, 3, xlabel="optimization step", sharey=False) as axes:
        for ax, paper in zip(axes, PAPER_REPETITION.values()):
            ax.axhline(paper, ls="--", color="0.4", lw=1, label="the paper's")
            ax.set_ylim(0, None)


# ----------------------------------------------------------------------------------------------------------------------
# Phase coherence of word pairs (PAM section II, figure 3)

WORDNET_URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/wordnet.zip"  # WordNet 3.0
REPAIRINGS = 100  # shuffles of the control
SYNSET = r"^(\d{8}) \d\d [nvasr] ([\da-fA-F]{2}) (.*?) \| "  # offset, number of words in hex, words and pointers
OPPOSITE = r" ! (\d{8}) ([nvasr]) ([\da-fA-F]{2})([\da-fA-F]{2})"  # a pointer: between words, by number in each synset
PARTS = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}  # of speech, in pointers: the file's name


def phase_coherence(embedding, pairs):
    """Normalised conjugate inner product <z1|z2> / (|z1| |z2|) of token pairs (PAM section II, figure 3).

    Args: embedding (V, D, 2) real pairs; pairs (n, 2) token ids.
    Returns: coherence, its modulus, and phase, its angle in (-pi, pi], (n,) each."""
    z = torch.view_as_complex(embedding.double().contiguous())
    first, second = z[pairs[:, 0]], z[pairs[:, 1]]
    product = (first.conj() * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    return product.abs(), product.angle()


def near_zero(phase):
    """Share of angles within pi/4 of 0."""
    return (phase.abs() < math.pi / 4).double().mean().item()


def word_tokens(tokens, decode):
    """{word: its token} of those in `tokens` (size,) that are a space and then the word. decode: token -> bytes."""
    seen = {token: decode(token) for token in np.unique(tokens).tolist()}
    return {text[1:].decode(errors="replace"): token for token, text in seen.items() if text.startswith(b" ")}


def wordnet_pairs(folder):
    """Synonym and antonym pairs of WordNet (PAM section II) from its files data.noun, data.verb, data.adj and data.adv:
    two sets of (lemma, lemma) in alphabetical order, spaces for underscores. What is both is in neither."""
    words, synonyms, opposites = {}, set(), []  # words: {(part of speech, offset, number): lemma}; pairs of such keys
    for pos in dict.fromkeys(PARTS.values()):
        path = Path(folder) / f"data.{pos}"
        with explain(f"read WordNet's {path.name} (unzip {WORDNET_URL} and name its folder)"):
            synsets = re.findall(SYNSET, path.read_text(encoding="latin-1"), re.MULTILINE)
        if not synsets:
            raise InputError(f"{path} is no file of WordNet's: unzip {WORDNET_URL} and name its folder")
        for offset, count, rest in synsets:
            lemmas = [word.partition("(")[0].replace("_", " ") for word in rest.split(" ")[: 2 * int(count, 16) : 2]]
            words |= {(pos, offset, n): lemma for n, lemma in enumerate(lemmas, 1)}
            synonyms |= {tuple(sorted(pair)) for pair in combinations(set(lemmas), 2)}
            for target, of, own, other in re.findall(OPPOSITE, rest):
                opposites.append(((pos, offset, int(own, 16)), (PARTS[of], target, int(other, 16))))
    antonyms = {tuple(sorted(words[key] for key in pair)) for pair in opposites}
    antonyms = {(a, b) for a, b in antonyms if a != b}  # WordNet 3.0 opposes two meanings of "kern"
    return synonyms - antonyms, antonyms - synonyms


def coherence_groups(embedding, untrained, pairs, ids):
    """Phase coherence of word pairs, beside shuffled pairs of the same words (PAM section II, figure 3).

    Args: embedding, untrained (V, D, 2); pairs {name: set of (word, word)}; ids {word: token}. Pairs with a word that
        is not in `ids` are dropped. A group "random" is added, as many pairs as the first group has, of all words.
    Returns: {name: dict} with n; words, how many there are; coherence and phase (n,); untrained, the mean coherence
        there; and shuffled, [mean coherence, near_zero] of REPAIRINGS shuffles of the second words."""
    generator, tokens, found = torch.Generator().manual_seed(1), {}, {}
    embedding, untrained = embedding.double(), untrained.double()  # once for all calls of phase_coherence
    for name, group in pairs.items():
        known = [[ids[a], ids[b]] for a, b in sorted(group) if a in ids and b in ids]
        tokens |= {name: torch.tensor(known)} if len(known) > 1 else {}
    if not tokens:
        raise InputError("fewer than two pairs of WordNet's words are tokens of the training text: train on more")
    words, n = torch.cat([*tokens.values()]).unique(), len(next(iter(tokens.values())))
    draws = words[torch.randint(len(words), (2 * n + 8, 2), generator=generator)]
    tokens["random"] = draws[draws[:, 0] != draws[:, 1]][:n]
    for name, group in tokens.items():
        g = found[name] = {"n": len(group), "words": len(group.unique()), "shuffled": []}
        g["coherence"], g["phase"] = phase_coherence(embedding, group)
        g["untrained"] = phase_coherence(untrained, group)[0].mean().item()
        for _ in range(REPAIRINGS):
            again = torch.stack((group[:, 0], group[torch.randperm(len(group), generator=generator), 1]), 1)
            coherence, phase = phase_coherence(embedding, again[again[:, 0] != again[:, 1]])
            g["shuffled"].append([coherence.mean().item(), near_zero(phase)])
    return found


def coherence_table(groups):
    """Markdown of coherence_groups. The interval of the mean takes pairs as independent, though they share words; the
    range of the shuffled means does not."""
    rows = []
    for name, g in groups.items():
        (mean, half), (means, near) = mean_interval(g["coherence"].tolist()), zip(*g["shuffled"])
        quantiles = statistics.quantiles(means, n=40)
        shuffled = f"{statistics.fmean(means):.4f} ({quantiles[0]:.4f}-{quantiles[-1]:.4f})"
        rows.append([name, g["n"], g["words"], f"{mean:.4f} +- {half:.4f}", shuffled, f"{g['untrained']:.4f}",
                     f"{near_zero(g['phase']):.3f}", f"{statistics.fmean(near):.3f}"])  # fmt: skip
    return markdown(["pairs", "n", "words", "coherence", "shuffled (95 % of shuffles)", "untrained",
                     "phases within pi/4 of 0", "shuffled"], rows)  # fmt: skip


def plot_coherence(groups, path):
    """PAM figure 3: coherence against phase, a panel for each group of coherence_groups."""
    titles = [f"{name}, n = {g['n']:,}" for name, g in groups.items()]
    with figure(path, "Phase coherence of word pairs", titles, len(groups), 2.8, "phase of <z1|z2>, radians",
                "coherence", sharey=True) as axes:  # fmt: skip
        for ax, g, colour in zip(axes, groups.values(), COLOURS.values()):
            ax.plot(g["phase"], g["coherence"], ".", ms=2, alpha=min(1, 1000 / g["n"] + 0.1), color=colour)
            ax.axhline(g["coherence"].mean(), ls="--", lw=1.2, color="black", label="mean")
            shuffled = statistics.fmean(mean for mean, _ in g["shuffled"])
            ax.axhline(shuffled, ls=":", lw=1.2, color="black", label="mean of shuffled pairs")
            ax.set_xlim(-math.pi, math.pi)
        ax.set_ylim(0, None)  # of all panels, when all are drawn


# ----------------------------------------------------------------------------------------------------------------------
# The three, of runs of PAM and SAM


def diagnose(folders, wordnet=None):
    """(tables, {file name: function that draws it}). wordnet: the folder of WordNet's files, or None."""
    pairs = dict(zip(("synonyms", "antonyms"), wordnet_pairs(wordnet))) if wordnet else {}
    rank_rows, by_head, coherence, curves, figures = [], [], [], {}, {}
    repetition_table = [["the paper", "tokens", "its sample", 1, *PAPER_REPETITION.values()]]
    for folder in folders:
        name, events, (model, meta) = folder.name, read_log(folder), sample.load(folder)
        s = sample.read_checkpoint(folder, ("last.pt", "prev.pt", "best.pt"))["meta"]["settings"]  # its data may move
        if not isinstance(model, pam.PAM):
            raise InputError(f"{folder} is no PAM or SAM, but {meta['spec']}: draw its state with --text or --prompt")
        if wordnet and s["tokens"] != "gpt2":
            raise InputError(f"{folder} has bytes, and no byte is a word: --wordnet takes runs with --tokens gpt2")
        corpus = data.load(s["data"], s["seq"], tokens=s["tokens"], column=s.get("column"))
        if corpus.sha256 != meta["data"]["sha256"]:
            raise InputError(f"{corpus.path} is not the data of {folder}")
        torch.manual_seed(int(s["seeds"]))  # as train.py does
        fresh = type(model)(model.config).eval()

        val, settled = corpus.split("val"), min(PAPER_SETTLED, s["seq"])
        windows, _ = data.get_windows(val, s["seq"], data.eval_index(data.num_windows(val, s["seq"]), RANK_WINDOWS))
        positions = sorted({settled, s["seq"]} | {int(1.15**i) for i in range(int(math.log(s["seq"], 1.15)) + 1)})
        try:
            ranks = [state_ranks(m, windows, positions) for m in (model, fresh)]
        except Exception as e:  # a user's model may have any state
            raise InputError(f"{folder}: the memory of {meta['spec']} has no ranks ({sample.reason(e)})") from None
        heads = [r[positions.index(t)].mean(-1).flatten().tolist() if t in positions else []
                 for r in ranks for t in (PAPER_SETTLED, s["seq"])]  # fmt: skip
        ranges = (range_text(x, 2) if x else "-" for x in heads)
        rank_rows.append([name, model.config.d, len(windows), s["seq"], *ranges])
        by_head += [f"#### {name}", ranks_table(positions, *ranks, settled)]
        figures[f"ranks-{name}.png"] = partial(plot_ranks, positions, *ranks, model.config.d)

        encode, decode = data.codec(model.config.V)
        of_tokens = ("tokens", lambda text, encode=encode: encode(text.encode()))
        unit, split = of_tokens if s["tokens"] == "gpt2" else ("words", str.split)
        repetition_table += [[name, unit, *row] for row in repetition_rows(events, windows, split, decode)]
        found = {e["step"]: repetitions([e["text"]], split) for e in events if e["event"] == "generated"}
        curves[f"{name} ({unit})"] = spec_label(s["model"]), found

        if wordnet:
            # A real embedding is a complex one without imaginary parts: its coherence is |cosine|, its phase 0 or pi.
            embeddings = [m.embedding.weight.detach() for m in (model, fresh)]
            embeddings = [torch.stack((e, 0 * e), -1) if model.real else e.unflatten(-1, (-1, 2)) for e in embeddings]
            groups = coherence_groups(*embeddings, pairs, word_tokens(corpus.split("train"), decode))
            coherence += [f"#### {name}", coherence_table(groups)]
            figures[f"coherence-{name}.png"] = partial(plot_coherence, groups)
    if any(found for _, found in curves.values()):
        figures["repetition.png"] = partial(plot_repetition, curves)
    head = [f"{kind}after {t}" for kind in ("", "untrained, ") for t in (f"{PAPER_SETTLED} tokens", "all of it")]
    text = [
        markdown(["run", "d", "windows", "tokens", *head], rank_rows, "### Effective rank of the memory S_t",
                 f"The paper: about {PAPER_RANK} of d = 64 within 10-{PAPER_SETTLED} tokens. Ours: mean over layers, "
                 "heads and windows of validation text (lowest-highest head)."),
        markdown(["run", "unit", "texts", "n", "3-grams repeated", "4-grams repeated", "unique"], repetition_table,
                 "### Repetition of the generated texts",
                 f"In pieces of {PAPER_SAMPLE} tokens, or words where the tokens are bytes; means over pieces and 95 % "
                 "intervals."),
        "### Phase coherence of word pairs",
        ("The paper, without numbers: synonyms lie near phase 0 at elevated coherence, random pairs anywhere. Of "
         "uniform phases a quarter is within pi/4 of 0. +-: 95 %, as if pairs that share a word were independent."),
        *(coherence or [f"Not measured: --wordnet FOLDER names WordNet's files ({WORDNET_URL})."]),
        "### Effective rank by layer and head", *by_head,
    ]  # fmt: skip
    return "\n\n".join(text), figures


# ----------------------------------------------------------------------------------------------------------------------
# Phases over a text

DRAWN = {hmamba.HMamba: "state psi_t", htransformer.HTransformer: "turned keys k_t",
         pam.PAM: "diagonal S_jj of the memory S_t"}  # fmt: skip
VISIBLE = str.maketrans(" \n\t\r", "\u2423\u21b5\u2192\u240d")
MOST_TOKENS, MOST_LAYERS, MOST_HEADS, MOST_ROWS = 64, 4, 4, 16  # in a picture; rows: complex numbers of a head


@torch.no_grad()
def complex_states(model, idx):
    """What DRAWN says, of a model that reads idx (1, T): complex (layers, heads, numbers, T), or None if it is real."""
    if getattr(model, "real", getattr(model.config, "field", "real") == "real"):
        return None
    if isinstance(model, htransformer.HTransformer):
        with torch.inference_mode(False), torch.enable_grad():  # where gradients are kept, its state holds every key
            _, _, state = deepcopy(model).requires_grad_()(idx.clone())
        keys = torch.stack([past[-2][0].detach() for *_, past in state])  # (L, H, T, N, 2), or with N and 2 as one axis
        return torch.view_as_complex(keys.reshape(*keys.shape[:3], -1, 2)).transpose(2, 3)
    states, state = [], model.init_state(1)
    for token in idx[0]:
        _, state = model.step(token[None], state)
        if isinstance(model, pam.PAM):
            states.append(memories(state)[:, 0].diagonal(dim1=2, dim2=3).mT)  # (L, H, d, 2)
        else:
            states.append(torch.stack([psi[0] for _, psi in state]))  # (L, H, N, 2)
    return torch.view_as_complex(torch.stack(states, 3))


def plot_phases(z, labels, title, path):
    """Hue: phase, brightness: root of the modulus of z (layers, heads, numbers, T), over the characters `labels`."""
    layers = np.unique(np.linspace(0, len(z) - 1, min(len(z), MOST_LAYERS)).round().astype(int))
    with figure(path, title, [f"layer {layer}" for layer in layers], height=2, sharex=False) as axes:
        import matplotlib

        for ax, layer in zip(axes, layers):
            shown = z[layer, :MOST_HEADS, :MOST_ROWS].numpy()
            heads, rows, T = shown.shape
            largest = np.quantile(np.abs(shown), 0.95, axis=(1, 2), keepdims=True).clip(1e-30)
            bright = (np.abs(shown) / largest).clip(0, 1) ** 0.5
            hue = matplotlib.colormaps["hsv"](np.angle(shown) / (2 * np.pi) + 0.5)[..., :3]
            ax.imshow((hue * bright[..., None]).reshape(-1, T, 3), aspect="auto", interpolation="nearest")
            ax.hlines(np.arange(1, heads) * rows - 0.5, -0.5, T - 0.5, color="white", lw=1.5)
            ax.set_yticks(np.arange(heads) * rows + (rows - 1) / 2, [f"head {i}" for i in range(heads)])
            turn = 90 * any(len(x) > 1 for x in labels)
            ax.set_xticks(range(T), labels, family="monospace", rotation=turn, parse_math=False)
            ax.tick_params(length=0)
            ax.grid(False)
        phase = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-math.pi, math.pi), "hsv")
        bar = ax.figure.colorbar(phase, ax=axes, aspect=40, pad=0.01, label="phase (hue)")
        bar.set_ticks((-math.pi, 0, math.pi), labels=("-pi", "0", "pi"))


def phases(folders, text):
    """(what is drawn, {file name: function that draws it}) of runs over the first tokens of a text, bytes."""
    lines, figures = [], {}
    for folder in folders:
        name, (model, meta) = folder.name, sample.load(folder)
        encode, decode = data.codec(model.config.V)
        tokens = encode(text[: 64 * MOST_TOKENS])[:MOST_TOKENS]
        what = next((what for model_class, what in DRAWN.items() if isinstance(model, model_class)), None)
        z, why = None, ""
        try:
            z = complex_states(model, torch.tensor([tokens])) if what else None
        except Exception as e:  # a user's model may have any state
            why = f" ({sample.reason(e)})"
        if z is None:
            lines.append(f"{name}: {meta['spec']} has no phase that can be drawn{why}")
            continue
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character stands at its last byte
        labels = [sample.printable(decoder.decode(decode(token))).translate(VISIBLE) for token in tokens]
        title = f"{name}: {what}, a row a complex number; hue: phase, brightness: root of the modulus"
        figures[f"phases-{name}.png"] = partial(plot_phases, z, labels, title)
        lines.append(f"{name}, {Path(meta['path']).name} of step {meta['step']}: {what} over {len(tokens)} tokens")
    return "\n".join(lines), figures


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or their log.jsonl")
    where = "folder for tables and figures (default: %(default)s)"
    parser.add_argument("--out", metavar="FOLDER", default="diagnostics", help=where)
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--text", metavar="FILE", type=lambda file: Path(os.path.expanduser(file)).read_bytes(),
                       help=f"draw phases over the first {MOST_TOKENS} tokens of this file")  # fmt: skip
    texts.add_argument("--prompt", dest="text", type=os.fsencode, help="draw phases over this text")
    words = "folder of WordNet's files, for word pairs; of runs on GPT-2's tokens"
    parser.add_argument("--wordnet", metavar="FOLDER", type=os.path.expanduser, help=words)
    parser.add_argument("--model", default="", metavar="FILE.py:CLASS", help="the class, if a file of yours has it")
    args = parser.parse_args()
    sample.import_class(args.model)
    paths = [Path(os.path.expanduser(run)) for run in args.runs]
    folders = [(path.parent if path.is_file() else path).resolve() for path in paths]
    if any(path.suffix == ".pt" and not path.is_dir() for path in paths):
        raise InputError("diagnose.py takes run folders, and of each best.pt or, without one, last.pt")
    if len({folder.name for folder in folders}) < len(folders):
        raise InputError("two runs have the same name, and figures are named after them: rename one")
    out = parse_out(args.out)
    if args.text is None:
        sys.exit(show_report(*diagnose(folders, args.wordnet), out))
    if not args.text or args.wordnet:
        raise InputError("phases are drawn over a text that is not empty, and without --wordnet")
    sys.exit(show_report(*phases(folders, args.text), out, written=""))


if __name__ == "__main__":
    command_line(main)
