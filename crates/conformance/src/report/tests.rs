use super::json::utc;
use super::*;
use etalon_problem::{Algorithm, Dtype, Pass};
use std::time::{Duration, SystemTime};

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
        date: SystemTime::UNIX_EPOCH + Duration::from_secs(1_709_251_199),
        cpu: Some("an abacus".to_string()),
        commit: None,
        depth: "core",
        profile: "strict",
        seed: 7,
        threads: 2,
    };
    let records = verdicts.iter().map(|(verdict, margin)| record(verdict.clone(), *margin));
    let absent = Absent { tier: "cuda".to_string(), reason: "no driver".to_string() };
    Report { about, records: records.collect(), absent: vec![absent] }
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
    assert_eq!(bad().counts(), Counts { checks: 4, negative: 2, not_checked: 1 });
    let not_checked = bad().not_checked();
    let what = (Algorithm::Attention, Pass::Forward, "simd/portable".to_string());
    assert_eq!(
        not_checked.into_iter().collect::<Vec<_>>(),
        [("no such thing".into(), [what].into())]
    );
    let other = report(&[(Verdict::Pass, None), (Verdict::Convention("slopes".to_string()), None)]);
    let negative: Vec<_> = other.negative().map(|record| record.verdict.reason()).collect();
    assert_eq!(negative, [Some("slopes")]);
}

#[test]
fn json_holds_everything() {
    let value: serde_json::Value = serde_json::from_str(&json(&bad()).unwrap()).unwrap();
    assert_eq!(
        (&value["schema"], &value["passed"], &value["seed"]),
        (&1.into(), &false.into(), &7.into())
    );
    assert_eq!((&value["checks"], &value["negative"]), (&4.into(), &2.into()));
    assert_eq!((&value["depth"], &value["profile"]), (&"core".into(), &"strict".into()));
    assert_eq!((&value["cpu"], &value["threads"]), (&"an abacus".into(), &2.into()));
    assert_eq!(value["date"], "2024-02-29T23:59:59Z");
    assert!(value.get("commit").is_none());
    assert_eq!(value["absent"][0]["reason"], "no driver");
    let records = value["records"].as_array().unwrap();
    let verdicts: Vec<&str> = records.iter().map(|x| x["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["pass", "pass", "fail", "vacuous", "unsupported"]);
    assert_eq!((&records[1]["margin"], &records[1]["microseconds"]), (&0.5.into(), &1500.into()));
    assert_eq!(records[2]["reason"], "o is <wrong>");
    assert!(records[2].get("margin").is_none());
}

#[test]
fn dates_follow_the_calendar() {
    // `date -u -d @SECONDS`.
    for (seconds, text) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_400, "2000-02-29T00:00:00Z"),
        (1_735_689_599, "2024-12-31T23:59:59Z"),
        (4_107_542_400, "2100-03-01T00:00:00Z"),
    ] {
        assert_eq!(utc(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), text);
    }
}
