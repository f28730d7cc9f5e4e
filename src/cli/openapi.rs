//! `onejob openapi`: the gateway's OpenAPI document.

use super::{Exit, Failure, print};

pub(super) fn run() -> Result<Exit, Failure> {
    print(&onejob::server::openapi());
    Ok(Exit::Done)
}
