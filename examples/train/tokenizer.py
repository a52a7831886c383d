"""Byte-pair encoding, learned on the spot, and the text of this machine: sources of the crates in Cargo.lock."""

import hashlib
import heapq
import os
import random
import re
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "target" / "train"
# A piece is a word, a number or a run of signs with the blank before it, or blanks; merges stay within pieces.
PIECES = re.compile(rb" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z_0-9]+|\s+?(?= ?\S)|\s+")


def sources():
    """The Rust files of the crates in Cargo.lock that Cargo has unpacked on this machine."""
    lock = (ROOT / "Cargo.lock").read_text()
    crates = {"-".join(found) for found in re.findall(r'^name = "(.+)"\nversion = "(.+)"\nsource', lock, re.M)}
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    folders = [folder for folder in sorted(home.glob("registry/src/*/*")) if folder.name in crates]
    if not folders:
        raise SystemExit(f"no text: no crate of Cargo.lock lies in {home}/registry/src; run `cargo fetch` and build, "
                         "or name files or folders with --text PATH ...")  # fmt: skip
    return [path for folder in folders for path in sorted(folder.rglob("*.rs"))]


def texts(paths, most):
    """Files below these paths, whole and in a fixed random order, up to `most` bytes; none above 200,000 bytes."""
    files = []
    for path in map(Path, paths):
        if not path.exists():
            raise SystemExit(f"no text: {path} does not exist")
        files += sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]
    random.Random(0).shuffle(files)
    total = 0
    for path in files:
        text = path.read_bytes()
        if 0 < len(text) <= 200_000 and b"\0" not in text:
            yield text[: most - total]
            total += len(text)
        if total >= most:
            return


class Words:
    """The different pieces of a text as sequences of tokens, and where each pair of neighbours occurs."""

    def __init__(self, counts):
        self.counts = list(counts.values())
        self.tokens = [list(piece) for piece in counts]
        self.pairs, self.places = Counter(), defaultdict(set)
        for at, word in enumerate(self.tokens):
            self.add(at, word)

    def add(self, at, word):
        for pair in zip(word, word[1:]):
            self.pairs[pair] += self.counts[at]
            self.places[pair].add(at)

    def merge(self, pair, token):
        """Puts `token` in the place of a pair, and returns the pairs that are new."""
        new = set()
        for at in self.places.pop(pair):
            word = self.tokens[at]
            if pair not in zip(word, word[1:]):
                continue  # an earlier merge took one of the two
            for old in zip(word, word[1:]):
                self.pairs[old] -= self.counts[at]
            self.tokens[at] = word = merged(word, pair, token)
            self.add(at, word)
            new.update(found for found in zip(word, word[1:]) if token in found)
        return new


def merged(word, pair, token):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(token)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def learn(words, vocab):
    """Merges the most frequent pair until there are `vocab` tokens: the bytes of each token."""
    spelled = [bytes([byte]) for byte in range(256)]
    heap = [(-times, pair) for pair, times in words.pairs.items()]
    heapq.heapify(heap)
    while len(spelled) < vocab and heap:
        times, pair = heapq.heappop(heap)
        now = words.pairs[pair]
        if now < -times:  # counts of pairs only fall: this one comes later
            if now > 1:
                heapq.heappush(heap, (-now, pair))
            continue
        new = words.merge(pair, len(spelled))
        spelled.append(spelled[pair[0]] + spelled[pair[1]])
        for other in new:
            heapq.heappush(heap, (-words.pairs[other], other))
    return spelled


def encode(text, vocab):
    """A text as tokens, with the bytes of each token. What was learned on the text has encoded its pieces, too."""
    pieces = PIECES.findall(text)
    counts = Counter(pieces)
    words = Words(counts)
    spelled = learn(words, vocab)
    found = dict(zip(counts, words.tokens))
    total = sum(times * len(found[piece]) for piece, times in counts.items())
    return np.fromiter((token for piece in pieces for token in found[piece]), np.int32, total), spelled


def load(paths, vocab, cache=CACHE, most=24_000_000):
    """The tokens of the text at `paths`, or of the sources of crates, int32 [tokens]; a file keeps them."""
    begun = time.perf_counter()
    text = b"\n".join(texts(paths or sources(), most))
    if len(text) < 10_000:
        raise SystemExit(f"too little text: {len(text)} bytes in {', '.join(map(str, paths)) or 'the crates'}")
    name = hashlib.sha256(text).hexdigest()[:12]
    file = Path(cache) / f"{name}-{vocab}.npy"
    if not file.exists():
        print(f"learning {vocab} tokens from {len(text):,} bytes ...", flush=True)
        ids, spelled = encode(text, vocab)
        if len(spelled) < vocab:
            raise SystemExit(f"too little text for {vocab} tokens: {len(spelled)} were found; ask for less by --vocab")
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, ids)
        print(f"{len(ids):,} tokens, {time.perf_counter() - begun:.0f} s; kept in {file}", flush=True)
    return np.load(file, mmap_mode="r"), name
