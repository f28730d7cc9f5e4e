//! One module a script: state before, one call, the reply and the record after.

mod ask;
mod begin;
mod cancel;
mod dedup;
mod extend;
mod finish;
mod hint;
mod mark;
mod mirror;
mod note;
mod postpone;
mod protection;
mod read;
mod reopen;
mod resolve;
mod submit;
mod tick;
