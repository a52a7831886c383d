//! Reports of any run: their sizes, what they escape, that they are well-formed, and the same each time.

use etalon_cli::annotations::annotations;
use etalon_cli::badge::badge;
use etalon_cli::html::{self, html};
use etalon_cli::junit::junit;
use etalon_cli::markdown::{self, markdown};
use etalon_cli::page::Block;
use etalon_cli::report::{Report, Study, causes, chosen};
use etalon_cli::summary::headline;
use etalon_conformance::check::{Cell, Picture, Side, Spread};
use etalon_conformance::report::{self, About, Record, Simplest, Status, Verdict};
use etalon_problem::{Algorithm, Dtype, Pass};
use quick_xml::Reader;
use quick_xml::events::Event;
use std::time::Duration;

/// A run as `etalon verify` tells of it.
pub fn told(run: report::Report) -> Report<'static> {
    let again = |of: &Record| {
        format!("etalon verify --tier {} --case {} --law {}", of.tier, of.case, of.check)
    };
    Report {
        command: "etalon verify",
        status: run.status(),
        verdict: headline(&run),
        run,
        studies: Vec::new(),
        tables: Vec::new(),
        notes: Vec::new(),
        replay: Box::new(again),
    }
}

/// A text as a candidate, a file or a name may hold it.
const HOSTILE: &str = "</title></script><script>alert(1)</script>]]>&amp;\u{1b}[31m\"'`x`\n# h\n| a | b |\u{0}\u{202e}--><img \
    src=x onerror=y>[a](javascript:b)";

fn record(case: String, verdict: Verdict) -> Record {
    Record {
        tier: "mine".to_string(),
        algorithm: Algorithm::Attention,
        pass: Pass::Backward,
        dtype: Dtype::Bf16,
        check: "bound".to_string(),
        case,
        verdict,
        margin: None,
        elapsed: Duration::ZERO,
    }
}

/// The worst picture there is: no two cells that stand side by side are alike.
fn noisy() -> Picture {
    let side = |name: &str| {
        let (name, lines) = (name.to_string(), Some(32));
        Side { name, extent: 128, step: 2, lines, at_lines: false }
    };
    let margins = [0.0, 0.1, 0.7, 3.0, 30.0, 1e3, 1e9];
    let cell = |i: usize| match i % 11 {
        9 => Cell::NaN,
        10 => Cell::Infinite,
        7 => Cell::Free,
        at => Cell::Margin(margins[at % 7]),
    };
    Picture {
        down: side("N"),
        across: side("D"),
        over: vec!["B"],
        cells: (0..4096).map(cell).collect(),
    }
}

fn spread() -> Spread {
    let mut spread = Spread::default();
    [0.0, 0.4, 7.0, f64::INFINITY].into_iter().for_each(|margin| spread.add(margin));
    spread
}

/// A run with so many failures, each of a cause of its own if so, and with pictures of some.
fn failed(failures: usize, differ: bool, hostile: &str) -> Report<'static> {
    // Words that differ in more than numbers.
    let word = |i: usize| (0..13).map(move |bit| if i >> bit & 1 == 1 { 'x' } else { 'y' });
    let cause = |i: usize| if differ { word(i).collect() } else { String::new() };
    let reason = |i: usize| {
        let long = "long ".repeat(200);
        Verdict::Fail(format!("o[{i}] is 1e{i}, {}{hostile} {long}", cause(i)))
    };
    let records = (0..failures).map(|i| record(format!("case/{i}/{hostile}"), reason(i)));
    let about = About { candidate: Some(hostile.to_string()), depth: "core", ..About::default() };
    let run = report::Report { about, records: records.collect(), ..report::Report::default() };
    let study = |i: usize| Study {
        title: format!("{i} {hostile}"),
        status: Status::Failed,
        blocks: vec![
            Block::Text(hostile.to_string()),
            Block::Items(vec![hostile.to_string()]),
            Block::Pictures("o", vec![noisy(), noisy()]),
            Block::Code(vec![hostile.to_string()]),
            Block::Command(hostile.to_string()),
        ],
        spreads: vec![("o", spread(), f64::INFINITY)],
    };
    let studies = (0..failures.min(60)).map(study).collect();
    let notes = vec![hostile.to_string()];
    let tables = vec![("table", vec![vec![hostile.to_string()], vec![hostile.to_string()]])];
    Report { studies, notes, tables, ..told(run) }
}

