//! The Lua scripts, composed and hashed.
//!
//! What a script does stands in its own header, under `lua/`; how its text comes about, in `compose.rs`. Nothing here knows what a
//! script means.

use std::sync::LazyLock;

use crate::store::compose::compose;

const PRELUDE: &str = concat!(
    include_str!("../../lua/prelude.lua"),
    "\n",
    include_str!("../../lua/dedup_prelude.lua"),
    "\n",
    include_str!("../../lua/mirror_prelude.lua"),
);

macro_rules! scripts {
    ($($variant:ident $name:literal,)*) => {
        /// One script under `lua/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Script { $(#[doc = concat!("`lua/", $name, ".lua`")] $variant,)* }

        impl Script {
            /// Every script.
            pub const ALL: &[Script] = &[$(Script::$variant,)*];

            /// Its name: the file's, without the ending.
            pub fn name(self) -> &'static str {
                match self { $(Script::$variant => $name,)* }
            }

            fn source(self) -> &'static str {
                match self { $(Script::$variant => include_str!(concat!("../../lua/", $name, ".lua")),)* }
            }
        }
    };
}

scripts! {
    SubmitJob "submit_job",
    BeginAttempt "begin_attempt",
    MarkRunning "mark_running",
    ExtendLease "extend_lease",
    FinishAttempt "finish_attempt",
    ResolveAttempt "resolve_attempt",
    NoteAttempt "note_attempt",
    CancelJob "cancel_job",
    TickJob "tick_job",
    ReopenJob "reopen_job",
    ReadJob "read_job",
    SettleHint "settle_hint",
    PostponeJob "postpone_job",
    AdmitCall "admit_call",
    ReportCall "report_call",
    ExtendPermits "extend_permits",
    ExtendAsk "extend_ask",
    IssueCertificate "issue_certificate",
    MarkCertificate "mark_certificate",
    DedupBatch "dedup_batch",
    DedupClaim "dedup_claim",
    DedupCommit "dedup_commit",
    DedupRelease "dedup_release",
    MirrorBatch "mirror_batch",
    MirrorClaim "mirror_claim",
    MirrorCommit "mirror_commit",
}

struct Composed {
    code: String,
    sha1: String,
}

static COMPOSED: LazyLock<Vec<Composed>> = LazyLock::new(|| {
    let compose = |script: &Script| {
        let code = compose(script.name(), script.source(), PRELUDE);
        let sha1 = redis::Script::new(&code).get_hash().to_owned();
        Composed { code, sha1 }
    };
    Script::ALL.iter().map(compose).collect()
});

impl Script {
    /// The whole text, as Redis gets it.
    pub fn code(self) -> &'static str {
        &COMPOSED[self as usize].code
    }

    /// Whether the hint sent before it is the job's only one. The other scripts meet jobs that have one already, and must go
    /// through even when Redis is out of memory and refuses the hint.
    pub(crate) fn needs_its_hint(self) -> bool {
        matches!(self, Script::SubmitJob | Script::BeginAttempt | Script::ReopenJob)
    }

    /// Its SHA-1, by which Redis remembers it.
    pub fn sha1(self) -> &'static str {
        &COMPOSED[self as usize].sha1
    }
}
