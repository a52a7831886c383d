//! Rendering of a run: numbers, tables, progress, reports.

use etalon_cli::junit::junit;
use etalon_cli::markdown::markdown;
use etalon_cli::noise::{Times, busy};
use etalon_cli::progress::Lines;
use etalon_cli::summary::{absent, headline, not_checked, rows};
use etalon_cli::table::{Table, fold};
use etalon_cli::units::{bytes, counted, digits, margin, marked, time};
use etalon_conformance::report::{About, Absent, Record, Report, Status, Verdict, json};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::time::Duration;

#[path = "rendering/report.rs"]
mod told;

use told::told;

#[test]
fn numbers_have_three_or_four_digits() {
    for (number, text) in [
        (0.0, "0"),
        (0.000_123_4, "1.23e-4"),
        (0.012_34, "0.0123"),
        (0.25, "0.250"),
        (0.9996, "1.00"),
        (12.345, "12.3"),
        (99.96, "100"),
        (1234.5, "1234"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(digits(number), text);
    }
}

#[test]
fn margins_have_three_digits_and_words_a_number() {
    for (number, text) in [
        (0.25, "0.250"),
        (12.345, "12.3"),
        (999.4, "999"),
        (1323.4, "1.32e3"),
        (1.5e30, "1.50e30"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(margin(number), text);
    }
    assert_eq!([1, 2].map(|n| counted(n, "query head")), ["1 query head", "2 query heads"]);
    assert_eq!([1, 0].map(|n| counted(n, "query")), ["1 query", "0 queries"]);
    assert_eq!([1, 3].map(|n| counted(n, "key")), ["1 key", "3 keys"]);
    let shares = [(0.8, "80 %"), (1.0, "100 %"), (1.12, "112 % !")];
    shares.iter().for_each(|(share, text)| assert_eq!(marked(*share, 0, 1.0), *text));
}

#[test]
fn a_table_has_the_width_that_is_there() {
    let mut table = Table::new(["name", "text"]);
    table.add_row(["a", &"word ".repeat(30)]);
    for columns in [40, 60, 200] {
        let text = table.within(columns);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(columns), "{text}");
        assert_eq!(text.lines().count() > 5, columns < 150, "no line is folded in vain: {text}");
    }
}

/// No word can be broken: where the narrowest columns are too wide together, every row is a list.
#[test]
fn a_table_too_wide_stands_as_lists() {
    let mut table = Table::new(["law", "", "algorithm", "pass"]);
    table.add_title("simd/avx512_and_its_many_names");
    table.add_row(["double_backward_is_symmetric", "chosen", "linear_cross_entropy", "7\n9"]);
    table.add_row(["bound", "", "attention", "8"]);
    let text = table.within(40);
    assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
    let rows = "double_backward_is_symmetric\n    chosen; algorithm:\n    linear_cross_entropy; pass: 7, 9\n\
        bound\n    algorithm: attention; pass: 8\n";
    assert!(text.contains(rows) && text.contains("── simd/avx512_and_its_many_names ─"), "{text}");
}

#[test]
fn absent_levels_with_one_reason_are_one_line() {
    let of = |tier: &str, reason: &str| Absent { tier: tier.into(), reason: reason.into() };
    let mut report = report(&[(Verdict::Pass, None)]);
    report.absent = vec![
        of("cuda/portable", "no driver"),
        of("simd/avx512", "no AVX-512"),
        of("cuda/sm80", "no driver"),
        of("cuda", "no driver"),
    ];
    let lines = absent(&report.absent);
    let expected = [("cuda (portable, sm80)", "no driver"), ("simd/avx512", "no AVX-512")];
    let expected = expected.map(|(tiers, reason)| (tiers.to_string(), reason));
    assert_eq!(lines, expected);
    assert!(headline(&report).starts_with("PASSED: 1 check, 0 negative"), "{}", headline(&report));
}

#[test]
fn times_have_the_unit_of_their_size() {
    for (seconds, text) in [
        (0.0, "0 ns"),
        (999e-9, "999 ns"),
        (12.345e-6, "12.3 µs"),
        (0.000_999_6, "1.00 ms"),
        (0.123_456_789, "123 ms"),
        (61.5, "61.5 s"),
    ] {
        assert_eq!(time(seconds), text);
    }
}

#[test]
fn memory_has_the_unit_of_its_size() {
    for (number, text) in [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (12_345, "12.1 KiB"),
        (134_217_728, "128 MiB"),
        (1_073_000_000, "0.999 GiB"),
        (8 << 30, "8.00 GiB"),
        (5000 << 40, "5000 TiB"),
    ] {
        assert_eq!(bytes(number), text);
    }
}

#[test]
fn tables_fold_between_words_and_fit_the_page() {
    let mut table = Table::new(["algorithm", "tensors", "number"]);
    let names: Vec<String> = (0..40).map(|i| format!("tensor_with_a_name_{i}")).collect();
    table.add_title("linear");
    table.add_row(["linear_cross_entropy", &names.join(" "), "7"]);
    table.add_row(["attention", "q k v", "12345"]);
    let text = table.to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(names.iter().all(|name| words.contains(&name.as_str())), "{text}");
    assert!(text.contains("──\nlinear_cross_entropy  tensor_with_a_name_0 "), "{text}");
    let number =
        |end: &str| text.lines().find(|line| line.ends_with(end)).map(|x| x.chars().count());
    assert_eq!(number(" 7"), number("12345"), "numbers stand on the right: {text}");
    assert_eq!(fold("a bb\nccc d e", 3), ["a", "bb", "ccc", "d e"]);
}

#[test]
fn lines_of_progress_are_an_interval_apart() {
    let printed = |interval| {
        let mut out = Vec::new();
        let mut lines = Lines::new(&mut out, interval);
        lines.report(1, 2, "first");
        lines.report(2, 2, "second");
        String::from_utf8(out).unwrap()
    };
    let all = printed(Duration::ZERO);
    let lines: Vec<&str> = all.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("1/2 after "), "{all}");
    assert!(lines[1].ends_with(" s: second"), "{all}");
    assert_eq!(printed(Duration::from_secs(3600)), "");
}