/// Reads a page as XML, whose parser takes no tag that is not closed, and returns the names of its tags.
fn tags(page: &str) -> Vec<String> {
    let mut reader = Reader::from_str(page);
    let mut tags = Vec::new();
    let mut open = 0;
    loop {
        match reader
            .read_event()
            .unwrap_or_else(|error| panic!("{error} at {}", reader.error_position()))
        {
            Event::Eof => break,
            Event::Start(tag) => {
                open += 1;
                tag.attributes().for_each(|attribute| drop(attribute.expect("name=\"value\"")));
                tags.push(String::from_utf8(tag.name().as_ref().to_vec()).unwrap());
            }
            Event::End(_) => open -= 1,
            Event::GeneralRef(name) => {
                let name = name.decode().unwrap();
                assert!(["amp", "lt", "gt", "quot", "apos"].contains(&&*name), "&{name};");
            }
            Event::Comment(_) | Event::CData(_) | Event::PI(_) => panic!("no part of a report"),
            _ => {}
        }
    }
    assert_eq!(open, 0, "every tag is closed");
    tags
}

#[test]
fn pages_stay_below_their_limits_and_say_what_they_leave_out() {
    for (failures, differ) in [(0, false), (1, false), (3000, false), (3000, true)] {
        let report = failed(failures, differ, "");
        let (page, text) = (html(&report), markdown(&report));
        assert!(page.len() < 2_000_000 && page.len() <= html::LIMIT, "{}", page.len());
        assert!(text.len() < 900_000 && text.len() <= markdown::LIMIT, "{}", text.len());
        tags(&page);
        let left_out = |form: &str| form.contains("Left out, for want of room");
        assert_eq!((left_out(&page), left_out(&text)), (failures > 1, differ), "{failures}");
        assert_eq!(page.contains("Left out") && page.contains(" pictures"), failures > 1);
        for form in [&page, &text] {
            assert!(form.contains("About this run"), "the last section stands: {failures}");
            assert_eq!(form.contains("and 2900 more commands"), failures > 1 && !differ);
        }
    }
}

#[test]
fn nothing_from_outside_is_markup() {
    let report = failed(3, false, HOSTILE);
    let page = html(&report);
    let known = "html head meta title style body header p h1 h2 h3 main section ul li pre div figure figcaption svg g \
        path text details summary table tr th td";
    let known: Vec<&str> = known.split_whitespace().collect();
    let found = tags(&page);
    assert!(found.iter().all(|tag| known.contains(&tag.as_str())), "{found:?}");
    assert!(!page.contains('\u{1b}') && !page.contains('\u{0}') && !page.contains('\u{202e}'));
    // Between fences nothing is markup.
    let text = markdown(&report);
    let fenced = text.split("```").skip(1).step_by(2);
    assert!(fenced.clone().count() > 5 && fenced.clone().all(|x| !x.contains('\u{1b}')));
    let text: String = text.split("```").step_by(2).collect();
    for part in ["<script", "<img", "\n# h", "\n| a |", " [a](", "\u{1b}"] {
        assert!(!text.contains(part), "{part:?} in {text}");
    }
    let xml = junit(&report).unwrap();
    assert!(!xml.contains('\u{1b}') && !xml.contains("<script"), "{xml}");
    tags(&xml);
    let lines = annotations(&report);
    assert!(lines.lines().all(|line| line.starts_with("::error title=")), "{lines}");
}

