//! A job whose ending may not be told yet, because too few have it (`redis.durability`).

use crate::attempt::AttemptState;
use crate::error::Want;
use crate::job::{Job, JobState, Payload};

/// How the reason begins of a job whose ending is not told yet.
const UNTOLD: &str = "not_durable: how it ended is not told yet";

impl Job {
    /// The job as it stood before its ending: open, without a result, one version and one revision earlier. Whoever knows it by this
    /// ETag learns of the ending later.
    pub(crate) fn before_its_end(mut self, have: u32, want: Want) -> Job {
        let (ended_ms, winner) = (self.ended_ms, self.completed_by);
        for attempt in &mut self.attempts {
            let ended_it = attempt.number == winner || (attempt.ended_ms == ended_ms && !attempt.state.is_open());
            // Sent or not, nobody may know: what was aborted is no news of the job's end.
            if ended_it && attempt.state != AttemptState::Aborted {
                attempt.state = AttemptState::Running;
                attempt.ended_ms = 0;
                attempt.reason.clear();
                attempt.model.clear();
            }
        }
        let has = |state| self.attempts.iter().any(|attempt| attempt.state == state);
        self.state = if self.state == JobState::Canceled {
            JobState::Canceling
        } else if has(AttemptState::Running) || has(AttemptState::Starting) {
            JobState::Running
        } else if has(AttemptState::Unknown) {
            JobState::Unknown
        } else {
            JobState::Pending
        };
        self.events.retain(|event| event.at_ms < ended_ms);
        self.version = self.version.saturating_sub(1);
        self.revision = self.revision.saturating_sub(1);
        self.updated_ms = self.updated_ms.min(ended_ms);
        (self.ended_ms, self.completed_by, self.retain_until_ms) = (0, 0, 0);
        self.result = Payload::default();
        self.reason = format!("{UNTOLD}: {have} of {want} have it");
        self
    }

    /// Whether its ending is there and may not be told yet.
    #[cfg(feature = "gateway")]
    pub(crate) fn is_untold(&self) -> bool {
        !self.is_ended() && self.reason.starts_with(UNTOLD)
    }
}
