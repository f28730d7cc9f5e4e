//! One module a script: state before, one call, the reply and the record after.

mod ask;
mod begin;
mod cancel;
mod extend;
mod finish;
mod hint;
mod mark;
mod note;
mod read;
mod reopen;
mod resolve;
mod submit;
mod tick;
