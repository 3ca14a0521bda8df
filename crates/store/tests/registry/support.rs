//! What these tests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layerpack_fixtures::servers::{DockerRegistry, Reply, Request, Scripted};
use layerpack_store::registry::{Registry, RegistryOptions};
use layerpack_store::{RetryPolicy, Timeouts};

/// Options that give up soon: nothing here is slow.
pub(crate) fn options() -> RegistryOptions {
    RegistryOptions {
        retry: RetryPolicy {
            attempts: 4,
            first_wait: Duration::from_millis(2),
            longest_wait: Duration::from_millis(1500),
            total: Duration::from_secs(60),
        },
        timeouts: Timeouts {
            connect: Duration::from_secs(20),
            response: Duration::from_secs(60),
            idle: Duration::from_secs(60),
            operation: Duration::from_secs(120),
        },
        ..RegistryOptions::default()
    }
}

/// A repository of the registry on `host`.
pub(crate) fn repository(host: &str, options: RegistryOptions) -> Registry {
    Registry::new(format!("{host}/some/where").parse().unwrap(), options).unwrap()
}

/// The host of a scripted server.
pub(crate) fn host(server: &Scripted) -> String {
    server.url().strip_prefix("http://").unwrap().to_owned()
}

/// Bytes that do not repeat.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A registry behind a proxy that may answer in its place.
pub(crate) struct Proxied {
    pub(crate) proxy: Scripted,
    pub(crate) registry: Arc<DockerRegistry>,
}

impl Proxied {
    /// `meddle` sees each request; what it does not answer the registry does.
    pub(crate) fn start(
        meddle: impl Fn(&Request, &DockerRegistry) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let registry = Arc::new(DockerRegistry::start().unwrap());
        let behind = Arc::clone(&registry);
        let proxy = Scripted::start(move |request| {
            meddle(request, &behind).unwrap_or_else(|| behind.forward(request))
        })
        .unwrap();
        Self { proxy, registry }
    }

    pub(crate) fn host(&self) -> String {
        host(&self.proxy)
    }
}

/// Counts calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counter(Arc<AtomicU64>);

impl Counter {
    /// How many calls came before this one.
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}
