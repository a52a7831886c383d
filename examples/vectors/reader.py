"""Judges a softmax attention in plain Python with test vectors (docs/guide.md): python reader.py DIR"""

import hashlib, json, math, struct, sys
from pathlib import Path

CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<H", "I64": "<q", "BOOL": "<?"}
TAKES = {"algorithm", "batch", "query_heads", "key_heads", "queries", "keys", "dim", "value_dim", "mask"}

def load(folder, file):
    data = (folder / file["file"]).read_bytes()
    if len(data) != file["bytes"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
        sys.exit(f"{file['file']}: it was changed")
    return data

def tensors(data):
    start, found = 8 + struct.unpack_from("<Q", data)[0], {}
    for name, x in json.loads(data[8:start]).items():
        begin, end = x["data_offsets"]
        found[name] = [value for (value,) in struct.iter_unpack(CODES[x["dtype"]], data[start + begin : start + end])]
        if x["dtype"] == "BF16":
            found[name] = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in found[name]]
    return found

def is_off(got, exact, bound):
    same = got == exact or math.isnan(got) and math.isnan(exact)
    return not same and bound < math.inf and not abs(got - exact) <= bound

def attention(problem, x):
    heads, groups, rows, keys, dim = (problem[n] for n in ("query_heads", "key_heads", "queries", "keys", "dim"))
    if groups < 1 or heads % groups or dim < 1 or problem.get("value_dim", 1) < 1:
        raise ValueError("the problem has no meaning")
    width, o, lse = problem.get("value_dim", dim), [], []
    for row in range(problem["batch"] * heads * rows):
        head, i = divmod(row, rows)
        first = (head // heads * groups + head % heads // (heads // groups)) * keys
        seen = range(first, first + max(0, keys if problem["mask"] == "full" else i + 1 + keys - rows))
        s = [sum(x["q"][row * dim + d] * x["k"][j * dim + d] for d in range(dim)) / math.sqrt(dim) for j in seen]
        p = [math.exp(score - max(s)) for score in s]
        lse.append(max(s) + math.log(sum(p)) if p else -math.inf)
        o += [sum(w * x["v"][j * width + e] for w, j in zip(p, seen)) / (sum(p) or 1) for e in range(width)]
    return {"o": o, "lse": lse}

def judge(folder, kernel=attention):
    for vector in json.loads((folder / "manifest.json").read_text())["vectors"]:
        problem, valid = json.loads(load(folder, vector["problem"])), vector["result"] == "valid"
        plain = {key for key, value in problem.items() if str(value) not in ("None", "False", "dense")} <= TAKES
        mask = problem.setdefault("mask", "full") in ("full", {"causal": {"align": "bottom_right"}})
        if problem["algorithm"] == "attention" and vector.get("pass") in (None, "forward") and plain and mask:
            try:
                x = tensors(load(folder, vector["tensors"])) if valid else {}
                results = [(y, x[f"{name}.exact"], x[f"{name}.bound"]) for name, y in kernel(problem, x).items()]
                right = valid and not any(is_off(*z) for one in results for z in zip(*one, strict=True))
            except ValueError:
                right = not valid
            yield vector["id"], right

if __name__ == "__main__":
    verdicts = dict(judge(Path(sys.argv[1])))
    print(f"{sum(verdicts.values())} of {len(verdicts)} right", *(x for x in verdicts if not verdicts[x]), sep="\n")
    sys.exit(not verdicts or not all(verdicts.values()))
