//! `etalon power`: the smallest errors that the gates notice.

use crate::options::{self, one_of};
use crate::outcome::{Outcome, say};
use crate::table::Table;
use etalon_conformance::power::{Power, power};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_problem::Error;

const MEANING: &str = "\
uniform: every element too large by this share of itself. one row: only one row. one key: one row of \
attention forgets a key of this weight. A correct kernel is simulated, and the error is planted in \
its results, on generic inputs.";

#[derive(Debug, clap::Args)]
#[command(after_help = MEANING)]
pub struct Arguments {
    #[command(flatten)]
    run: options::Run,
    /// Profiles; all if absent.
    #[arg(long, value_name = "P,…", value_delimiter = ',', value_parser = one_of(Profile::ALL))]
    profile: Vec<Profile>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let chosen =
        |profile: &Profile| arguments.profile.is_empty() || arguments.profile.contains(profile);
    let profiles: Vec<Profile> = Profile::ALL.into_iter().filter(chosen).collect();
    let algorithms = arguments.run.algorithms().into_iter();
    let passes = algorithms.flat_map(|of| of.passes().iter().map(move |&pass| (of, pass)));
    let all: Vec<_> = passes
        .flat_map(|(of, pass)| profiles.iter().map(move |&profile| (of, pass, profile)))
        .collect();
    let found = arguments.run.watch(|progress| -> Result<Vec<Power>, Error> {
        let mut found = Vec::new();
        for (done, &(of, pass, profile)) in all.iter().enumerate() {
            found.extend(power(of, pass, profile, arguments.run.seed())?);
            progress(done + 1, all.len(), &format!("{of} {pass} {profile}"));
        }
        Ok(found)
    })??;
    say(&table(&found))?;
    Ok(Status::Passed)
}

fn table(found: &[Power]) -> String {
    let mut table = Table::new(["output", "profile", "uniform", "one row", "one key"]);
    let size = |x: Option<f64>| x.map_or("–".to_string(), |x| format!("{x:.1e}"));
    for x in found {
        table.add_title(&format!("{} {}", x.algorithm, x.pass));
        let sizes = [x.uniform, x.row, x.key].map(size);
        let [uniform, row, key] = &sizes;
        table.add_row([x.output, x.profile.name, uniform, row, key]);
    }
    table.to_string()
}