#[test]
fn a_busy_machine_is_told_by_its_peak_and_by_its_spread() {
    let calm = Times::new(vec![1500, 1010, 1000, 990, 980]);
    assert_eq!((calm.runs, calm.min_ns, calm.median_ns, calm.max_ns), (5, 980, 1000, 1500));
    assert_eq!((calm.lower_quartile_ns, calm.upper_quartile_ns, calm.spread()), (990, 1010, 0.01));
    assert_eq!(busy([2000.0, 1990.0], &[calm]), [""; 0]);
    let signs = busy([2000.0, 1800.0], &[calm]);
    assert!(signs.len() == 1 && signs[0].contains("2000 GFLOP/s before the runs"), "{signs:?}");
    let signs = busy([2000.0, 2000.0], &[calm, Times::new(vec![800, 1000, 1200])]);
    assert!(signs.len() == 1 && signs[0].starts_with("1 of 2 times spread"), "{signs:?}");
    assert_eq!(busy([0.0, 0.0], &[Times::new(Vec::new())]), [""; 0]);
}

fn record(verdict: Verdict, margin: Option<f64>) -> Record {
    Record {
        tier: "simd/portable".to_string(),
        algorithm: Algorithm::Attention,
        pass: Pass::Forward,
        dtype: Dtype::F32,
        check: "bound".to_string(),
        case: "a|b".to_string(),
        verdict,
        margin,
        elapsed: Duration::from_micros(1500),
    }
}

fn report(verdicts: &[(Verdict, Option<f64>)]) -> Report {
    let about = About {
        candidate: None,
        date: Some("2024-02-29T23:59:59Z".to_string()),
        cpu: Some("an abacus".to_string()),
        commit: None,
        threads: 2,
        depth: "core",
        part: None,
        profile: "strict",
        seed: 7,
        allow_undecided: 0.0,
    };
    let records = verdicts.iter().map(|(verdict, margin)| record(verdict.clone(), *margin));
    let absent = Absent { tier: "cuda".to_string(), reason: "no driver".to_string() };
    Report { about, records: records.collect(), absent: vec![absent], ..Report::default() }
}

