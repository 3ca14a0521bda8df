//! Opening the store that a command or the daemon is given: what the address says, and what the
//! environment adds for all remote stores.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use layerpack_layerfs::StoreOpener;
use layerpack_store::{BlobStore, LayerStore, OpenOptions, ReadCacheOptions, StoreError, open};

use crate::registries;

/// Settings of remote stores, as in an address's query: `timeout=60&retries=2`. An address's own
/// come after them.
pub(crate) const OPTIONS: &str = "LAYERPACK_STORE_OPTIONS";

/// Opens the store at `url`. With `cache`, what never changes in a remote store is kept there: for
/// commands that only look.
///
/// # Errors
/// When the address or the environment's settings cannot be used.
pub(crate) fn open_store(
    url: &str,
    cache: Option<ReadCacheOptions>,
) -> anyhow::Result<Arc<dyn BlobStore>> {
    open_with(url, cache, OpenOptions::default())
}

/// Opens stores for who serves reads that wait for `read_timeout` at most: a request without any
/// progress is tried again in time for the reader who waits for it, unless the store's own settings
/// say otherwise.
pub(crate) fn opener(read_timeout: Duration) -> StoreOpener {
    Arc::new(move |url| {
        let blobs = open_with(url, None, for_readers(read_timeout));
        blobs
            .map(LayerStore::new)
            .map_err(|error| match error.downcast::<StoreError>() {
                Ok(error) => error,
                Err(error) => StoreError::InvalidUrl {
                    url: url.to_owned(),
                    why: format!("{error:#}"),
                },
            })
    })
}

fn for_readers(read_timeout: Duration) -> OpenOptions {
    let mut options = OpenOptions::default();
    let patience = (read_timeout / 4).max(Duration::from_secs(1));
    let patience = patience.min(Duration::from_secs(15));
    let timeouts = &mut options.timeouts;
    for limit in [&mut timeouts.response, &mut timeouts.idle] {
        *limit = patience.min(*limit);
    }
    options
}

fn open_with(
    url: &str,
    cache: Option<ReadCacheOptions>,
    usual: OpenOptions,
) -> anyhow::Result<Arc<dyn BlobStore>> {
    let text = std::env::var(OPTIONS).unwrap_or_default();
    let mut options = parse(&text, usual).with_context(|| format!("cannot use {OPTIONS}"))?;
    options.registry_credentials = registries::credential_files();
    options.read_cache = cache;
    Ok(open(url, &options)?)
}

/// Ends the threads that remote stores work with, before this process forks a sandbox.
///
/// # Errors
/// When another thread is in the middle of a request, which no command's is.
pub(crate) fn quiesce() -> anyhow::Result<()> {
    if layerpack_store::blob::remote::shutdown() {
        return Ok(());
    }
    bail!("a request to the store is still on its way: run again");
}

/// What `text` sets, over what is usual.
fn parse(text: &str, usual: OpenOptions) -> anyhow::Result<OpenOptions> {
    let mut options = usual;
    for field in text.split('&').filter(|field| !field.is_empty()) {
        let Some((name, value)) = field.split_once('=') else {
            bail!("{field:?} is not NAME=VALUE");
        };
        match options.set(name, value) {
            Ok(true) => {}
            Ok(false) => bail!("there is no setting {name:?}"),
            Err(why) => bail!("{why}"),
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_taken_or_named() {
        let usual = OpenOptions::default;
        let options = parse("retries=0&&bytes_per_second=5", usual()).unwrap();
        assert_eq!(options.retry.attempts, 1);
        assert_eq!(options.rate.bytes_per_second, Some(5));
        assert_eq!(parse("", usual()).unwrap(), usual());
        for (text, why) in [
            ("retries", "NAME=VALUE"),
            ("colour=red", "colour"),
            ("timeout=0", "timeout"),
        ] {
            assert!(parse(text, usual()).unwrap_err().to_string().contains(why));
        }
    }

    #[test]
    fn requests_for_readers_end_in_time_for_them() {
        for (read_timeout, at_most) in [(4, 1), (20, 5), (60, 15), (600, 15), (0, 1)] {
            let options = for_readers(Duration::from_secs(read_timeout));
            let at_most = Duration::from_secs(at_most);
            assert_eq!(options.timeouts.response, at_most);
            assert_eq!(options.timeouts.idle, at_most);
            // What is set counts.
            let set = parse("timeout=9", options).unwrap();
            assert_eq!(set.timeouts.idle, Duration::from_secs(9));
        }
        let error = opener(Duration::from_secs(4))("s3://").unwrap_err();
        assert!(matches!(error, StoreError::InvalidUrl { .. }), "{error}");
    }
}
