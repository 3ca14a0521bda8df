//! Opening the store that a command or the daemon is given: what the address says, and what the
//! environment adds for all remote stores.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use layerpack_store::{BlobStore, OpenOptions, ReadCacheOptions, open};

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
    let text = std::env::var(OPTIONS).unwrap_or_default();
    let mut options = parse(&text).with_context(|| format!("cannot use {OPTIONS}"))?;
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

fn parse(text: &str) -> anyhow::Result<OpenOptions> {
    let mut options = OpenOptions::default();
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
        let options = parse("retries=0&&bytes_per_second=5").unwrap();
        assert_eq!(options.retry.attempts, 1);
        assert_eq!(options.rate.bytes_per_second, Some(5));
        assert_eq!(parse("").unwrap(), OpenOptions::default());
        for (text, why) in [
            ("retries", "NAME=VALUE"),
            ("colour=red", "colour"),
            ("timeout=0", "timeout"),
        ] {
            assert!(parse(text).unwrap_err().to_string().contains(why));
        }
    }
}
