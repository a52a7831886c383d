"""Scripts of examples/train run on small models: losses fall, contenders agree, and pictures are XML."""

import json
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")
import etalon.torch  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "train"
MODULES = ("measure", "model", "operators", "tokenizer")


@pytest.fixture
def scripts(monkeypatch):
    """The folder as that of a script, and one thread: models are so small that others would only wait."""
    threads = torch.get_num_threads(), etalon.get_num_threads()
    monkeypatch.syspath_prepend(FOLDER)
    torch.set_num_threads(1)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    torch.set_num_threads(threads[0])
    etalon.set_num_threads(threads[1])
    etalon.set_precision("strict")


@pytest.fixture
def run(scripts, monkeypatch, capsys):
    """Runs a script: the lines of JSON that it prints. In this process, as each import of PyTorch takes seconds."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return run


def losses(log):
    """Losses of each contender of a log."""
    found = {}
    for line in map(json.loads, log.read_text().splitlines()):
        if "step" in line:
            found.setdefault(line["contender"], []).append(line["loss"])
    return found


def assert_falls(values):
    tenth = len(values) // 5
    first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
    assert last < first - 0.02 * abs(first), f"from {first} to {last}"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of this repository: a machine that has only a wheel has no sources of crates."""
    pages = [path.read_text() for path in sorted((FOLDER.parents[1] / "docs").glob("*.md"))]
    file = tmp_path_factory.mktemp("text") / "pages.txt"
    file.write_text("\n".join(pages)[:150_000])
    return file


# Roundings of gradients move a loss by 1e-6 in the first steps, and steps of Adam amplify what is near 0: measured
# within 2e-5 after all of them. Lazy attention decides pairs within a rounding of its threshold either way, which
# gradients show: 1.4e-4.
@pytest.mark.parametrize(("mixer", "tolerance"), [("softmax", 1e-4), ("linear", 1e-4), ("lazy", 1e-3)])
def test_contenders_learn_the_same(run, mixer, tolerance, text, tmp_path):
    log = tmp_path / "log.jsonl"
    names = "eager,chunked,etalon" if mixer == "softmax" else "eager,etalon"
    options = ["--mixer", mixer, "--contenders", names, "--text", text, "--cache", tmp_path, "--log", log]
    rows = run("train.py", "--quick", *options)
    found = losses(log)
    assert set(found) == set(names.split(","))
    for values in found.values():
        assert_falls(values)
        assert values == pytest.approx(found["eager"], abs=tolerance)
    assert all(row["tokens_per_second"] > 0 for row in rows if "tokens_per_second" in row)
    run("plot.py", log, "--out", tmp_path / "loss")
    for key in ("steps", "seconds"):
        picture = ElementTree.parse(tmp_path / f"loss_{key}.svg").getroot()
        curves = picture.findall(".//{*}path[@class='curve']")
        assert len(curves) == 2 * len(found), "a curve and its key for each contender"
        numbers = [float(x) for x in curves[0].get("d")[1:].replace("L", " ").split()]
        assert len(numbers) >= 2 * 20 and all(0 <= x <= 720 for x in numbers)


def test_an_inner_loop_learns_as_through_the_math_path_of_pytorch(run, tmp_path):
    log = tmp_path / "log.jsonl"
    rows = run("test_time_training.py", "--quick", "--log", log)
    found = losses(log)
    assert_falls(found["etalon"])
    # As above: 30 steps of Adam on equal gradients of second order.
    assert found["etalon"] == pytest.approx(found["math"], abs=1e-4)
    after = [row for row in rows if "error_after" in row]
    assert len(after) == 2 and all(row["error_after"] < row["error_before"] for row in after)


def test_forward_mode_trains_a_generator(run):
    rows = run("jvp.py", "--quick")
    errors = next(row for row in rows if "from_difference" in row)
    # float32 against a central difference in float64, whose own error is its step squared, 1e-10.
    assert errors["from_difference"] < 1e-5 and errors["from_math_path"] < 1e-5
    distances = [row["distance"] for row in rows if "distance" in row]
    assert distances[-1] < 0.7 * distances[0], distances


def test_calls_agree(run):
    rows = [row for row in run("calls.py", "--quick") if "call" in row]
    assert {row["call"] for row in rows} == {"softmax", "linear", "lazy", "loss"}
    for row in rows:
        # Roundings of gradients: 2⁻²⁴ and 2⁻⁹ of an operation, of sums of some hundred terms.
        assert row["gradients_apart"] < (1e-5 if row["dtype"] == "float32" else 1e-2), row


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc")
def test_peak_memory_is_measured(run, text, tmp_path):
    options = ["--contenders", "etalon", "--text", text, "--cache", tmp_path, "--steps", 1]
    (row,) = run("train.py", "--quick", "--memory", *options)
    assert row["contender"] == "etalon" and 0 < row["peak_mb"] < 500 and row["imports_mb"] > 50


@pytest.fixture
def tokenizer(scripts):
    import tokenizer

    return tokenizer


def test_tokens_spell_the_text_and_are_those_of_the_definition(tokenizer):
    text = b"let mut x1 = f(x, 12345);\n    let mut y = f(x1 + 2);\n\xc3\xa9\n\n" * 3
    ids, spelled = tokenizer.encode(text, 280)
    assert b"".join(spelled[i] for i in ids) == text
    words = [list(piece) for piece in tokenizer.PIECES.findall(text)]
    for token in range(256, len(spelled)):
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [tokenizer.merged(word, best, token) for word in words]
        assert spelled[token] == spelled[best[0]] + spelled[best[1]]
    assert [i for word in words for i in word] == ids.tolist()


def test_a_machine_without_text_is_told_so(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="no text: no crate of Cargo.lock .* --text PATH"):
        tokenizer.load([], 512)
    with pytest.raises(SystemExit, match="no text: .*missing does not exist"):
        tokenizer.load([tmp_path / "missing"], 512, tmp_path)
    (tmp_path / "short").write_text("a" * 20_000)
    with pytest.raises(SystemExit, match="too little text for 512 tokens"):
        tokenizer.load([tmp_path / "short"], 512, tmp_path)


def test_the_snippet_of_the_page_is_the_same_as_pytorch(scripts):
    (text,) = re.findall(r"^```python\n(.*?)^```$", (FOLDER / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    source = torch.Generator().manual_seed(0)
    names = {x: torch.randn(1, 2, 9, 4, generator=source) for x in "qkv"}
    names |= {x: torch.randn(n, 6, generator=source) for x, n in (("h", 9), ("w", 11))}
    names |= {"targets": torch.arange(9), "etalon": etalon}
    exec(compile(text, "README.md", "exec"), names)
    F = torch.nn.functional
    q, k, v, h, w, targets = (names[x] for x in ("q", "k", "v", "h", "w", "targets"))
    torch.testing.assert_close(names["o"], F.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(names["loss"], F.cross_entropy(F.linear(h, w), targets))