fn bad() -> Report {
    report(&[
        (Verdict::Pass, Some(0.25)),
        (Verdict::Pass, Some(0.5)),
        (Verdict::Fail("o is <wrong>".to_string()), None),
        (Verdict::Vacuous("tells nothing".to_string()), None),
        (Verdict::Unsupported("no such thing".to_string()), None),
    ])
}

#[test]
fn a_report_passes_when_nothing_is_negative() {
    let status = |verdicts: &[Verdict]| {
        let verdicts: Vec<_> = verdicts.iter().map(|verdict| (verdict.clone(), None)).collect();
        report(&verdicts).status()
    };
    let text = String::new;
    let (open, unasked) = (Verdict::Undecided(text()), Verdict::NotAsked(text()));
    assert_eq!(
        status(&[Verdict::Pass, Verdict::Unsupported(text()), unasked.clone()]),
        Status::Passed
    );
    for negative in [Verdict::Fail(text()), Verdict::Vacuous(text()), Verdict::Convention(text())] {
        assert_eq!(status(&[Verdict::Pass, open.clone(), negative]), Status::Failed);
    }
    assert_eq!(status(&[Verdict::Pass, open]), Status::Undecided);
    assert_eq!(status(&[]), Status::Undecided, "nothing was checked");
    assert_eq!(status(&[unasked]), Status::Undecided, "nothing was checked");
}

