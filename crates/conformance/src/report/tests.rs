use super::*;

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
    let records = verdicts.iter().map(|(verdict, margin)| record(verdict.clone(), *margin));
    let absent = Absent { tier: "cuda".to_string(), reason: "no driver".to_string() };
    Report { seed: 7, records: records.collect(), absent: vec![absent] }
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
    let unsupported = Verdict::Unsupported(String::new());
    assert!(report(&[(Verdict::Pass, None), (unsupported, None)]).passed());
    assert!(!report(&[(Verdict::Fail(String::new()), None)]).passed());
    assert!(!report(&[(Verdict::Vacuous(String::new()), None)]).passed());
    assert!(!report(&[(Verdict::Convention(String::new()), None)]).passed());
}

#[test]
fn groups_count_what_was_checked() {
    let groups = bad().groups();
    let group = groups.values().next().unwrap();
    assert_eq!((groups.len(), group.checks, group.failed, group.vacuous), (1, 4, 1, 1));
    assert_eq!(group.worst, Some((0.5, "a|b".to_string())));
    assert_eq!(group.cell(), "1 of 4 FAIL");
    assert_eq!(bad().headline(), "4 checks, 2 negative, seed 7");
    assert_eq!(bad().not_checked(), ["simd/portable attention forward: no such thing"]);
    let good = report(&[(Verdict::Pass, Some(0.25)), (Verdict::Pass, None)]);
    assert_eq!(good.rows()[0], ["algorithm", "pass", "tier", "f32"]);
    assert_eq!(good.rows()[1], ["attention", "forward", "simd/portable", "0.250 (2)"]);
    let only_vacuous = report(&[(Verdict::Vacuous(String::new()), None)]);
    assert_eq!(only_vacuous.rows()[1][3], "1 of 1 VACUOUS");
    let other = report(&[(Verdict::Pass, None), (Verdict::Convention("slopes".to_string()), None)]);
    assert_eq!(other.rows()[1][3], "1 of 2 ANOTHER CONVENTION");
    assert_eq!(other.negative().map(|(_, text)| text).collect::<Vec<_>>(), ["slopes"]);
    assert!(junit(&other).unwrap().contains(r#"type="convention""#));
    assert!(json(&other).unwrap().contains(r#""verdict": "convention""#));
}

#[test]
fn junit_tells_failures_errors_and_skips_apart() {
    let xml = junit(&bad()).unwrap();
    for part in [
        r#"tests="5" skipped="1" failures="1" errors="1""#,
        r#"<testsuite name="simd/portable attention forward f32""#,
        r#"<failure message="o is &lt;wrong&gt;""#,
        r#"<error message="tells nothing""#,
        r#"<skipped message="no such thing""#,
        r#"<property name="margin" value="0.5"/>"#,
        r#"time="0.002""#, // 1500 µs, in JUnit's thousandths
    ] {
        assert!(xml.contains(part), "{part} is not in\n{xml}");
    }
}

#[test]
fn json_holds_everything() {
    let value: serde_json::Value = serde_json::from_str(&json(&bad()).unwrap()).unwrap();
    assert_eq!(value["passed"], false);
    assert_eq!(value["seed"], 7);
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
    let text = markdown(&bad());
    assert!(text.starts_with("# etalon: failed\n\n4 checks, 2 negative, seed 7.\n"), "{text}");
    assert!(text.contains("| attention | forward | simd/portable | 1 of 4 FAIL |\n"), "{text}");
    assert!(text.contains("- `simd/portable` bound `a|b`: o is &lt;wrong>\n"), "{text}");
    assert!(text.contains("## Absent\n\n- cuda: no driver\n"), "{text}");
}
