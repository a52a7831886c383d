//! Prints how long each law, each shape, each case, each tier and each pass takes of a run at core depth, on one
//! thread. The first law that needs the exact results of a case waits for them: mostly that is `bound`. Arguments
//! are names of laws: those alone.
//!
//! ```sh
//! cargo bench -p etalon-conformance --bench costs
//! ```

use etalon_conformance::cases::Spec;
use etalon_conformance::report::Record;
use etalon_conformance::suite::{SuiteOptions, run};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use rayon::ThreadPoolBuilder;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

/// Rows of a table, at the most.
const MOST: usize = 80;

fn main() -> Result<(), Box<dyn Error>> {
    let (tiers, _) = tiers::present();
    let tiers: Vec<&dyn Tier> = tiers.iter().map(|tier| &**tier).collect();
    // cargo adds the flag of its own benches.
    let laws = std::env::args().skip(1).filter(|x| x != "--bench");
    let laws: Vec<String> = laws.collect();
    let options = SuiteOptions { laws, ..SuiteOptions::own(tiers) };
    let pool = ThreadPoolBuilder::new().num_threads(1).build()?;
    let report = pool.install(|| run(&options, &|_, _, _| {}));
    let records: Vec<&Record> =
        report.records.iter().filter(|record| !record.case.is_empty()).collect();
    let negative = records.iter().filter(|record| record.verdict.is_negative());
    for record in negative {
        let Record { tier, pass, check, case, verdict, .. } = record;
        println!("{tier} {pass} {check} {case}: {verdict:?}");
    }
    table("law", &records, |record| record.check.clone());
    table("shape", &records, |record| {
        let spec = record.case.parse::<Spec>();
        spec.map_or(String::new(), |spec| format!("{} {}", spec.algorithm, spec.shape()))
    });
    table("case", &records, |record| record.case.clone());
    table("tier", &records, |record| record.tier.clone());
    table("pass", &records, |record| format!("{} {}", record.algorithm, record.pass));
    table("check", &records, |record| format!("{} {} {}", record.pass, record.check, record.case));
    Ok(())
}

/// Times of the checks of each group, the dearest first.
fn table(what: &str, records: &[&Record], group: impl Fn(&Record) -> String) {
    let mut groups: BTreeMap<String, (usize, Duration)> = BTreeMap::new();
    for record in records {
        let (checks, elapsed) = groups.entry(group(record)).or_default();
        *checks += 1;
        *elapsed += record.elapsed;
    }
    let all: Duration = groups.values().map(|(_, elapsed)| elapsed).sum();
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (_, elapsed))| std::cmp::Reverse(*elapsed));
    println!("\n| {what} | checks | seconds | share |\n|---|---|---|---|");
    for (name, (checks, elapsed)) in groups.iter().take(MOST) {
        let (seconds, all) = (elapsed.as_secs_f64(), all.as_secs_f64().max(f64::MIN_POSITIVE));
        println!("| `{name}` | {checks} | {seconds:.2} | {:.1} % |", 100.0 * seconds / all);
    }
    println!("| all | {} | {:.2} | |", records.len(), all.as_secs_f64());
}