/// A name that ends in a quotation mark closes no attribute and no fence.
#[test]
fn fences_are_longer_than_what_they_hold() {
    let mut report = failed(1, false, "");
    report.studies[0].blocks =
        vec![Block::Code(vec!["````".to_string(), "# no heading".to_string()])];
    let text = markdown(&report);
    assert!(text.contains("\n`````\n````\n# no heading\n`````\n"), "{text}");
}

#[test]
fn a_cause_is_one_annotation() {
    let fail = |i: usize, text: &str| record(format!("case/{i}"), Verdict::Fail(text.to_string()));
    let mut records: Vec<Record> = (0..30).map(|i| fail(i, &format!("o[{i}] is {i}e3"))).collect();
    records.extend(
        (0..20).map(|i| {
            fail(i, &format!("crash {}", "abcdefghijklmnopqrstu".chars().nth(i).unwrap()))
        }),
    );
    records[3].tier = "simd/avx2".to_string();
    records.push(record("case/x".to_string(), Verdict::Undecided("50 %, so: it is".to_string())));
    let report = told(report::Report { records, ..report::Report::default() });
    let found = causes(report.run.negative());
    assert_eq!((found.len(), found[0].records.len()), (21, 30));
    assert_eq!(
        found[0].title(),
        "attention backward, bound: 30 × on mine (bf16), simd/avx2 (bf16)"
    );
    let lines = annotations(&report);
    let lines: Vec<&str> = lines.lines().collect();
    let first = "::error title=etalon verify%3A attention backward%2C bound%3A 30 × on mine (bf16)%2C simd/avx2 (bf16)\
        ::case/0: o[0] is 0e3%0ATo see it again: etalon verify --tier mine --case case/0 --law bound";
    assert_eq!(lines[0], first);
    assert!(
        lines[9].ends_with("::and 12 more records of 12 causes; the reports have them"),
        "{}",
        lines[9]
    );
    assert!(
        lines[10].starts_with("::warning title=") && lines[10].contains("::case/x: 50 %25, so: it")
    );
    assert_eq!(lines.len(), 11, "a step shows ten of a kind");
    let passed = record(String::new(), Verdict::Pass);
    let report = told(report::Report { records: vec![passed], ..report::Report::default() });
    assert_eq!(annotations(&report), format!("::notice title=etalon verify::{}\n", report.verdict));
}

/// The same outputs twice would take the place of others.
#[test]
fn each_failure_in_detail_is_of_another_law_and_case() {
    let of = [
        ("probe", "a"),
        ("bound", "b"),
        ("bound", "c"),
        ("poison", "d"),
        ("edge", "a"),
        ("edge", "e"),
    ];
    // The last two are of the whole run.
    let records = of.into_iter().chain([("one", ""), ("other", "")]).map(|(check, case)| {
        let verdict = Verdict::Fail("off".to_string());
        Record { check: check.to_string(), ..record(case.to_string(), verdict) }
    });
    let records: Vec<Record> = records.collect();
    let (case, reason) = ("d".to_string(), "less".to_string());
    let simplest = vec![Simplest { of: records[1].clone(), case, reason }];
    let run = report::Report { records, simplest, ..report::Report::default() };
    let found =
        chosen(&run).into_iter().map(|(of, case, symptom)| (of.check.as_str(), case, symptom));
    let expected = [
        ("bound", "d", "less"),
        ("probe", "a", "off"),
        ("edge", "e", "off"),
        ("one", "", "off"),
        ("other", "", "off"),
    ];
    assert_eq!(found.collect::<Vec<_>>(), expected);
}

#[test]
fn a_symptom_is_told_without_its_numbers() {
    let text = "o[0, 12] is -3.5e-1, exact is 2e0 ± 1.1e-7 (margin inf); one-hot é…";
    let of = |texts: &[&str]| -> Vec<usize> {
        let records: Vec<Record> = texts
            .iter()
            .map(|text| record(String::new(), Verdict::Fail((*text).to_string())))
            .collect();
        causes(records.iter()).iter().map(|cause| cause.records.len()).collect()
    };
    assert_eq!(of(&[text, &text.replace("12", "7").replace("2e0", "-9")]), [2]);
    assert_eq!(of(&[text, &text.replace("inf", "3")]), [1, 1]);
    assert_eq!(of(&[text, &text.replace("one-hot", "onehot")]), [1, 1]);
    assert_eq!(of(&["é…±", "é…", "é…±"]), [2, 1]);
}

