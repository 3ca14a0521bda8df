//! A store's promise to keep what is about to be mounted, got beside the fetching of it.
//!
//! A mount from a store that takes leases needs three answers, one after the other: the lease is
//! written; no collector is deleting the layers just then; the manifests that somebody read before are
//! still there. Each looks for what may have happened until the one before was given, so none can go
//! first. Metadata, maps and locators need not wait for any of it: they are known by their digests (a
//! locator is a hint). So they are fetched meanwhile, and a layer is mounted when both are done.
//!
//! What was fetched before the promise was there is as good as what is fetched after it: collectors
//! delete manifests before anything that these use, so a manifest that is there after the lease was
//! written, while nobody deletes, has all that it names. Where one collection ended just before and the
//! layer was published anew, an object may have been missing in between: then it is asked for again.

use std::path::PathBuf;

use layerpack_store::{Digest, StoreError, at_once};

use super::Node;
use super::given::{AT_ONCE, Candidate};
use super::layer::StoreRef;
use crate::error::{LayerfsError, Result};
use crate::sync::{Condvar, Mutex};

/// Whether a store keeps some layers, as far as that is known yet.
#[derive(Debug, Default)]
pub(super) struct Promise {
    kept: Mutex<Option<bool>>,
    told: Condvar,
}

impl Promise {
    /// One that needs no asking.
    pub(super) fn given() -> Self {
        Self {
            kept: Mutex::new(Some(true)),
            told: Condvar::new(),
        }
    }

    fn tell(&self, kept: bool) {
        self.kept.lock().get_or_insert(kept);
        self.told.notify_all();
    }

    /// Waits until it is known. Whoever asks for it always tells.
    ///
    /// # Errors
    /// If it was not given. Who asked for it knows why.
    pub(super) fn wait(&self) -> Result<()> {
        let mut kept = self.kept.lock();
        loop {
            match *kept {
                Some(true) => return Ok(()),
                Some(false) => {
                    return Err(LayerfsError::Stack {
                        what: "their store does not keep them".to_owned(),
                    });
                }
                None => kept = self.told.wait(kept),
            }
        }
    }
}

/// Tells that there is no promise, unless something was told before.
struct Told<'a>(&'a Promise);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.tell(false);
    }
}

impl Node {
    /// Does `work`, which fetches layers and has them mounted once the promise is there, and gets the
    /// promise meanwhile, if it takes any asking.
    ///
    /// # Errors
    /// Why there is no promise, else those of `work`.
    pub(super) fn with_promise(
        &self,
        store: &StoreRef,
        candidates: &[Candidate],
        work: &dyn Fn(&Promise) -> Result<Vec<PathBuf>>,
    ) -> Result<Vec<PathBuf>> {
        let digests: Vec<Digest> = candidates.iter().map(|c| c.digest).collect();
        let given: Vec<&Candidate> = candidates.iter().filter(|c| c.is_given()).collect();
        match self.is_kept(store, &digests) {
            Some(true) if given.is_empty() => return work(&Promise::given()),
            // The store takes no lease.
            None => return work(&Promise::given()),
            Some(_) => {}
        }
        let promise = Promise::default();
        let (asked, done) = std::thread::scope(|scope| {
            let ask = || {
                let told = Told(&promise);
                let asked = self.ask_promise(store, &digests, &given);
                promise.tell(asked.is_ok());
                drop(told);
                asked
            };
            let thread = std::thread::Builder::new().name("store-lease".to_owned());
            match thread.spawn_scoped(scope, ask) {
                Ok(asking) => {
                    let done = work(&promise);
                    match asking.join() {
                        Ok(asked) => (asked, done),
                        Err(panic) => std::panic::resume_unwind(panic),
                    }
                }
                // The system has no thread to give: `ask` went with it.
                Err(_) => {
                    let asked = self.ask_promise(store, &digests, &given);
                    promise.tell(asked.is_ok());
                    (asked, work(&promise))
                }
            }
        });
        asked?;
        match done {
            Err(LayerfsError::Store(StoreError::Missing { store: at, key })) => {
                tracing::debug!(store = %at, %key, "was not there before the lease; asked for again");
                work(&promise)
            }
            done => done,
        }
    }

    /// The lease names these layers, no collector deletes them, and manifests that somebody read
    /// before are still there. In this order.
    fn ask_promise(
        &self,
        store: &StoreRef,
        digests: &[Digest],
        given: &[&Candidate],
    ) -> Result<()> {
        if !self.protect(store, digests)? || given.is_empty() {
            return Ok(());
        }
        let open = self.opened(store)?;
        at_once(given, AT_ONCE, |candidate| {
            match open.has_manifest(&candidate.digest)? {
                true => Ok(()),
                false => Err(LayerfsError::from(candidate.missing(store))),
            }
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_always_tells() {
        Promise::given().wait().unwrap();
        for told in [Some(true), Some(false), None] {
            let promise = Promise::default();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| promise.wait().is_ok());
                let guard = Told(&promise);
                if let Some(kept) = told {
                    promise.tell(kept);
                }
                drop(guard);
                assert_eq!(waiting.join().unwrap(), told == Some(true));
            });
        }
    }
}
