//! Places at which a process can be told to kill itself, so that tests see what its death leaves behind.
//!
//! Only with the cargo feature `failpoints`, which is off by default and refused in a release build. Without it `failpoint!` is
//! nothing: not a branch, not a name. With it, the variable `ONEJOB_FAILPOINT` names the one point of [`POINTS`] that kills. The
//! kill is SIGKILL, as from the kernel's out-of-memory killer: no destructor runs and nothing is flushed.

#[cfg(feature = "failpoints")]
use std::sync::OnceLock;

#[cfg(all(feature = "failpoints", not(debug_assertions)))]
compile_error!("the feature failpoints is for tests: a release build must not be able to kill itself");

/// Every point, in the order of an attempt's life.
#[cfg(feature = "failpoints")]
pub const POINTS: [&str; 25] = [
    "claim.blob",
    "claim.made",
    "call.connected",
    "call.sent",
    "call.answered",
    "finish.blob",
    "finish.recorded",
    "finish.stored",
    "begin.before",
    "begin.made",
    "tick.made",
    "adopt.made",
    "adopt.render",
    "adopt.marked",
    "ask.taken",
    "ask.answered",
    "ask.noted",
    "resolve.before",
    "resolve.made",
    "cancel.before",
    "cancel.made",
    "spool.temporary",
    "spool.renamed",
    "spool.stored",
    "spool.removed",
];

/// The variable that names the point.
#[cfg(feature = "failpoints")]
pub const VARIABLE: &str = "ONEJOB_FAILPOINT";

#[cfg(feature = "failpoints")]
static ARMED: OnceLock<String> = OnceLock::new();

/// Names the point at which this process kills itself.
///
/// # Errors
/// There is no such point.
#[cfg(feature = "failpoints")]
pub fn arm(point: &str) -> Result<(), String> {
    if !POINTS.contains(&point) {
        return Err(format!("there is no failpoint {point:?}"));
    }
    ARMED.get_or_init(|| point.to_owned());
    Ok(())
}

/// Kills the process if this is its point.
#[cfg(feature = "failpoints")]
pub(crate) fn reach(point: &'static str) {
    debug_assert!(POINTS.contains(&point), "{point} is not in the list");
    if ARMED.get().is_some_and(|armed| armed == point) {
        // No other thread gets further either: the kernel ends them all.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// A place at which the process may be told to die.
macro_rules! failpoint {
    ($point:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::reach($point);
    };
}
pub(crate) use failpoint;

/// Proof that without the feature a point is nothing: a constant can run no code of ours.
#[cfg(not(feature = "failpoints"))]
const _: () = {
    failpoint!("claim.made");
};
