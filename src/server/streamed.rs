//! A streamed answer on its way to one client: parts as they come, then the rest of the stored result.
//!
//! It ends well only when the result is stored; otherwise the response is broken off, and the client sees a connection that failed.
//! Nothing is added to the provider's bytes, no keep-alive either.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};

use crate::runtime::{Next, Reader};
use crate::server::{Activity, App, InFlight, answer, jobs};

/// A response is broken off. Nobody reads this: it closes the connection, or resets the stream.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the stream was broken off")]
struct BrokenOff;

type Part = Result<Bytes, BrokenOff>;

/// The body of a response that a reader fills; `activity` is that of its connection's streams.
pub(crate) fn body(app: Arc<App>, reader: Reader, activity: Option<Arc<Activity>>) -> Body {
    let parts = stream::unfold(Some((app, reader)), |reading| async {
        let (app, mut reader) = reading?;
        match reader.next().await {
            Next::Part(part) => Some((Ok(part), Some((app, reader)))),
            Next::Rest { job, read_bytes } => match jobs::result_of(&app, &job).await {
                Ok(Some(stored)) if stored.response.body.len() >= read_bytes => {
                    let rest = answer::hold(stored.response.body, stored.share).slice(read_bytes..);
                    (!rest.is_empty()).then_some((Ok(rest), None))
                }
                Ok(_) | Err(_) => Some((Err(BrokenOff), None)),
            },
            Next::Broken => Some((Err(BrokenOff), None)),
        }
    });
    Body::from_stream(Streamed { parts: parts.boxed(), activity, waiting: None })
}

/// Whoever polls it waits for the provider, and is not idle. Whoever does not poll it does not read.
struct Streamed {
    parts: BoxStream<'static, Part>,
    activity: Option<Arc<Activity>>,
    waiting: Option<InFlight>,
}

impl Stream for Streamed {
    type Item = Part;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Part>> {
        let this = self.get_mut();
        if this.waiting.is_none() {
            this.waiting = this.activity.as_ref().map(InFlight::begin);
        }
        let part = this.parts.poll_next_unpin(context);
        if part.is_ready() {
            this.waiting = None;
        }
        part
    }
}
