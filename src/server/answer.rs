//! Stored answers on their way out: large ones have a share of one memory, until their client has taken them.
//!
//! Deliberately not here: small answers, which stand in the record and are bounded by it.

use std::sync::Arc;

use axum::body::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use crate::job;
use crate::server::App;
use crate::server::problem::{Kind, Problem};

/// In which steps a stored answer takes of the memory for them.
pub(crate) const ANSWER_STEP_BYTES: usize = 16 << 10;

/// Takes what a stored body needs of the memory for answers; waits for it for a while, holding nothing.
///
/// # Errors
/// The memory is full of answers that are not taken.
pub(crate) async fn share(app: &App, body: &job::Body) -> Result<Option<OwnedSemaphorePermit>, Problem> {
    let bytes = match body {
        job::Body::Inline(_) => return Ok(None),
        job::Body::Blob { bytes, .. } => usize::try_from(*bytes).unwrap_or(usize::MAX),
    };
    let limit = app.options.answers_bytes_max;
    // One that is larger than all of it takes all of it, alone.
    let steps = bytes.min(limit).div_ceil(ANSWER_STEP_BYTES);
    let steps = u32::try_from(steps).unwrap_or(u32::MAX);
    let room = tokio::time::timeout(app.options.answer_room_wait, Arc::clone(&app.answers).acquire_many_owned(steps)).await;
    match room {
        Ok(permit) => Ok(Some(permit.expect("the semaphore is never closed"))),
        Err(_) => {
            let detail = format!("the answers that are being sent fill the {limit} bytes that are meant for them");
            Err(Problem::new(Kind::Overloaded, detail).member("limit", limit))
        }
    }
}

/// Bytes that give back their share when they have been sent, or their connection is gone.
pub(crate) fn hold<T: AsRef<[u8]> + Send + 'static>(bytes: T, share: Option<OwnedSemaphorePermit>) -> Bytes {
    Bytes::from_owner(Held { bytes, _share: share })
}

struct Held<T> {
    bytes: T,
    _share: Option<OwnedSemaphorePermit>,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Held<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}
