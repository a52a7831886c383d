"""The scripts of benches/findings: recordings merge and go on, a profile holds, a page is made, damage is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benches/findings"
sys.path.insert(0, str(SCRIPTS))

import findings
import record
import recording
from contenders import CONTENDERS

NAN = {"pass": "forward", "law": "seen_poison", "kind": "nan", "reason": "o[0] = NaN, expected 1e0"}


def run(profile, failures=(), dtype="f32", date="2026-11-29T10:00:00Z", passes=("forward",)):
    counts = {"checks": 9, "failed": sum(len(x["cases"]) for x in failures), "undecided": 0, "margin": 0.5}
    settings = {"depth": "smoke", "seed": 44, "date": date, "etalon": "0.1.0", "status": "failed", "unanswered": {}}
    by_pass = {name: counts for name in passes}
    own = {"dtype": dtype, "profile": profile, "passes": list(passes), "checks": 9 * len(passes)}
    return settings | own | {"by_pass": by_pass, "failures": list(failures)}


def recorded(*runs, name="sdpa-math", **other):
    place = {"schema": 1, "contender": name, "device": "cpu", "hardware": "a CPU", "python": "3.12.0"}
    return place | {"versions": {"torch": "2.15.0"}, "runs": list(runs)} | other


def nan(*cases):
    return NAN | {"cases": list(cases)}


def value(*cases):
    return {
        "pass": "forward",
        "law": "bound",
        "kind": "value",
        "cases": list(cases),
        "reason": "o[0] is 2, exact is 1",
    }


def test_a_profile_holds_if_only_what_the_widest_leaves_fails():
    strict, middle, wide = (
        run("f32-strict", [value("a"), nan("b")]),
        run("f32-bf16x3", [nan("b")]),
        run("f32-tf32", [nan("b")]),
    )
    held = lambda *runs: recording.holding(recorded(*runs), "attention", "f32", "forward")
    assert held(strict, middle, wide) == ("f32-bf16x3", middle)
    assert held(strict, wide) == ("f32-tf32", wide)
    # Another case of the same law is another failure.
    assert held(run("f32-strict", [nan("c")]), wide) == ("f32-tf32", wide)
    # Without the widest nobody knows what is a matter of rounding.
    assert held(strict, middle) is None


def test_runs_merge_by_date_and_a_new_place_begins_anew():
    old, new = run("f32-tf32", [nan("a")]), run("f32-tf32", date="2026-11-29T11:00:00Z")
    other = run("f32-strict")
    both = recording.merged(recorded(old, other), recorded(new))
    assert sorted(x["profile"] for x in both["runs"]) == ["f32-strict", "f32-tf32"]
    assert new in both["runs"] and old not in both["runs"]
    # The older does not replace the newer, whichever comes first.
    assert recording.merged(recorded(new), recorded(old))["runs"] == [new]
    newer = recorded(new, versions={"torch": "2.16.0"})
    assert recording.merged(recorded(old, other), newer) == newer
    absent = recorded(absent="not installed: torch")
    assert recording.merged(recorded(old), absent) == absent


def test_a_run_that_is_recorded_is_not_repeated():
    ladder = recording.LADDERS["attention"]["f32"]
    settled = lambda found, profile: record.Runner.settled(found, ladder, "f32", "forward", profile)
    clean = recorded(run("f32-tf32"), run("f32-strict"))
    assert settled(clean, "f32-tf32") and settled(clean, "f32-strict")
    # The strictest holds: nothing between needs a run.
    assert settled(clean, "f32-bf16x3")
    rough = recorded(run("f32-tf32"), run("f32-strict", [value("a")]))
    assert not settled(rough, "f32-bf16x3")
    assert not settled(recorded(), "f32-tf32")


def test_a_report_becomes_a_run():
    common = {"tier": "x", "algorithm": "attention", "dtype": "f32", "microseconds": 1}
    of = lambda law, case, verdict, **more: (
        common | {"pass": "forward", "check": law, "case": case, "verdict": verdict} | more
    )
    report = {"etalon": "0.1.0", "status": "failed"}
    report["records"] = [
        of("bound", "a", "pass", margin=0.25),
        of("bound", "b", "fail", reason="o[0, 1] is NaN, exact is 1", margin=None),
        of("bound", "c", "fail", reason="o[0, 1] is 2e0, exact is 1e0 ± 1e-6 (margin inf)"),
        of("key_order", "a", "unsupported", reason="no"),
        of("log_probe", "a", "not asked", reason="the kernel does not return `lse`"),
        of("hull", "a", "undecided", reason="refused: D = 7"),
        of("bound", "a", "fail", reason="of another pass") | {"pass": "backward"},
    ]
    report["simplest"] = [{"of": report["records"][1], "case": "c", "reason": "o[0] is NaN"}]
    made = record.recorded(report, "f32", "f32-strict", ["forward"], "smoke", 44)
    assert made["failures"][0]["shrunk"] == {"case": "c", "symptom": "o[0] is NaN"}
    assert made["by_pass"] == {"forward": {"checks": 4, "failed": 2, "undecided": 1, "margin": 0.25}}
    assert [(x["law"], x["kind"], x["cases"]) for x in made["failures"]] == [
        ("bound", "nan", ["b"]),
        ("bound", "value", ["c"]),
    ]
    assert made["unanswered"] == {"undecided: refused: D = #": 1}
    assert made.keys() == recording.RUN_KEYS
    assert record.too_slow(report) == 0
    report["records"].append(of("bound", "d", "fail", reason="did not answer within 20 s"))
    assert record.too_slow(report) == 1


@pytest.fixture
def room(tmp_path):
    """A folder of recordings, and one of words."""
    (tmp_path / "results").mkdir()
    (tmp_path / "words" / "faults").mkdir(parents=True)
    words = {"library": "A library", "quotes": [{"text": "It is exact.", "source": "its page"}]}
    promises = {contender.promise: words for contender in CONTENDERS.values()}
    (tmp_path / "words/promises.json").write_text(json.dumps(promises))
    judgement = {
        "id": "C1",
        "verdict": "convention",
        "title": "NaN",
        "text": "It spreads.",
        "match": [{"law": "*_poison"}],
    }
    (tmp_path / "words/judgements.json").write_text(json.dumps([judgement]))
    shrunk = {"case": "b/0", "problem": {"algorithm": "attention"}, "symptom": "o[0] = NaN, expected 1e0"}
    runs = [run("f32-strict", [value("a"), nan("b")]), run("f32-tf32", [nan("b") | {"shrunk": shrunk}])]
    runs.append(run("f32-bf16x3", [value("a"), nan("b")]))
    runs.append(run("bf16-eager", dtype="bf16"))
    recording.write(tmp_path / "results/sdpa-math-cpu.json", recorded(*runs))
    recording.write(tmp_path / "results/liger-cpu.json", recorded(name="liger", absent="x[0] has | none"))
    recording.write(tmp_path / "results/flex-cpu.json", recorded(name="flex"))
    return tmp_path


def page(*parts):
    return "".join(f"<!-- findings: {part} -->\n<!-- end of findings -->\n" for part in parts)


def made(room, *parts):
    return findings.rendered(page(*parts), findings.Findings(room / "results", room / "words"))


def test_the_parts_of_a_page(room):
    text = made(room, "verdicts", "contenders", "absent", "promises", "faults", "conventions")
    assert (
        "| `sdpa-math` | cpu | forward | f32-tf32 [C1](#c1) (8/9) | bf16-eager or stricter (9/9) | not run |" in text
    )
    assert "| `liger` | cpu | x\\[0\\] has \\| none |" in text
    assert "| `flex` | cpu | cut before a run was complete |" in text
    assert "`sdpa-math`" in next(line for line in text.splitlines() if line.endswith("| cuda | not run yet |"))
    assert "> It is exact." in text and "> — its page" in text
    assert "**C1. NaN**" in text and "* `sdpa-math` (cpu): forward `seen_poison` (f32)." in text
    assert "--case b/0 --law seen_poison" in text and '{"algorithm": "attention"}' in text
    assert "<!-- findings: faults -->\nNone.\n" in text
    # A second time nothing changes.
    assert findings.rendered(text, findings.Findings(room / "results", room / "words")) == text


def test_a_failure_without_a_judgement_is_named(room):
    (room / "words/judgements.json").write_text("[]")
    with pytest.raises(recording.Damaged, match="sdpa-math cpu f32 forward seen_poison nan: o.0. = NaN"):
        made(room, "verdicts")


def test_a_failure_is_open_until_somebody_judges_it(room):
    path = room / "words/judgements.json"
    one = json.loads(path.read_text())[0] | {"id": "O1", "verdict": "open", "match": [{"case": ["b", "b/*"]}]}
    path.write_text(json.dumps([one]))
    text = made(room, "verdicts", "open", "conventions")
    assert "f32-tf32 [O1](#o1) (8/9)" in text and "**O1. NaN**" in text
    assert text.endswith("<!-- findings: conventions -->\nNone.\n\n<!-- end of findings -->\n")
    # A failure in another case, too, is another failure.
    recording.write(room / "results/sdpa-math-cpu.json", recorded(run("f32-tf32", [nan("b", "c")])))
    with pytest.raises(recording.Damaged, match="without a judgement"):
        made(room, "verdicts")


def test_an_example_shows_what_its_failure_was(room):
    """A problem that shrank until it failed otherwise is no example."""
    shrunk = {"case": "c/0", "problem": {"algorithm": "attention"}, "symptom": "o[0] is 2, exact is 1"}
    recording.write(room / "results/sdpa-math-cpu.json", recorded(run("f32-tf32", [nan("b") | {"shrunk": shrunk}])))
    text = made(room, "verdicts", "conventions")
    assert "--case b --law seen_poison" in text and "c/0" not in text


def damaged(room, change, words):
    path = room / "results/sdpa-math-cpu.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(recording.Damaged, match=words):
        made(room, "verdicts")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda text: text[:40], "sdpa-math-cpu.json: expected a recording in JSON"),
        (lambda text: "[]", "expected schema 1, found list"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "expected schema 1, found 2"),
        (lambda text: text.replace('"hardware"', '"hard"'), "missing or unknown keys: hard, hardware"),
        (lambda text: text.replace('"sdpa-math"', '"flex"'), "of its name, found flex-cpu"),
        (lambda text: text.replace('"undecided"', '"undone"'), "keys of a count: undecided, undone"),
        (lambda text: text.replace('"law"', '"lore"'), "keys of a failure: law, lore"),
        (lambda text: text.replace('"depth"', '"deep"'), "keys of a run: deep, depth"),
    ],
)
def test_damage_is_named(room, change, words):
    damaged(room, change, words)


def test_a_recording_of_nobody_is_named(room):
    recording.write(room / "results/nobody-cpu.json", recorded(name="nobody"))
    with pytest.raises(recording.Damaged, match="found nobody-cpu"):
        made(room, "verdicts")


def test_a_folder_is_merged(room, tmp_path):
    target = tmp_path / "target"
    command = [sys.executable, SCRIPTS / "record.py", "--merge", room / "results", "--results", target]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        names = sorted(path.name for path in target.iterdir())
        assert names == ["flex-cpu.json", "liger-cpu.json", "sdpa-math-cpu.json"]
        assert len(recording.read(target / "sdpa-math-cpu.json")["runs"]) == 4


def test_the_page_is_that_of_its_recordings():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "findings.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_contender_is_asked_and_a_part_goes_on(tmp_path):
    """A program without a library, by the harness of all contenders: its answers reach etalon."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nfrom frames import Refused, serve\n"
        "def kernel(request, given):\n    raise Refused('on principle')\n"
        "takes = {'algorithm': 'attention_lse', 'dtypes': ['f32'], 'passes': ['forward']}\n"
        "serve('nobody', {'kernels': [takes]}, lambda: kernel)\n"
    )
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "etalon", "verify", "--depth", "smoke", "--report", f"json={report}"]
    command += ["--candidate", f"'{sys.executable}' '{program}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stdout + done.stderr
    kept = record.recorded(json.loads(report.read_text()), "f32", "f32-strict", ["forward"], "smoke", 0)
    assert kept["by_pass"]["forward"]["undecided"] > 0 and "on principle" in " ".join(kept["unanswered"])
