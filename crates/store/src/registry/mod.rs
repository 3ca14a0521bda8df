//! A client of container registries (OCI distribution specification 1.1, and the docker registries
//! before it).
//!
//! It is written on an HTTP client and not on `oci-client`, which we tried: that one never tries
//! again, starts a blob anew when one of its chunks fails, does not check what it reads in part,
//! hands out a whole blob where a registry ignores `Range`, knows no credential helpers, and has no
//! limits on sizes. What is left of it is the list of endpoints, so here is all of it:
//!
//! * `transport`: requests with redirects, authorization, time limits and retries;
//!   `auth` and `credentials` say who we are.
//! * [`Registry`]: one repository. Manifests, tags and referrers (`manifests`), reading blobs
//!   (`download`), writing them (`upload`).
//!
//! Everything read whole is checked against its SHA-256 digest. A range of a blob cannot be: who
//! reads ranges checks them by other means, as layers do by their own digests. All sizes are
//! bounded before anything is allocated.

mod auth;
mod credentials;
pub mod document;
mod download;
mod manifests;
mod name;
mod options;
mod sha;
mod transport;
mod upload;

use std::sync::Arc;

pub use download::BlobReader;
pub use manifests::{Deleted, Fetched};
pub(crate) use name::{MAX_TAG, is_tag};
pub use name::{ManifestName, NotRegistryName, RegistryName};
pub use options::RegistryOptions;
pub use sha::{NotSha256, Sha256, Sha256Hasher};
use transport::Transport;
pub use upload::{Pushed, Upload};

use crate::error::{Result, StoreError};

/// Largest manifest or index that is read, in bytes: registries must take 4 MiB.
pub const MAX_MANIFEST: u64 = 4 << 20;

/// One repository of a registry. Copies share connections, tokens and limits.
#[derive(Debug, Clone)]
pub struct Registry {
    transport: Arc<Transport>,
}

impl Registry {
    /// The repository of `name`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`StoreError::InvalidUrl`] if the options cannot be.
    pub fn new(name: RegistryName, options: RegistryOptions) -> Result<Self> {
        let name = name.with_manifest(None);
        let address = format!("registry:{name}");
        Self::with_address(name, options, address)
    }

    /// The same, called `address` in messages.
    pub(crate) fn with_address(
        name: RegistryName,
        options: RegistryOptions,
        address: String,
    ) -> Result<Self> {
        if options.chunk_bytes < 64 << 10 || options.max_concurrency == 0 {
            return Err(StoreError::InvalidUrl {
                url: address,
                why: "its upload chunks must have at least 64 KiB, its concurrency must be at least 1"
                    .to_owned(),
            });
        }
        Ok(Self {
            transport: Arc::new(Transport::new(name, options, address)?),
        })
    }

    /// The repository.
    #[must_use]
    pub fn name(&self) -> &RegistryName {
        &self.transport.name
    }

    /// The time by the registry's own clock, as its last answer told it; `None` if it did not.
    #[must_use]
    pub fn now(&self) -> Option<std::time::SystemTime> {
        self.transport.now()
    }

    /// How the registry is spoken to.
    #[must_use]
    pub fn options(&self) -> &RegistryOptions {
        &self.transport.options
    }
}
