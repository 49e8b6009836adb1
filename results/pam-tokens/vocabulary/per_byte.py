"""Losses of runs on several vocabularies, in bits a byte of one text: the table of results/pam-tokens/vocabulary.

    python results/pam-tokens/vocabulary/per_byte.py english-utf8.txt LOG ... > tables.md

A run's loss is over the whole validation split. A token counts as many bytes as those of this split have in the mean.
"""

import sys
from itertools import pairwise

from merges import data, use_merges  # first: it finds the files of the repository

from report import final_loss, interval_text, markdown, range_text, read_log

WIDTH = 88  # of SAM, where its blocks have the parameters of PAM's
EQUAL = "SAM, equal blocks", "SAM, equal total"
NAMES = "PAM", *EQUAL


def bytes_a_token(text, V):
    """In the mean over the validation split of a text, in GPT-2's first tokens; 1 if the tokens are bytes."""
    if V == 256:
        return 1
    use_merges(V)
    tokens = data.load(text, 256, tokens="gpt2").split("val").tolist()
    return len(data.gpt2_encoding().decode_bytes(tokens)) / len(tokens)


def minus(values, others):
    return {seed: value - others[seed] for seed, value in values.items() if seed in others}


def shown(by_seed):
    return interval_text([*by_seed.values()], "+") if by_seed else "-"


def main():
    text, *paths = sys.argv[1:]
    groups = {}  # (V, rate) -> model -> seed -> events
    for path in paths:
        events = read_log(path)
        c, s = events[0]["config"], events[0]["settings"]
        model = EQUAL[c["width"] != WIDTH] if "width" in c else "PAM"
        groups.setdefault((c["V"], s["lr"]), {}).setdefault(model, {})[s["seeds"]] = events
    losses, gaps = [], {}  # gaps: (V, rate) -> SAM -> seed -> PAM minus it
    for (V, rate), models in sorted(groups.items()):
        size = bytes_a_token(text, V)
        bits = {}
        for name in NAMES:
            bits[name] = {seed: final_loss(events) / size for seed, events in models.get(name, {}).items()}
        losses.append([V, rate, f"{size:.3f}", *(range_text(runs.values(), 3) for runs in bits.values())])
        gaps[V, rate] = {name: minus(bits["PAM"], bits[name]) for name in EQUAL}
    changes = {}
    for (W, other), (V, rate) in pairwise(sorted(gaps, key=lambda key: key[::-1])):
        if rate == other:
            changes[f"{V} - {W}", rate] = {name: minus(gaps[V, rate][name], gaps[W, rate][name]) for name in EQUAL}
    note = "Bits a byte of the whole validation split: mean over the seeds, in brackets the lowest and the highest."
    print(markdown(["vocabulary", "rate", "bytes a token", *NAMES], losses, "## Losses by vocabulary", note))
    note = "Bits a byte, paired by seed; +- half of the 95 % interval (Student's t). Above 0 SAM leads."
    rows = [[*key, *map(shown, of_key.values())] for key, of_key in (gaps | changes).items()]
    print("\n" + markdown(["vocabulary", "rate", *EQUAL], rows, "## PAM minus SAM, and its change", note))


if __name__ == "__main__":
    main()
