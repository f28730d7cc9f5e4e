//! SIGTERM, Ctrl-C, and the end of the terminal.
//!
//! Deliberately not here: SIGHUP where it was ignored when the process began, as under `nohup`. It stays ignored.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Exit, Failure, OrExit as _};

/// Where Linux tells which signals a process ignores.
const STATUS: &str = "/proc/self/status";

/// Hears the signals that ask the process to end, from its making on.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Option<Signal>,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        let hang_up = if ignores_hang_up() { None } else { Some(signal(SignalKind::hangup()).or_exit(Exit::Internal)?) };
        Ok(Signals {
            terminate: signal(SignalKind::terminate()).or_exit(Exit::Internal)?,
            interrupt: signal(SignalKind::interrupt()).or_exit(Exit::Internal)?,
            hang_up,
        })
    }

    /// Waits for the next one and says which it was. SIGHUP counts once: a terminal and its shell both send it at their end.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            () = hung_up(&mut self.hang_up) => {
                self.hang_up = None;
                "SIGHUP"
            }
        }
    }
}

async fn hung_up(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Whether SIGHUP is ignored. Where that cannot be found out, it is left as it is.
fn ignores_hang_up() -> bool {
    let status = std::fs::read_to_string(STATUS).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // The signal n is the bit n - 1.
    mask.is_none_or(|mask| mask & 1 == 1)
}
