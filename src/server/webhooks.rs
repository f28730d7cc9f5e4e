//! Webhooks of providers: what one says by itself of an attempt. No bearer token; its signature says who it is.
//!
//! The signature is checked before Redis is asked for anything. An absent job and another's look the same.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, RawQuery, State};
use axum::response::Response;
use http::{HeaderMap, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

use crate::config;
use crate::job::JobId;
use crate::provider::webhook::{Delivery, WebhookRefused};
use crate::runtime::WebhookError;
use crate::server::App;
use crate::server::body;
use crate::server::jobs::json;
use crate::server::problem::{Document, Kind, Problem};

/// What a webhook led to.
#[derive(Serialize, ToSchema)]
#[schema(as = Taken)]
struct TakenDocument {
    /// `won`, `recorded`, `repeated`, `discarded`, or `ignored`: it settles nothing.
    status: &'static str,
}

/// A provider's own word about an attempt that it was given.
#[utoipa::path(
    post, path = "/v1/webhooks/{provider}/{id}/{number}", operation_id = "take_webhook", tag = "webhooks",
    request_body(content = String, content_type = "application/json", description = "As the provider writes it"),
    params(
        ("provider" = String, Path, description = "The provider's name"),
        ("id" = String, Path, description = "The job's id"),
        ("number" = u32, Path, description = "The attempt's number"),
        ("code" = String, Query, description = "What binds the address to the attempt; part of the URL that the provider was given"),
    ),
    responses(
        (status = 200, description = "Taken; the same again changes nothing", body = inline(TakenDocument)),
        (status = "4XX", description = "Refused", body = Document, content_type = "application/problem+json"),
        (status = "5XX", description = "Not now: to be sent again", body = Document, content_type = "application/problem+json"),
    ),
    security(()),
)]
pub(crate) async fn take_webhook(
    State(app): State<Arc<App>>,
    path: Result<RawPathParams, RawPathParamsRejection>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let path = path.map_err(|_| Problem::job_unknown())?;
    let of = |name: &str| path.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value);
    let (provider, id, number) = (of("provider"), of("id").parse::<JobId>(), of("number").parse::<u32>());
    let (Ok(job_id), Ok(attempt)) = (id, number) else { return Err(Problem::job_unknown()) };
    if provider.len() > config::NAME_BYTES_MAX {
        return Err(Problem::job_unknown());
    }
    let held = body::read(&app, body).await?;
    let delivery = Delivery {
        provider: provider.to_owned(),
        job_id,
        attempt,
        query: query.unwrap_or_default(),
        headers: headers
            .iter()
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect(),
        body: held.bytes.into(),
    };
    let runtime = app.runtime.clone();
    let share = held.share;
    let taken = app
        .detached(async move {
            let taken = runtime.webhook(delivery).await;
            drop(share);
            taken
        })
        .await?;
    match taken {
        Ok(delivered) => Ok(json(StatusCode::OK, &TakenDocument { status: delivered.as_str() })),
        Err(WebhookError::Read(error)) => Err(Problem::from(error)),
        Err(WebhookError::Refused(refused)) => {
            tracing::debug!(job = %job_id, attempt, %refused, "a webhook is refused");
            Err(match refused {
                WebhookRefused::NotConfigured => Problem::job_unknown(),
                WebhookRefused::Header(_) | WebhookRefused::Time(..) | WebhookRefused::Signature => {
                    Problem::new(Kind::WebhookRefused, format!("the webhook is not taken: {refused}"))
                }
            })
        }
    }
}