/// One undecided check in four passes where a quarter is allowed, and the headline says so.
#[test]
fn an_allowed_share_of_undecided_checks_passes() {
    let open = Verdict::Undecided("no bound".to_string());
    let verdicts =
        [Verdict::Pass, Verdict::Pass, Verdict::Pass, open].map(|verdict| (verdict, None));
    let mut report = report(&verdicts);
    for (share, status) in
        [(0.0, Status::Undecided), (0.24, Status::Undecided), (0.25, Status::Passed)]
    {
        report.about.allow_undecided = share;
        assert_eq!(report.status(), status, "{share}");
    }
    let line = headline(&report);
    assert!(
        line.starts_with("PASSED: 4 checks, 0 negative, 1 undecided (25.0 % allowed), "),
        "{line}"
    );
    let told = told(report);
    let text = markdown(&told);
    let part = "## Undecided by cause\n\n<details><summary>attention forward, bound: 1 × on simd/portable (f32)\
        </summary>\n\nFirst in a\\|b:\n\nno bound\n";
    assert!(text.contains(part), "{text}");
    let xml = junit(&told).unwrap();
    assert!(xml.contains(r#"skipped="0" failures="0" errors="1""#), "{xml}");
}

#[test]
fn cells_count_what_was_checked() {
    let only = |report: &Report| rows(report)[1][3].clone();
    assert_eq!(only(&bad()), "1 of 4 FAIL");
    let good = report(&[(Verdict::Pass, Some(0.25)), (Verdict::Pass, None)]);
    assert_eq!(rows(&good)[0], ["algorithm", "pass", "tier", "f32"]);
    assert_eq!(rows(&good)[1], ["attention", "forward", "simd/portable", "0.250 (2)"]);
    assert_eq!(only(&report(&[(Verdict::Vacuous(String::new()), None)])), "1 of 1 VACUOUS");
    let other = report(&[(Verdict::Pass, None), (Verdict::Convention("slopes".to_string()), None)]);
    assert_eq!(only(&other), "1 of 2 ANOTHER CONVENTION");
    let negative: Vec<_> = other.negative().map(|record| record.verdict.reason()).collect();
    assert_eq!(negative, [Some("slopes")]);
    assert!(junit(&told(other.clone())).unwrap().contains(r#"type="convention""#));
    assert!(json(&other).unwrap().contains(r#""verdict": "convention""#));
}

#[test]
fn the_headline_has_the_verdict_and_the_counts() {
    assert_eq!(
        headline(&bad()),
        "FAILED: 4 checks, 2 negative, 0 undecided, 1 not offered, seed 7"
    );
    let good = report(&[(Verdict::Pass, None)]);
    assert_eq!(headline(&good), "PASSED: 1 check, 0 negative, 0 undecided, 0 not offered, seed 7");
}

#[test]
fn each_reason_not_to_check_is_one_line() {
    use Algorithm::{Attention, LazyAttention, LinearCrossEntropy};
    let lacking = |algorithm: Algorithm, pass, tier: &str, reason: &str| Record {
        algorithm,
        pass,
        tier: tier.to_string(),
        ..record(Verdict::Unsupported(reason.to_string()), None)
    };
    let mut records = vec![lacking(Attention, Pass::Jvp, "cuda", "no tangents")];
    for tier in ["simd/avx2", "simd/portable"] {
        for algorithm in [LazyAttention, LinearCrossEntropy] {
            let passes = algorithm.passes().iter();
            records.extend(passes.map(|&pass| lacking(algorithm, pass, tier, "not written")));
        }
        records.push(lacking(Attention, Pass::Forward, tier, "not written"));
    }
    let report = Report { records, ..Report::default() };
    assert_eq!(rows(&report).len(), 1, "what was not checked has no row");
    assert_eq!(
        not_checked(&report),
        [
            "jvp of attention (cuda): no tangents",
            "lazy_attention, linear_cross_entropy; forward of attention (simd/avx2, simd/portable): \
             not written",
        ]
    );
}

#[test]
fn junit_has_a_test_for_each_law_and_names_its_cases() {
    let xml = junit(&told(bad())).unwrap();
    for part in [
        r#"tests="1" skipped="0" failures="1" errors="0""#,
        r#"<testsuite name="simd/portable attention""#,
        r#"<testcase name="forward bound" classname="simd/portable attention" time="0.007""#,
        r#"<failure message="2 of 5 cases, the first a|b: o is &lt;wrong&gt;""#,
        "fail a|b: o is &lt;wrong&gt;\nvacuous a|b: tells nothing",
        r#"<property name="margin" value="0.500"/>"#,
        r#"<property name="cases" value="5"/>"#,
    ] {
        assert!(xml.contains(part), "{part} is not in\n{xml}");
    }
    // The suite is at fault, not the tier.
    let vacuous = told(report(&[(Verdict::Vacuous("tells nothing".to_string()), None)]));
    let vacuous = junit(&vacuous).unwrap();
    assert!(vacuous.contains(r#"failures="0" errors="1""#), "{vacuous}");
    let lacking = (Verdict::Unsupported("no such thing".to_string()), None);
    let skipped = junit(&told(report(std::slice::from_ref(&lacking)))).unwrap();
    assert!(skipped.contains(r#"<skipped message="no such thing""#), "{skipped}");
    let passed = junit(&told(report(&[lacking, (Verdict::Pass, None)]))).unwrap();
    assert!(passed.contains(r#"skipped="0" failures="0" errors="0""#), "{passed}");
}

#[test]
fn json_holds_everything() {
    let value: serde_json::Value = serde_json::from_str(&json(&bad()).unwrap()).unwrap();
    for (key, expected) in [
        ("schema", serde_json::json!(1)),
        ("date", "2024-02-29T23:59:59Z".into()),
        ("cpu", "an abacus".into()),
        ("threads", 2.into()),
        ("depth", "core".into()),
        ("profile", "strict".into()),
        ("seed", 7.into()),
        ("status", "failed".into()),
        ("passed", false.into()),
        ("undecided", 0.into()),
        ("checks", 4.into()),
        ("negative", 2.into()),
    ] {
        assert_eq!(value[key], expected, "{key}");
    }
    assert!(value.get("commit").is_none(), "not known");
    assert_eq!(value["absent"][0]["reason"], "no driver");
    let records = value["records"].as_array().unwrap();
    let verdicts: Vec<&str> = records.iter().map(|x| x["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["pass", "pass", "fail", "vacuous", "unsupported"]);
    assert_eq!((&records[1]["margin"], &records[1]["microseconds"]), (&0.5.into(), &1500.into()));
    assert_eq!(records[2]["reason"], "o is <wrong>");
    assert!(records[2].get("margin").is_none());
}

#[test]
fn markdown_cannot_be_broken_by_a_message() {
    let text = markdown(&told(bad()));
    assert!(text.starts_with("# etalon verify: FAILED: 4 checks, 2 negative, "), "{text}");
    assert!(text.contains("| attention | forward | simd/portable | 1 of 4 FAIL |\n"), "{text}");
    assert!(text.contains("First in a\\|b:\n\no is &lt;wrong>\n"), "{text}");
    assert!(text.contains("## Absent\n\n- cuda: no driver\n"), "{text}");
}
