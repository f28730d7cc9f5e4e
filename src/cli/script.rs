//! `onejob script`: a Lua script as Redis gets it, for `redis-cli`, for audits, for clients in other languages.

use clap::builder::PossibleValuesParser;
use onejob::store::Script;

use super::{Exit, Failure, print};

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Which script.
    #[arg(value_parser = PossibleValuesParser::new(Script::ALL.iter().map(|script| script.name())))]
    name: String,
    /// Prints its SHA-1, by which Redis remembers it, instead.
    #[arg(long)]
    sha1: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let script = Script::ALL.iter().find(|script| script.name() == arguments.name);
    let script = script.ok_or_else(|| Failure::new(Exit::Usage, format!("there is no script {:?}", arguments.name)))?;
    print(if arguments.sha1 { script.sha1() } else { script.code() });
    Ok(Exit::Done)
}
