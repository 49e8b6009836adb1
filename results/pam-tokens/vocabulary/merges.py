"""train.py with GPT-2's first merges: a vocabulary of V tokens, for the question whether PAM's lag is the vocabulary's.

    python results/pam-tokens/vocabulary/merges.py 512 --model pam:D=64:H=2 --tokens gpt2 --data english-utf8.txt ...

The first argument is V; the others are train.py's. Texts in these tokens are kept in a folder of their own.
"""

import os
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import data
import train

HOME, gpt2 = data.cache_dir(), cache(data.gpt2_encoding)


def use_merges(V):
    """From here on GPT-2's tokens are those below V: single bytes, and what the first V - 256 merges make."""
    import tiktoken

    ranks = {piece: rank for piece, rank in gpt2()._mergeable_ranks.items() if rank < V}
    encoding = tiktoken.Encoding(f"gpt2-{V}", pat_str=gpt2()._pat_str, mergeable_ranks=ranks, special_tokens={})
    data.GPT2_VOCAB, data.gpt2_encoding = V, lambda: encoding
    os.environ["NANOHILBERT_DATA"] = str(HOME / f"merges-{V}")


def main():
    V = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if not (V.isdecimal() and 256 < int(V) <= 50257):
        raise data.InputError(f"the first argument is the vocabulary, from 257 to 50257, not {V!r}")
    use_merges(int(V))
    train.main()


if __name__ == "__main__":
    train.command_line(main, silent=train.rank > 0)
