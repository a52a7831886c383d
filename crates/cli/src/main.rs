//! The command `etalon`: see `etalon --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    etalon_cli::main()
}
