//! How a registry is spoken to. The caller decides everything: nothing is read from the
//! environment or from the user's home here.

use std::path::PathBuf;
use std::time::Duration;

use crate::blob::{RetryPolicy, Timeouts};

/// Largest request body by default: some registries refuse more than 4 MiB at once.
const CHUNK: u64 = (4 << 20) - (64 << 10);

/// How a registry is spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryOptions {
    /// Files with credentials, as docker (`config.json`) and the containers tools (`auth.json`)
    /// keep them; the first that knows the registry counts, those that do not exist are passed
    /// over. None: anonymous.
    pub credential_files: Vec<PathBuf>,
    /// How long a credential helper may take.
    pub helper_limit: Duration,
    /// `Some(true)`: without TLS, also to other machines. `Some(false)`: with TLS, also on this
    /// machine. `None`: without TLS on loopback hosts only.
    pub plain_http: Option<bool>,
    /// Time limits.
    pub timeouts: Timeouts,
    /// What is tried again.
    pub retry: RetryPolicy,
    /// Largest body of an upload request in bytes, at least 64 KiB. Larger blobs go in several.
    pub chunk_bytes: u64,
    /// Requests at once that one operation makes, at least 1.
    pub max_concurrency: usize,
    /// Directory for objects on their way to the registry; None: the system's for temporary
    /// files. They have no name there and go with the process.
    pub spool: Option<PathBuf>,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            credential_files: Vec::new(),
            helper_limit: Duration::from_secs(30),
            plain_http: None,
            timeouts: Timeouts::default(),
            retry: RetryPolicy::default(),
            chunk_bytes: CHUNK,
            max_concurrency: 4,
            spool: None,
        }
    }
}