#[test]
fn a_badge_has_version_profile_and_worst_margin() {
    let shown = |verdicts: &[(Verdict, Option<f64>)]| {
        let records = verdicts.iter().map(|(verdict, margin)| Record {
            margin: *margin,
            ..record(String::new(), verdict.clone())
        });
        let about = About { profile: "bf16-flash", ..About::default() };
        let run = report::Report { about, records: records.collect(), ..report::Report::default() };
        let badge: serde_json::Value = serde_json::from_str(&badge(&told(run)).unwrap()).unwrap();
        assert_eq!((&badge["schemaVersion"], badge.as_object().unwrap().len()), (&1.into(), 4));
        assert_eq!(badge["label"], concat!("etalon ", env!("CARGO_PKG_VERSION")));
        ["message", "color"].map(|key| badge[key].as_str().unwrap().to_string())
    };
    let own = |message: &str, color: &str| [message.to_string(), color.to_string()];
    let (pass, open) = (Verdict::Pass, Verdict::Undecided("wide".to_string()));
    let passed = [(pass.clone(), Some(0.25)), (pass.clone(), None), (pass.clone(), Some(0.5))];
    assert_eq!(shown(&passed), own("bf16-flash, worst margin 0.500", "brightgreen"));
    assert_eq!(shown(&[(pass.clone(), None)]), own("passed", "brightgreen"));
    let undecided = [(open.clone(), Some(0.5)), (pass, Some(0.1))];
    assert_eq!(shown(&undecided), own("undecided: 1 of 2 checks", "yellow"));
    let failed = [(open, None), (Verdict::Fail("off".to_string()), Some(7.0))];
    assert_eq!(shown(&failed), own("failed: 1 of 2 checks", "red"));
}

#[test]
fn equal_runs_give_equal_bytes() {
    let [one, two] = [(); 2].map(|()| failed(4, true, "x"));
    assert_eq!((html(&one), markdown(&one)), (html(&two), markdown(&two)));
    assert_eq!(annotations(&one), annotations(&two));
}

/// The whole of a small page, but for its style.
#[test]
fn a_small_page_is_as_it_was() {
    let side = |name: &str, extent, lines| Side {
        name: name.to_string(),
        extent,
        step: 1,
        lines,
        at_lines: true,
    };
    let cells = [0.5, 2.0, 2.0, 0.0].map(Cell::Margin).into_iter().chain([Cell::NaN, Cell::Free]);
    let (down, across) = (side("N", 3, Some(2)), side("D", 2, None));
    let picture = Picture { down, across, over: Vec::new(), cells: cells.collect() };
    let mut report = told(report::Report {
        records: vec![record("c".to_string(), Verdict::Fail("o <is> off".to_string()))],
        ..report::Report::default()
    });
    report.studies = vec![Study {
        title: "o".to_string(),
        status: Status::Failed,
        blocks: vec![Block::Pictures("o", vec![picture])],
        spreads: Vec::new(),
    }];
    let golden = include_str!("report.html");
    let page = html(&report);
    let (head, rest) = page.split_once("<style>").unwrap();
    let (_, body) = rest.split_once("</style>").unwrap();
    let page = format!("{head}{body}").replace(env!("CARGO_PKG_VERSION"), "VERSION");
    if page != golden && std::env::var_os("ETALON_RENEW").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/rendering/report.html");
        std::fs::write(path, &page).unwrap();
    }
    assert_eq!(page, golden, "ETALON_RENEW=1 writes it anew, where the page is meant to change");
    assert!(
        markdown(&report).contains("     0 ·1\n     1 1·\n     2 N\n"),
        "{}",
        markdown(&report)
    );
}
