//! SIGTERM and Ctrl-C.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Exit, Failure, OrExit as _};

/// Hears the signals that ask the process to end, from its making on.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate()).or_exit(Exit::Internal)?,
            interrupt: signal(SignalKind::interrupt()).or_exit(Exit::Internal)?,
        })
    }

    /// Waits for the next one and says which it was.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
