//! What an entry says of how its provider is asked, and how it calls back: templates, pointers, words, times, secrets.

use std::time::Duration;

use super::super::sources::Environment;
use super::super::{ProviderEntry, Secret, Webhook};
use super::{Checker, DURATION_MIN, HEADERS_OF_CREDENTIALS, HEADERS_OF_THE_CONNECTION, LIST_MAX, SECRET_BYTES_MAX, shown};
use crate::provider::asking::json::is_pointer;
use crate::provider::asking::template::{problem_of_body, problem_of_path};
use crate::provider::webhook::SECRET_BYTES_MIN;

/// Longest template, in bytes.
const TEMPLATE_BYTES_MAX: usize = 8 << 10;
/// How much longer each pause between two polls may be than the one before.
const FACTOR_MAX: f64 = 10.0;
/// How far a webhook's time may be from ours, at most: until then a captured one can be sent again, harmlessly.
const TOLERANCE_MAX: Duration = Duration::from_secs(3600);

impl Checker<'_> {
    pub(super) fn asking(&mut self, key: &str, provider: &ProviderEntry) {
        let former = format!("{key}.former_base_urls");
        self.count(&former, provider.former_base_urls.len(), LIST_MAX);
        self.repeated(&former, &provider.former_base_urls);
        for url in &provider.former_base_urls {
            self.base_url(&former, url);
        }
        if let Some(status) = &provider.status {
            let key = format!("{key}.status");
            self.call(&key, &status.path, &status.method);
            for (name, pointer) in
                [("id", &status.id), ("state", &status.state), ("result", &status.result), ("error", &status.error)]
            {
                self.pointer(&format!("{key}.{name}"), pointer);
            }
            self.count(&format!("{key}.states"), status.states.len(), LIST_MAX);
            if status.states.is_empty() {
                let hint = "as in states = { finished = \"succeeded\", jammed = \"failed\" }";
                self.refuse(&format!("{key}.states"), None, "it is empty, so no answer would mean anything", hint);
            }
            if let Some(retention) = status.retention {
                self.time(&format!("{key}.retention"), retention, DURATION_MIN);
            }
        }
        if let Some(find) = &provider.find {
            let key = format!("{key}.find");
            self.call(&key, &find.path, &find.method);
            self.pointer(&format!("{key}.item"), &find.item);
            self.pointer(&format!("{key}.key"), &find.key);
            if find.key.is_empty() {
                let what = "it is missing: what is found must name our key, or it may be anybody's";
                self.refuse(&format!("{key}.key"), None, what, "name its place in the piece of work, as in /key");
            }
            if let Some(header) = &find.header {
                let refused = [&HEADERS_OF_THE_CONNECTION[..], &HEADERS_OF_CREDENTIALS, &["traceparent", "content-type"]];
                self.header_name(&format!("{key}.header"), header, &refused);
            }
        }
        if let Some(cancel) = &provider.cancel {
            let key = format!("{key}.cancel");
            self.call(&key, &cancel.path, &cancel.method);
            self.time(&format!("{key}.settle"), cancel.settle, Duration::ZERO);
        }
        if let Some(result) = &provider.result {
            self.call(&format!("{key}.result"), &result.path, &result.method);
        }
        let needs_status = [
            ("find", provider.find.is_some()),
            ("cancel", provider.cancel.is_some()),
            ("result", provider.result.is_some()),
            ("submit", provider.is_asynchronous()),
        ];
        if let Some((name, _)) = needs_status.iter().find(|(_, is_there)| *is_there && provider.status.is_none()) {
            let what = format!("it is missing: {name} needs what status says of a piece of work");
            self.refuse(
                &format!("{key}.status"),
                None,
                what,
                "as in status = { path = \"/prints/{{ remote.id }}\", states = { … } }",
            );
        }
        self.submit(key, provider);
    }

    fn submit(&mut self, key: &str, provider: &ProviderEntry) {
        if provider.webhook.is_some() && !provider.is_asynchronous() {
            let what = "one request brings one answer here: nothing is handed in";
            self.refuse(&format!("{key}.webhook"), None, what, "set adapter = \"async_http\", or remove it");
        }
        if let Some(submit) = &provider.submit {
            let at = format!("{key}.submit.id");
            match &submit.id {
                Some(id) if !provider.is_asynchronous() => {
                    let what = "one request brings one answer here: nothing is handed in that would have an id";
                    self.refuse(&at, Some(&id.escape_debug()), what, "set adapter = \"async_http\", or leave body alone");
                }
                Some(id) => self.pointer(&at, id),
                None => {}
            }
            if let Some(body) = &submit.body {
                let key = format!("{key}.submit.body");
                self.template(&key, body, problem_of_body(body));
                if body.contains("webhook.url") && provider.webhook.is_none() {
                    self.refuse(&key, None, "it wants webhook.url, and there is no webhook", "set webhook, or leave it out");
                }
            }
        }
        let (poll, key) = (provider.poll, format!("{key}.poll"));
        self.time(&format!("{key}.first"), poll.first, DURATION_MIN);
        self.time(&format!("{key}.max"), poll.max, DURATION_MIN);
        if !(1.0..=FACTOR_MAX).contains(&poll.factor) {
            let what = format!("it must be 1 to {FACTOR_MAX}");
            self.refuse(&format!("{key}.factor"), Some(&poll.factor), what, "2 doubles each pause");
        }
        if poll.first > poll.max {
            let what = format!("it is longer than max = {}", shown(poll.max));
            self.refuse(&format!("{key}.first"), Some(&shown(poll.first)), what, "shorten it, or lengthen max");
        }
    }

    fn call(&mut self, key: &str, path: &str, method: &str) {
        let at = format!("{key}.path");
        if path.starts_with('/') {
            self.template(&at, path, problem_of_path(path));
        } else {
            self.refuse(&at, Some(&path.escape_debug()), "it must begin with /", "as in /prints/{{ remote.id }}");
        }
        if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()) || method == "CONNECT" {
            let what = "it is no method in capital letters";
            self.refuse(&format!("{key}.method"), Some(&method.escape_debug()), what, "as in GET");
        }
    }

    fn template(&mut self, key: &str, template: &str, problem: Option<String>) {
        if template.len() > TEMPLATE_BYTES_MAX {
            let what = format!("it has {} bytes; the limit is {TEMPLATE_BYTES_MAX}", template.len());
            self.refuse(key, None, what, "shorten it");
        } else if let Some(problem) = problem {
            let hint = "paths know remote.id, key, job.id and attempt; bodies body, key, job.id, attempt and webhook.url";
            self.refuse(key, Some(&template.escape_debug()), problem, hint);
        }
    }

    fn pointer(&mut self, key: &str, pointer: &str) {
        if !is_pointer(pointer) {
            self.refuse(key, Some(&pointer.escape_debug()), "it is no JSON pointer (RFC 6901)", "as in /result");
        }
    }

    /// Checks how a provider calls back, and resolves the secret. The error names the variable, never what is in it.
    pub(super) fn webhook(
        &mut self,
        key: &str,
        provider: &ProviderEntry,
        public_url: Option<&str>,
        environment: &Environment,
    ) -> Option<Secret> {
        let webhook = provider.webhook.as_ref()?;
        if public_url.is_none() {
            let hint = "where the provider reaches the gateways, as in https://jobs.example";
            self.refuse("server.public_url", None, format!("it is missing, and {key} needs it"), hint);
        }
        if !provider.submit.as_ref().is_some_and(|submit| submit.body.as_ref().is_some_and(|body| body.contains("webhook.url"))) {
            let what = "nothing tells the provider where to call: submit.body does not say webhook.url";
            self.refuse(key, None, what, "as in submit = { body = \"{{ with(body, webhook_url=webhook.url) }}\" }");
        }
        self.pointer(&format!("{key}.item"), &webhook.item);
        let refused = [&HEADERS_OF_THE_CONNECTION[..], &HEADERS_OF_CREDENTIALS];
        self.header_name(&format!("{key}.timestamp_header"), &webhook.timestamp_header, &refused);
        self.header_name(&format!("{key}.signature_header"), &webhook.signature_header, &refused);
        let (tolerance, at) = (webhook.tolerance, format!("{key}.tolerance"));
        if tolerance < Duration::from_secs(1) || tolerance > TOLERANCE_MAX {
            let what = format!("it must be 1s to {}", shown(TOLERANCE_MAX));
            self.refuse(&at, Some(&shown(tolerance)), what, "five minutes are common");
        }
        self.webhook_secret(&format!("{key}.secret_env"), webhook, environment)
    }

    fn webhook_secret(&mut self, key: &str, webhook: &Webhook, environment: &Environment) -> Option<Secret> {
        let variable = webhook.secret_env.escape_debug().to_string();
        let refused = match environment.get(&webhook.secret_env) {
            None => "it is not set".to_owned(),
            Some(text) if text.len() < SECRET_BYTES_MIN => {
                format!("it has {} bytes; a secret has {SECRET_BYTES_MIN} or more", text.len())
            }
            Some(text) if text.len() > SECRET_BYTES_MAX => {
                format!("it has {} bytes; the limit is {SECRET_BYTES_MAX}", text.len())
            }
            Some(text) => return Some(Secret::new(text)),
        };
        let what = format!("no secret can be taken from the variable {variable}: {refused}");
        self.refuse(key, None, what, "put the secret there that the provider signs its webhooks with");
        None
    }
}
