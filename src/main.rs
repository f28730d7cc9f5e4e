//! The gateway and its command line: everything is in `cli.rs`.

use std::process::ExitCode;

mod cli;

fn main() -> ExitCode {
    cli::main()
}
